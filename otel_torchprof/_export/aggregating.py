"""Aggregates runs of short spans of one name: an aggregate span has their number and total duration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.generation import TEXT_COMPLETION
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.phases import PHASE_PREFIX, Part
from otel_torchprof._model.limits import LINK_SIZE, limited, span_sizes
from otel_torchprof._model.span_table import AttributeColumn, AttributeType, SpanTable
from otel_torchprof._model.span_tables import picked
from otel_torchprof._model.span_tree import SpanTree, column_of, rows_of_spans

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch, Names

# ---- Spans that replace others: parents, links and attributes when spans are removed from a table ----

Array = npt.NDArray[Any]

AGGREGATED_COUNT, AGGREGATED_DURATION = "torch.aggregated.count", "torch.aggregated.duration"
COLLAPSED_COUNT, COLLAPSED_DURATION = "torch.collapsed.count", "torch.collapsed.duration"
PRECIOUS = "torch.collective."
"""Prefix of attributes of spans to which other processes link: these are never aggregated, and collapsed last."""
MOST_LINKS = 128
"""Most links of a span that replaces others; further ones count as dropped. OpenTelemetry's default limit."""


def counts_of(table: SpanTable) -> npt.NDArray[np.int64]:
    """Number of recorded spans that each span replaces, without those collapsed into it."""
    return _numbers(table, AGGREGATED_COUNT, 1)


def collapsed_of(table: SpanTable) -> npt.NDArray[np.int64]:
    """Number of recorded spans collapsed into each span."""
    return _numbers(table, COLLAPSED_COUNT, 0)


def durations_of(table: SpanTable) -> npt.NDArray[np.int64]:
    """Duration of each span, ns; for an aggregate span, the sum."""
    own = table.end - table.start
    column = column_of(table, AGGREGATED_DURATION)
    return own if column is None else np.where(column[1], np.rint(column[0] * 1e9), own).astype(np.int64)


def precious(table: SpanTable) -> npt.NDArray[np.bool_]:
    """Mask of the spans to which other processes link."""
    is_precious = np.zeros(len(table), dtype=np.bool_)
    for column in table.attributes:
        if column.key.startswith(PRECIOUS):
            is_precious[slice(None) if column.rows is None else column.rows] = True
    return is_precious


def phases(names: Names, name: Array) -> npt.NDArray[np.bool_]:
    """Mask of the phases, which are never aggregated or collapsed; without tokens, of which there may be thousands."""
    named = phase_names(names)
    return np.zeros(len(name), dtype=np.bool_) if named is None else named[name]


def phase_names(names: Names) -> npt.NDArray[np.bool_] | None:
    """Mask of the names of :func:`phases`; None if there are none."""
    named = names.matching((TEXT_COMPLETION,), prefixes=(PHASE_PREFIX, f"{TEXT_COMPLETION} "))
    of_tokens = names.matching((Part.DECODE.event_name,))
    return named if named is None or of_tokens is None else named & ~of_tokens


def tokens(names: Names, name: Array) -> npt.NDArray[np.bool_]:
    """Mask of the calls of a model in which ``generate`` produces one further token."""
    named = names.matching((Part.DECODE.event_name,))
    return np.zeros(len(name), dtype=np.bool_) if named is None else named[name]


def _numbers(table: SpanTable, key: str, otherwise: int) -> npt.NDArray[np.int64]:
    column = column_of(table, key)
    if column is None:
        return np.full(len(table), otherwise, dtype=np.int64)
    return np.where(column[1], column[0], otherwise)


def with_values(table: SpanTable, key: str, kind: AttributeType, rows: Array, values: Any) -> SpanTable:
    """Sets an attribute on some rows; other rows keep their values."""
    before = column_of(table, key)
    column = np.zeros(len(table), dtype=kind.dtype) if before is None else before[0].copy()
    present = np.zeros(len(table), dtype=np.bool_) if before is None else before[1]
    column[rows], present[rows] = values, True
    others = tuple(c for c in table.attributes if c.key != key)
    return replace(table, attributes=(*others, AttributeColumn.where(key, kind, column, present)))


