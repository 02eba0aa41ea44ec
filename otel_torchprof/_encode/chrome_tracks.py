"""Chooses the track of each span in a Chrome trace, export after export.

Viewers display a track as nested slices, and drop or misplace a slice that overlaps another without nesting. A span with a thread is on
the track of that thread, where spans nest like the thread's stack. Spans that do not nest there, ended on another thread or have
no thread (overlapping requests, tasks of one event loop) are on lanes.

A *lane* is a track of the file. Its slices are disjoint or nested, and a slice is inside another only if
that is its parent: viewers display a slice inside another as called by it.
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
    """OpenTelemetry's ``thread.id`` and ``thread.name`` (empty if unknown); each id once."""


class _ThreadTrack:
    """The top-level intervals that earlier exports put on a thread's track: disjoint, sorted by time.

    Slices inside an interval are not stored, so a span that begins or ends in one is refused: it may cross such a slice.
    A span that encloses intervals fits: it was open when they were exported.
    """

    _MOST = 1024

    def __init__(self, tid: int, name: str) -> None:
        self.tid = tid
        self.name = name
        self._start: Times = np.empty(0, dtype=np.int64)
        self._end: Times = np.empty(0, dtype=np.int64)

    def crossing(self, start: Times, end: Times) -> npt.NDArray[np.bool_]:
        """Returns a mask of the intervals that do not fit, as they begin or end inside one that is on the track."""
        if not len(self._start):
            return np.zeros(len(start), dtype=bool)
        began = np.searchsorted(self._start, start, side="right") - 1
        ended = np.searchsorted(self._start, end, side="left") - 1
        crossing: npt.NDArray[np.bool_] = (began >= 0) & (start < self._end[began])
        return crossing | ((ended >= 0) & (end < self._end[ended]))

    def add(self, start: Times, end: Times) -> None:
        """Adds intervals that fit, by start. If there are too many, those with the smallest gaps between them are merged."""
        start, end = _top_level(start, end)
        order = np.argsort(start := np.concatenate((self._start, start)), kind="stable")
        start, end = _top_level(start[order], np.concatenate((self._end, end))[order])
        if len(start) > self._MOST:
            gaps = start[1:] - end[:-1]
            apart = gaps > np.median(gaps)
            start, end = start[np.concatenate(([True], apart))], end[np.concatenate((apart, [True]))]
        self._start, self._end = start, end


