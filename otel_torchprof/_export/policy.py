"""Reduces traces to the size limit: aggregates, collapses and splits, in this order and only as far as necessary.

Pure functions from tables to tables. Spans that are sent, aggregated and collapsed always add up to the recorded spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.batch import Names
from otel_torchprof._encode.event_attributes import ITERATION
from otel_torchprof._model.limits import LINK_SIZE, most_bytes, span_sizes
from otel_torchprof._model.span_table import LINK, STEP_NUMBER, AttributeType, SpanTable
from otel_torchprof._model.span_tables import joined_tables, taken
from otel_torchprof._model.span_tree import DEEPEST, SpanTree, column_of, rows_of_spans

from .aggregating import (
    AGGREGATE_SIZE,
    COLLAPSED_COUNT,
    COLLAPSED_DURATION,
    NOT_SHORT,
    Sizes,
    TraceGroups,
    absorbed,
    aggregated,
    collapsed_of,
    composed,
    counts_of,
    durations_of,
    first_alike,
    linked_rows,
    links_once,
    phases,
    precious,
    siblings_of,
    tokens,
    with_all_below,
    with_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._model.limits import Budget

    from .aggregating import Siblings

__all__ = [
    "RECORDED",
    "Reduction",
    "TargetTrace",
    "TracePart",
    "fits",
    "reduced",
    "reduced_together",
    "row_of",
    "without_hidden",
]

# ---- Aggregation of thousands of generated tokens, except the slowest ----

Array = npt.NDArray[Any]


def tokens_aggregated(table: SpanTable, groups: TraceGroups, sizes: Sizes) -> tuple[SpanTable, Array]:
    """Aggregates the tokens of calls of ``generate`` in a table of one trace group, except as many of the slowest as fit.

    Between two tokens that stay, all tokens and their siblings with the same name become one span, and so do their descendants, level
    by level. The number of tokens that stay is doubled while the result fits; if it never does, none stays. For the spans that are never
    aggregated, and the returned values, see :func:`~.aggregating.aggregated`.
    """
    token_rows = np.flatnonzero(tokens(table.names, table.name))
    if len(token_rows) < 2:  # noqa: PLR2004 - a single token has nothing to be aggregated with
        return table, np.arange(len(table))
    siblings = siblings_of(table, groups)
    may_go = siblings.length[token_rows] != NOT_SHORT
    by_length = token_rows[may_go][np.argsort(-durations_of(table)[token_rows[may_go]], kind="stable")]
    into = best = _groups(siblings, token_rows, token_rows[~may_go])
    whole = 1
    while groups.allow(*sizes.after(into, groups)).all() and whole <= len(by_length):
        best = into
        into = _groups(siblings, token_rows, np.concatenate((token_rows[~may_go], by_length[:whole])))
        whole *= 2
    return composed(table, siblings.tree, best), best


def _groups(siblings: Siblings, token_rows: Array, whole: Array) -> npt.NDArray[np.int64]:
    """Returns for each row the first row of its aggregate. ``token_rows``: all tokens; ``whole``: the tokens that stay."""
    tree, order = siblings.tree, siblings.tree.order
    stays = np.zeros(len(order), dtype=np.bool_)
    stays[whole] = True
    family = tree.siblings[order]
    begins = stays[order]
    begins[1:] |= family[1:] != family[:-1]
    run = np.cumsum(begins)
    may_go = np.isin(family, tree.siblings[token_rows]) & ~stays[order] & (siblings.length[order] != NOT_SHORT)
    nodes = order[may_go]
    into = np.arange(len(order))
    into[nodes] = first_alike(nodes, run[may_go] * (siblings.label.max(initial=0) + 1) + siblings.label[nodes])
    return with_all_below(siblings, into)


# ---- Collapsing: removes spans that are too short to be displayed ----
# Their nearest remaining ancestor gets their number and total duration.


_COLLAPSED_SIZE = 80
"""Bytes that the two attributes add to a span, at most."""


def collapsed(table: SpanTable, groups: TraceGroups, sizes: Sizes) -> tuple[SpanTable, Array]:
    """Collapses as few spans as necessary into their ancestors, in each trace group that is too large; only short ones with short descendants.

    The shortest are collapsed first, spans in error and link targets last. Roots, phases, and spans whose parent is not in the table
    stay. Returns the table, and for each row the row that it is now part of.
    """
    tree = SpanTree(table, parent=groups.parent)
    goes = _order_of_leaving(table, tree, groups)
    goes = _fewest(tree, groups, sizes, goes)
    return _without(table, tree, goes) if goes.size else (table, np.arange(len(table)))


def _order_of_leaving(table: SpanTable, tree: SpanTree, groups: TraceGroups) -> npt.NDArray[np.int64]:
    """Returns the rows that may be collapsed, group by group, each before its ancestors."""
    key = tree.highest_below(durations_of(table))
    late = tree.any_below(precious(table) | (table.error != 0))
    has_phase = tree.any_below(phases(table.names, table.name))
    rows = np.flatnonzero((key <= groups.short[groups.of_row]) & (tree.above >= 0) & ~has_phase)
    # One number to sort by: a sort of several keys takes three times as long.
    shortest_first = late[rows].astype(np.int64) << 62 | np.minimum(key[rows], (1 << 51) - 1) << 11
    rows = rows[np.argsort(shortest_first | (DEEPEST - tree.depth[rows]), kind="stable")]
    in_order: npt.NDArray[np.int64] = rows[_by_group(groups.of_row[rows])]
    return in_order


def _by_group(of_row: Array) -> npt.NDArray[np.intp]:
    """Returns the rows sorted by group, stable. A stable sort of 16-bit numbers is a radix sort."""
    return np.argsort(of_row.astype(np.min_scalar_type(of_row.max(initial=0))), kind="stable")


def _fewest(tree: SpanTree, groups: TraceGroups, sizes: Sizes, goes: Array) -> npt.NDArray[np.int64]:
    """Returns the first rows of each group in ``goes``: as few as suffice, or all."""
    whole, of_row = sizes.whole, groups.of_row[goes]
    most = groups.sums(goes)
    rank = np.arange(len(goes)) - (np.cumsum(most) - most)[of_row]
    spans, total = sizes.by_group(groups)

    def enough(count: Array) -> npt.NDArray[np.bool_]:
        removed = goes[rank < count[of_row]]
        absorbing = np.zeros(len(whole), dtype=np.bool_)
        absorbing[tree.above[removed]] = True
        absorbing[removed] = False
        remaining = total - groups.sums(removed, whole[removed]) + _COLLAPSED_SIZE * groups.sums(absorbing)
        return groups.allow(spans - count, remaining)

    # Where the number of spans decides, the first try is the last.
    low = np.where(groups.allow(spans, total), 0, np.clip(spans - groups.max_spans, 0, most))
    high = np.where(enough(low), low, most)
    while (low < high).any():
        middle = (low + high) // 2
        does = enough(middle)
        low, high = np.where(does, low, np.minimum(middle + 1, high)), np.where(does, middle, high)
    return goes[rank < low[of_row]]


def _without(table: SpanTable, tree: SpanTree, goes: Array) -> tuple[SpanTable, Array]:
    leaves = np.zeros(len(table), dtype=np.bool_)
    leaves[goes] = True
    into = np.where(leaves, tree.above, np.arange(len(table)))
    while (on := np.flatnonzero(leaves[into])).size:
        into[on] = into[into[on]]
    rows = distinct_values(into[goes])
    counts = np.bincount(into[goes], weights=(counts_of(table) + collapsed_of(table))[goes], minlength=len(table))
    top_level = goes[~leaves[tree.parent[goes]]]
    durations = np.bincount(into[top_level], weights=durations_of(table)[top_level], minlength=len(table))
    nanoseconds = durations.astype(np.int64)  # exact: sums of doubles are up to 2^53, a hundred days
    before = column_of(table, COLLAPSED_DURATION)
    if before is not None:
        nanoseconds += np.where(before[1], np.rint(before[0] * 1e9), 0).astype(np.int64)
    whole = with_values(table, COLLAPSED_COUNT, AttributeType.INT64, rows, (counts + collapsed_of(table))[rows])
    whole = with_values(whole, COLLAPSED_DURATION, AttributeType.DOUBLE, rows, nanoseconds[rows] / 1e9)
    # Links of collapsed spans would be noise on their ancestors.
    return absorbed(whole, tree, into, with_links=False), into


# ---- Splitting of a trace that is too large into several linked traces ----


PART = "torch.part"
_PART_ROOT_SIZE = 256
"""Bytes of the root of a part without its name and its trace state, at most."""


class TargetTrace(NamedTuple):
    """The root of a trace group: the span of a step, or a top-level event."""

    trace_id: int
    span_id: int
    name: str
    step: int
    """Number of the step, -1 for none."""
    trace_state: str = ""
    """W3C tracestate of the trace."""


class TracePart(NamedTuple):
    """A further trace of a trace group that was split, and its root span."""

    trace_id: int
    span_id: int


def split(
    table: SpanTable,
    target: TargetTrace,
    first: tuple[int, int],
    most: tuple[int, int],
    *,
    before: int,
    stays: bool,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
) -> tuple[SpanTable, list[TracePart]]:
    """Splits the spans of one trace into several traces; returns them trace by trace, each with its root first, and the new roots.

    ``first`` and ``most`` are the numbers of spans and bytes that the trace of ``target`` and every other one may have. Each trace gets a
    segment of the order in which every span follows its parent. All segments go to new traces, unless the first one ``stays`` in that of
    ``target``; new traces are numbered after the ``before`` that exist. If the parent of a span is in another trace, the span becomes
    a child of its own trace's root, and links to its parent. It has no such link if the parent is ``target``, to which the root links, or is not
    in the table, so that its trace is unknown.
    """
    tree = SpanTree(table, row_of(table, target.span_id))
    part = _parts(table, tree, target, (first, most), 0 if stays else 1)
    count = int(part.max(initial=0))
    parts = [TracePart(new_trace_id(), new_span_id()) for _ in range(count)]
    whole = joined_tables([table, _roots(table, part, target, [made.span_id for made in parts], before)])
    trace_ids = _trace_ids([target.trace_id, *(made.trace_id for made in parts)])
    span_ids = np.array([target.span_id, *(made.span_id for made in parts)], dtype=np.uint64)
    known = np.where(tree.parent >= 0, part[tree.parent], np.where(part > 0, -1, 0))
    moved = np.concatenate((known != part, np.zeros(count, np.bool_)))
    trace = np.concatenate((part, np.arange(1, count + 1)))
    parent = np.where(moved, span_ids[trace], whole.parent_span_id)
    apart = moved[: len(table)] & (tree.parent >= 0) & (table.parent_span_id != span_ids[0])
    links = _links(table, tree, part, np.flatnonzero(apart), trace_ids)
    to_home = _link_rows(np.arange(len(table), len(whole)), trace_ids[:1], np.full(count, target.span_id))
    links = np.concatenate((links, to_home))
    remote = whole.parent_is_remote
    whole = replace(
        whole,
        trace=trace.astype(np.uint32),
        trace_ids=trace_ids,
        trace_states=(target.trace_state,) * len(trace_ids) if target.trace_state else (),
        parent_span_id=parent,
        parent_is_remote=None if remote is None else np.where(moved, 0, remote),
        links=links_once(links),
    )
    is_event = np.arange(len(whole)) < len(table)
    is_root = whole.span_id == np.uint64(target.span_id)
    return taken(whole, np.lexsort((is_event & ~is_root, trace))), parts


def row_of(table: SpanTable, span_id: int) -> int:
    """Returns the row of a span; -1 if the table does not have it."""
    rows = np.flatnonzero(table.span_id == np.uint64(span_id))
    return int(rows[0]) if rows.size else -1


def _parts(
    table: SpanTable, tree: SpanTree, target: TargetTrace, limits: tuple[tuple[int, int], tuple[int, int]], number: int
) -> npt.NDArray[np.int64]:
    """Returns the number of each span's part, from ``number`` on; 0 is the trace of ``target``."""
    rows = tree.preorder()
    ends = np.cumsum(span_sizes(table)[rows] + LINK_SIZE + 2)
    spare = _PART_ROOT_SIZE + 3 * len(target.name.encode()) + 2 * len(target.trace_state)
    part = np.empty(len(rows), dtype=np.int64)
    begin = 0
    while begin < len(rows):
        spans, size = limits[0] if number == 0 else (limits[1][0] - 1, limits[1][1] - spare)
        bytes_before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, bytes_before + size, side="right"))
        end = max(min(end, begin + spans), begin + 1)
        part[rows[begin:end]] = number
        begin, number = end, number + 1
    return part


