"""The latest ended steps of a recording, for those who wait for steps or report how fast they are."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import FLOPS, LOADED, MFU, PHASE_PREFIX, PHASES, UNATTRIBUTED
from otel_torchprof._model.step_spans import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from otel_torchprof._model.step_spans import StepSpan

_MEAN_OF = 20
_RATES = ("tokens", "samples", "flops", "mfu")


class StepLog:
    """The last 20 ended steps, and all of them for a recording that follows. One thread may add, any thread read.

    Args:
        ahead_ns: returns what is added to the times: the recorder's clock minus that of the steps.
    """

    def __init__(self, ahead_ns: Callable[[], int] = int) -> None:
        self._steps: deque[RecordedStep] = deque(maxlen=_MEAN_OF)
        self._followed: deque[RecordedStep] | None = None
        self._ahead_ns = ahead_ns
        self._read_ns: int | None = None

    def add(self, spans: Iterable[StepSpan]) -> None:
        """Adds the spans of ended steps, as they come with a drain, also if there are none."""
        self._read_ns = time.time_ns()
        for span in spans:
            if span.segment is not None and span.is_whole and not span.is_running:
                name, attributes = span.segment.span_name, span.attributes
                self.add_step(RecordedStep(span.number, span.start, span.end, span.thread, name, attributes))

    def add_step(self, step: RecordedStep) -> None:
        """Adds an ended step, or what stands between steps."""
        followed = self._followed
        if step.number >= 0:
            self._steps.append(step)
        if followed is not None:
            followed.append(step)

    def follow(self, *, on: bool) -> None:
        """Keeps every step from now on until :meth:`take`, about 1 kB each: a drain may bring any number. Or no longer."""
        self._followed = deque() if on else None

    def take(self) -> list[RecordedStep]:
        """The steps since the last call, and evaluations and checkpoints between them, in order; empty unless they are followed. By one thread."""
        followed, ahead, taken = self._followed, self._ahead_ns(), []
        while followed:
            taken.append(_ahead_by(followed.popleft(), ahead))
        return taken

    @property
    def last(self) -> RecordedStep | None:
        """The latest step; None without one."""
        return next(iter(self.latest[-1:]), None)

    @property
    def latest(self) -> list[RecordedStep]:
        """The last 20 steps, in order."""
        ahead = self._ahead_ns() if self._steps else 0
        return [_ahead_by(step, ahead) for step in list(self._steps)]

    @property
    def seconds(self) -> float | None:
        """Mean duration of the last 20 steps, in seconds; None without one."""
        latest = list(self._steps)
        return sum(step.end - step.start for step in latest) / len(latest) / 1e9 if latest else None

    @property
    def median(self) -> float | None:
        """Median duration of the last 20 steps, in seconds; None without one."""
        latest = list(self._steps)
        return statistics.median((step.end - step.start) / 1e9 for step in latest) if latest else None

    def status(self) -> dict[str, Any]:
        """The latest step and its speed, for the control socket."""
        last = self.last
        return {
            "step": None if last is None else last.number,
            "step_end_ns": None if last is None else last.end,
            "step_seconds": self.seconds,
            "step_median": self.median,
            "steps_read_ns": self._read_ns or time.time_ns(),  # without drains they come as they end
            "phases": self._shares(),
            "rates": self._rates(),
        }

    def _shares(self) -> dict[str, float]:
        """Shares of the time of the last 20 steps, by phase and the rest; empty if they are not known."""
        latest = list(self._steps)
        times = {
            name: sum((step.attributes or {}).get(f"{PHASE_PREFIX}{name}.duration", 0.0) for step in latest)
            for name in (*PHASES, UNATTRIBUTED)
        }
        total = sum(times.values())
        return {name: time / total for name, time in times.items() if time > 0}

    def _rates(self) -> dict[str, float]:
        """Tokens, samples and floating-point operations per second of the last 20 steps, and MFU, of those steps of which each is known."""
        latest, found = [(step.attributes or {}, step.end - step.start) for step in list(self._steps)], {}
        for name, key in zip(_RATES, (*LOADED, FLOPS, MFU), strict=True):
            known = [(attributes[key], duration) for attributes, duration in latest if key in attributes]
            if time := sum(duration for _, duration in known):
                found[name] = sum(amount * (duration if key == MFU else 1e9) for amount, duration in known) / time
        return found


def _ahead_by(step: RecordedStep, ahead: int) -> RecordedStep:
    return step._replace(start=step.start + ahead, end=step.end + ahead) if ahead else step
