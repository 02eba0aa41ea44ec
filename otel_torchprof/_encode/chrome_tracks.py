"""Chooses the track of a Chrome trace on which each span is drawn, export after export.

Viewers draw a track as slices inside one another and drop or misplace a slice that overlaps its neighbour otherwise. A span
that says on which thread it ran is drawn on the track of that thread, where the threads own stack makes spans nest; what
does not nest there, ended on another thread or names no thread (requests that overlap, tasks of one event loop) goes to a lane.

A *lane* is a track of the file. On it slices lie apart or one inside the other, and a slice lies inside another only if
that is its parent: a viewer draws everything that is inside in time as if it had been called from there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._native.encoders import detach_overlapping

from .chrome_json import LARGEST_TID, track_events

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Times = npt.NDArray[np.int64]


class Outlines(NamedTuple):
    """Ids, times and threads of the spans of one export; one entry per span, in any order."""

    start: Times
    """Unix ns."""
    end: Times
    """Unix ns, not before the start."""
    span_id: npt.NDArray[np.uint64]
    parent_id: npt.NDArray[np.uint64]
    """0 for none."""
    thread: npt.NDArray[np.int64]
    """Index into ``threads``, -1 for a span that belongs to no thread."""
    threads: Sequence[tuple[int, str]]
    """OpenTelemetry's ``thread.id`` and ``thread.name``, the empty name where it is not known; each id once."""


class _ThreadTrack:
    """The top-level intervals that earlier exports put on a thread's track: disjoint, sorted by time.

    What lies inside an interval is not kept, so a span that begins inside one is refused: it may cross a slice there.
    A span around some intervals fits: it was still open when they were exported.
    """

    _MOST = 1024

    def __init__(self, tid: int, name: str) -> None:
        self.tid = tid
        self.name = name
        self._start: Times = np.empty(0, dtype=np.int64)
        self._end: Times = np.empty(0, dtype=np.int64)

    def crossing(self, start: Times, end: Times) -> npt.NDArray[np.bool_]:
        """Mask of the intervals that do not fit: they begin or end inside one that is on the track."""
        if not len(self._start):
            return np.zeros(len(start), dtype=bool)
        began = np.searchsorted(self._start, start, side="right") - 1
        ended = np.searchsorted(self._start, end, side="left") - 1
        crossing: npt.NDArray[np.bool_] = (began >= 0) & (start < self._end[began])
        return crossing | ((ended >= 0) & (end < self._end[ended]))

    def add(self, start: Times, end: Times) -> None:
        """Remembers intervals that fit, as they begin. Of too many, those with the smallest gaps between them become one."""
        start, end = _top_level(start, end)
        order = np.argsort(start := np.concatenate((self._start, start)), kind="stable")
        start, end = _top_level(start[order], np.concatenate((self._end, end))[order])
        if len(start) > self._MOST:
            gaps = start[1:] - end[:-1]
            apart = gaps > np.median(gaps)
            start, end = start[np.concatenate(([True], apart))], end[np.concatenate((apart, [True]))]
        self._start, self._end = start, end