def _roots(table: SpanTable, part: Array, target: TargetTrace, span_ids: Sequence[int], before: int) -> SpanTable:
    """Returns the root spans of the parts."""
    count = len(span_ids)
    start = np.full(count + 1, np.iinfo(np.int64).max)
    end = np.zeros(count + 1, dtype=np.int64)
    np.minimum.at(start, part, table.start)
    np.maximum.at(end, part, table.end)
    numbers = np.arange(count)
    roots = SpanTable(
        name=np.ones(count, dtype=np.uint32),
        start=start[1:],
        end=end[1:],
        trace=np.zeros(count, dtype=np.uint32),
        trace_ids=np.zeros((1, 16), dtype=np.uint8),
        span_id=np.array(span_ids, dtype=np.uint64),
        parent_span_id=np.zeros(count, dtype=np.uint64),
        error=np.zeros(count, dtype=np.uint8),
        row=np.full(count, -1),
        step=np.full(count, target.step),
        links=np.empty(0, dtype=LINK),
        names=Names.of(["", target.name]),
    )
    if target.step >= 0:
        for key in (STEP_NUMBER,) if config.ALIASES.read() is None else (STEP_NUMBER, ITERATION):
            roots = with_values(roots, key, AttributeType.INT64, numbers, target.step)
    return with_values(roots, PART, AttributeType.INT64, numbers, before + 1 + numbers)


