"""Assigns traces, parents, span ids and links to the events of a live recording, drain by drain.

Trace and parent of a top-level event apply to its whole tree, even to parts in later drains. The first of these rules applies:

1. It began in a step, and its context is none or one of the training loop's: its parent is the span of that step.
2. Its context is that of a span that was open when it began: that span is its parent.
3. It is an operator: its parent is a root that the operators of a thread share for a second (``operator_roots``).
4. It is the root of a new trace, for which the sampler was called.

If the span of its context had ended before it began, rule 3 or 4 applies, and the root links to that span.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values, is_any_of
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import DEVICE_COLUMNS, NEVER, MemoryFlag
from otel_torchprof._native.loops import roots_of
from otel_torchprof._native.placing import PlacedNodes, Trees, placed_nodes
from otel_torchprof._process.give_way import give_way, with_pauses
from otel_torchprof._process.heap import Arena

from .compiled import shares
from .devices import DeviceTimes, timed_rows, times_of
from .flops import group_flops
from .forest import Forest, Lasting, OpenEventInfo, at_nodes, forest
from .frames import distinct
from .inputs import has_inputs
from .limits import Budget
from .live_table import CallRules, without_loose_calls
from .memory import device_number
from .operator_roots import OPERATORS_NAME, OperatorRoots, operators
from .peak_flops import note_flops
from .phases import exclusive_times
from .placed import Placed, TraceGroup
from .span_table import event_span_ids
from .step_spans import Trace
from .steps import Steps
from .tree import ChildTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.trace import SpanContext

    from .collectives import LiveCollectives
    from .devices import TimedRows
    from .step_spans import RecordedStep, Step, StepSpan
    from .tree import ChildTime


Array = npt.NDArray[Any]

# ---- Device times over several drains: an event may end in a later drain than its children ----


_STREAM = ("device_type", "device_index", "stream")


class _EventStream(NamedTuple):
    """Key of the device time that children of an open event took on one stream, in earlier drains."""

    event: int
    """Id of the event."""
    device_type: int
    device_index: int
    stream: int


class LiveDevices:
    """Computes device times of the events of one recording, drain by drain. Not thread-safe.

    Stores only data of open events, so memory does not grow with the number of events. A pair in a later drain than its event is not counted.
    """

    def __init__(self) -> None:
        self._child_times: dict[_EventStream, int] = {}

    def times(self, batch: Batch, trees: Trees) -> DeviceTimes | None:
        """Returns the device times of the rows; None if no device was timed. The batch must have the parents of ``trees``.

        Total times include children from earlier drains; self times (``own``) exclude them.
        """
        devices = batch.devices
        if not self._child_times and (devices is None or not len(devices["event"])):
            return None
        whole = self._with_children(batch)
        timed = timed_rows(whole)
        if timed is not None:
            self._remember(batch, whole, timed, trees)
        still_open = set(batch.opens.id.tolist())
        self._child_times = {
            child_time: time for child_time, time in self._child_times.items() if child_time.event in still_open
        }
        if timed is None or whole.devices is None:
            return None
        all_times = times_of(whole, timed, whole.devices["duration"])
        rows = len(batch)
        return DeviceTimes(all_times.pair[:rows], all_times.own[:rows], all_times.total[:rows])

    def _with_children(self, batch: Batch) -> Batch:
        """Adds to each event that ended in this batch one child row with its timing per stream, for the device time of earlier drains."""
        ids = np.fromiter((child_time.event for child_time in self._child_times), np.uint64, len(self._child_times))
        ended = np.flatnonzero(np.isin(batch["id"], ids))
        row_of = dict(zip(batch["id"][ended].tolist(), ended.tolist(), strict=True))
        known = [(child_time, time) for child_time, time in self._child_times.items() if child_time.event in row_of]
        for child_time, _ in known:
            del self._child_times[child_time]
        if not known and batch.devices is not None:
            return batch
        new = np.arange(len(known), dtype=np.uint64) + np.uint64(2**64 - 1 - len(known))
        added: dict[str, Any] = {
            "event": new,
            "start": np.zeros(len(known)),
            "duration": [time for _, time in known],
            **{name: [getattr(child_time, name) for child_time, _ in known] for name in _STREAM},
        }
        parent = np.array([row_of[child_time.event] for child_time, _ in known], dtype=np.int32)
        columns = {
            "id": np.concatenate((batch["id"], new)),
            "start": np.concatenate((batch["start"], np.zeros(len(known), np.int64))),
            "parent": np.concatenate((batch["parent"], parent)),
        }
        return Batch(columns, batch.names, batch.threads, devices=_joined(batch.devices, added))

    def _remember(self, batch: Batch, whole: Batch, timed: TimedRows, trees: Trees) -> None:
        """Adds the device times of rows to the nearest open ancestor of each, by stream."""
        rows, devices = len(batch), whole.devices
        top = roots_of(whole["parent"])[timed.rows]
        node = trees.parent[top].astype(np.int64)
        chosen = np.flatnonzero((node >= rows) & (timed.enclosing < 0))
        if devices is not None and chosen.size:
            pair, stream = timed.pair[timed.rows[chosen]], timed.stream[chosen]
            width = int(stream.max()) + 1
            _, first, place = np.unique(node[chosen] * width + stream, return_index=True, return_inverse=True)
            sums = np.zeros(len(first), dtype=np.int64)
            np.add.at(sums, place.reshape(-1), devices["duration"][pair])
            keys = [batch.opens.id[node[chosen[first]] - rows], *(devices[name][pair[first]] for name in _STREAM)]
            for *key, time in zip(*(column.tolist() for column in keys), sums.tolist(), strict=True):
                child_time = _EventStream(*key)
                self._child_times[child_time] = self._child_times.get(child_time, 0) + time


class LiveMemory:
    """Counts the allocations below an event in earlier drains as records of the event itself. Not thread-safe.

    Stores sums of open events only, so memory does not grow with the number of records.
    """

    def __init__(self) -> None:
        self._earlier: dict[str, Array] = {}

    def with_earlier(self, batch: Batch, trees: Trees) -> Batch:
        """Returns the batch with records of what was allocated and freed earlier below its events; itself if there is none.

        Such a record has the sum of the bytes, and the total and time of the record with the highest total.
        """
        memory = batch.memory
        if memory is None or not (len(memory["time"]) or self._earlier):
            return batch
        if self._earlier:
            memory = {name: np.concatenate((self._earlier[name], values)) for name, values in memory.items()}
        self._earlier = self._of_open_events(batch, memory, trees)
        return replace(batch, memory=memory)

    @staticmethod
    def _of_open_events(batch: Batch, memory: Mapping[str, Array], trees: Trees) -> dict[str, Array]:
        rows, opens = len(batch), batch.opens.id
        if not len(opens):
            return {}
        row, order = rows_of(batch, memory["event"]), np.argsort(opens)
        at = order[np.minimum(np.searchsorted(opens, memory["event"], sorter=order), len(opens) - 1)]
        node = np.where(opens[at] == memory["event"], rows + at, -1)
        inside = np.flatnonzero(row >= 0)
        node[inside] = trees.parent[roots_of(batch["parent"])[row[inside]]]
        kept = np.flatnonzero((node >= rows) & ((memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0))
        if not len(kept):
            return {}
        device = device_number(
            memory["device_type"][kept].astype(np.int64), memory["device_index"][kept].astype(np.int64)
        )
        key = (node[kept] - rows) * 2 + (memory["bytes"][kept] < 0) + len(opens) * 2 * device
        _, group = np.unique(key, return_inverse=True)
        order = np.lexsort((memory["total_allocated"][kept], group))
        last = order[np.flatnonzero(np.diff(group[order], append=-1))]
        size = np.zeros(len(last), np.int64)
        np.add.at(size, group, memory["bytes"][kept])
        found = {name: values[kept[last]] for name, values in memory.items()}
        return {
            **found,
            "bytes": size,
            "event": opens[node[kept[last]] - rows],
            "thread": np.zeros(len(last), np.uint32),
        }


def _joined(devices: Mapping[str, Array] | None, added: Mapping[str, Any]) -> dict[str, Array]:
    """Pairs, and others behind them."""
    new = {column.name: np.asarray(added[column.name], dtype=column.dtype) for column in DEVICE_COLUMNS}
    return new if devices is None else {name: np.concatenate((devices[name], new[name])) for name in new}


_ID_BYTES = 8 + 8
"""Bytes of the span id and the trace group of an event."""

_MOST_LINKS = 32
"""Maximum number of links from the operators' shared root to ended spans."""


