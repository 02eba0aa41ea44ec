"""Self times of events that come in any order, from columns, so that an event costs some bytes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .attribute_keys import AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_DURATION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Numbers = npt.NDArray[np.int64]

Row = tuple[int, int, int, int, int, int]
"""Start, duration, duration without what was collapsed into it, track or -1, id, parent's id."""

_NS = 1e9
MOST_ROWS = 200_000
"""Events whose parents are looked for among one another; then half of them are settled, those that ended first."""


def span_times(duration: int, attributes: Mapping[str, Any]) -> tuple[int, int]:
    """What a span took, and without what was collapsed into it, in ns: of an aggregate span the sum of those that it stands for."""
    if AGGREGATED_COUNT in attributes:
        duration = round(float(attributes.get(AGGREGATED_DURATION, duration / _NS)) * _NS)
    return duration, duration - round(float(attributes.get(COLLAPSED_DURATION, 0)) * _NS)


class SelfTimes:
    """Events whose self time is not known before their children are.

    Args:
        settled: takes the keys, starts and self times of events whose children have all come.
        key_of: gets the keys of events and of each the place of its parent among them, or -1; returns those that are handed over.
        nested: takes keys, parents and durations as above, and which events have a parent there: each event once.
    """

    def __init__(
        self,
        settled: Callable[[Numbers, Numbers, Numbers], None],
        key_of: Callable[[Numbers, Numbers], Numbers] = lambda keys, _parents: keys,
        nested: Callable[[Numbers, Numbers, Numbers, Numbers], None] = lambda _keys, _parents, _durations, _rows: None,
    ) -> None:
        self._settled = settled
        self._key_of = key_of
        self._nested = nested
        self._key, self._track = array("q"), array("i")
        self._start, self._duration = array("q"), array("q")
        self._own = array("d")  # exact up to 104 days, and no sum of many is too large for it
        self._id, self._parent = array("Q"), array("Q")
        self._checked = 0
        self._settled_until = np.empty(0, dtype=np.int64)
        self.is_incomplete = False
        """An event came that began before the end of one on its track that was settled: they may be parent and child."""

    def __len__(self) -> int:
        return len(self._key)

    def append(self, key: int, row: Row) -> None:
        """One event. Once there are :data:`MOST_ROWS`, half of them are settled."""
        start, duration, own, track, span_id, parent_id = row
        self._key.append(key)
        self._start.append(start)
        self._duration.append(duration)
        self._own.append(own)
        self._track.append(track)
        self._id.append(span_id)
        self._parent.append(parent_id)
        if len(self) >= MOST_ROWS:
            self.settle(MOST_ROWS // 2)

    def settle(self, keep: int = 0) -> None:
        """Hands over all but those ``keep`` that end last, of which more children may come."""
        if not len(self):
            return
        key, track, start, duration, own, ids, parents = (np.array(column) for column in self._columns())
        self._check(track[self._checked :], start[self._checked :])
        of_ids = _parents_by_id(ids, parents)
        parent = np.where(of_ids >= 0, of_ids, _parents_by_time(track, start, duration))
        # Of those that end together, what is inside goes first: it began later, or came later.
        order = np.lexsort((-np.arange(len(key)), -start, start + duration))
        is_settled = np.zeros(len(key), dtype=bool)
        is_settled[order[: len(key) - keep]] = True
        child = np.flatnonzero(parent >= 0)
        child = child[is_settled[child] | is_settled[parent[child]]]
        np.subtract.at(own, parent[child], duration[child])
        self._nested(key, parent, duration, child)
        parents[child] = 0
        given = self._key_of(key, parent)
        self._settled(given[is_settled], start[is_settled], np.maximum(own[is_settled], 0).astype(np.int64))
        self._note_settled(track[is_settled], (start + duration)[is_settled])
        self._checked = keep
        columns = (key, track, start, duration, own, ids, parents)
        for column, values in zip(self._columns(), columns, strict=True):
            column[:] = array(column.typecode, values[~is_settled].tobytes())

    def _check(self, track: Numbers, start: Numbers) -> None:
        """Events that came since some were settled."""
        place = track + 1
        known = place < len(self._settled_until)
        self.is_incomplete |= bool((start[known] < self._settled_until[place[known]]).any())

    def _note_settled(self, track: Numbers, end: Numbers) -> None:
        more = int(track.max()) + 2 - len(self._settled_until)
        if more > 0:
            self._settled_until = np.append(self._settled_until, np.full(more, np.iinfo(np.int64).min))
        np.maximum.at(self._settled_until, track + 1, end)

    def _columns(self) -> tuple[array[Any], ...]:
        return self._key, self._track, self._start, self._duration, self._own, self._id, self._parent


def _parents_by_id(ids: npt.NDArray[np.uint64], parents: npt.NDArray[np.uint64]) -> Numbers:
    order = np.argsort(ids, kind="stable")
    found = order[np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)]
    return np.where((parents != 0) & (ids[found] == parents), found, -1)


def _parents_by_time(track: npt.NDArray[np.int32], start: Numbers, duration: Numbers) -> Numbers:
    """Of what is on tracks: the nearest that was begun before, or with it, and lasts at least as long."""
    end = start + duration
    rows = np.flatnonzero(track >= 0)
    rows = rows[np.lexsort((-end[rows], start[rows], track[rows]))]
    parent = np.full(len(track), -1, dtype=np.int64)
    enclosing: list[tuple[int, int]] = []
    on = -1
    for row, where, begun, over in zip(
        rows.tolist(), track[rows].tolist(), start[rows].tolist(), end[rows].tolist(), strict=True
    ):
        if where != on:
            enclosing, on = [], where
        while enclosing and enclosing[-1][1] <= begun:
            enclosing.pop()
        while enclosing and enclosing[-1][1] < over:  # crosses: it is not inside
            enclosing.pop()
        if enclosing:
            parent[row] = enclosing[-1][0]
        enclosing.append((row, over))
    return parent