def _trace_ids(ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(number.to_bytes(16, "big") for number in ids), dtype=np.uint8).reshape(-1, 16)


def _links(table: SpanTable, tree: SpanTree, part: Array, apart: Array, trace_ids: Array) -> Array:
    """Returns the existing links with the new traces of their targets, and links from the rows ``apart`` to their parents."""
    links = table.links.copy()
    if len(links):
        target, inside = linked_rows(table)
        links["trace_id"][inside] = trace_ids[part[target[inside]]]
    return np.concatenate((links, _link_rows(apart, trace_ids[part[tree.parent[apart]]], table.parent_span_id[apart])))


def _link_rows(rows: Array, trace_ids: Array, span_ids: Array) -> Array:
    links = np.zeros(len(rows), dtype=LINK)
    links["row"], links["trace_id"], links["span_id"] = rows, trace_ids, span_ids
    return links


def with_links(table: SpanTable, row: int, parts: Sequence[TracePart]) -> SpanTable:
    """Returns the table with links from a row to the roots of parts."""
    added = _link_rows(
        np.full(len(parts), row),
        _trace_ids([part.trace_id for part in parts]),
        np.array([part.span_id for part in parts], dtype=np.uint64),
    )
    links = np.concatenate((table.links, added))
    return replace(table, links=links[np.argsort(links["row"], kind="stable")])