class Tracks:
    """The tracks of one process. For one thread at a time; memory grows with threads, not with spans."""

    def __init__(self, pid: int, lanes: Lanes | None = None) -> None:
        self._pid = pid
        self._threads: dict[int, _ThreadTrack] = {}
        self._lanes = Lanes() if lanes is None else lanes
        self._lane_tids: list[int] = []
        self._tids: set[int] = set()
        self._next_tid = 1
        self._reported: set[int] = set()

    def place(self, spans: Outlines) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The order in which to write the spans, and the tid of each span, not in that order.

        On each track spans are written as they begin, the longer one first of those that begin together. Costs some numpy
        passes, a sort where the spans of a thread do not stand so, and some µs for a span that goes to a lane.
        """
        tracks = [self._thread(number, name) for number, name in spans.threads]
        rows = _by_thread(spans)
        off = (spans.thread < 0).astype(np.uint8)
        bounds = np.searchsorted(spans.thread[rows], np.arange(len(tracks) + 1))
        parts = [rows[first:last] for first, last in itertools.pairwise(bounds)]
        for track, part in zip(tracks, parts, strict=True):
            off[part] = track.crossing(spans.start[part], spans.end[part])
        self._leave_what_crosses(spans, rows, off)
        tids = np.array([track.tid for track in tracks] + [0], dtype=np.int64)[spans.thread]
        for track, part in zip(tracks, parts, strict=True):
            remaining = part[off[part] == 0]
            track.add(spans.start[remaining], spans.end[remaining])
        strays = np.flatnonzero(off)
        strays = strays[np.lexsort((~spans.end[strays], spans.start[strays]))]
        self._place_on_lanes(spans, strays, tids)
        return np.concatenate((rows[off[rows] == 0], strays)), tids

    def news(self) -> Iterator[str]:
        """Names and places of the tracks that are not in the file yet, as metadata events."""
        known = [(tid, f"spans {lane}", lane) for lane, tid in enumerate(self._lane_tids, 1)]
        # Lanes, which requests are on, above threads.
        known += [
            (track.tid, track.name, LARGEST_TID // 2 + place) for place, track in enumerate(self._threads.values())
        ]
        for tid, name, place in known:
            if tid not in self._reported:
                self._reported.add(tid)
                yield from track_events(self._pid, tid, name, place)

    def report_again(self) -> None:
        """Makes the next :meth:`news` return everything. Call it when what it returned was lost."""
        self._reported.clear()

    def _leave_what_crosses(self, spans: Outlines, rows: npt.NDArray[np.int64], off: npt.NDArray[np.uint8]) -> None:
        """Sets 1 for spans that cross one of their thread that began earlier, and is not off it."""
        rows, thread, start, end = (
            np.ascontiguousarray(values, dtype=np.int64) for values in (rows, spans.thread, spans.start, spans.end)
        )
        detach_overlapping(rows, thread, start, end, off)

    def _place_on_lanes(self, spans: Outlines, rows: npt.NDArray[np.int64], tids: npt.NDArray[np.int64]) -> None:
        columns = (spans.start, spans.end, spans.span_id, spans.parent_id)
        for row, *outline in zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True):
            tids[row] = self._lane_tid(self._lanes.place(*outline))

    def _thread(self, number: int, name: str) -> _ThreadTrack:
        track = self._threads.get(number)
        if track is None:
            tid = number if 0 < number <= LARGEST_TID and number not in self._tids else self._free_tid()
            self._tids.add(tid)
            track = self._threads[number] = _ThreadTrack(tid, name)
        track.name = track.name or name
        return track

    def _lane_tid(self, lane: int) -> int:
        while lane >= len(self._lane_tids):  # more than one where an interrupt came in between
            self._lane_tids.append(self._free_tid())
            self._tids.add(self._lane_tids[-1])
        return self._lane_tids[lane]

    def _free_tid(self) -> int:
        """A number for a lane, or for a thread whose id (mostly an address) viewers cannot take.

        Not the process id, by which viewers know the main thread.
        """
        while self._next_tid in self._tids or self._next_tid == self._pid:
            self._next_tid += 1
        return self._next_tid


def _by_thread(spans: Outlines) -> npt.NDArray[np.int64]:
    """The rows that are on threads, thread by thread, as they began there, the longer one first of those that began together."""
    rows = np.flatnonzero(spans.thread >= 0)
    thread, start, end = spans.thread[rows], spans.start[rows], spans.end[rows]
    # The recorder gives them in this order, and then there is nothing to sort.
    later = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] <= end[:-1]))
    if ((thread[1:] > thread[:-1]) | ((thread[1:] == thread[:-1]) & later)).all():
        return rows
    ordered: npt.NDArray[np.int64] = rows[np.lexsort((~end, start, thread))]
    return ordered


def _top_level(start: Times, end: Times) -> tuple[Times, Times]:
    """The top-level of nested intervals that stand as they begin."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    apart = start[1:] >= reach[:-1]
    return start[np.concatenate(([True], apart))], reach[np.concatenate((apart, [True]))]


# --- lanes ---


_BEGIN = attrgetter("start")
_END = attrgetter("end")


class _TrackSlice:
    __slots__ = ("end", "inside", "parent", "span", "start")

    def __init__(self, start: int, end: int, span: int, parent: int) -> None:
        self.start = start
        self.end = max(end, start + 1)  # what takes no time must not lie across a boundary either
        self.span = span
        self.parent = parent
        self.inside: list[_TrackSlice] = []

    def holds(self, other: _TrackSlice) -> bool:
        return self.start <= other.start and other.end <= self.end


