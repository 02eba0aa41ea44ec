"""Operators added up by name, of which a bounded number is told apart: what metrics are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.schema import Scope
from otel_torchprof._tree.devices import device_times
from otel_torchprof._tree.tree import torch_view

from .averages import Averages

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._tree.tree import TreeView

OTHER = "other"
"""The name that stands for all operators without an entry of their own."""

_LATE_SHARE = 0.01
"""Of all self time that an operator must have had to get one of the places that are kept for late comers."""


class OperatorSum(NamedTuple):
    """What was recorded under one name; times in ns."""

    name: str
    calls: int
    time: int
    own: int
    """Without what ran directly inside."""
    device: int
    device_own: int


class OperatorSums:
    """Sums by operator that only grow; for one thread at a time.

    An operator that has an entry keeps it, so that what is read is never less than before. Of those that come first, the
    ones with the most self time get four fifths of the entries; the last fifth is kept for operators that come later and
    have at least 1 % of all self time so far. What an operator did before it got its entry stays with :data:`OTHER`.
    Labels are not counted, they have no bound; what ran inside of them is.

    Args:
        most: how many operators have an entry.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._at_once = most - most // 5
        self._sums: dict[str, list[int]] = {}
        self._other = [0] * 5
        self._own_unplaced: dict[str, int] = {}
        self._inside: dict[int, int] = {}
        self.has_devices = False
        """Whether the time of a device was ever recorded."""

    def add(self, batch: Batch) -> None:
        """Adds the operators of a drained batch: some 30 ns per event, 200 us for any."""
        view = self._with_earlier_children(torch_view(batch, modules=True))
        devices = device_times(batch)
        amounts = {}
        if devices is not None:
            self.has_devices = True
            amounts = {"total": devices.total[view.rows], "own": devices.own[view.rows]}
        groups = Averages.of(view, amounts={f"device_{name}": column for name, column in amounts.items()})
        if not len(groups):
            return
        rows = view.rows[groups.first]
        nothing = np.zeros(len(groups), dtype=np.int64)
        columns = (
            groups.count,
            groups.cpu_time_total,
            groups.self_cpu_time_total,
            groups.amounts.get("device_total", nothing),
            groups.amounts.get("device_own", nothing),
        )
        sums = np.stack(columns, axis=1)[batch["scope"][rows] != Scope.USER_SCOPE].tolist()
        named = batch["name"][rows][batch["scope"][rows] != Scope.USER_SCOPE].tolist()
        self._place(sorted(zip((batch.names[name] for name in named), sums, strict=True), key=lambda each: -each[1][2]))

    def read(self) -> list[OperatorSum]:
        """What there is so far; :data:`OTHER` last, where there is any."""
        found = [OperatorSum(name, *sums) for name, sums in self._sums.items()]
        return [*found, OperatorSum(OTHER, *self._other)] if self._other[0] else found

    def _place(self, sums: list[tuple[str, list[int]]]) -> None:
        """Adds what a batch had of each name, the most self time first."""
        total = self._other[2] + sum(each[2] for each in self._sums.values()) + sum(own[2] for _, own in sums)
        for name, amounts in sums:
            into = self._sums.get(name)
            if into is None and self._gets_entry(name, amounts[2], total):
                into = self._sums[name] = [0] * 5
            if into is None:
                into = self._other
            for place, amount in enumerate(amounts):
                into[place] += amount

    def _gets_entry(self, name: str, own: int, total: int) -> bool:
        if name == OTHER or len(self._sums) >= self._most:
            return False
        if len(self._sums) < self._at_once:
            return True
        # Names are few, or else not worth a memory: who is in a long line here has less than its share anyway.
        if name not in self._own_unplaced and len(self._own_unplaced) >= 100 * self._most:
            self._own_unplaced.clear()
        so_far = self._own_unplaced[name] = self._own_unplaced.get(name, 0) + own
        if so_far < _LATE_SHARE * total:
            return False
        del self._own_unplaced[name]
        return True

    def _with_earlier_children(self, view: TreeView) -> TreeView:
        """Takes from the self times of operators that have ended now what their children took that came before them."""
        batch = view.batch
        if self._inside:
            late = np.isin(batch["id"][view.rows], np.fromiter(self._inside, np.uint64, len(self._inside)))
            if late.any():
                own = view.self_time.copy()
                for at in np.flatnonzero(late).tolist():
                    inside = self._inside.pop(int(batch["id"][view.rows[at]]))
                    own[at] = max(int(own[at]) - inside, 0)
                view = replace(view, self_time=own)
        outer = batch.outer_rows.astype(np.int64)
        duration = (batch["end"] - batch["start"])[outer]
        for parent, time in zip(batch.outer_parents.tolist(), duration.tolist(), strict=True):
            self._inside[parent] = self._inside.get(parent, 0) + time
        if self._inside:
            still_open = set(batch.opens.id.tolist())
            self._inside = {key: time for key, time in self._inside.items() if key in still_open}
        return view