RECORDED = "torch.recorded_spans"
_MOST_PART_LINKS = 100
"""Links from a root to its parts. Every part links to the root, which has their number as an attribute."""
_ROOT_SIZE = 160
"""Bytes that the counts of a :class:`Reduction` add to a root, at most."""


@dataclass(frozen=True)
class Reduction:
    """Outcomes of spans; can be added over the tables of a trace group."""

    recorded: int = 0
    """Number of all spans: sent, aggregated and collapsed."""
    aggregated: int = 0
    """Number of spans that aggregate spans replace, without the aggregate spans."""
    collapsed: int = 0
    """Number of spans collapsed into others."""
    parts: int = 0
    """Number of traces beside the trace group's own."""
    linked: tuple[TracePart, ...] = ()
    """The first parts, for links from the trace group's root."""
    became: Array | None = field(default=None, compare=False)
    """For each span of one table, the id of the span that it is part of now; None if no span changed."""

    def __add__(self, other: Reduction) -> Reduction:
        return Reduction(
            self.recorded + other.recorded,
            self.aggregated + other.aggregated,
            self.collapsed + other.collapsed,
            self.parts + other.parts,
            (self.linked + other.linked)[:_MOST_PART_LINKS],
        )

    def __bool__(self) -> bool:
        """Whether anything was reduced."""
        return bool(self.aggregated or self.collapsed or self.parts)


def fits(table: SpanTable, budget: Budget) -> bool:
    """Whether the spans, as one trace, are within the size limit. Costs about 0.3 µs per span where an upper bound is above the limit."""
    if len(table) > budget.max_spans:
        return False
    return most_bytes(table, len(table)) <= budget.max_bytes or int(span_sizes(table).sum()) <= budget.max_bytes


