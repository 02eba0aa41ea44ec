"""The latest ended steps of a recording, for those who wait for steps or report how fast they are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, UNATTRIBUTED, Segment
from otel_torchprof._model.step_spans import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from otel_torchprof._model.step_spans import StepSpan

_MOST = 1_000
_MEAN_OF = 20


class StepLog:
    """The last 1,000 ended steps. One thread may add, any thread read.

    Args:
        ahead_ns: returns what is added to the times: the recorder's clock minus that of the steps.
    """

    def __init__(self, ahead_ns: Callable[[], int] = int) -> None:
        # Tuples of numbers, of which Python's collector keeps no account.
        self._steps: deque[tuple[int, int, int, int | None]] = deque(maxlen=_MOST)
        self._attributes: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=_MEAN_OF)
        self._ahead_ns = ahead_ns

    def add(self, spans: Iterable[StepSpan]) -> None:
        """Adds the spans of ended steps, as they come with a drain."""
        for span in spans:
            if span.segment is Segment.STEP and span.is_whole and not span.is_running:
                self._attributes.append((span.number, span.attributes))
                self.add_step(span.number, span.start, span.end, span.thread)

    def add_step(self, number: int, start: int, end: int, thread: int | None = None) -> None:
        """Adds a step: the fields of :class:`RecordedStep`."""
        self._steps.append((number, start, end, thread))

    def keep_attributes(self, *, of_all: bool) -> None:
        """Keeps the attributes of all its steps from now on, or of the last 20: they take about 1 kB a step."""
        self._attributes = deque(self._attributes, _MOST if of_all else _MEAN_OF)

    def steps_from(self, time_ns: int) -> list[RecordedStep]:
        """The steps that began at a time (Unix ns) or later, in order."""
        steps, ahead, attributes = self._steps.copy(), self._ahead_ns(), dict(self._attributes.copy())
        latest = []
        while steps and (step := steps.pop())[1] + ahead >= time_ns:
            number, start, end, thread = step
            latest.append(RecordedStep(number, start + ahead, end + ahead, thread, attributes=attributes.get(number)))
        return latest[::-1]

    @property
    def last(self) -> RecordedStep | None:
        """The latest step; None without one."""
        steps = list(self._steps)[-1:]
        ahead = self._ahead_ns() if steps else 0
        return next((RecordedStep(number, start + ahead, end + ahead, of) for number, start, end, of in steps), None)

    @property
    def seconds(self) -> float | None:
        """Mean duration of the last 20 steps, in seconds; None without one."""
        latest = list(self._steps)[-_MEAN_OF:]
        return sum(end - start for _, start, end, _ in latest) / len(latest) / 1e9 if latest else None

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
        latest = [attributes for _, attributes in list(self._attributes)[-_MEAN_OF:]]
        times = {
            name: sum(attributes.get(f"{PHASE_PREFIX}{name}.duration", 0.0) for attributes in latest)
            for name in (*PHASES, UNATTRIBUTED)
        }
        total = sum(times.values())
        return {name: time / total for name, time in times.items() if time > 0}
