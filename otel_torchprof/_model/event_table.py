"""The displayed events of a recording with the step, the phase and the module of each, for formats that are tables or sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.schema import Kind
from otel_torchprof._native.loops import roots_of

from .phases import PHASE_OF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.batch import Batch

    from .event_info import EventInfo
    from .step_spans import RecordedStep

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

_MOST_NESTED = 64
"""Most phases around a phase."""


@dataclass(frozen=True, eq=False)
class EventTable:
    """The events of a view with modules, and where in the training loop they are. Immutable; computes on access. Thread-safe."""

    info: EventInfo
    """Columns of the events."""
    steps: Sequence[RecordedStep]
    """The numbered steps."""
    rank: int | None
    """Rank of the process; None if it is not known, or if there are several."""

    @property
    def batch(self) -> Batch:
        """The batch of the view, with rows for changes of memory and the work of devices."""
        return self.info.view.batch

    def column(self, name: str) -> Array:
        """A column of the batch by event; a view of it if all its rows are displayed in their order."""
        rows, column = self.info.view.rows, self.batch[name]
        is_whole = len(rows) == len(column) and bool((rows[1:] > rows[:-1]).all())
        return column if is_whole else column[rows]

    def steps_at(self, times: Array) -> Integers:
        """The number of the step at each time (Unix ns), -1 for none. Of steps of several ranks, that which began last."""
        steps = sorted(self.steps, key=lambda step: step.start)
        start, end, number = (np.array([getattr(step, name) for step in steps], np.int64) for name in _STEP)
        if not steps:
            return np.full(len(times), -1, dtype=np.int64)
        at = np.maximum(np.searchsorted(start, times, side="right") - 1, 0)
        return np.where((times >= start[at]) & (times < end[at]), number[at], -1)

    @cached_property
    def phases(self) -> Integers:
        """The innermost phase of each event, an index into ``PHASES``; -1 for none.

        That around the event or, on other threads such as those of autograd, that of the loop's thread when the event began.
        """
        view = self.info.view
        if not len(self._phase_events):
            return np.full(len(view), -1, dtype=np.int64)
        is_phase = self.column("kind") == int(Kind.PHASE)
        outer = roots_of(np.where(is_phase, -1, view.parent))
        inside = is_phase[outer]
        found = np.full(len(view), -1, dtype=np.int64)
        found[inside] = self._part_phases[outer[inside]]
        found[~inside] = self.phases_at(self.column("start")[~inside])
        return found

    def phases_at(self, times: Array) -> Integers:
        """The innermost phase of the loop's thread at each time (Unix ns), an index into ``PHASES``; -1 for none."""
        rows = self._phase_events
        if not len(rows):
            return np.full(len(times), -1, dtype=np.int64)
        thread = self.column("thread")[rows]
        rows = rows[thread == np.bincount(thread).argmax()]
        start, end = self.column("start")[rows], self.column("end")[rows]
        found = np.searchsorted(start, times, side="right") - 1
        enclosing = _enclosing(end, start)
        for _ in range(_MOST_NESTED):
            over = np.flatnonzero((found >= 0) & (end[found] <= times))
            if not over.size:
                break
            found[over] = enclosing[found[over]]
        is_in = (found >= 0) & (times < end[found])
        return np.where(is_in, self._part_phases[rows[found]], -1)

    @cached_property
    def _phase_events(self) -> Array:
        return np.flatnonzero(self.column("kind") == int(Kind.PHASE))

    @cached_property
    def _part_phases(self) -> Integers:
        """The phase of each event that is one; others have a wrong one."""
        return PHASE_OF[np.minimum(self.column("fwd_thread"), len(PHASE_OF) - 1)]


_STEP = ("start", "end", "number")


def _enclosing(end: Array, start: Array) -> Integers:
    """For intervals by start, the longer of two first: the nearest one before each that ends after its start; -1 for none."""
    enclosing = np.arange(-1, len(end) - 1, dtype=np.int64)
    while (over := np.flatnonzero((enclosing >= 0) & (end[enclosing] <= start))).size:
        enclosing[over] = enclosing[enclosing[over]]
    return enclosing
