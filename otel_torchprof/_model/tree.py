"""The events of a batch as torch's profiler displays them: which are displayed, with which parent and self time.

torch rebuilds the tree from intervals when a profile ends (``EventList._build_tree``). Here the parents are recorded, and arithmetic on
columns gives the same tree: utility operators are hidden, asynchronous events have no parent, the parent of an event is
an ancestor that contains it in time, and an operator that only forwards to one of the same name is merged with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import find
from otel_torchprof._columns.schema import MEMORY_KIND, WORK_KIND, Flag, Kind
from otel_torchprof._native.loops import (
    display_parents,
    display_tree,
    positions_of,
    subtract_from_parents,
    with_crossing,
)
from otel_torchprof._process.heap import Arena

from .reductions import weights_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from otel_torchprof._columns.batch import Batch, Names

    from .reductions import Weights

Array = npt.NDArray[Any]

HIDDEN_NAMES: tuple[str, ...] = (
    "[memory]",
    "[OutOfMemory]",
    "profiler::_record_function_enter",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    "aten::is_leaf",
    "aten::output_nr",
    "aten::_version",
)
"""Operators that torch keeps out of every list (``torch.autograd.profiler_util._filter_name``)."""

STEP_PREFIX = "ProfilerStep#"
STEP_KEY = "ProfilerStep*"
"""The name under which torch lists all numbered steps."""


_VIEW_BYTES = 24
"""Bytes of an event in a view, without its row."""


@dataclass(frozen=True, eq=False)
class TreeView:
    """The events that torch displays, in its order: by start, with equal starts the longer first, else as recorded.

    All arrays have one entry per displayed event. Immutable, hence thread-safe.
    """

    batch: Batch
    rows: npt.NDArray[np.int32]
    """Row of the event in the batch."""
    parent: npt.NDArray[np.int32]
    """Position in this view of the parent, -1 for none; always smaller than the event's own position."""
    duration: npt.NDArray[np.int64]
    """End minus start, ns."""
    self_time: npt.NDArray[np.int64]
    """Duration minus the durations of the direct children, ns; 0 for asynchronous events."""
    children: npt.NDArray[np.int32]
    """Number of direct children."""
    display_name: npt.NDArray[np.uint32]
    """Per row of the batch, the index of its displayed name: its own, except for numbered steps."""
    calls: npt.NDArray[np.int64] | None = None
    """Number of calls that the event stands for, whose durations :attr:`duration` adds up; None: each is one."""
    collapsed: npt.NDArray[np.int64] | None = None
    """Total duration of collapsed calls inside the event, ns; None as for :attr:`calls`."""

    def __len__(self) -> int:
        return len(self.rows)

    def children_of(self, event: int) -> list[int]:
        """Returns the positions of the direct children of an event, in order; reads no further than its last child."""
        requested, positions = int(self.children[event]), list[int]()
        begin, width = event + 1, 64
        while len(positions) < requested:
            positions += (np.flatnonzero(self.parent[begin : begin + width] == event) + begin).tolist()
            begin, width = begin + width, width * 2
        return positions


def torch_view(batch: Batch, *, modules: bool = False) -> TreeView:
    """Returns a batch as torch's event list, which has no modules, or with ``modules``.

    Costs 25 ns per event, 60 if threads are merged and events dropped, and 30 bytes, 28 of them in the result. An event that begins and
    ends in the last nanosecond of its parent stays its child; torch, which compares only times, would make it a sibling.
    """
    weights = weights_of(batch)
    events = displayed_events(batch, modules=modules, weights=weights)
    parent, left_out = display_parents(events) or (batch["parent"], None)
    rows = _order(batch["start"], batch["end"], left_out)
    display = display_tree(rows, parent, batch["start"], batch["end"], Arena(len(batch) * _VIEW_BYTES))
    if rows is None:
        rows = np.arange(len(batch), dtype=np.int32)
    is_async = (batch["flags"] & Flag.ASYNC) != 0
    if is_async.any():
        display.self_time[is_async[rows]] = 0
    if batch.work is not None:  # it takes no time of the CPU
        is_work = batch["kind"][rows] == WORK_KIND
        display.duration[is_work] = display.self_time[is_work] = 0
    view = TreeView(batch, rows, display.parent, display.duration, display.self_time, display.children, events["name"])
    return view if weights is None else _weighted(view, weights)


