"""Which steps a recording keeps: the first ones, or those up to one that is slow, waits long for other ranks, or raises the memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config, parsers
from otel_torchprof._columns.phases import DEVICE_PEAK, PEAK, RESIDENT
from otel_torchprof._encode.table import brief_time, format_memory
from otel_torchprof._export.span_policy import ENOUGH, WINDOW, SlowDetector
from otel_torchprof._files.attribute_keys import COLLECTIVE_PHASE
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof.errors import TorchProfError, check_names, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_torchprof._model.step_spans import RecordedStep

DETAILS = ("ops", "frames")
DEFAULT_STEPS = 25
"""What an explanation needs for a verdict."""
ALL, SLOW, WAIT, MEMORY = "all", "slow", "wait", "memory"
"""Which steps are kept."""

_LEAST_WAIT = 10
"""Duration of a step in long waits."""
_LEAST_EXCESS_NS = 10_000_000
"""Time by which a slow step takes longer than the median."""
_LEAST_BYTES, _LEAST_SHARE = 16 << 20, 0.01
"""Bytes by which a step raises the memory above the median rise, and their share of the memory."""
_SHARED_NS = 15 * 10**9
"""Time for which a rank has its steps, until it is told which one all ranks keep: drains, looks and answers take some seconds."""
_UNJUDGED_NS = 5 * 10**9
"""Time in which steps only show what memory they need, and the recording and drains with them."""


class StepRequest(NamedTuple):
    """What is to be recorded."""

    steps: int | None = None
    """Number of steps, with ``keep`` the most; None: those in ``seconds``."""
    seconds: float | None = None
    """Longest time; of a recording without a number of steps, its length."""
    keep: str = ALL
    """``all``: the first steps. Else the steps up to the first that is slow (``slow``), waits long for other ranks (``wait``), or raises
    the memory by much (``memory``)."""
    slow_limit: float | None = None
    """Seconds from which on a step, or its wait, is slow; None: three times the median of the last 200."""
    detail: str = "ops"
    record_shapes: bool = False
    at_step: int | None = None
    """Number of the first step; None: the next one."""
    shared: str = ""
    """With ``keep``, a word of the client that records several ranks: it chooses among the steps that they find, for all of them."""

    @classmethod
    def checked(cls, **given: Any) -> StepRequest:
        """Checks the fields; without ``steps``, which ``seconds`` take the place of if all are kept: :data:`DEFAULT_STEPS` steps.

        Raises:
            TypeError, ValueError: a value is not allowed; the message has its name, its value and the allowed values.
        """
        check_names("record()", given, cls._fields)
        values = {name: checked(name, value, _CHECKS[name]) for name, value in given.items() if value is not None}
        request = cls(**values)
        if request.shared and request.keep == ALL:
            raise ValueError(f"shared is {request.shared!r}; it is for recordings with keep")
        if request.slow_limit is not None and request.keep not in {SLOW, WAIT}:
            raise ValueError(f"slow_limit is {request.slow_limit!r}; it is for keep={SLOW!r} and keep={WAIT!r}")
        if request.steps is None and (request.seconds is None or request.keep != ALL):
            return request._replace(steps=DEFAULT_STEPS)
        return request


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "steps": parsers.whole("a whole number above 0, or None", 1),
    "seconds": parsers.number("a number of seconds above 0, or None", lambda value: value > 0),
    "keep": parsers.one_of(ALL, SLOW, WAIT, MEMORY),
    "slow_limit": parsers.number("a number of seconds above 0, or None", lambda value: value > 0),
    "detail": parsers.one_of(*DETAILS),
    "record_shapes": parsers.boolean("True or False"),
    "at_step": parsers.whole("a number of a step, or None", 0),
    "shared": str,
}


class _Measure(NamedTuple):
    """What is compared of steps, with a kind of ``keep``."""

    what: str
    """What a step did, before the figure."""
    none: str
    """What no step did, if none is kept."""
    text: Callable[[int], str]
    """The figure."""


def _time(duration_ns: int) -> str:
    return brief_time(duration_ns / 1e3)


_MEASURES = {
    SLOW: _Measure("took", "was slow", _time),
    WAIT: _Measure("waited for other ranks for", "waited long for other ranks", _time),
    MEMORY: _Measure("raised the memory by", "raised the memory by much", format_memory),
}


class _MemoryRise:
    """How far a step's memory is above that of the 200 before: the process's peak, what it has at the end, and a device's peak.

    All of that, since the peak of a process stays, while what it has is up to 10 ms old; a device's is read at drains.
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[int]] = {key: deque(maxlen=WINDOW) for key in (PEAK, RESIDENT, DEVICE_PEAK)}
        self._seen, self._begin = 0, 0
        self.least = _LEAST_BYTES
        """Bytes above the median rise from which on one is large."""

    @property
    def is_known(self) -> bool:
        """Whether the system tells the memory."""
        return any(self._recent.values())

    def add(self, step: RecordedStep) -> int:
        """Adds a step; returns its rise in bytes."""
        rise = 0
        for key, recent in self._recent.items():
            size = (step.attributes or {}).get(key)
            if size is not None:
                rise = max(rise, size - max(recent, default=size))
                self.least = max(self.least, round(_LEAST_SHARE * size))
                recent.append(size)
        self._seen, self._begin = self._seen + 1, self._begin or step.start
        return rise

    def judges(self, step: RecordedStep) -> bool:
        """Whether enough is known at a step that was added: the first steps, drains and this recording raise the memory too."""
        return self._seen > ENOUGH and step.end >= self._begin + _UNJUDGED_NS