def _default_max_spans() -> int:
    """Returns the default limit of spans per trace."""
    return Budget().max_spans


def _never_ended(_context: int) -> int | None:
    """Default of ``ended``: treats every span as open."""
    return None


class LiveTrees:
    """Assigns trace, parent and span id to the events of one recording, drain by drain. Not thread-safe.

    Stores only open events, so memory does not grow with the number of events.

    Args:
        key: key of the span ids, the same for the whole recording.
        steps: the steps known so far.
        new_trace: creates the trace of a top-level event that is a root, from its name, -1, and None.
        current_span: returns the span of a context, and its start.
        ended: latest possible end of that span, Unix ns; None while it is open.
        calls: rules for omitting calls; None to omit none.
        collectives: the known collectives.
        max_spans: maximum number of spans of a trace.
    """

    def __init__(
        self,
        *,
        key: int,
        steps: Steps,
        new_trace: Callable[[str, int, tuple[int, int] | None], Trace],
        current_span: Callable[[int], tuple[SpanContext, int | None] | None],
        ended: Callable[[int], int | None] = _never_ended,
        calls: CallRules | None = CallRules(),  # noqa: B008 - immutable
        collectives: LiveCollectives | None = None,
        max_spans: Callable[[], int] = _default_max_spans,
    ) -> None:
        self._key = key
        self._operators = OperatorRoots(key, new_trace, max_spans)
        self._collectives = collectives
        self._steps = steps
        self._new_trace = new_trace
        self._current_span = current_span
        self._ended = ended
        self._calls = calls
        self._decided = OpenEventInfo()
        self._places: dict[int, TraceGroup] = {}
        self._root_of: dict[int, int] = {}
        self._child_times = ChildTimes()
        self._devices, self._memory = LiveDevices(), LiveMemory()

    def place(self, batch: Batch, device_times: DeviceTimes | None = None) -> Placed:
        """Gives every row of a drained batch its trace, its span id and its parent. Costs some 20 ns per row.

        ``device_times``: of the rows, for batches from which events were left out; default: computed from the batch.
        """
        if self._steps.active and "context" in batch.columns:
            self._note_stepping_contexts(batch)
        steps = self._steps.known()
        if self._calls is not None:
            batch = self._without_loose_calls(batch, steps, self._calls)
        nodes = forest(batch, self._decided, self._lasting_in(steps, batch))
        rows, trees = len(batch), nodes.trees
        give_way()
        trace_groups, of_root = self._trace_groups(nodes, batch, steps)
        room = Arena(_ID_BYTES * len(trees.root))
        trace_group = room.empty(len(trees.root), np.int64)
        trace_group[trees.roots] = of_root
        give_way()
        child_time = self._times(trees, batch)
        self._remember(nodes, trace_groups, trace_group[trees.root[rows:]])
        if self._collectives is not None:
            batch = self._collectives.place(batch, trees, trace_groups, trace_group)
        span_id = self._span_ids(batch["id"], room)
        found = self._placed_nodes(nodes, batch, span_id, trace_groups, trace_group)
        own = batch
        if trees.is_moved:
            parent = np.where(trees.parent[:rows] < rows, trees.parent[:rows], np.int32(-1))
            own = replace(batch, columns={**batch.columns, "parent": parent})
        own = self._memory.with_earlier(own, trees)
        placed = Placed(
            own,
            trace_groups,
            found.group[:rows],
            span_id,
            found.parent_span_id,
            found.is_root[:rows],
            child_time,
            found.root_id[:rows],
            self._open_roots(batch, trace_groups, found),
            found.sums,
            self._devices.times(own, trees) if device_times is None else device_times,
        )
        give_way()
        self._widen_steps(placed)
        self._add_shares(placed, trees.parent)
        self._add_flops(placed)
        give_way()
        self._add_phases(placed, nodes.enclosing, found.group)
        self._steps.settle()
        return placed

    def ended_roots(self, watermark: int, *, final: bool) -> Sequence[StepSpan]:
        """Returns the ended shared roots of operators; repeatedly, until :meth:`forget_roots`.

        ``watermark``: Unix ns; all earlier events are placed. ``final``: there are no more events.
        """
        busy = {trace_group.step for trace_group in self._places.values() if trace_group.step is not None}
        return self._operators.ended(watermark, busy, final=final)

    def forget_roots(self, ended: Sequence[StepSpan]) -> None:
        """Drops ended roots after they were sent."""
        self._operators.forget(ended)

    def _span_ids(self, events: npt.NDArray[np.uint64], room: Arena | None = None) -> npt.NDArray[np.uint64]:
        own = event_span_ids(events, self._key, room)
        return own if self._collectives is None else self._collectives.span_ids(events, own)

    def _placed_nodes(
        self, nodes: Forest, batch: Batch, span_id: Array, trace_groups: Sequence[TraceGroup], trace_group: Array
    ) -> PlacedNodes:
        """``trace_group``: that of each node that is a root; written for the others."""
        is_loops = np.zeros(len(batch.threads), dtype=np.uint8)
        is_loops[self._loop_threads(batch)] = 1
        # If the parent ended in an earlier drain, the root may have too.
        beyond = at_nodes(batch, "id", nodes.beyond)
        known_roots = zip(beyond.tolist(), self._span_ids(beyond).tolist(), strict=True)
        columns = {
            "is_loops": is_loops,
            "span_id": span_id,
            "open_span_id": self._span_ids(batch.opens.id),
            "beyond": nodes.beyond,
            "beyond_parent": self._span_ids(nodes.beyond_parents),
            "beyond_root": np.array([self._root_of.get(event, own) for event, own in known_roots], dtype=np.uint64),
            "group_parent": np.array([group.parent_span_id for group in trace_groups], dtype=np.uint64),
            "group_root": _synthetic_roots(trace_groups),
            "group": trace_group,
        }
        return placed_nodes(batch, nodes.trees, columns)

    def _open_roots(self, batch: Batch, trace_groups: Sequence[TraceGroup], found: PlacedNodes) -> frozenset[int]:
        """Returns the roots that are events with open descendants."""
        rows = len(batch)
        at = np.flatnonzero(_synthetic_roots(trace_groups)[found.group[rows:]] == 0)
        self._root_of = dict(zip(batch.opens.id[at].tolist(), found.root_id[rows:][at].tolist(), strict=True))
        return frozenset(self._root_of.values())

    def _without_loose_calls(self, batch: Batch, steps: Sequence[Step], rules: CallRules) -> Batch:
        def is_foreign(context: Array) -> npt.NDArray[np.bool_]:
            foreign = [c for c in distinct_values(context).tolist() if self._current_span(c) is not None]
            return is_any_of(context, foreign)

        return without_loose_calls(
            batch,
            self._decided.id,
            rules,
            lasting=lambda times, context: self._lasting(steps, times, context),
            is_foreign=is_foreign,
        )

    def _note_stepping_contexts(self, batch: Batch) -> None:
        """A context that the loop's own thread was in belongs to the loop."""
        if not (batch["context"].any() or batch.opens.context.any()):
            return
        own = self._loop_threads(batch)
        opened = batch.opens.context[is_any_of(batch.opens.thread, own)]
        contexts = distinct_values(batch["context"][is_any_of(batch["thread"], own)])
        self._steps.note_contexts(c for c in (*contexts.tolist(), *opened.tolist()) if c)

    def _loop_threads(self, batch: Batch) -> list[int]:
        """Indices into the batch's threads of those of the training loop."""
        return [i for i, known in enumerate(batch.threads) if known.ident in self._steps.threads]

    @staticmethod
    def _widen_steps(placed: Placed) -> None:
        """A synthetic span holds its events, those that are still open too."""
        bounds = zip(*(column.tolist() for column in placed.sums[:-1]), strict=True)
        for group, (start, *others) in zip(placed.trace_groups, bounds, strict=True):
            if group.step is not None and start != NEVER:
                group.step.widen(start, *others)

    @staticmethod
    def _add_shares(placed: Placed, parent: Array) -> None:
        """Adds the shares that ``torch.compile`` captured to steps. ``parent``: of rows and open events."""
        spans = [group.step for group in placed.trace_groups]
        all_shares = shares(placed.batch, placed.trace_group, len(spans), parent) if any(spans) else None
        for number, span in enumerate(spans):
            if all_shares is not None and span is not None:
                own = all_shares.chosen(number)
                span.shares = own if span.shares is None else span.shares.plus(own)

    @staticmethod
    def _add_flops(placed: Placed) -> None:
        """Adds the floating-point operations to steps of operators with inputs."""
        spans = [group.step for group in placed.trace_groups]
        if not any(spans) or not has_inputs(placed.batch):
            return
        counted = group_flops(placed.batch, placed.trace_group, len(spans)).tolist()
        for span, flops in zip(spans, counted, strict=True):
            if span is not None and flops:
                span.flops += int(flops)

    @staticmethod
    def _add_phases(placed: Placed, enclosing: Array, trace_group: Array) -> None:
        """Adds the times of phases to steps. ``enclosing``, ``trace_group``: of rows and open events."""
        spans = [group.step for group in placed.trace_groups]
        if not any(span is not None and span.phases is not None for span in spans):
            return
        times = exclusive_times(placed.batch, enclosing, trace_group, len(spans))
        for number, span in enumerate(with_pauses(spans)):
            if times is not None and span is not None and span.phases is not None:
                span.phases.add(times, number)

    # ---- Trace groups ----

    def _trace_groups(
        self, nodes: Forest, batch: Batch, steps: Sequence[Step]
    ) -> tuple[list[TraceGroup], npt.NDArray[np.int64]]:
        """The trace groups of a drain, those of trees that are known from earlier ones first, and of each root which it is in."""
        roots, trace_groups = nodes.trees.roots, list[TraceGroup]()
        if "context" not in batch.columns and len(steps) == 1 and not self._places:
            trace_groups += filter(None, [self._shared_group(0, steps[0])])
            return trace_groups, np.zeros(len(roots), dtype=np.int64)
        of_root = np.full(len(roots), -1, dtype=np.int64)
        known = np.sort(nodes.known[nodes.trees.parent[nodes.known] < 0])
        of_root[np.searchsorted(roots, known)] = np.arange(len(known))
        trace_groups += [self._places[event] for event in at_nodes(batch, "id", known).tolist()]
        late = self._shared_groups(batch, roots, steps, trace_groups, of_root)
        self._operator_groups(nodes, batch, trace_groups, of_root)
        alone = np.flatnonzero(of_root < 0)
        of_root[alone] = len(trace_groups) + np.arange(len(alone))
        names = at_nodes(batch, "name", roots[alone])
        trace_groups += [TraceGroup(self._new_trace(batch.names[name], -1, None), 0) for name in names.tolist()]
        for at, context in late.items():
            self._link(trace_groups, of_root[at], context)
        return trace_groups, of_root

    def _shared_groups(
        self, batch: Batch, roots: Array, steps: Sequence[Step], trace_groups: list[TraceGroup], of_root: Array
    ) -> dict[int, int]:
        """Assigns roots to the spans of steps and contexts, with one lookup per pair of context and step.

        Returns:
            Context numbers by index into ``roots``, for roots outside of steps that began after the span of their context had ended.
        """
        late: dict[int, int] = {}
        waiting = np.flatnonzero(of_root < 0)
        start, context = at_nodes(batch, "start", roots[waiting]), None
        if "context" in batch.columns:
            contexts = at_nodes(batch, "context", roots[waiting])
            context = contexts.astype(np.int64) if contexts.any() else None
        step = self._positions(steps, start, context)
        for end, following in self._steps.gaps():
            step[(start > end) & (start < following)] = -1
        if context is None:
            pairs, of_pair = distinct(step + 1)
        else:
            is_late = self._is_late(context, start) & (step < 0)
            late = dict(zip(waiting[is_late].tolist(), context[is_late].tolist(), strict=True))
            context[is_late] = 0
            pairs, of_pair = np.unique(context << 32 | step + 1, return_inverse=True)
        number = np.full(len(pairs), -1, dtype=np.int64)
        for at, packed in enumerate(pairs.tolist()):
            position = (packed & 0xFFFFFFFF) - 1
            trace_group = self._shared_group(packed >> 32 & 0xFFFFFFFF, steps[position] if position >= 0 else None)
            if trace_group is not None:
                number[at] = len(trace_groups)
                trace_groups.append(trace_group)
        of_root[waiting] = number[of_pair]
        return late

    def _is_late(self, context: Array, start: Array) -> npt.NDArray[np.bool_]:
        """Mask of the events that began after the span of their context ended: its tasks and threads may outlive it."""
        contexts, place = np.unique(context, return_inverse=True)
        known = (self._ended(number) if number else None for number in contexts.tolist())
        ends = np.fromiter((NEVER if end is None else end for end in known), np.int64, len(contexts))
        late: npt.NDArray[np.bool_] = start > ends[place]
        return late

    def _link(self, trace_groups: list[TraceGroup], at: int, context: int) -> None:
        """Adds a link from the root of a trace group to the span of a context; a shared root has at most :data:`_MOST_LINKS`."""
        current, group = self._current_span(context), trace_groups[at]
        link = None if current is None else (current[0].trace_id, current[0].span_id)
        if link is None or link in group.trace.links or len(group.trace.links) >= _MOST_LINKS:
            return
        trace = replace(group.trace, links=(*group.trace.links, link))
        if group.step is not None:
            group.step.trace = trace
        trace_groups[at] = replace(group, trace=trace)

    def _operator_groups(self, nodes: Forest, batch: Batch, trace_groups: list[TraceGroup], of_root: Array) -> None:
        """Operators that are in none of these, which share roots."""
        is_shared = np.array(
            [trace_group.step is not None and trace_group.step.name == OPERATORS_NAME for trace_group in trace_groups]
            + [False]
        )
        waiting = of_root < 0
        if not is_shared.any() and not waiting.any():
            return
        root, roots = nodes.trees.root, nodes.trees.roots
        waiting &= operators(batch, roots)
        below = np.zeros(len(root), dtype=np.bool_)
        below[roots] = waiting | is_shared[of_root]
        below = below[root]
        below[nodes.known] = False
        new = np.flatnonzero(below)
        if not new.size:
            return
        is_waiting = np.zeros(len(root), dtype=np.bool_)
        is_waiting[roots] = waiting
        spans, which = self._operators.shared(batch, new, is_waiting[new])
        of_root[waiting] = len(trace_groups) + which
        trace_groups += [TraceGroup(span.trace, span.span_id, False, span) for span in spans]

    def _positions(self, steps: Sequence[Step], times: Array, context: Array | None) -> npt.NDArray[np.int64]:
        """Returns the index of the step at each time; -1 for contexts that are not those of steps."""
        if not steps:
            return np.full(len(times), -1, dtype=np.int64)
        starts = np.array([step.start for step in steps], dtype=np.int64)
        position = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        if (origin := self._steps.origin) is not None:
            position[times < origin] = -1
        if context is None:
            return position
        foreign = [c for c in distinct_values(context).tolist() if not self._steps.owns(c)]
        if foreign:
            position[is_any_of(context, foreign)] = -1
        return position

    def _lasting_in(self, steps: Sequence[Step], batch: Batch) -> Lasting | None:
        """Returns None if no event of the batch can last longer than a whole step."""
        if not steps or (not steps[1:] and not len(batch.opens)):
            return None
        # What lasts for more than a step is longer than the shortest one, or open since an earlier one.
        starts = sorted({*(step.start for step in steps), self._steps.origin or steps[0].start})
        shortest = np.diff(starts).min(initial=NEVER)
        return Lasting(lambda times, context: self._lasting(steps, times, context), int(shortest))

    def _lasting(self, steps: Sequence[Step], times: Array, context: Array | None) -> npt.NDArray[np.int64]:
        """As :meth:`_positions`, to count the steps that an event spans: ``len(steps)`` for :data:`NEVER`, the end of an open event.

        Before the first known step: -1, or 0 if that step is the first one and its start is not known.
        """
        position = self._positions(steps, times, context)
        if steps:
            own = position >= 0
            position[own & (times == NEVER)] = len(steps)
            has_first = steps[0].starts_earlier or steps[0].start == self._steps.origin
            position[own & (times < steps[0].start)] = 0 if has_first else -1
        return position

    def _shared_group(self, context: int, step: Step | None) -> TraceGroup | None:
        if step is not None:
            span = self._steps.span(step, context)
            return TraceGroup(span.trace, span.span_id, False, span)
        current = self._current_span(context) if context else None
        if current is None:
            return None
        parent, _ = current
        # An empty state takes a microsecond to say so.
        state = parent.trace_state.to_header() if parent.trace_state else ""
        return TraceGroup(Trace(parent.trace_id, True, True, state), parent.span_id, parent.is_remote)

    # ---- State between drains ----

    def _remember(self, nodes: Forest, trace_groups: Sequence[TraceGroup], of_open: Array) -> None:
        """Stores the trace groups of open events. ``of_open``: index of each."""
        self._decided = nodes.decided
        groups = (trace_groups[number] for number in of_open.tolist())
        self._places = dict(zip(nodes.decided.id.tolist(), groups, strict=True))

    def _times(self, trees: Trees, batch: Batch) -> ChildTime | None:
        """Stores the times of children of open parents; returns the stored times of parents that have ended now."""
        if not len(self._child_times) and not len(batch.opens):
            return None
        outer = trees.outer
        durations = batch["end"][outer] - batch["start"][outer]
        parents = batch.opens.id[trees.parent[outer] - len(batch)]
        return self._child_times.settle(batch["id"], parents, durations, batch.opens.id)