def _weighted(view: TreeView, weights: Weights) -> TreeView:
    """The view with the times of the calls that events stand for."""
    batch, rows = view.batch, view.rows
    duration = weights.duration[rows]
    duration[batch["kind"][rows] == WORK_KIND] = 0
    own = duration.copy()
    subtract_from_parents(own, view.parent, duration)
    own[(batch["flags"][rows] & Flag.ASYNC) != 0] = 0
    # What was collapsed into an event that is not displayed is in the nearest one around it that is.
    position = np.full(len(batch), -1, dtype=np.int64)
    position[rows] = np.arange(len(view))
    collapsed = np.flatnonzero(weights.collapsed)
    around = collapsed.copy()
    while (moving := (around >= 0) & (position[around] < 0)).any():
        around[moving] = batch["parent"][around[moving]]
    known = around >= 0
    inside = np.zeros(len(view), dtype=np.int64)
    np.add.at(inside, position[around[known]], weights.collapsed[collapsed[known]])
    own = np.maximum(own - inside, 0)
    return replace(view, duration=duration, self_time=own, calls=weights.calls[rows], collapsed=inside)


def displayed_events(batch: Batch, *, modules: bool, weights: Weights | None = None) -> dict[str, Array]:
    """Returns the arrays of ``otp_events`` in ``display.h``. ``modules``: whether modules are displayed; ``weights``: of the rows."""
    columns = {name: np.ascontiguousarray(batch[name]) for name in ("parent", "start", "end", "kind", "flags")}
    columns["name"] = np.ascontiguousarray(display_names(batch.names, batch["name"]))
    if (hidden := hidden_rows(batch, modules)) is not None:
        columns["hidden"] = hidden
    is_module = columns["kind"] == int(Kind.MODULE)
    if weights is not None:
        columns["reduced"] = (weights.calls != 1) + 2 * (weights.collapsed != 0).astype(np.uint8)
        columns["reduced"] |= is_module
    elif modules and is_module.any():  # a call of a module is not merged with that around it
        columns["reduced"] = is_module.view(np.uint8)
    return columns


