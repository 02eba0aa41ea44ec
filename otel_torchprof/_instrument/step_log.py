"""The latest ended steps of a recording, for those who wait for steps or report how fast they are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, UNATTRIBUTED, Segment
from otel_torchprof._model.step_spans import NO_ATTRIBUTES, RecordedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from otel_torchprof._model.step_spans import StepSpan

_MEAN_OF = 20


class _Logged(NamedTuple):
    number: int
    start: int
    end: int
    thread: int | None
    name: str
    attributes: Mapping[str, Any]


class StepLog:
    """The last 20 ended steps, and all of them for a recording that follows. One thread may add, any thread read.

    Args:
        ahead_ns: returns what is added to the times: the recorder's clock minus that of the steps.
    """

    def __init__(self, ahead_ns: Callable[[], int] = int) -> None:
        self._steps: deque[_Logged] = deque(maxlen=_MEAN_OF)
        self._followed: deque[_Logged] | None = None
        self._ahead_ns = ahead_ns

    def add(self, spans: Iterable[StepSpan]) -> None:
        """Adds the spans of ended steps, as they come with a drain."""
        for span in spans:
            if span.segment is not None and span.is_whole and not span.is_running:
                name = span.segment.span_name
                self.add_step(span.number, span.start, span.end, span.thread, span.attributes, name=name)

    def add_step(
        self,
        number: int,
        start: int,
        end: int,
        thread: int | None = None,
        attributes: Mapping[str, Any] = NO_ATTRIBUTES,
        *,
        name: str = Segment.STEP.span_name,
    ) -> None:
        """Adds a step, or what stands between steps: the fields of :class:`RecordedStep`."""
        step, followed = _Logged(number, start, end, thread, name, attributes), self._followed
        if number >= 0:
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
            taken.append(_recorded(followed.popleft(), ahead))
        return taken

    @property
    def last(self) -> RecordedStep | None:
        """The latest step; None without one."""
        return next(iter(self.latest[-1:]), None)

    @property
    def latest(self) -> list[RecordedStep]:
        """The last 20 steps, in order."""
        ahead = self._ahead_ns() if self._steps else 0
        return [_recorded(step, ahead) for step in list(self._steps)]

    @property
    def seconds(self) -> float | None:
        """Mean duration of the last 20 steps, in seconds; None without one."""
        latest = list(self._steps)
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
        latest = list(self._steps)
        times = {
            name: sum(step.attributes.get(f"{PHASE_PREFIX}{name}.duration", 0.0) for step in latest)
            for name in (*PHASES, UNATTRIBUTED)
        }
        total = sum(times.values())
        return {name: time / total for name, time in times.items() if time > 0}


def _recorded(step: _Logged, ahead: int) -> RecordedStep:
    return RecordedStep(step.number, step.start + ahead, step.end + ahead, step.thread, step.name, step.attributes)