class _Lane:
    def __init__(self) -> None:
        self.top_level: list[_TrackSlice] = []
        """Apart from one another, by time, as is what is inside each."""
        self.forgotten_until: int | None = None
        """Unix ns: no span may begin before this, since earlier slices have been forgotten."""

    def add(self, slice_: _TrackSlice) -> bool:
        """Puts a slice on the lane if it fits there, between others, inside its parent or around its children."""
        if self.forgotten_until is not None and slice_.start < self.forgotten_until:
            return False
        enclosing, level = 0, self.top_level
        while True:
            first, last = bisect_right(level, slice_.start, key=_END), bisect_left(level, slice_.end, key=_BEGIN)
            if last - first != 1 or not level[first].holds(slice_):
                break
            enclosing, level = level[first].span, level[first].inside
        if level is not self.top_level and enclosing != slice_.parent:
            return False
        # A child that begins with its parent must stand before it in no file: viewers take the first for the outer one.
        if any(child.parent != slice_.span or child.start == slice_.start for child in level[first:last]):
            return False
        if not all(slice_.holds(child) for child in level[first:last]):
            return False
        slice_.inside = level[first:last]
        level[first:last] = [slice_]
        return True

    def forget_older_half(self) -> None:
        forgotten = self.top_level[: (len(self.top_level) + 1) // 2]
        if forgotten:
            self.forgotten_until = forgotten[-1].end
            del self.top_level[: len(forgotten)]


class Lanes:
    """Finds a lane for each span, however late it comes, in constant memory. For one thread at a time.

    Looked at in this order: the lane of its parent, that of children or siblings that came earlier, the first one with
    room, a new one. What was put on a lane long ago is forgotten; nothing is put there any more. Of too many lanes the last one takes what
    has no room elsewhere, and viewers draw that as well as they can.
    """

    def __init__(self, *, most_slices: int = 20_000, most_lanes: int = 1000) -> None:
        self._lanes: list[_Lane] = []
        self._ends: list[int] = []
        """Per lane, when its last slice ends: a look at numbers finds nearly every lane, and there may be hundreds."""
        self._most, self._most_lanes = most_slices, most_lanes
        self._count = 0
        self._lane_of: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        """Lane of a child by the id of its parent, for parents not yet placed."""

    def place(self, start: int, end: int, span: int, parent: int) -> int:
        """The lane, from 0, for a span with these ids; ``parent`` is 0 for none.

        If several spans begin at the same time, place the outer one first. Costs some µs.
        """
        if self._count >= self._most:
            self._forget()
        slice_ = _TrackSlice(start, end, span, parent)
        for lane in self._candidates(start, span, parent):
            if self._lanes[lane].add(slice_):
                break
        else:
            lane = min(len(self._lanes), self._most_lanes - 1)
            if lane == len(self._lanes):
                self._lanes.append(_Lane())
                self._ends.append(slice_.end)
                self._lanes[lane].add(slice_)
        self._ends[lane] = max(self._ends[lane], slice_.end)
        self._count += 1
        self._note(slice_, lane)
        return lane

    def _candidates(self, start: int, span: int, parent: int) -> Iterator[int]:
        for likely in (self._lane_of.get(parent), self._waiting.pop(span, None), self._waiting.get(parent)):
            if likely is not None:
                yield likely
        yield from (lane for lane, ended in enumerate(self._ends) if ended <= start)
        yield from range(len(self._lanes))

    def _note(self, slice_: _TrackSlice, lane: int) -> None:
        self._lane_of[slice_.span] = lane
        if slice_.parent and slice_.parent not in self._lane_of:
            self._waiting.setdefault(slice_.parent, lane)

    def _forget(self) -> None:
        self._lane_of.clear()
        self._waiting.clear()
        self._count = 0
        for number, lane in enumerate(self._lanes):
            lane.forget_older_half()
            level = lane.top_level
            while level:
                self._count += len(level)
                for slice_ in level:
                    self._note(slice_, number)
                level = [inner for slice_ in level for inner in slice_.inside]