def display_names(names: Names, own: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Returns the indices of the displayed names of events, from those of their own names.

    All numbered profiler steps share the index of the first of them in the process; :func:`display_name` returns its text.
    """
    steps = names.matching((STEP_KEY,), (STEP_PREFIX,))
    return own if steps is None else np.where(steps[own], np.uint32(steps.argmax()), own)


def display_name(name: str) -> str:
    """Returns the name under which torch lists an event: its own, except for numbered steps."""
    return STEP_KEY if name.startswith(STEP_PREFIX) else name


def hidden_rows(batch: Batch, modules: bool) -> npt.NDArray[np.bool_] | None:
    """Returns a mask of utility operators, and of modules unless ``modules``; None if there are none."""
    by_name = batch.names.matching(HIDDEN_NAMES)
    hidden = None if by_name is None else by_name[batch["name"]] & (batch["kind"] != MEMORY_KIND)
    if not modules:
        is_module = batch["kind"] == Kind.MODULE
        hidden = is_module if hidden is None else hidden | is_module
    return hidden if hidden is not None and hidden.any() else None


def lifted(parent: Array, dropped: Array) -> Array:
    """Replaces every dropped parent by the nearest ancestor that is not dropped."""
    moving = find(len(parent), lambda block: dropped[parent[block]] & (parent[block] >= 0))
    parent = parent.copy()
    while moving.size:
        above = parent[parent[moving]]
        parent[moving] = above
        moving = moving[dropped[above] & (above >= 0)]
    return parent


def _order(start: Array, end: Array, dropped: Array | None) -> npt.NDArray[np.int32] | None:
    """Returns the rows in torch's order; None if that is all rows in their recorded order."""
    remaining = None if dropped is None else np.flatnonzero(~dropped).astype(np.int32)
    starts = start if remaining is None else start[remaining]
    if not (starts[1:] < starts[:-1]).any():
        rows = remaining
    else:
        # The rows are one rising run per thread; timsort, which "stable" means for int64, merges runs in 2 ns per event.
        rows = np.argsort(starts, kind="stable").astype(np.int32)
        starts = starts[rows]
        rows = rows if remaining is None else remaining[rows]
    tied = np.flatnonzero(starts[1:] == starts[:-1])
    ends = end if rows is None else _Picked(end, rows)
    if not (ends[tied + 1] > ends[tied]).any():
        return rows
    rows = np.arange(len(start), dtype=np.int32) if rows is None else rows
    at = np.union1d(tied, tied + 1)
    ties = rows[at]
    rows[at] = ties[np.lexsort((-end[ties], start[ties]))]
    return rows


@dataclass(frozen=True)
class _Picked:
    """A column in another order, without a copy."""

    column: Array
    rows: Array

    def __getitem__(self, positions: Array) -> Array:
        picked: Array = self.column[self.rows[positions]]
        return picked


# ---- Events that nest in time on their thread, as stacked slices must: ``parent`` does not imply it ----

Mask = npt.NDArray[np.bool_]


def nested_rows(batch: Batch) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yields the id of each thread of the operating system, and the rows that nest on it, by start, the longer of two first.

    Each row begins no earlier than the one before it, and ends within it or begins after it has ended. A writer of slices so
    needs only a stack of open rows. :func:`not_nested` masks the missing rows. Costs a sort. Thread-safe.
    """
    nest = ~not_nested(batch)
    tids = _system_threads(batch)
    order = np.lexsort((-batch["end"], batch["start"], tids))
    order = order[nest[order]]
    begins = np.flatnonzero(np.diff(tids[order], prepend=-1))
    for rows in np.split(order, begins[1:]) if len(order) else ():
        yield int(tids[rows[0]]), rows


def not_nested(batch: Batch) -> Mask:
    """Returns a mask of asynchronous events, events that ended on another thread, and events that cross another one.

    A label that begins in one call and ends in another crosses the first call. There the mask has the call: the
    label is what users look for on the thread's track. Costs two sorts.
    """
    given = ((batch["flags"] & Flag.ASYNC) != 0) | (batch["thread"] != batch["end_thread"])
    is_frame = batch["kind"] == Kind.FRAME
    track, start, end = _system_threads(batch), batch["start"], batch["end"]
    crossing = with_crossing(given, track, start, end)
    gives_way = np.flatnonzero(crossing & ~given & ~is_frame)
    if not len(gives_way) or not is_frame.any():
        return crossing
    parent = batch["parent"]
    for row in gives_way:
        above = parent[row]
        while above >= 0 and is_frame[above] and end[above] < end[row]:
            given[above] = True
            above = parent[above]
    return with_crossing(given, track, start, end)


def _system_threads(batch: Batch) -> npt.NDArray[np.int64]:
    return np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)[batch["thread"]]


# ---- Self time over several drains: children end, and are drained, before their parents ----


class ChildTime(NamedTuple):
    """Times of children that are no rows."""

    rows: npt.NDArray[np.int64]
    """Rows that have any, each once."""
    times: npt.NDArray[np.int64]
    """The time of each of them, ns."""


class ChildTimes:
    """Durations of the children of open events, by the id of the parent. Not thread-safe.

    Memory grows with the open events only.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._times)

    def settle(self, ended: Array, parents: Array, durations: Array, still_open: Array) -> ChildTime | None:
        """Returns the child times of events from earlier drains; None if no event has any. Call it once per drain.

        Args:
            ended: ids of ended events.
            parents: for each child that ended before its parent, the id of the parent.
            durations: of these children, ns.
            still_open: ids of all open events; the child times of others are dropped.
        """
        is_open = set(still_open.tolist())
        child_times = self._of(ended, is_open) if self._times else None
        ids, which = np.unique(parents, return_inverse=True)
        sums = np.zeros(len(ids), dtype=np.int64)
        np.add.at(sums, which, durations)
        for key, time in zip(ids.tolist(), sums.tolist(), strict=True):
            self._times[key] = self._times.get(key, 0) + time
        if self._times:
            self._times = {key: time for key, time in self._times.items() if key in is_open}
        return child_times

    def _of(self, ended: Array, is_open: Container[int]) -> ChildTime | None:
        # What was open is among the first rows of its thread, so that the search soon ends.
        keys = [key for key in self._times if key not in is_open]
        rows = positions_of(ended, np.array(keys, dtype=np.uint64))
        known = rows >= 0
        if not known.any():
            return None
        times = np.array([self._times.pop(key) for key, has in zip(keys, known.tolist(), strict=True) if has], np.int64)
        return ChildTime(rows[known], times)