class KeptSteps:
    """Chooses among steps that have ended: the first ones, or the last ones up to one that is slow, or raises the memory by much.

    If it is shared with other ranks, it has more of the last ones, until :meth:`end_at`.

    Args:
        request: what is to be kept.
        before: the latest steps before the recording.
    """

    def __init__(self, request: StepRequest, before: Sequence[RecordedStep]) -> None:
        self._request = request
        limit = request.slow_limit
        # Three times the median, not the policy's quantile: that has one step of 20, and this waits for the first.
        self._slow = SlowDetector(1.0, None) if limit is None else SlowDetector(None, round(limit * 1e9))
        self._measure = _MEASURES.get(request.keep, _MEASURES[SLOW])
        self._figure = 0
        self._memory = _MemoryRise()
        self.steps: list[RecordedStep] = []
        """The chosen ones, in order."""
        self.seen = 0
        """Number of the chosen ones, or while it waits for a slow one of all that were looked at."""
        self.is_complete = False
        """Whether there are as many as requested, or the last one is slow."""
        self.notes: tuple[str, ...] = ()
        """How slow that one is."""
        self.found: tuple[int, str] | None = None
        """The step that is found for all ranks, and how slow it is."""
        # Calls make steps several times longer: they are compared with others that have them. The recording itself needs memory.
        for step in before if request.keep in {SLOW, WAIT} and request.detail == "ops" else ():
            self._is_slow(step)

    @property
    def latest(self) -> RecordedStep | None:
        """The last of the chosen steps; None without one."""
        return next((step for step in reversed(self.steps) if step.number >= 0), None)

    def add(self, step: RecordedStep) -> None:
        """Adds a later step, without effect before the first one that was asked for, and once the choice is complete.

        The chosen steps are consecutive: after a lost one they begin anew. What is between two steps comes along.

        Raises:
            TorchProfError: they cannot, since the first one was given.
        """
        latest = self.latest
        if self.is_complete:
            return
        if step.number < 0:
            if latest is not None:
                self._add_pause(step, latest)
            return
        if step.number < (self._request.at_step or 0):
            return
        if latest is not None and step.number != latest.number + 1 and self._request.steps is not None:
            if self._request.keep == ALL and self._request.at_step is not None:
                raise TorchProfError(
                    f"step {latest.number + 1} was lost, since the drain that had it failed: the log says why; record again, "
                    "from a later step on"
                )
            self.steps.clear()
            self.seen = 0 if self._request.keep == ALL else self.seen
        self.steps.append(step)
        self.seen += 1
        if self._request.keep == ALL:
            self.is_complete = self.seen == self._request.steps
            return
        since = step.end - _SHARED_NS if self._request.shared else step.end
        while self.steps[0].number < 0 or (
            self._is_before_last(self.steps[0], step.number) and self.steps[0].end < since
        ):
            del self.steps[0]
        if self._is_slow(step):
            self._end_with(step.number, f"step {step.number}")

    def _is_before_last(self, step: RecordedStep, number: int) -> bool:
        """Whether a step is before those that are kept if the last one has a number."""
        return step.number <= number - (self._request.steps or DEFAULT_STEPS)

    def _add_pause(self, pause: RecordedStep, latest: RecordedStep) -> None:
        """Adds an evaluation, a checkpoint; without a limit there is nothing that its time could be compared with."""
        self.steps.append(pause)
        is_judged = self._request.keep == MEMORY or self._request.slow_limit is not None
        if self._request.keep != ALL and is_judged and self._is_slow(pause):
            self._end_with(latest.number, f"{pause.name} after step {latest.number}")

    def _end_with(self, number: int, name: str) -> None:
        note = f"{name} {self._measure.what} {self._measure.text(self._figure)}, the median is {self._median()}"
        if self._request.shared:
            self.found = self.found or (number, note)
        else:
            self.is_complete, self.notes = True, (note,)

    def end_at(self, number: int, why: str) -> None:
        """Ends a choice that is shared with the step that all ranks keep, and what comes before the next step, once it has ended here.

        Raises:
            TorchProfError: it is not there any more.
        """
        if self.is_complete or self.latest is None or self.latest.number < number:
            return
        numbers = [step.number for step in self.steps]
        if number not in numbers:
            raise TorchProfError(f"nothing is kept: {why}; that step was not recorded here, or is dropped already")
        end = numbers.index(number) + 1
        while end < len(numbers) and numbers[end] < 0:
            end += 1
        begin = next(place for place, step in enumerate(self.steps) if not self._is_before_last(step, number))
        self.steps, self.is_complete, self.notes = self.steps[begin:end], True, (why,)

    def settle(self) -> None:
        """Ends it with what was found here, if nobody has chosen: no more steps come."""
        if self.found is not None:
            self.end_at(*self.found)

    def _is_slow(self, step: RecordedStep) -> bool:
        """Whether a step is slow among those before it; what any machine may do to a short one is none, and a short wait neither."""
        figure, median = self._figure_of(step), self._slow.median(step.name)
        self._figure = figure
        is_slow = self._slow.takes(step.name, figure)
        if self._request.keep == MEMORY:
            return is_slow and figure - median >= self._memory.least and self._memory.judges(step)
        is_long = figure - median >= _LEAST_EXCESS_NS and _LEAST_WAIT * figure >= step.end - step.start
        return is_slow and (self._request.slow_limit is not None or is_long)

    def _figure_of(self, step: RecordedStep) -> int:
        """What is compared: ns, or bytes."""
        if self._request.keep == MEMORY:
            return self._memory.add(step)
        if self._request.keep == SLOW:
            return step.end - step.start
        seconds: float = (step.attributes or {}).get(COLLECTIVE_PHASE, 0.0)
        return round(seconds * 1e9)

    def _median(self) -> str:
        return self._measure.text(self._slow.median(STEP_NAME))

    def check(self, recorded: Sequence[RecordedStep]) -> None:
        """Raises TorchProfError if no step was slow, or the slow one is not among those that are recorded whole."""
        if self.is_complete and self.steps[-1] not in recorded[-1:]:
            raise TorchProfError(
                f"nothing is kept: {self.notes[0]}, and its events need more than half of {config.MEMORY_LIMIT}: set it higher"
            )
        if self.is_complete:
            return
        if self._request.keep == MEMORY and self.seen and not self._memory.is_known:
            raise TorchProfError("nothing is kept: this system does not tell how much memory the process has")
        raise TorchProfError(
            f"nothing is kept: none of {self.seen:,} steps {self._measure.none}, the median is {self._median()}"
        )
