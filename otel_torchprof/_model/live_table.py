"""Placed events and ended steps as a table of spans."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import without
from otel_torchprof._columns.schema import NEVER, Flag, Kind
from otel_torchprof._native.recorder import living_threads
from otel_torchprof._process.give_way import give_way, with_pauses
from otel_torchprof._process.heap import Arena

from .flows import NumberedEvents, has_backward, latest_forward, numbered_events, pair
from .forest import contexts_of_nodes, enclosing_of, ends_of_nodes, of_nodes
from .frame_spans import module_calls, plain_names
from .span_table import LINK, AttributeColumn, AttributeType, SpanTable, ascending, extend_names, rows_after

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from otel_torchprof._columns.batch import Batch

    from .collectives import LiveCollectives
    from .placed import Placed
    from .step_spans import StepSpan

Array = npt.NDArray[Any]

# ---- Selection of the Python calls of a live recording that become spans ----
# A service runs inside calls that last as long as the process: its main function, its event loop, the loop over its
# steps. They belong to no request and no step; as spans they would contain everything and end with the process.
# So a call becomes a span
#
# - inside an application span: always;
# - with steps: if it ends in the step in which it began, or in the next one;
# - elsewhere: if it is inside a module, a label or an operator.
#
# Children of other calls move to the nearest remaining ancestor. An open call that one drain has kept stays, however
# long it lasts, since spans that were sent have it as their parent.

Mask = npt.NDArray[np.bool_]
Nodes = npt.NDArray[np.int32]


class CallRules(NamedTuple):
    """Selects the calls inside a span or a step that become spans."""

    shortest_ns: int = 0
    """Shorter calls of functions are left out."""
    keeps_bare: bool = False
    """Whether to keep calls outside of steps, spans and other events, for programs without any of these."""


def without_loose_calls(
    batch: Batch,
    reported: npt.NDArray[np.uint64],
    rules: CallRules,
    *,
    lasting: Callable[[Array, Array | None], Array],
    is_foreign: Callable[[Array], Mask],
) -> Batch:
    """Removes Python calls that belong to no step, span or other event from a drained batch; returns the batch itself if it has no calls.

    Removes calls of modules too: the hooks of modules report them, with full names.

    Args:
        batch: the drained batch.
        reported: ids of calls that were open in the previous drain and not removed.
        rules: rules for the calls to keep.
        lasting: maps times and contexts to numbers of steps: 0 for the first known step, -1 before it, one more than the last for
            :data:`~.forest.NEVER`; always -1 without steps.
        is_foreign: for contexts, whether they are those of application spans outside of steps.
    """
    is_frame = of_nodes(batch, "kind") == int(Kind.FRAME)
    if not is_frame.any():
        return batch
    ids, name = of_nodes(batch, "id"), of_nodes(batch, "name")
    start, end = of_nodes(batch, "start"), ends_of_nodes(batch)
    contexts = contexts_of_nodes(batch)
    context = np.zeros(len(ids), dtype=np.uint32) if contexts is None else contexts
    enclosing = enclosing_of(batch)
    first, last = lasting(start, context), lasting(end, context)
    in_step = last >= 0
    loose = in_step & ((last - first > 1) | (first < 0) | ((first == 0) & (end == NEVER)))
    bare = is_frame & ~in_step & ~is_foreign(context)
    if bare.any() and not rules.keeps_bare:
        loose |= bare & ~_inside_of_others(enclosing, is_frame, context, start, end)
    loose |= (end - start < rules.shortest_ns) | module_calls(batch.names, name)
    return without_nodes(batch, ids, enclosing, loose & is_frame & ~np.isin(ids, reported))


def without_nodes(batch: Batch, ids: npt.NDArray[np.uint64], enclosing: Nodes, dropped: Mask) -> Batch:
    """Removes some nodes (rows, then open events) from a drained batch.

    Their children move to their parents, even if a parent is open or was drained before.
    """
    if not dropped.any():
        return batch
    rows = len(batch)
    outer = np.zeros(len(ids), dtype=np.uint64)  # parents that are not in the batch
    outer[batch.outer_rows.astype(np.intp)] = batch.outer_parents
    outer[rows:] = batch.opens.parent
    outer[enclosing >= 0] = 0
    enclosing = enclosing.copy()
    moving = np.flatnonzero((enclosing >= 0) & dropped[enclosing])
    while moving.size:
        above = enclosing[moving]
        outer[moving], enclosing[moving] = outer[above], enclosing[above]
        moving = moving[(enclosing[moving] >= 0) & dropped[enclosing[moving]]]
    parents = np.where(enclosing >= 0, ids[enclosing], outer)
    beyond = np.flatnonzero((enclosing[:rows] >= rows) | (outer[:rows] != 0))
    opens = batch.opens.chosen(~dropped[rows:])
    return without(
        replace(
            batch,
            columns={
                **batch.columns,
                "parent": np.where(enclosing[:rows] < rows, enclosing[:rows], -1).astype(np.int32),
            },
            outer_rows=beyond.astype(np.uint64),
            outer_parents=parents[beyond],
            opens=replace(opens, parent=parents[rows:][~dropped[rows:]]),
        ),
        dropped[:rows],
    )


def _inside_of_others(enclosing: Nodes, is_frame: Mask, context: Array, start: Array, end: Array) -> Mask:
    """Mask of the nodes with an open ancestor of the same context that is no call."""
    ancestor = enclosing.copy()
    moving = np.flatnonzero(ancestor >= 0)
    while moving.size:
        above = ancestor[moving]
        misses = is_frame[above] | (context[above] != context[moving]) | (end[above] < start[moving])
        moving = moving[misses]
        ancestor[moving] = enclosing[ancestor[moving]]
        moving = moving[ancestor[moving] >= 0]
    return ancestor >= 0


_COLUMN_BYTES = 49
"""Bytes of a span in a table, without attributes."""
REMEMBERED = 1 << 16
"""Forward operators of earlier drains that a backward function can link to."""


class _Ends(NamedTuple):
    """Targets of links."""

    trace_id: npt.NDArray[np.uint8]
    span_id: npt.NDArray[np.uint64]

    def words(self) -> npt.NDArray[np.uint64]:
        """The trace ids as two words each."""
        return np.ascontiguousarray(self.trace_id).view(np.uint64).reshape(-1, 2)

    def at(self, which: Array) -> _Ends:
        """The targets at the given positions."""
        return _Ends(self.trace_id[which], self.span_id[which])

    def followed_by(self, other: _Ends) -> _Ends:
        """These, then the others."""
        return _Ends(np.concatenate((self.trace_id, other.trace_id)), np.concatenate((self.span_id, other.span_id)))


class _Remembered(NamedTuple):
    """Forward operators of one drain, or of several."""

    events: NumberedEvents
    ends: _Ends
    highest: int
    """Their highest number."""

    def followed_by(self, other: _Remembered) -> _Remembered:
        """These, then the others."""
        events, ends = self.events.followed_by(other.events), self.ends.followed_by(other.ends)
        return _Remembered(events, ends, max(self.highest, other.highest))


_NO_IDS = np.empty((0, 16), dtype=np.uint8)
_MOST_DRAINS = 32
"""Drains whose operators are remembered apart, so that most drains copy nothing."""


class Flows:
    """Links of backward functions to forward operators, also to those of earlier drains. Not thread-safe.

    Remembers the latest :data:`REMEMBERED` numbered operators, or up to three times as many.
    """

    def __init__(self) -> None:
        self._remembered: deque[_Remembered] = deque()
        """One entry per drain, oldest first; joined from time to time."""

    def links(
        self,
        placed: Placed,
        traced: npt.NDArray[np.bool_],
        shown: npt.NDArray[np.bool_],
        trace_ids: Array,
        *,
        final: bool,
    ) -> tuple[Array, _Ends]:
        """Rows of backward functions that become spans, and what each links to.

        ``traced``: rows that may be linked to. ``shown``: those of them that become spans. ``trace_ids``: per trace group. ``final``:
        nothing more will come.
        """
        flows: tuple[Array, _Ends] = np.empty(0, dtype=np.int64), _Ends(_NO_IDS, np.empty(0, dtype=np.uint64))
        if final and not has_backward(placed.batch):
            return flows
        new = numbered_events(placed.batch)
        if not traced.all():
            new = new.at(traced[new.row])
        is_linking = new.is_backward if shown is traced else new.is_backward & shown[new.row]
        if is_linking.any():  # not in a drain all of whose steps are left out
            events = new if shown is traced else new.at(is_linking | ~new.is_backward)
            lowest, known = events.number[events.is_backward].min(), _Ends(_NO_IDS, np.empty(0, dtype=np.uint64))
            for earlier in reversed(self._remembered):
                if earlier.highest >= lowest:
                    may_match = np.flatnonzero(earlier.events.number >= lowest)
                    events = earlier.events.at(may_match).followed_by(events)
                    known = earlier.ends.at(may_match).followed_by(known)
            forward, backward = pair(events)
            rows = events.row[forward]
            flows = events.row[backward], _ends_of(np.maximum(rows, 0), placed, trace_ids)
            is_known = rows < 0
            flows[1].trace_id[is_known], flows[1].span_id[is_known] = known.at(forward[is_known])
        if not final:
            self._remember(placed, latest_forward(new), trace_ids)
        return flows

    def _remember(self, placed: Placed, new: NumberedEvents, trace_ids: Array) -> None:
        if not len(new.row):
            return
        if len(new.row) > REMEMBERED:
            new = new.at(np.argsort(new.start, kind="stable")[-REMEMBERED:])
        # -1: rows of earlier batches have no meaning later.
        events, ends = new._replace(row=np.full(len(new.row), -1)), _ends_of(new.row, placed, trace_ids)
        self._remembered.append(_Remembered(events, ends, int(new.number.max())))
        remembered = sum(len(earlier.events.row) for earlier in self._remembered)
        while remembered - len(self._remembered[0].events.row) >= REMEMBERED:
            remembered -= len(self._remembered.popleft().events.row)
        if len(self._remembered) > _MOST_DRAINS:
            first = self._remembered.popleft()
            for later in self._remembered:
                first = first.followed_by(later)
            self._remembered = deque([first])


def _ends_of(rows: Array, placed: Placed, trace_ids: Array) -> _Ends:
    return _Ends(trace_ids.take(placed.trace_group[rows], axis=0), placed.span_id[rows])


def failed_events(batch: Batch) -> npt.NDArray[np.bool_]:
    """Mask of the events that failed. Exceptions of Python calls are no errors: callers expect many, such as the end of an iterator."""
    # Not with the enums, which numpy takes for int64: eight times the memory of these columns.
    failed: npt.NDArray[np.bool_] = batch["error_type"] != 0
    if batch["flags"].max(initial=0):  # mostly no event has any
        failed |= batch["flags"] & int(Flag.ERROR) != 0
    if failed.any():
        failed &= batch["kind"] != int(Kind.FRAME)
    return failed


def traced_events(placed: Placed) -> npt.NDArray[np.bool_]:
    """Mask of the events that become spans, by samplers and steps; see :func:`live_table`."""
    of_trace_groups = np.array([trace_group.is_traced for trace_group in placed.trace_groups], dtype=np.bool_)
    if of_trace_groups.all():
        return np.ones(len(placed.trace_group), dtype=np.bool_)
    is_traced: npt.NDArray[np.bool_] = of_trace_groups[placed.trace_group]
    return is_traced


def live_table(
    placed: Placed,
    ended: Sequence[StepSpan],
    flows: Flows,
    *,
    collectives: LiveCollectives | None = None,
    final: bool = False,
    left_out: npt.NDArray[np.bool_] | None = None,
) -> SpanTable:
    """The spans of one drain: those of ended steps first, then one per event, in the order of the batch.

    Omits unsampled traces, and events below steps that are not traced in full. ``ended`` may contain other synthetic spans, such as
    the job span. ``final``: this is the last drain. ``left_out``: mask of further events to omit; links lead to these all the same.
    """
    batch, trace_groups = placed.batch, placed.trace_groups
    traced = traced_events(placed)
    shown = traced if left_out is None else traced & ~left_out
    rows = None if shown.all() else np.flatnonzero(shown)
    count = len(batch) if rows is None else len(rows)
    steps = [step for step in ended if step.trace.exported]
    traces = [trace_group.trace for trace_group in trace_groups] + [step.trace for step in steps]
    trace_ids = np.frombuffer(b"".join(t.trace_id.to_bytes(16, "big") for t in traces), np.uint8).reshape(-1, 16)
    step_names = list(dict.fromkeys([step.name for step in steps]))
    position = _positions(len(steps), rows, len(batch))
    give_way()
    flow = flows.links(placed, traced, shown, trace_ids, final=final)

    whole = len(steps) + count
    arena = Arena(whole * _COLUMN_BYTES)

    def column(of_steps: Sequence[Any], of_events: Array | int, dtype: npt.DTypeLike) -> Array:
        give_way()
        values = arena.empty(whole, dtype)
        values[: len(steps)] = np.array(of_steps, dtype)
        values[len(steps) :] = of_events if rows is None or isinstance(of_events, int) else of_events[rows]
        return values

    name, names = plain_names(batch)
    table = SpanTable(
        name=column([len(names) + step_names.index(step.name) for step in steps], name, np.uint32),
        start=column([step.start for step in steps], batch["start"], np.int64),
        end=column([step.end for step in steps], batch["end"], np.int64),
        trace=column([len(trace_groups) + i for i in range(len(steps))], placed.trace_group, np.uint32),
        trace_ids=trace_ids,
        trace_states=states if any(states := tuple(trace.trace_state for trace in traces)) else (),
        span_id=column([step.span_id for step in steps], placed.span_id, np.uint64),
        parent_span_id=column(
            [step.parent.span_id if step.parent else 0 for step in steps], placed.parent_span_id, np.uint64
        ),
        parent_is_remote=_remote(placed, steps, column),
        error=column([0] * len(steps), failed_events(batch), np.uint8),
        row=rows_after(len(steps), count) if rows is None else np.concatenate((np.full(len(steps), -1), rows)),
        step=column([step.number for step in steps], -1, np.int64),
        links=_links(steps, position, *_of_events(flow, placed, collectives)),
        names=extend_names(names, step_names),
    )
    return with_attributes(table, _own_attributes(placed, steps, position))


def _positions(before: int, rows: Array | None, events: int) -> Callable[[Array], Array]:
    """Returns a function from rows to indices of their spans in the table, -1 for none. ``rows``: rows with spans, None for all."""
    if rows is None:
        return lambda requested: requested + before
    position = np.full(events, -1, dtype=np.int64)
    position[rows] = np.arange(len(rows)) + before
    return lambda requested: position[requested]


def _remote(
    placed: Placed, steps: Sequence[StepSpan], column: Callable[[Sequence[Any], Array, npt.DTypeLike], Array]
) -> npt.NDArray[np.uint8] | None:
    """Flags of spans with a parent in another process; None if there are none."""
    of_steps = [step.parent is not None and step.parent.is_remote for step in steps]
    of_trace_groups = np.array([trace_group.is_remote for trace_group in placed.trace_groups], dtype=np.uint8)
    if not any(of_steps) and not of_trace_groups.any():
        return None
    return column(of_steps, of_trace_groups[placed.trace_group] * placed.is_root.astype(np.uint8), np.uint8)


def _of_events(flows: tuple[Array, _Ends], placed: Placed, collectives: LiveCollectives | None) -> tuple[Array, _Ends]:
    """The links of events: those of backward functions, of roots, and those to other ranks. As :meth:`Flows.links`."""
    rows, ends = flows
    more = [_of_roots(placed)]
    if collectives is not None:
        others = collectives.links(placed)
        more.append((others.row, _Ends(others.trace_id, others.span_id)))
    for other_rows, other_ends in more:
        if len(other_rows):
            rows, ends = np.concatenate((rows, other_rows)), ends.followed_by(other_ends)
    return rows, ends


def _of_roots(placed: Placed) -> tuple[Array, _Ends]:
    """Links of events that are roots of traces: to the spans that had ended when they began."""
    groups = placed.trace_groups
    has_links = np.array([group.step is None and bool(group.trace.links) for group in groups], dtype=np.bool_)
    roots = np.flatnonzero(has_links[placed.trace_group] & placed.is_root) if has_links.any() else has_links[:0]
    linked = [
        (row, trace_id.to_bytes(16, "big"), span_id)
        for row, number in zip(roots.tolist(), placed.trace_group[roots].tolist(), strict=True)
        for trace_id, span_id in groups[number].trace.links
    ]
    rows, trace_ids, span_ids = zip(*linked, strict=True) if linked else ((), (), ())
    ids = np.frombuffer(b"".join(trace_ids), dtype=np.uint8).reshape(-1, 16)
    return np.array(rows, dtype=np.int64), _Ends(ids, np.array(span_ids, dtype=np.uint64))


def _links(steps: Sequence[StepSpan], position: Callable[[Array], Array], rows: Array, ends: _Ends) -> Array:
    """Returns links of steps to the previous one, to other ranks and to the job, and of backward functions to forward operators, by row."""
    # Not a list of tuples, which the garbage collector would track: see ``untracked`` of python_sources.
    row, trace_ids, span_ids = [], bytearray(), []
    for i, step in enumerate(steps):
        for to in (step.link, *step.trace.links, step.job):
            if to is not None:
                row.append(i)
                trace_ids += to[0].to_bytes(16, "big")
                span_ids.append(to[1])
    linking_rows = np.where(rows >= 0, position(np.maximum(rows, 0)), -1)
    here = linking_rows >= 0
    links = np.zeros(len(row) + int(here.sum()), dtype=LINK)
    of_steps, rest = links[: len(row)], links[len(row) :]
    of_steps["row"], of_steps["span_id"] = row, np.array(span_ids, dtype=np.uint64)
    of_steps["trace_id"] = np.frombuffer(trace_ids, dtype=np.uint8).reshape(-1, 16)
    # As words: numpy copies arrays inside of structures one by one.
    words = rest.view(np.uint64).reshape(-1, 4)
    words[:, 0], words[:, 1:3], words[:, 3] = linking_rows[here], ends.words()[here], ends.span_id[here]
    linked = links["row"]
    return links if (linked[1:] >= linked[:-1]).all() else links[np.argsort(linked, kind="stable")]


def _own_attributes(
    placed: Placed, steps: Sequence[StepSpan], position: Callable[[Array], Array]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields attributes of samplers on roots, and of steps, by position in the table."""
    names: dict[int | None, str] = {}
    if any(step.thread is not None for step in steps):
        names = {thread.ident: thread.name for thread in living_threads()}
        names |= {thread.ident: thread.name for thread in placed.batch.threads}
    for i, step in enumerate(steps):
        attributes = {**step.trace.attributes, **step.attributes}
        if step.thread is not None:
            attributes["thread.id"] = step.thread
            if name := names.get(step.thread):
                attributes["thread.name"] = name
        if step.is_running:
            attributes["torch.unfinished"] = True
        if step.shares is not None and step.shares.regions.any():
            attributes |= {key: values.item() for key, values in step.shares.attributes().items()}
        yield i, attributes
    reported = np.array(
        [trace_group.step is None and bool(trace_group.trace.attributes) for trace_group in placed.trace_groups],
        dtype=np.bool_,
    )
    if reported.any():
        rows = np.flatnonzero(reported[placed.trace_group] & placed.is_root)
        for at, trace_group in zip(position(rows).tolist(), placed.trace_group[rows].tolist(), strict=True):
            if at >= 0:
                yield at, placed.trace_groups[trace_group].trace.attributes


