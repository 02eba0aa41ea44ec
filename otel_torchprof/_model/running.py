"""Averages over the life of a process: sums by name that grow with the names, never with the events."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.schema import Scope

from .averages import Averages

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Names

    from .tree import TreeView

Array = Any

MAX_FOREIGN_NAMES = 10_000
"""Different names of the application's own spans that are told apart; the rest share one entry."""
OTHER_NAMES = "(other spans)"


class Average(NamedTuple):
    """The sums of one name; times in ns."""

    name: str
    is_label: bool
    calls: int
    total: int
    own: int
    """Without what ran directly inside."""


class RunningAverages:
    """Sums over batches, and over spans of the application. Thread-safe; reading costs a microsecond per name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask in the middle
        self._sums = np.zeros((3, 0), dtype=np.int64)
        self._first: dict[int, None] = {}
        self._names: Names | None = None
        self._foreign: dict[str, list[int]] = {}

    def add(self, view: TreeView) -> None:
        """Adds the events of a batch: 15 ns per event."""
        sums = Averages.of(view)
        if not len(sums):
            return
        groups = _groups(view, sums.first)
        with self._lock:
            self._names = view.batch.names
            if self._sums.shape[1] < 2 * len(self._names):
                grown = np.zeros((3, 2 * len(self._names)), dtype=np.int64)
                grown[:, : self._sums.shape[1]] = self._sums
                self._sums = grown
            self._sums[:, groups] += np.stack((sums.count, sums.cpu_time_total, sums.self_cpu_time_total))
            self._first.update(dict.fromkeys(groups.tolist()))

    def add_foreign(self, name: str, duration: int, own: int) -> None:
        """Adds one span of the application; ns."""
        with self._lock:
            if name not in self._foreign and len(self._foreign) >= MAX_FOREIGN_NAMES:
                name = OTHER_NAMES
            sums = self._foreign.setdefault(name, [0, 0, 0])
            sums[0] += 1
            sums[1] += duration
            sums[2] += own

    def read(self) -> list[Average]:
        """The sums so far, in the order in which the names first came; the application's spans first."""
        with self._lock:
            found = [Average(name, True, *sums) for name, sums in self._foreign.items()]
            for group in self._first:
                count, total, own = self._sums[:, group].tolist()
                name = self._names[group >> 1] if self._names is not None else ""
                found.append(Average(name, bool(group & 1), count, total, own))
            return found


def _groups(view: TreeView, first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One number per name and sort (label or not), the same in every batch of a process: names keep their places."""
    rows = view.rows[first]
    is_label = view.batch["scope"][rows] == Scope.USER_SCOPE
    groups: npt.NDArray[np.int64] = view.batch["name"][rows].astype(np.int64) * 2 + is_label
    return groups