def reduced(
    table: SpanTable,
    budget: Budget,
    target: TargetTrace,
    *,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
    before: Reduction = Reduction(),
    stays: bool = False,
) -> tuple[SpanTable, Reduction]:
    """Reduces the spans of one trace group to traces within the size limit.

    Returns them with the reduction of this call, which the caller adds to ``before`` for the next table. If the table fits and nothing
    was reduced before, it is returned itself. ``table`` has the spans of one trace. While the span of ``target`` is not among them, all go to
    linked traces; with ``stays``, only the ones that do not fit, as the trace belongs to an application. ``new_trace_id`` and ``new_span_id`` have the contract
    of OpenTelemetry's IdGenerator. Thread-safe. Costs some 2 µs per excess span.
    """
    root = row_of(table, target.span_id)
    stays |= root >= 0
    if not len(table) or (stays and not before and fits(table, budget)):
        return table, _accounts(table)
    links_before = len(before.linked) if root >= 0 else 0
    links_left = min(_MOST_PART_LINKS - links_before, budget.max_bytes // (10 * LINK_SIZE))
    available = (
        budget.less(0, _ROOT_SIZE + links_before * LINK_SIZE) if root >= 0 else budget.less(0 if stays else 1, 512)
    )
    groups = _trace_groups(table, np.zeros(len(table), dtype=np.int64), np.array([root]), [budget], [available])
    if root >= 0:
        table, groups = _with_strays(table, groups, np.ones(1, dtype=np.bool_))
    table, became, groups, is_within = _smaller(table, groups, Sizes(table))
    done, parts = _accounts(table), list[TracePart]()
    if not stays or not is_within.all():
        first = available.less(0, links_left * LINK_SIZE)
        table, parts = split(
            table,
            target,
            (first.max_spans, first.max_bytes),
            (budget.max_spans, budget.max_bytes),
            before=before.parts,
            stays=stays,
            new_trace_id=new_trace_id,
            new_span_id=new_span_id,
        )
    done = replace(done, parts=len(parts), linked=tuple(parts[:links_left]), became=became)
    if root >= 0 and (total := before + done):
        row = row_of(table, target.span_id)
        numbers = (total.recorded, total.aggregated, total.collapsed, total.parts)
        table = _reported(table, np.array([row]), numbers)
        table = with_links(table, row, total.linked) if total.linked else table
    return without_hidden(table), done


class ReducedTogether(NamedTuple):
    """The result of :func:`reduced_together`."""

    table: SpanTable
    became: npt.NDArray[np.uint64]
    """For each row of the given table, the id of the span that it is now part of."""
    aggregated: npt.NDArray[np.int64]
    """By group, as in :class:`Reduction`."""
    collapsed: npt.NDArray[np.int64]
    is_within: npt.NDArray[np.bool_]
    """Mask of the groups that are within their limits; the others must be split."""


def reduced_together(table: SpanTable, of_row: Array, budgets: Sequence[Budget], roots: Array) -> ReducedTogether:
    """As :func:`reduced`, but for many trace groups at once, and without splitting: a third of the cost.

    Args:
        table: spans of complete trace groups, each in its own trace, without tokens of ``generate``. If not all of them fit afterwards,
            call it again without those: links to their spans may lead to where they would have been.
        of_row: number of each span's group.
        budgets: of each group.
        roots: row of each group's root.
    """
    groups, sizes = _trace_groups(table, of_row, roots, budgets, budgets), Sizes(table)
    is_small = groups.allow(*sizes.by_group(groups))
    available = np.array([budget.less(0, _ROOT_SIZE).max_bytes for budget in budgets], dtype=np.int64)
    groups = groups._replace(max_bytes=np.where(is_small, groups.max_bytes, available))
    table, groups = _with_strays(table, groups, ~is_small)
    table, became, groups, is_within = _smaller(table, groups, sizes)
    counts, into = counts_of(table), collapsed_of(table)
    every = slice(None)
    recorded, collapsed = groups.sums(every, counts + into), groups.sums(every, into)
    aggregated = groups.sums(every, counts) - groups.sums(every)
    if (done := np.flatnonzero(aggregated + collapsed)).size:
        numbers = recorded[done], aggregated[done], collapsed[done], np.zeros(len(done), dtype=np.int64)
        table = _reported(table, groups.roots[done], numbers)
    return ReducedTogether(without_hidden(table), became, aggregated, collapsed, is_within)


def _trace_groups(
    table: SpanTable, of_row: Array, roots: Array, budgets: Sequence[Budget], available: Sequence[Budget]
) -> TraceGroups:
    """Returns the trace groups of a table. ``budgets`` say which spans are short, ``available`` how large each group may be."""
    order = _by_group(of_row)
    begins = np.searchsorted(of_row[order], np.arange(len(roots)))
    lasts = np.maximum.reduceat(table.end[order], begins) - np.minimum.reduceat(table.start[order], begins)
    short = [
        last / budget.max_spans if budget.short is None else budget.short * 1e9
        for last, budget in zip(lasts.tolist(), budgets, strict=True)
    ]
    limits = np.array([(budget.max_spans, budget.max_bytes) for budget in available], dtype=np.int64).reshape(-1, 2)
    parent = rows_of_spans(table, table.parent_span_id)
    return TraceGroups(of_row, roots, limits[:, 0], limits[:, 1], np.array(short, dtype=np.float64), parent)


def without_hidden(table: SpanTable) -> SpanTable:
    """Removes the attributes that the setting hides."""
    hidden = config.HIDDEN_ATTRIBUTES.read()
    if not any(column.key in hidden for column in table.attributes):
        return table
    return replace(table, attributes=tuple(column for column in table.attributes if column.key not in hidden))


def _accounts(table: SpanTable) -> Reduction:
    count, into = int(counts_of(table).sum()), int(collapsed_of(table).sum())
    return Reduction(recorded=count + into, aggregated=count - len(table), collapsed=into)


def _smaller(
    table: SpanTable, groups: TraceGroups, sizes: Sizes
) -> tuple[SpanTable, npt.NDArray[np.uint64], TraceGroups, npt.NDArray[np.bool_]]:
    """Aggregates and collapses as far as necessary and possible.

    Returns the table, the id of the span that each row is now part of, the groups of the table, and which of them fit.
    """
    at = np.arange(len(table))
    is_within = groups.allow(*sizes.by_group(groups))
    for reduce, added in (
        (tokens_aggregated, AGGREGATE_SIZE),
        (aggregated, AGGREGATE_SIZE),
        (collapsed, _COLLAPSED_SIZE),
    ):
        if is_within.all():
            break
        table, into = reduce(table, groups, sizes)
        if len(table) == len(into):
            continue
        groups, sizes = groups.after(into), sizes.carried(table, into, added)
        spans, size = sizes.by_group(groups)
        is_within = groups.allow(spans, size)
        if (may_be_large := size > groups.max_bytes).any():  # the bytes decide, of which these are upper bounds
            sizes = sizes.exact(table, may_be_large[groups.of_row])
            is_within = groups.allow(*sizes.by_group(groups))
        at = (np.cumsum(into == np.arange(len(into))) - 1)[into[at]]
    return table, table.span_id[at], groups, is_within


def _with_strays(table: SpanTable, groups: TraceGroups, chosen: npt.NDArray[np.bool_]) -> tuple[SpanTable, TraceGroups]:
    """Moves spans whose parents are in other traces, or will be, below the root of their group, in the chosen groups."""
    parent, roots = groups.parent, groups.roots[groups.of_row]
    is_stray = ((parent < 0) & (table.parent_span_id != 0)) | ((parent >= 0) & (groups.of_row[parent] != groups.of_row))
    is_stray[groups.roots] = False
    is_stray &= chosen[groups.of_row]
    strays = np.flatnonzero(is_stray)
    if not strays.size:
        return table, groups
    parent, above = parent.copy(), table.parent_span_id.copy()
    parent[strays], above[strays] = roots[strays], table.span_id[roots[strays]]
    return replace(table, parent_span_id=above), groups._replace(parent=parent)


def _reported(table: SpanTable, roots: Array, numbers: Sequence[Any]) -> SpanTable:
    """Returns the table with counts on ``roots``: recorded, aggregated and collapsed spans, and parts; each an array or a number."""
    keys = (RECORDED, "torch.aggregated_spans", "torch.collapsed_spans", "torch.parts")
    for key, values in zip(keys, numbers, strict=True):
        table = with_values(table, key, AttributeType.INT64, roots, values)
    return table
