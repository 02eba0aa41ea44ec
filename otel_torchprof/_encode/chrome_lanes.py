"""Tracks for spans that belong to no thread: requests that overlap, tasks of one event loop.

A *lane* is a track of the file. On it slices lie apart or one inside the other, and a slice lies inside another only if
that is its parent: a viewer draws everything that is inside in time as if it had been called from there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_BEGIN = attrgetter("start")
_END = attrgetter("end")


class _Slice:
    __slots__ = ("end", "inside", "parent", "span", "start")

    def __init__(self, start: int, end: int, span: int, parent: int) -> None:
        self.start = start
        self.end = max(end, start + 1)  # what takes no time must not lie across a boundary either
        self.span = span
        self.parent = parent
        self.inside: list[_Slice] = []

    def holds(self, other: _Slice) -> bool:
        return self.start <= other.start and other.end <= self.end


class _Lane:
    def __init__(self) -> None:
        self.top_level: list[_Slice] = []
        """Apart from one another, by time, as is what is inside each."""
        self.forgotten_until: int | None = None
        """Nothing may begin before this any more: what is there is not known."""

    def add(self, slice_: _Slice) -> bool:
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
        """By the parent that has not come: the lane of one of its children."""

    def place(self, start: int, end: int, span: int, parent: int) -> int:
        """The lane, from 0, for a span with these ids; ``parent`` is 0 for none.

        Of spans that begin together the outer one has to be placed first. Costs some µs.
        """
        if self._count >= self._most:
            self._forget()
        slice_ = _Slice(start, end, span, parent)
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

    def _note(self, slice_: _Slice, lane: int) -> None:
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
