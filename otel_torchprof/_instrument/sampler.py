"""Which steps are recorded, so that recording costs no more than a share of the time: an account of what it cost.

Nothing here knows of torch or of threads: times are given, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NEVER = math.inf

_NEAR = 3
"""Steps before and after a recorded segment that it is compared with."""
_COMPARED = 15
"""Comparisons whose median counts."""
_ENOUGH = 5
"""Comparisons before which they are not believed."""
_COLD = 5.0
"""How many times dearer an event may be inside a model than in a loop of nothing else: what counts until it was seen."""
_SOME_TIME = 10.0
"""Seconds over which what is spent all the time is averaged."""
_SEGMENT = 0.02
"""Seconds that a segment of steps has at least: reading it out costs the same for one short step as for many."""
_STEP_TIMEOUT = 10.0
_PATIENT_STEPS = 20
"""A segment is broken off when a step takes longer than both, and then there are taken to be no steps any more."""


class Allowance:
    """Spends no more than a share of the time, but for what is spent at once. Saves nothing up for later.

    Args:
        share: above 0.
        now: when it begins.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self.free_at = now
        """When what was spent has been earned."""
        self.spent = 0.0
        """Seconds, since the begin."""

    def spend(self, seconds: float, now: float, *, less: float = 0.0) -> None:
        """So much was spent, where ``less`` of the share was spent elsewhere; a quarter of it remains in any case."""
        self.spent += seconds
        self.free_at = max(self.free_at, now) + seconds / max(self._share - less, self._share / 4)


class Rate:
    """What is spent all the time, as a share of it: of the last seconds, the latest counting most."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._rate = 0.0
        self.spent = 0.0
        """Seconds, in all."""

    def spend(self, seconds: float, now: float) -> None:
        """So much was spent."""
        self.spent += seconds
        self._rate = self.rate(now) + seconds / _SOME_TIME
        self._at = max(now, self._at)

    def rate(self, now: float) -> float:
        """Seconds per second."""
        return self._rate * math.exp(-max(now - self._at, 0.0) / _SOME_TIME)


def _median(values: Iterable[float]) -> float:
    # Not the one of statistics, which brings fractions and decimals, and those take longer to import than all of this folder.
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Comparison:
    """What recording adds to a step, from how long recorded steps took and how long those beside them.

    The median of each side, of three steps before and after, and of the last 15 such differences: a step that is slow for
    another reason, or steps that grow, do not count.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_NEAR)
        self._recorded: deque[float] = deque(maxlen=1000)
        self._after: list[float] = []
        self._differences: deque[float] = deque(maxlen=_COMPARED)

    def add(self, duration: float, *, recorded: bool) -> None:
        """The next step, in order."""
        if recorded:
            if self._after:
                self._compare()
            self._recorded.append(duration)
        elif self._recorded:
            self._after.append(duration)
            if len(self._after) == _NEAR:
                self._compare()
        else:
            self._before.append(duration)

    @property
    def added(self) -> float | None:
        """Seconds by which a recorded step is longer; None while that is not known."""
        return _median(self._differences) if len(self._differences) >= _ENOUGH else None

    def _compare(self) -> None:
        beside = [*self._before, *self._after]
        if len(beside) >= _NEAR:
            self._differences.append(_median(self._recorded) - _median(beside))
        self._before.extend(self._after)
        self._recorded.clear()
        self._after = []