class Tracks:
    """The tracks of one process. Not thread-safe; memory grows with threads, not with spans."""

    def __init__(self, pid: int, lanes: Lanes | None = None) -> None:
        self._pid = pid
        self._threads: dict[int, _ThreadTrack] = {}
        self._lanes = Lanes() if lanes is None else lanes
        self._lane_tids: list[int] = []
        self._tids: set[int] = set()
        self._next_tid = 1
        self._reported: set[int] = set()

    def place(self, spans: Outlines) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the order in which to write the spans, and the thread id of each span (in the given order).

        Spans of a track are written by start, with equal starts the longer first. Costs some numpy passes, a sort if the spans
        of a thread are not in that order, and some µs per span on a lane.
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

    def lanes(self) -> Iterator[tuple[int, str]]:
        """Yields id and name of each track that is a lane."""
        return ((tid, f"spans {lane}") for lane, tid in enumerate(self._lane_tids, 1))

    def threads(self) -> Iterator[tuple[int, str]]:
        """Yields id and name of each track that is that of a thread."""
        return ((track.tid, track.name) for track in self._threads.values())

    def news(self) -> Iterator[str]:
        """Yields names and positions of the tracks that are not in the file yet, as metadata events."""
        # Lanes, on which requests are, above threads.
        known = [*enumerate(self.lanes(), 1), *enumerate(self.threads(), LARGEST_TID // 2)]
        for place, (tid, name) in known:
            if tid not in self._reported:
                self._reported.add(tid)
                yield from track_events(self._pid, tid, name, place)

    def report_again(self) -> None:
        """Makes the next :meth:`news` return everything. Call it if the last result was lost."""
        self._reported.clear()

    def _leave_what_crosses(self, spans: Outlines, rows: npt.NDArray[np.int64], off: npt.NDArray[np.uint8]) -> None:
        """Sets ``off`` to 1 for spans that cross an earlier span on their thread's track."""
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
        while lane >= len(self._lane_tids):  # more than one after an interrupt
            self._lane_tids.append(self._free_tid())
            self._tids.add(self._lane_tids[-1])
        return self._lane_tids[lane]

    def _free_tid(self) -> int:
        """Returns a thread id for a lane, or for a thread whose id (mostly an address) viewers do not accept.

        Never the process id, which marks the main thread for viewers.
        """
        while self._next_tid in self._tids or self._next_tid == self._pid:
            self._next_tid += 1
        return self._next_tid


def _by_thread(spans: Outlines) -> npt.NDArray[np.int64]:
    """Returns the rows on threads, by thread and start, with equal starts the longer first."""
    rows = np.flatnonzero(spans.thread >= 0)
    thread, start, end = spans.thread[rows], spans.start[rows], spans.end[rows]
    # Spans of the recorder are in this order already.
    later = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] <= end[:-1]))
    if ((thread[1:] > thread[:-1]) | ((thread[1:] == thread[:-1]) & later)).all():
        return rows
    ordered: npt.NDArray[np.int64] = rows[np.lexsort((~end, start, thread))]
    return ordered


def _top_level(start: Times, end: Times) -> tuple[Times, Times]:
    """Returns the top-level ones of nested intervals, which are sorted by start."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    apart = start[1:] >= reach[:-1]
    return start[np.concatenate(([True], apart))], reach[np.concatenate((apart, [True]))]


# --- Lanes ---


_BEGIN = attrgetter("start")
_END = attrgetter("end")


class _TrackSlice:
    __slots__ = ("end", "inside", "parent", "span", "start")

    def __init__(self, start: int, end: int, span: int, parent: int) -> None:
        self.start = start
        self.end = max(end, start + 1)  # not empty, so that it cannot lie on a boundary
        self.span = span
        self.parent = parent
        self.inside: list[_TrackSlice] = []

    def holds(self, other: _TrackSlice) -> bool:
        return self.start <= other.start and other.end <= self.end


class _Lane:
    def __init__(self) -> None:
        self.top_level: list[_TrackSlice] = []
        """Disjoint, by time; so are the children of each."""
        self.forgotten_until: int | None = None
        """Unix ns; no span may begin before this, since earlier slices were dropped."""

    def add(self, slice_: _TrackSlice) -> bool:
        """Adds a slice if it fits between others, inside its parent, or around its children; returns whether it does."""
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
        # A child with the start of its parent must not be written first: viewers take the first for the outer one.
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
    """Finds a lane for each span, in any order of arrival, in constant memory. Not thread-safe.

    Tries in this order: the lane of its parent, that of earlier children or siblings, the first one with room, a new one. The oldest
    slices are dropped, and their time is closed to new ones. At the limit of lanes, the last one gets all spans without room elsewhere, which
    viewers then cannot nest correctly.
    """

    def __init__(self, *, most_slices: int = 20_000, most_lanes: int = 1000) -> None:
        self._lanes: list[_Lane] = []
        self._ends: list[int] = []
        """End of the last slice of each lane: these numbers alone decide in nearly all cases, even with hundreds of lanes."""
        self._most, self._most_lanes = most_slices, most_lanes
        self._count = 0
        self._lane_of: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        """Lane of a child by the id of its parent, for parents not yet placed."""

    def place(self, start: int, end: int, span: int, parent: int) -> int:
        """Returns the lane, from 0, for a span with these ids; ``parent`` is 0 for none.

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
