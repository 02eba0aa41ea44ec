"""Selects the steps to record, within an overhead budget, from measurements of the cost of recording.

Independent of torch and threads: callers pass times, in seconds of any monotonic clock.
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
"""Number of latest comparisons of which the median is used."""
_ENOUGH = 5
"""Comparisons needed before their median is used."""
_COLD = 5.0
"""Cost of an event inside a model relative to its cost in a tight loop, assumed until there are enough comparisons."""
_SOME_TIME = 10.0
"""Time constant, in seconds, of the average of continuous costs."""
_SEGMENT = 0.02
"""Least seconds of a recorded segment: draining it costs the same for one short step as for many."""
_STEP_TIMEOUT = 10.0
_PATIENT_STEPS = 20
"""Seconds, and multiple of the median step: after the longer of both a segment ends, and the loop counts as ended."""


class Allowance:
    """A budget of a share of the time. A cost may exceed it, and delays the next one; unused time is not saved up.

    Args:
        share: share of the time, above 0.
        now: start of the budget.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self.free_at = now
        """Time from which the budget allows the next cost."""
        self.spent = 0.0
        """Seconds spent since the start."""

    def spend(self, seconds: float, now: float, *, less: float = 0.0) -> None:
        """Charges a cost. ``less``: share that was spent elsewhere; at least a quarter of the budget remains."""
        self.spent += seconds
        self.free_at = max(self.free_at, now) + seconds / max(self._share - less, self._share / 4)


class Rate:
    """Share of the time that continuous costs take: an exponential average over the last seconds."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._rate = 0.0
        self.spent = 0.0
        """Seconds spent in total."""

    def spend(self, seconds: float, now: float) -> None:
        """Charges a cost."""
        self.spent += seconds
        self._rate = self.rate(now) + seconds / _SOME_TIME
        self._at = max(now, self._at)

    def rate(self, now: float) -> float:
        """Seconds per second."""
        return self._rate * math.exp(-max(now - self._at, 0.0) / _SOME_TIME)


def _median(values: Iterable[float]) -> float:
    # Not statistics.median: importing statistics, with fractions and decimal, takes longer than importing this whole folder.
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Comparison:
    """Cost of recording per step, from the durations of recorded steps and of unrecorded steps beside them.

    Uses medians of the recorded steps, of the three steps before and after, and of the last 15 differences, so that single slow
    steps and growing steps have no effect.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_NEAR)
        self._recorded: deque[float] = deque(maxlen=1000)
        self._after: list[float] = []
        self._differences: deque[float] = deque(maxlen=_COMPARED)

    def add(self, duration: float, *, recorded: bool) -> None:
        """Adds the next step; call it in order."""
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
        """Seconds by which a recorded step is longer; None until there are enough comparisons."""
        return _median(self._differences) if len(self._differences) >= _ENOUGH else None

    def _compare(self) -> None:
        beside = [*self._before, *self._after]
        if len(beside) >= _NEAR:
            self._differences.append(_median(self._recorded) - _median(beside))
        self._before.extend(self._after)
        self._recorded.clear()
        self._after = []


class Sampler:
    """Decides when recording begins and ends. Not thread-safe.

    Records segments: a step, or several short ones of 20 ms together; without steps, windows. The cost of a segment is the
    cost of its events and the time to drain them. The cost of an event is the larger of its cost in a tight loop and the
    one from the comparison of steps. The next segment begins when the budget allows it, less the continuous costs (noting the
    ends of steps, periodic work); if steps are so short that these use up most of the budget, a quarter remains for segments.
    At least one unrecorded step separates two segments, for the comparison.

    Args:
        share: share of the time that recording may cost, above 0; from 1 on everything is recorded and nothing is measured.
        now: the current time.
        switch: ``switch(True)`` starts recording and returns whether that succeeded; after a failure, it is not called again.
            ``switch(False)`` stops recording.
    """

    def __init__(self, share: float, now: float, switch: Callable[[bool], bool]) -> None:
        self.always = share >= 1
        self._allowance = Allowance(share, now)
        self._standing = Rate(now)
        self.is_on = False
        self.ask_at = NEVER
        """Time from which :meth:`boundary` is to be called at the end of a step; :meth:`step_ended` is called for every step."""
        self.steps = 0
        """Number of ended steps."""
        self.recorded_steps = 0
        """Number of steps that were recorded from begin to end."""
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
        """Allows recording from now on; ``event_cost``: cost of an event in a tight loop, in seconds."""
        self._event_cost = event_cost
        if self.always:
            self._on(now)
        else:
            self.ask_at = now

    def step_ended(self, now: float) -> tuple[float | None, bool]:
        """Notes the end of a step; returns its duration (None if its begin is unknown) and whether all of it was recorded."""
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
        # A step that was recorded in part is in neither group.
        if not self.always and (recorded or not (self.is_on or self._off_since > begin)):
            self._comparison.add(now - begin, recorded=recorded)
        return now - begin, recorded

    def boundary(self, now: float) -> None:
        """Begins or ends recording, if due, at the end of a step for which :meth:`step_ended` was called."""
        if self.always or self._event_cost is None:
            return
        if self.is_on:
            if now - self._on_since >= _SEGMENT:
                self._off(now)
        elif self._may_begin(now) and self._durations:
            self._on(now, now + _SEGMENT)

    def window_may_begin(self, now: float, *, expects_steps: bool) -> bool:
        """Whether a window may be recorded now: the program has no steps, or its loop counts as ended."""
        if self.always or self._event_cost is None or self.is_on or not self._may_begin(now):
            return False
        return not expects_steps if self._last_boundary is None else now - self._last_boundary > self._step_timeout()

    def open_window(self, now: float) -> None:
        """Starts recording a window; :meth:`break_off` ends it."""
        self._on(now)

    def break_off(self, now: float) -> None:
        """Stops recording at once, if it is on."""
        if self.is_on:
            self._off(now)

    def watch(self, now: float) -> None:
        """Stops recording if the current step exceeds its timeout."""
        if (
            self.is_on
            and not self.always
            and now - max(self._on_since, self._last_boundary or 0) > self._step_timeout()
        ):
            self._off(now)

    def resume(self, now: float) -> None:
        """Starts recording again after :meth:`break_off`, if everything is recorded."""
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
        """Charges a drain of ``events`` events, which took ``seconds`` of thread time.

        ``whole``: recording was off before the drain, so that the last segment was drained completely.
        """
        # The cost cannot exceed the recorded time, even if slow steps distort the estimated cost of an event.
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
        """Charges a continuous cost."""
        self._standing.spend(seconds, now)

    def share(self, now: float) -> float:
        """Share of the time so far that recording cost."""
        return (self._allowance.spent + self._standing.spent) / max(now - self._begin, 1e-9)

    @property
    def event_cost(self) -> float:
        """Estimated cost of an event, in seconds."""
        alone, added = self._event_cost or 0.0, self._comparison.added
        if added is None:
            return alone * _COLD
        return max(alone, added / self._events_per_step if self._events_per_step else 0.0)

    def times(self, now: float) -> tuple[float, float]:
        """Seconds with and without recording."""
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
