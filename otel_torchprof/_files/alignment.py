"""Clocks of ranks beside one another, from the ends of the same collectives.

No rank leaves a collective of all before the last has come: on a perfect clock its ends are the same moment, but for the time that each
rank takes to wake up. The difference of two clocks is a straight line through the differences of those ends, offset and drift.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .collectives import Collectives
    from .self_times import Numbers

Floats = npt.NDArray[np.float64]

FEWEST_COMMON = 8
"""Collectives of two ranks: a median of eight holds though a busy machine delays three of them, and what is left of eight tells the
error to about a third of itself."""
_FEWEST_OF_DRIFT = 20
_LARGEST_DRIFT = 500_000.0
"""In ns a second, 500 ppm: the kernel slews a clock by no more, and crystals differ by less than a fifth of it. What is more is no clock's."""
_LARGEST_DRIFT_ERROR = 10_000.0
"""In ns a second, 10 ppm: undisturbed clocks differ by some tens of ppm, so a drift that is known worse is hardly known better than as 0."""
_DRIFT_ERRORS = 3.0
"""A drift is told from 0 if it is so many times its own error."""
_IMPOSSIBLE_DRIFT, _IMPOSSIBLE_DRIFT_ERRORS = 2_000_000.0, 10.0
"""In ns a second, 0.2 %: times that run so much faster, and surely, were changed by somebody."""
_MOST_SEGMENTS = 100
"""Of a recording, for whose medians all pairs are looked at."""
_NORMAL = 1.4826
"""A median deviation as a standard deviation: a few ends that a busy machine delayed do not count."""
_OF_MEDIAN = 1.2533
"""The standard deviation of a median beside that of a mean."""


class ClockLine(NamedTuple):
    """One clock beside another, in ns: it is ahead by the offset at its origin, and by the drift more with each ns from there on."""

    offset: int
    drift: float
    origin: int

    def corrected(self, time: int) -> int:
        """A time on the other clock. What is later is never before what was earlier."""
        return time - self.offset - round(self.drift * (time - self.origin))

    def seconds(self, times: Numbers, begin: int) -> Floats:
        """Times on the other clock, in seconds from a moment on."""
        found: Floats = ((times - (self.offset + begin)) - self.drift * (times - self.origin)) / 1e9
        return found


class ClockFit(NamedTuple):
    """A line, and how well it fits; in ns."""

    line: ClockLine
    error: float
    """Standard deviation of what is left, from its median."""
    largest: float
    collectives: int
    duration: float
    """Of a collective in the middle, on the rank that waits longer in them."""
    steep: float = 0.0
    """As a fraction, a drift that is no clock's; 0: there is none."""

    @property
    def is_useful(self) -> bool:
        """The clocks are aligned closer than collectives last: else none is seen to be the same on both."""
        return self.error <= self.duration and not self.steep


class Clock(NamedTuple):
    """How times of a rank become those of the reference, and how well that is known; in ns."""

    lines: tuple[ClockLine, ...] = ()
    """One after the other: the last leads to the reference."""
    error: float = 0.0
    largest: float = 0.0
    collectives: int = 0
    """In common with the rank that it is aligned by."""
    by: int | None = None
    """That rank; None of the reference."""

    def corrected(self, time: int) -> int:
        """A time on the reference's clock."""
        for line in self.lines:
            time = line.corrected(time)
        return time

    @property
    def offset(self) -> int:
        """By how much it is ahead of the reference, in the middle of its collectives."""
        origin = self.lines[0].origin if self.lines else 0
        return origin - self.corrected(origin)

    @property
    def drift(self) -> float:
        """By how much it runs faster, as a fraction."""
        return math.fsum(line.drift for line in self.lines)


class Unaligned(NamedTuple):
    """A rank that shares too little with those whose clocks are known."""

    most: int
    """Collectives in common with one of them,"""
    by: int
    """with this one."""
    fit: ClockFit | None
    """What fits best, and is not useful; None where the collectives are too few."""