class Sampler:
    """Says when recording begins and ends. For one thread at a time.

    Recorded are segments: a step, or as many short ones as make 20 ms; where there are no steps, windows. What a segment
    cost is what its events cost and what reading them out took. An event costs what was measured in a loop of nothing
    else, or more where the comparison of steps says so; the higher of the two counts. The next segment begins when the
    share that is allowed has paid for it, less what is spent all the time (noting the ends of steps, looking after things); with steps so short
    that this is most of what is allowed, a quarter of the share still goes to segments.
    A step at least lies between two, to compare with.

    Args:
        share: of the time that recording may cost, above 0; from 1 on everything is recorded, and nothing is measured.
        now: when it begins.
        switch: ``switch(True)`` begins to record and returns whether it could: if not, it is not asked again;
            ``switch(False)`` ends it.
    """

    def __init__(self, share: float, now: float, switch: Callable[[bool], bool]) -> None:
        self.always = share >= 1
        self._allowance = Allowance(share, now)
        self._standing = Rate(now)
        self.is_on = False
        self.ask_at = NEVER
        """When a boundary of steps is next to be told by :meth:`boundary`, at once; all are told by :meth:`step_ended`."""
        self.steps = 0
        """Steps that have ended."""
        self.recorded_steps = 0
        """Those that were recorded from begin to end."""
        self._switch = switch
        self._begin = now
        self._event_cost: float | None = None
        self._comparison = Comparison()
        self._durations: deque[float] = deque(maxlen=_COMPARED)
        self._last_boundary: float | None = None
        self._on_since = self._off_since = -NEVER
        self._recorded_time = self._charged_time = 0.0
        self._is_read_out = True
        self._segment = [0, 0]
        self._events_per_step = 0.0

    def begin(self, event_cost: float, now: float) -> None:
        """Recording is possible from now on; ``event_cost``: seconds that an event costs in a loop of nothing else."""
        self._event_cost = event_cost
        if self.always:
            self._on(now)
        else:
            self.ask_at = now

    def step_ended(self, now: float) -> tuple[float | None, bool]:
        """A step has ended: its duration, None where its begin is not known, and whether it was recorded as a whole."""
        begin, self._last_boundary = self._last_boundary, now
        if begin is None:
            recorded = self.always and self.is_on
        else:
            recorded = self._on_since <= begin and (self.is_on or self._off_since >= now)
        self.steps += 1
        self.recorded_steps += recorded
        if begin is None:
            return None, recorded
        self._durations.append(now - begin)
        if recorded:
            self._segment[1] += 1
        # One that was recorded in part is neither.
        if not self.always and (recorded or not (self.is_on or self._off_since > begin)):
            self._comparison.add(now - begin, recorded=recorded)
        return now - begin, recorded

    def boundary(self, now: float) -> None:
        """At a boundary of steps, of which :meth:`step_ended` was notified: recording may begin or end here."""
        if self.always or self._event_cost is None:
            return
        if self.is_on:
            if now - self._on_since >= _SEGMENT:
                self._off(now)
        elif self._may_begin(now) and self._durations:
            self._on(now, now + _SEGMENT)

    def window_may_begin(self, now: float, *, expects_steps: bool) -> bool:
        """Whether to record for some time, whatever runs: there are no steps, or none any more."""
        if self.always or self._event_cost is None or self.is_on or not self._may_begin(now):
            return False
        return not expects_steps if self._last_boundary is None else now - self._last_boundary > self._step_timeout()

    def open_window(self, now: float) -> None:
        """Begins to record between boundaries; :meth:`break_off` ends it."""
        self._on(now)

    def break_off(self, now: float) -> None:
        """Ends recording wherever it is, if it is on."""
        if self.is_on:
            self._off(now)

    def watch(self, now: float) -> None:
        """Breaks off what is recorded in a step that does not end."""
        if (
            self.is_on
            and not self.always
            and now - max(self._on_since, self._last_boundary or 0) > self._step_timeout()
        ):
            self._off(now)

    def resume(self, now: float) -> None:
        """Where everything is recorded: on again, after a break."""
        if self.always and self._event_cost is not None and not self.is_on:
            self._on(now)

    def stop(self, now: float) -> None:
        """Ends recording for good."""
        self.break_off(now)
        self._event_cost = None
        self.ask_at = NEVER

    @property
    def needs_reading(self) -> bool:
        """Whether a segment waits for :meth:`read_out`."""
        return not self._is_read_out

    def read_out(self, events: int, seconds: float, now: float, *, whole: bool) -> None:
        """So many events were taken from the recorder, which took so long, in a thread's own time.

        ``whole``: recording was off before they were taken, so that nothing of the last segment is left.
        """
        # What was recorded cannot have cost more than the time that it took, whatever disturbed steps say of an event.
        recorded, _ = self.times(now)
        cost = min(events * self.event_cost, recorded - self._charged_time) + seconds
        self._charged_time = recorded
        self._allowance.spend(cost, now, less=self._standing.rate(now))
        self._segment[0] += events
        if self.is_on or not whole:
            return
        self._is_read_out = True
        events, steps = self._segment
        if steps:
            self._events_per_step = events / steps
        self._segment = [0, 0]
        if self._event_cost is not None and not self.always:
            self.ask_at = self._allowance.free_at

    def spend(self, seconds: float, now: float) -> None:
        """What it costs all the time."""
        self._standing.spend(seconds, now)

    def share(self, now: float) -> float:
        """Of the time so far, what all of it cost."""
        return (self._allowance.spent + self._standing.spent) / max(now - self._begin, 1e-9)

    @property
    def event_cost(self) -> float:
        """Seconds that an event costs, as far as is known."""
        alone, added = self._event_cost or 0.0, self._comparison.added
        if added is None:
            return alone * _COLD
        return max(alone, added / self._events_per_step if self._events_per_step else 0.0)

    def times(self, now: float) -> tuple[float, float]:
        """Seconds in which was recorded, and in which was not."""
        recorded = self._recorded_time + (now - self._on_since if self.is_on else 0.0)
        return recorded, max(now - self._begin - recorded, 0.0)

    def _may_begin(self, now: float) -> bool:
        return self._is_read_out and now >= self._allowance.free_at

    def _step_timeout(self) -> float:
        return max(_STEP_TIMEOUT, _PATIENT_STEPS * _median(self._durations) if self._durations else 0.0)

    def _on(self, now: float, ask_at: float = NEVER) -> None:
        if not self._switch(True):
            self.stop(now)
            return
        self.is_on, self._on_since, self._is_read_out = True, now, False
        self.ask_at = ask_at

    def _off(self, now: float) -> None:
        self.is_on, self._off_since = False, now
        self._recorded_time += now - self._on_since
        self.ask_at = NEVER
        self._switch(False)