def with_reductions(table: SpanTable, batch: Batch) -> SpanTable:
    """Sets the attributes of spans that stand for several calls of the file that a batch was read from.

    ``table``: spans of the batch's events, and synthetic ones. What was collapsed into other spans of the file is in the synthetic span
    that began last before these, or in the first one.
    """
    reductions = batch.reductions
    if reductions is None:
        return table
    span_of_row = np.full(len(batch) + 1, -1)
    span_of_row[table.row[table.row >= 0]] = np.flatnonzero(table.row >= 0)
    span = span_of_row[rows_of(batch, reductions["event"])]
    roots = np.flatnonzero(table.row < 0)
    roots = roots[np.argsort(table.start[roots], kind="stable")]
    before = np.searchsorted(table.start[roots], reductions["start"], side="right") - 1
    span = np.where(reductions["event"] == 0, roots[np.maximum(before, 0)], span)
    own = np.flatnonzero((span >= 0) & (reductions["calls"] != 1) & (reductions["event"] > 0))
    inside = np.flatnonzero((span >= 0) & (reductions["collapsed"] > 0))
    collapsed = np.zeros((2, len(table)), np.int64)
    for sums, name in zip(collapsed, ("collapsed", "collapsed_duration"), strict=True):
        np.add.at(sums, span[inside], reductions[name][inside])
    within = np.flatnonzero(collapsed[0])
    for rows, (key, values), (key_of_sum, sums) in (
        (span[own], (AGGREGATED_COUNT, reductions["calls"][own]), (AGGREGATED_DURATION, reductions["duration"][own])),
        (within, (COLLAPSED_COUNT, collapsed[0, within]), (COLLAPSED_DURATION, collapsed[1, within])),
    ):
        if len(rows):
            table = with_values(table, key, AttributeType.INT64, rows, values)
            table = with_values(table, key_of_sum, AttributeType.DOUBLE, rows, sums / 1e9)
    return table


def absorbed(table: SpanTable, tree: SpanTree, into: Array, *, with_links: bool = True) -> SpanTable:
    """Removes spans, and replaces them as parents and in links by the spans that absorb them.

    ``into``: for each row the row that replaces it, itself if it stays. Attributes and times do not change. ``with_links``: moves the links of
    removed spans to the spans that replace them.
    """
    if not with_links:
        links = table.links
        table = replace(table, links=links[into[links["row"].astype(np.int64)] == links["row"].astype(np.int64)])
    parent = np.where(tree.parent >= 0, table.span_id[into[tree.parent]], table.parent_span_id)
    surviving = np.flatnonzero(into == np.arange(len(into)))
    links = _moved_links(table, into)
    dropped = table.dropped_links
    if dropped is not None:
        dropped = np.bincount(into, weights=dropped, minlength=len(into)).astype(np.uint32)
    whole = replace(table, parent_span_id=parent, links=links, dropped_links=dropped)
    return limited(picked(whole, surviving), max_attributes=None, max_links=MOST_LINKS, max_attribute_length=None)


def _moved_links(table: SpanTable, into: Array) -> Array:
    """The links of all spans on the surviving spans, sorted by row, without duplicates and links to the same span."""
    if not len(table.links):
        return table.links
    links = table.links.copy()
    row = into[links["row"].astype(np.int64)]
    target, inside = linked_rows(table)
    target = np.where(inside, into[target], -1)
    links["span_id"] = np.where(inside, table.span_id[target], links["span_id"])
    links["row"] = row
    return links_once(links[target != row])


def links_once(links: Array) -> Array:
    """Sorts links by row, and removes duplicates with the same row and span id."""
    row, span_id = links["row"], links["span_id"]
    order = np.lexsort((span_id, row))
    is_duplicate = (row[order][1:] == row[order][:-1]) & (span_id[order][1:] == span_id[order][:-1])
    surviving = np.sort(order[np.concatenate((np.ones(min(len(row), 1), np.bool_), ~is_duplicate))])
    unique_links: Array = links[surviving[np.argsort(row[surviving], kind="stable")]]
    return unique_links