def _synthetic_roots(trace_groups: Sequence[TraceGroup]) -> npt.NDArray[np.uint64]:
    """Span id of the synthetic root of each trace group, 0 if its root is an event."""
    return np.array([0 if group.step is None else group.step.span_id for group in trace_groups], dtype=np.uint64)


def placed_recording(
    batch: Batch,
    steps: Sequence[RecordedStep],
    *,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
    parent: SpanContext | None = None,
    device_times: DeviceTimes | None = None,
) -> tuple[Placed, list[StepSpan]]:
    """Returns the events of a recording with trace, parent and span id, and the spans of its steps, at least one.

    Without ``parent`` each step is the root of its own trace, and links to the previous one; with it all join that span's trace.
    The first call of ``new_span_id`` gives the key of the events' ids, which so do not depend on the steps. ``device_times``: as for
    :meth:`LiveTrees.place`.
    """

    def new_trace(_name: str, _number: int, _link: tuple[int, int] | None) -> Trace:
        if parent is None:
            return Trace(new_trace_id(), True, True)
        return Trace(parent.trace_id, True, True, parent.trace_state.to_header(), parent=parent)

    def no_span(_context: int) -> None:
        return None

    key = new_span_id()
    known = Steps(new_trace, new_span_id, no_span)
    known.add(steps)
    trees = LiveTrees(key=key, steps=known, new_trace=new_trace, current_span=no_span, calls=None)
    placed = trees.place(batch, device_times)
    spans = [span for step in known.take_ended() for span in step.spans.values()]
    note_flops(spans)
    return placed, spans