def fit(own: Collectives, reference: Collectives) -> tuple[int, ClockFit | None]:
    """How many collectives two ranks have in common, and the line through the differences of their ends, where they are enough."""
    _, mine, others = np.intersect1d(own.key, reference.key, assume_unique=True, return_indices=True)
    if len(mine) < FEWEST_COMMON:
        return len(mine), None
    ends, duration = own.end[mine], float(np.median(own.end[mine] - own.start[mine]))
    found = _line(ends, ends - reference.end[others])
    longer = max(duration, float(np.median(reference.end[others] - reference.start[others])))
    return len(mine), found._replace(collectives=len(mine), duration=longer)


def align(ranks: Sequence[Collectives], reference: int) -> tuple[dict[int, Clock], dict[int, Unaligned]]:
    """The clocks of ranks beside that of the reference, and the ranks of which they cannot be known.

    A rank that shares too little with the reference is aligned by one that is aligned already, the fewest steps away.
    """
    clocks = {reference: Clock()}
    unaligned = {each: Unaligned(0, reference, None) for each in range(len(ranks)) if each != reference}
    level = [reference]
    while level and unaligned:
        reached = []
        for by in level:
            for each, before in list(unaligned.items()):
                count, found = fit(ranks[each], ranks[by])
                if found is not None and found.is_useful:
                    clocks[each] = _through(found, clocks[by], by)
                    del unaligned[each]
                    reached.append(each)
                elif count > before.most:
                    unaligned[each] = Unaligned(count, by, found)
        level = reached
    return clocks, unaligned


def _through(found: ClockFit, clock: Clock, by: int) -> Clock:
    """Errors of several steps are independent of one another."""
    error, largest = math.hypot(found.error, clock.error), found.largest + clock.largest
    return Clock((found.line, *clock.lines), error, largest, found.collectives, by)


def _line(times: Numbers, differences: Numbers) -> ClockFit:
    """The line, and what is known of it from the differences alone."""
    origin, base = int(np.sort(times)[len(times) // 2]), int(differences[0])
    x, y = (times - origin) / 1e9, (differences - base).astype(np.float64)
    drift, steep = _drift(x, y)
    rest = y - drift * x
    middle = float(np.median(rest))
    error, largest = _spread(rest), float(np.abs(rest - middle).max())
    return ClockFit(ClockLine(base + round(middle), drift / 1e9, origin), error, largest, 0, 0.0, steep / 1e9)


def _drift(x: Floats, y: Floats) -> tuple[float, float]:
    """The slope, where it is known and is not 0: the median of those between all pairs of segments (Theil 1950, Sen 1968).

    Second, in its place, a slope that is no clock's.
    """
    if len(x) < _FEWEST_OF_DRIFT or x.min() == x.max():
        return 0.0, 0.0
    order = np.argsort(x, kind="stable")
    segments = min(len(x), _MOST_SEGMENTS)
    at, value = (np.array([np.median(each) for each in np.array_split(column[order], segments)]) for column in (x, y))
    first, second = np.triu_indices(segments, 1)
    apart = at[second] > at[first]
    if not apart.any():
        return 0.0, 0.0
    slopes = (value[second] - value[first])[apart] / (at[second] - at[first])[apart]
    slope = float(np.median(slopes))
    error = _OF_MEDIAN * _spread(y - slope * x) / (math.sqrt(len(x)) * float(x.std()))
    if abs(slope) > _IMPOSSIBLE_DRIFT and _IMPOSSIBLE_DRIFT_ERRORS * error <= abs(slope):
        return 0.0, slope
    is_known = error <= _LARGEST_DRIFT_ERROR and _DRIFT_ERRORS * error <= abs(slope) <= _LARGEST_DRIFT
    return (slope if is_known else 0.0), 0.0


def _spread(values: Floats) -> float:
    return _NORMAL * float(np.median(np.abs(values - np.median(values))))