def linked_rows(table: SpanTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The row that each link points to, and whether it is in the table."""
    target = rows_of_spans(table, table.links["span_id"])
    inside = target >= 0
    inside &= (table.trace_ids[table.trace[target]] == table.links["trace_id"]).all(axis=1)
    return target, inside


STEPS = 10
"""Number of thresholds to try: the longest, half of it and so on."""
AGGREGATE_SIZE = 110
"""Upper bound of the bytes that an aggregate span has more than its first span: two attributes, and longer numbers."""

_ADDED = frozenset(
    (
        COLLAPSED_COUNT,
        COLLAPSED_DURATION,
        "torch.op.flops",
        "torch.self_duration",
        "torch.device.duration",
        "torch.device.self_duration",
        "torch.device.drained_duration",
        "torch.device.energy",
        "torch.memory.allocated",
        "torch.memory.released",
        "torch.device.memory.allocated",
        "torch.device.memory.released",
        "torch.dropped_events",
    )
)
_HIGHEST = frozenset(("torch.memory.peak", "torch.device.memory.peak", "torch.unfinished", "torch.dropped_before"))
"""Attributes of which an aggregate span has the maximum; flags are true if they are true for one span."""


NOT_SHORT = int(np.iinfo(np.int64).max)
"""More than any threshold."""


class Siblings(NamedTuple):
    """Data of a table that do not depend on which spans are aggregated."""

    tree: SpanTree
    label: npt.NDArray[np.int64]
    """Equal for spans that may be aggregated: same trace group, name, thread and error status."""
    is_next: npt.NDArray[np.bool_]
    """In the order of the tree, whether a span directly follows a sibling with the same label."""
    length: npt.NDArray[np.int64]
    """Duration, ns, for aggregate spans on average; :data:`NOT_SHORT` for spans that must not be aggregated."""
    is_aggregate: npt.NDArray[np.bool_]


class TraceGroups(NamedTuple):
    """The trace groups of a table, and the size limit of each."""

    of_row: npt.NDArray[np.int64]
    """Number of each row's group."""
    roots: npt.NDArray[np.int64]
    """Row of each group's root; -1 where it is not in the table."""
    max_spans: npt.NDArray[np.int64]
    max_bytes: npt.NDArray[np.int64]
    short: npt.NDArray[np.float64]
    """Nanoseconds; what took longer is neither aggregated nor collapsed."""
    parent: npt.NDArray[np.int64]
    """Row of each row's parent; -1 where it is not in the table."""

    def sums(self, rows: Array | slice, values: Array | None = None) -> npt.NDArray[np.int64]:
        """Returns sums by group. ``values``: one per entry of ``rows``; default: 1 each."""
        return np.bincount(self.of_row[rows], weights=values, minlength=len(self.roots)).astype(np.int64)

    def allow(self, spans: Array, size: Array) -> npt.NDArray[np.bool_]:
        """Returns which groups are within their limits with these numbers of spans and bytes."""
        is_allowed: npt.NDArray[np.bool_] = (spans <= self.max_spans) & (size <= self.max_bytes)
        return is_allowed

    def after(self, into: Array) -> TraceGroups:
        """Returns the groups after a reduction. ``into``: for each row the row that replaces it, itself if it stays."""
        stays = into == np.arange(len(into))
        place = (np.cumsum(stays) - 1)[into]
        parent = self.parent[stays]
        return self._replace(
            of_row=self.of_row[stays],
            roots=np.where(self.roots >= 0, place[self.roots], -1),
            parent=np.where(parent >= 0, place[parent], -1),
        )


def aggregated(table: SpanTable, groups: TraceGroups, sizes: Sizes) -> tuple[SpanTable, Array]:
    """Aggregates as few short spans as necessary, in each trace group that is too large.

    Adjacent short siblings with the same thread and name are aggregated into the first of them, and so are all their descendants with
    the same name, in any order. If that is not enough, all short spans are. Roots, phases and link targets of others are never
    aggregated. Returns the table, and for each row the row that replaces it.
    """
    siblings = siblings_of(table, groups)
    is_large = ~groups.allow(*sizes.by_group(groups))

    def try_out(step: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        threshold = np.where(is_large, groups.short / 2.0**step, -1)
        into = _groups(siblings, threshold[groups.of_row])
        return into, groups.allow(*sizes.after(into, groups))

    # By group: steps of a threshold that suffices, or of the longest; and of one that does not.
    low, high = np.zeros(len(is_large), dtype=np.int64), np.full(len(is_large), STEPS)
    best, enough = try_out(low)
    searched = is_large & enough
    while (searched & (high - low > 1)).any():
        middle = (low + high) // 2
        into, does = try_out(middle)
        does &= searched
        best = np.where(does[groups.of_row], into, best)
        low, high = np.where(does, middle, low), np.where(does, high, middle)
    return composed(table, siblings.tree, best), best


class Sizes:
    """Upper bounds of the sizes of a table's spans, in bytes: computed once, then updated as spans are aggregated and collapsed."""

    def __init__(self, table: SpanTable, own: Array | None = None) -> None:
        """``own``: bytes of each span without its links; default: computed."""
        self._links = LINK_SIZE * np.bincount(table.links["row"].astype(np.int64), minlength=len(table))
        self._own = span_sizes(table) - self._links if own is None else own
        self._by_group: tuple[Array, Array] | None = None

    @property
    def whole(self) -> Array:
        """Bytes of each span including its links."""
        return self._own + self._links

    def by_group(self, groups: TraceGroups) -> tuple[Array, Array]:
        """Returns the number of spans of each group, and their bytes. Computed once: always call it with the same groups."""
        if self._by_group is None:
            self._by_group = groups.sums(slice(None)), groups.sums(slice(None), self.whole)
        return self._by_group

    def after(self, into: Array, groups: TraceGroups) -> tuple[Array, Array]:
        """As :meth:`by_group`, after aggregation. ``into``: for each row, the row that replaces it."""
        surviving, own = self._without(into, AGGREGATE_SIZE)
        return groups.sums(surviving), groups.sums(surviving, own) + groups.sums(slice(None), self._links)

    def carried(self, table: SpanTable, into: Array, added: int) -> Sizes:
        """Returns the sizes for ``table``, the result of a reduction. ``added``: bytes by which a span that replaces others may grow."""
        return self if len(table) == len(into) else Sizes(table, self._without(into, added)[1])

    def exact(self, table: SpanTable, rows: npt.NDArray[np.bool_]) -> Sizes:
        """Returns these sizes, exact for some rows of the table."""
        exact = Sizes(table)
        return Sizes(table, np.where(rows, exact.whole - self._links, self._own))

    def _without(self, into: Array, added: int) -> tuple[Array, Array]:
        surviving = np.flatnonzero(into == np.arange(len(into)))
        others = np.bincount(into, minlength=len(into))[surviving] > 1
        return surviving, self._own[surviving] + added * others


def siblings_of(table: SpanTable, groups: TraceGroups) -> Siblings:
    """The siblings of a table. Roots, phases, and spans to which other processes link, are not short."""
    tree = SpanTree(table, parent=groups.parent)
    count = counts_of(table)
    length = durations_of(table) // count
    apart = tree.any_below(precious(table) | phases(table.names, table.name))
    apart[groups.roots[groups.roots >= 0]] = True
    length[apart] = NOT_SHORT
    label = ((table.name.astype(np.int64) << 1) | (table.error != 0)) * len(groups.roots) + groups.of_row
    label = label * (tree.thread.max(initial=0) + 1) + tree.thread
    order, is_next = tree.order, np.zeros(len(table), dtype=np.bool_)
    family, same = tree.siblings[order], label[order]
    is_next[1:] = (family[1:] == family[:-1]) & (same[1:] == same[:-1])
    return Siblings(tree, label, is_next, length, count > 1)


def _groups(siblings: Siblings, threshold: Array) -> npt.NDArray[np.int64]:
    """Returns for each row the first row of its aggregate; itself if it stays. ``threshold``: by row."""
    order = siblings.tree.order
    short = siblings.length[order] <= threshold[order]
    begins = ~siblings.is_next
    begins[1:] |= ~(short[1:] & short[:-1])
    into = np.empty(len(order), dtype=np.int64)
    into[order] = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return with_all_below(siblings, into)


def with_all_below(siblings: Siblings, into: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Extends ``into``: also aggregates descendants of aggregate spans with the same name, level by level."""
    tree = siblings.tree
    in_run = np.bincount(into, minlength=len(into))[into] > 1
    top = tree.topmost(in_run | siblings.is_aggregate)
    below = tree.by_start[top[tree.by_start] >= 0]
    into[below] = below
    # One round for each level below aggregate spans: aggregates children of one aggregate span with the same name.
    level = tree.depth[below] - tree.depth[top[below]]
    labels = siblings.label.max(initial=0) + 1
    for number in range(1, int(level.max(initial=0)) + 1):
        nodes = below[level == number]
        into[nodes] = first_alike(nodes, into[tree.above[nodes]] * labels + siblings.label[nodes])
    return into


def first_alike(nodes: Array, key: Array) -> Array:
    """Returns for each node the first one with the same key."""
    order = np.argsort(key, kind="stable")
    first = np.ones(len(nodes), dtype=np.bool_)
    first[1:] = key[order][1:] != key[order][:-1]
    first_nodes = np.empty(len(nodes), dtype=np.int64)
    first_nodes[order] = nodes[order[first]][np.cumsum(first) - 1]
    return first_nodes


class _SiblingGroups(NamedTuple):
    """The rows of all groups with several rows, group by group."""

    rows: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    """Index in ``rows`` at which each group begins."""
    into: npt.NDArray[np.int64]
    """The row that each group becomes."""
    which: npt.NDArray[np.int64]
    """The group of each of ``rows``."""


def composed(table: SpanTable, tree: SpanTree, into: Array) -> SpanTable:
    """Replaces groups by aggregate spans. ``into``: for each row, the first of its group."""
    rows = np.flatnonzero(np.bincount(into, minlength=len(into))[into] > 1)
    if not rows.size:
        return table
    rows = rows[np.argsort(into[rows], kind="stable")]
    first = np.concatenate(([True], into[rows][1:] != into[rows][:-1]))
    groups = _SiblingGroups(rows, np.flatnonzero(first), into[rows][first], np.cumsum(first) - 1)
    end = table.end.copy()
    end[groups.into] = np.maximum.reduceat(table.end[rows], groups.begins)
    count = np.add.reduceat(counts_of(table)[rows], groups.begins)
    seconds = np.add.reduceat(durations_of(table)[rows], groups.begins) / 1e9
    attributes = tuple(_combined(column, groups, len(table)) for column in table.attributes)
    whole = replace(table, end=end, attributes=attributes)
    whole = with_values(whole, AGGREGATED_COUNT, AttributeType.INT64, groups.into, count)
    whole = with_values(whole, AGGREGATED_DURATION, AttributeType.DOUBLE, groups.into, seconds)
    return absorbed(whole, tree, into)


def _combined(column: AttributeColumn, groups: _SiblingGroups, spans: int) -> AttributeColumn:
    """A column with the values of aggregate spans: sums or maxima, else the value that all their spans share."""
    whole, present = column.spread(spans)
    values, here = whole[groups.rows], present[groups.rows]
    if column.key in _ADDED:
        combined = _sums(np.where(here, values, column.type.dtype.type(0)), groups)
        has = np.logical_or.reduceat(here, groups.begins)
    elif column.key in _HIGHEST:
        lowest = 0 if column.type == AttributeType.BOOL else np.iinfo(np.int64).min
        combined = np.maximum.reduceat(np.where(here, values, column.type.dtype.type(lowest)), groups.begins)
        has = np.logical_or.reduceat(here, groups.begins)
    else:
        combined = whole[groups.into]
        has = np.logical_and.reduceat(here & (values == combined[groups.which]), groups.begins)
    if column.rows is None and has.all() and column.key not in _ADDED | _HIGHEST:
        return column
    whole = whole.copy()
    whole[groups.into], present[groups.into] = combined, has
    return AttributeColumn.where(column.key, column.type, whole, present)


def _sums(values: Array, groups: _SiblingGroups) -> Array:
    """Sums of values by group; integer sums are limited to the largest int64."""
    sums = np.add.reduceat(values, groups.begins)
    if values.dtype == np.int64 and values.size:
        about = np.add.reduceat(values.astype(np.float64), groups.begins)
        sums = np.where(about >= 2.0**63, np.iinfo(np.int64).max, sums)
    return sums