def with_attributes(table: SpanTable, added_attributes: Iterable[tuple[int, Mapping[str, Any]]]) -> SpanTable:
    """Adds attributes to single spans, by position. Sequences become JSON text: samplers give scalars as a rule."""
    columns = _columns(added_attributes)
    if not columns:
        return table
    strings: dict[str, int] = {}
    first = len(table.names)

    def stored(kind: AttributeType, values: Collection[Any]) -> Array:
        if kind is AttributeType.NAME:
            texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
            values = [strings.setdefault(text, first + len(strings)) for text in texts]
        return np.fromiter(values, dtype=kind.dtype, count=len(values))

    added = []
    for (key, number), (positions, values) in columns.items():
        give_way()
        kind, rows = AttributeType(number), np.array(positions, dtype=np.uint32)
        added.append(AttributeColumn(key, kind, *ascending(stored(kind, values), rows)))
    return replace(table, attributes=(*table.attributes, *added), names=extend_names(table.names, list(strings)))


def _columns(
    added_attributes: Iterable[tuple[int, Mapping[str, Any]]],
) -> dict[tuple[str, int], tuple[list[int], list[Any]]]:
    """Returns the positions and values of each key and :class:`AttributeType`, of which a key may have several."""
    # Most spans have the same keys: their values are taken apart together, and from one list, since the collector counts many.
    alike: dict[tuple[str, ...], tuple[list[int], list[Any]]] = {}
    for position, attributes in with_pauses(added_attributes):
        keys = tuple(attributes)
        positions, values = alike.get(keys) or alike.setdefault(keys, ([], []))
        positions.append(position)
        values.extend(attributes.values())
    columns: dict[tuple[str, int], tuple[list[int], list[Any]]] = {}
    for keys, (positions, all_values) in alike.items():
        for at, key in enumerate(keys):
            values = all_values[at :: len(keys)]
            for kind, chosen in _places_by_kind(values).items():
                of_column = columns.setdefault((str(key), kind), ([], []))
                of_column[0].extend(map(positions.__getitem__, chosen))
                of_column[1].extend(map(values.__getitem__, chosen))
    return columns


def _places_by_kind(values: Sequence[Any]) -> Mapping[int, Sequence[int]]:
    """Returns the places of the values of each :class:`AttributeType`: usually of one."""
    types = set(map(type, values))
    # A type has one kind, but for large integers.
    if len(types) > 1 or (types == {int} and not _MIN <= min(values) <= max(values) <= _MAX):
        kinds = list(map(_kind, values))
        return {kind: [at for at, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}
    return {_kind(values[0]): range(len(values))}


_SCALARS = {bool: int(AttributeType.BOOL), int: int(AttributeType.INT64), float: int(AttributeType.DOUBLE)}
_KINDS = {str: int(AttributeType.NAME), **_SCALARS}
_MIN, _MAX = -(1 << 63), (1 << 63) - 1


def _kind(value: Any) -> int:
    """Returns the :class:`AttributeType` of a value; integers that are too large become text."""
    kind = _KINDS.get(type(value))
    if kind is None:
        kind = next((_SCALARS[base] for base in type(value).__mro__ if base in _SCALARS), _KINDS[str])
    return _KINDS[str] if kind == _KINDS[int] and not _MIN <= value <= _MAX else kind
