"""Self times of events that come in any order, computed in columns with some bytes per event."""

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
"""Start, duration, duration without collapsed children, track or -1, id, id of the parent."""

_NS = 1e9
MOST_ROWS = 200_000
"""Most buffered events; then the half of them that ended first is settled."""


def span_times(duration: int, attributes: Mapping[str, Any]) -> tuple[int, int]:
    """Duration of a span, and its duration without collapsed children, in ns; for an aggregate span, of all that it replaces."""
    if AGGREGATED_COUNT in attributes:
        duration = round(float(attributes.get(AGGREGATED_DURATION, duration / _NS)) * _NS)
    return duration, duration - round(float(attributes.get(COLLAPSED_DURATION, 0)) * _NS)


class SelfTimes:
    """Buffers events until their children are known, and computes their self times.

    Args:
        settled: gets keys, starts and self times of events whose children are all known.
        key_of: gets the keys of events and the index of each one's parent among them, or -1; returns the keys for ``settled``.
        nested: gets keys, parents and durations, and the indices of events with a parent; each event once.
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
        """Whether an event began before the end of a settled event of its track: they may be parent and child."""

    def __len__(self) -> int:
        return len(self._key)

    def append(self, key: int, row: Row) -> None:
        """Adds an event. At :data:`MOST_ROWS` events, half of them are settled."""
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
        """Settles all events but the ``keep`` that end last, which may still get children."""
        if not len(self):
            return
        key, track, start, duration, own, ids, parents = (np.array(column) for column in self._columns())
        self._check(track[self._checked :], start[self._checked :])
        of_ids = _parents_by_id(ids, parents)
        parent = np.where(of_ids >= 0, of_ids, _parents_by_time(track, start, duration))
        # Of events with the same end, inner ones first: they began later, or came later.
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
        """Checks new events for starts before the end of settled ones on their track."""
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
    candidate = order[np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)]
    return np.where((parents != 0) & (ids[candidate] == parents), candidate, -1)


def _parents_by_time(track: npt.NDArray[np.int32], start: Numbers, duration: Numbers) -> Numbers:
    """For events on tracks, the index of the nearest event that encloses it on its track; -1 for none."""
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
