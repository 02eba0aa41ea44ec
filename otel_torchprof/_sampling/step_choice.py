"""Which steps are traced in full: decided before they begin, from their number and their trace id alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_LOW_BITS = (1 << 64) - 1


class StepChoice(NamedTuple):
    """All three have to want a step. Immutable; ``schedule`` may be somebody's code."""

    schedule: Callable[[int], bool] | None = None
    every: int = 1
    ratio: float = 1.0

    @property
    def is_all(self) -> bool:
        """Whether every step is wanted, so that nobody has to ask."""
        return self.schedule is None and self.every == 1 and self.ratio >= 1

    def selects(self, step: int, trace_id: int) -> bool:
        """Whether the step of that number (from 0) and trace is traced in full. A microsecond and the schedule's own time.

        The share is taken as OpenTelemetry's ``TraceIdRatioBased`` takes it: by the lower 64 bits of the trace id, which are random
        for everybody. So of a step that a provider samples at 10 %, this at 1 % takes every tenth, and none of those that it does not.
        """
        if step < 0:
            return True
        if self.every > 1 and step % self.every:
            return False
        if self.ratio < 1 and (trace_id & _LOW_BITS) >= round(self.ratio * (1 << 64)):
            return False
        return self.schedule is None or self.schedule(step)
