"""Operators added up by name, of which a bounded number is told apart: what metrics are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._tree.child_times import ChildTimes
from otel_torchprof._tree.devices import device_times
from otel_torchprof._tree.tree import torch_view

from .averages import Averages
from .named_sums import Average, NamedSums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._tree.tree import TreeView

OTHER = "other"
"""The name that stands for all operators without an entry of their own."""

_LATE_SHARE = 0.01
"""Of all self time that an operator must have had to get one of the places that are kept for late comers."""


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
        self._sums = NamedSums(OTHER, self._gets_entry)
        self._self_time = 0
        self._without_entry: dict[str, int] = {}
        self._child_times = ChildTimes()
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
        columns = [groups.count, groups.cpu_time_total, groups.self_cpu_time_total, *groups.amounts.values()]
        is_operator = (batch["scope"][rows] != Scope.USER_SCOPE) & (batch["kind"][rows] != Kind.PHASE)
        named = [batch.names[name] for name in batch["name"][rows][is_operator].tolist()]
        sums = np.stack(columns, axis=1)[is_operator]
        self._self_time += int(sums[:, 2].sum())
        for at in np.argsort(-sums[:, 2], kind="stable").tolist():
            self._sums.add(named[at], sums[at].tolist())

    def read(self) -> list[Average]:
        """What there is so far; :data:`OTHER` last, where there is any."""
        found = [Average(name, False, *sums) for name, sums in self._sums]
        return sorted(found, key=lambda each: each.name == OTHER)

    def _gets_entry(self, name: str, amounts: Sequence[int]) -> bool:
        entries = len(self._sums) - (OTHER in self._sums)
        if name == OTHER or entries >= self._most:
            return False
        if entries < self._at_once:
            return True
        # Names are few, or else not worth memory: one of very many has less than its share anyway.
        if name not in self._without_entry and len(self._without_entry) >= 100 * self._most:
            self._without_entry.clear()
        so_far = self._without_entry[name] = self._without_entry.get(name, 0) + amounts[2]
        if so_far < _LATE_SHARE * self._self_time:
            return False
        del self._without_entry[name]
        return True

    def _with_earlier_children(self, view: TreeView) -> TreeView:
        """Subtracts from the self times of operators that have ended now those of children that ended in earlier batches."""
        batch = view.batch
        outer = batch.outer_rows.astype(np.int64)
        durations = (batch["end"] - batch["start"])[outer]
        child_time = self._child_times.settle(batch["id"], batch.outer_parents, durations, batch.opens.id)
        return view if child_time is None else view.without_child_time(child_time)
