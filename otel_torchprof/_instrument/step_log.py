"""The latest ended steps of a recording, for those who wait for steps or report how fast they are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, UNATTRIBUTED, Segment
from otel_torchprof._model.step_spans import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from otel_torchprof._model.step_spans import StepSpan

_MOST = 10_000
_MEAN_OF = 20


class StepLog:
    """The last 10,000 ended steps. One thread may add, any thread read.

    Args:
        ahead_ns: returns what is added to the times: the recorder's clock minus that of the steps.
    """

    def __init__(self, ahead_ns: Callable[[], int] = int) -> None:
        self._steps: deque[RecordedStep] = deque(maxlen=_MOST)
        self._ahead_ns = ahead_ns

    def add(self, spans: Iterable[StepSpan]) -> None:
        """Adds the spans of ended steps, as they come with a drain."""
        for span in spans:
            if span.segment is Segment.STEP and span.is_whole and not span.is_running:
                self.add_step(RecordedStep(span.number, span.start, span.end, span.thread, attributes=span.attributes))

    def add_step(self, step: RecordedStep) -> None:
        """Adds a step."""
        self._steps.append(step)

    def steps_from(self, time_ns: int) -> list[RecordedStep]:
        """The steps that began at a time (Unix ns) or later, in order."""
        steps, ahead = self._steps.copy(), self._ahead_ns()
        latest = []
        while steps and (step := steps.pop()).start + ahead >= time_ns:
            latest.append(_later(step, ahead))
        return latest[::-1]

    @property
    def last(self) -> RecordedStep | None:
        """The latest step; None without one."""
        steps = list(self._steps)[-1:]
        return _later(steps[0], self._ahead_ns()) if steps else None

    @property
    def seconds(self) -> float | None:
        """Mean duration of the last 20 steps, in seconds; None without one."""
        latest = list(self._steps)[-_MEAN_OF:]
        return sum(step.end - step.start for step in latest) / len(latest) / 1e9 if latest else None

    def status(self) -> dict[str, Any]:
        """The latest step and its speed, for the control socket."""
        last = self.last
        return {
            "step": None if last is None else last.number,
            "step_end_ns": None if last is None else last.end,
            "step_seconds": self.seconds,
            "phases": self._shares(),
        }

    def _shares(self) -> dict[str, float]:
        """Shares of the time of the last 20 steps, by phase and the rest; empty if they are not known."""
        latest = [step for step in list(self._steps)[-_MEAN_OF:] if step.attributes]
        total = sum(step.end - step.start for step in latest) / 1e9
        times = {name: sum(_phase_time(step, name) for step in latest) for name in (*PHASES, UNATTRIBUTED)}
        return {name: time / total for name, time in times.items() if time > 0} if total > 0 else {}


def _phase_time(step: RecordedStep, name: str) -> float:
    return float((step.attributes or {}).get(f"{PHASE_PREFIX}{name}.duration", 0.0))


def _later(step: RecordedStep, by_ns: int) -> RecordedStep:
    return step._replace(start=step.start + by_ns, end=step.end + by_ns)
