"""Alignment of the clocks of ranks, by the ends of the collectives that they share.

No rank leaves a collective of all ranks before the last one has arrived: on one clock, its ends would be equal but for the time that each
rank takes to wake up. The difference of two clocks is a line through the differences of these ends, with an offset and a drift.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.arrays import Integers

    from .collectives import Collectives

Floats = npt.NDArray[np.float64]

FEWEST_COMMON = 8
"""Fewest common collectives of two ranks: a median of eight tolerates three delayed ones, and the residuals of eight give the error to
about a third of itself."""
_FEWEST_OF_DRIFT = 20
_LARGEST_DRIFT = 500_000.0
"""Largest drift of a clock, ns per second (500 ppm): the kernel slews a clock by at most that, and crystals differ by less than 100 ppm."""
_LARGEST_DRIFT_ERROR = 10_000.0
"""Largest error of a drift, ns per second (10 ppm): clocks differ by some tens of ppm, so a less exact drift is no better than 0."""
_DRIFT_ERRORS = 3.0
"""A drift is significant if it is this many times its error."""
_IMPOSSIBLE_DRIFT, _IMPOSSIBLE_DRIFT_ERRORS = 2_000_000.0, 10.0
"""A drift, ns per second (0.2 %), and its significance, from which on the times of a file must have been edited."""
_MOST_SEGMENTS = 100
"""Most segments of a recording; all pairs of their medians are compared."""
_NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation, which ignores a few delayed ends."""
_OF_MEDIAN = 1.2533
"""Ratio of the standard deviations of a median and of a mean."""


class ClockLine(NamedTuple):
    """The difference of a clock from another one: ahead by ``offset`` ns at ``origin``, and by ``drift`` ns more per ns after it."""

    offset: int
    drift: float
    origin: int

    def corrected(self, time: int) -> int:
        """A time on the other clock. Keeps the order of times."""
        return time - self.offset - round(self.drift * (time - self.origin))

    def seconds(self, times: Integers, begin: int) -> Floats:
        """Times on the other clock, in seconds since ``begin``."""
        seconds_since_begin: Floats = ((times - (self.offset + begin)) - self.drift * (times - self.origin)) / 1e9
        return seconds_since_begin


class ClockFit(NamedTuple):
    """A line and the errors of its fit; in ns."""

    line: ClockLine
    error: float
    """Standard deviation of the residuals, from their median deviation."""
    largest: float
    collectives: int
    duration: float
    """Median duration of a collective, on the rank that waits longer."""
    steep: float = 0.0
    """An impossible drift, as a fraction; 0: there is none."""
    period: int = 0
    """Shortest of :attr:`Collectives.period`; 0: the files have all numbers."""

    @property
    def is_ambiguous(self) -> bool:
        """Whether the clocks differ by so much that collectives numbered by their order may be those of another step."""
        return 0 < self.period < 2 * abs(self.line.offset)

    @property
    def is_useful(self) -> bool:
        """Whether the error is smaller than the duration of collectives, as events of two ranks cannot be compared otherwise."""
        return self.error <= self.duration and not self.steep and not self.is_ambiguous


class Clock(NamedTuple):
    """Conversion of times of a rank to those of the reference, and its errors; in ns."""

    lines: tuple[ClockLine, ...] = ()
    """Corrections to apply one after the other; the last one leads to the reference."""
    error: float = 0.0
    largest: float = 0.0
    collectives: int = 0
    """Number of collectives in common with the rank that it is aligned with."""
    by: int | None = None
    """The rank that it is aligned with; None for the reference."""

    def corrected(self, time: int) -> int:
        """A time on the reference's clock."""
        for line in self.lines:
            time = line.corrected(time)
        return time

    @property
    def offset(self) -> int:
        """Time by which it is ahead of the reference, at the median of its collectives."""
        origin = self.lines[0].origin if self.lines else 0
        return origin - self.corrected(origin)

    @property
    def drift(self) -> float:
        """Rate by which it runs faster, as a fraction."""
        return math.fsum(line.drift for line in self.lines)


class Unaligned(NamedTuple):
    """A rank with too few collectives in common with aligned ranks."""

    most: int
    """Largest number of collectives in common with an aligned rank."""
    by: int
    """That aligned rank."""
    fit: ClockFit | None
    """The fit, which is not useful; None if the collectives are too few."""


def fit(own: Collectives, reference: Collectives) -> tuple[int, ClockFit | None]:
    """The number of common collectives of two ranks, and the line through the differences of their ends; None if they are too few."""
    _, mine, others = np.intersect1d(own.key, reference.key, assume_unique=True, return_indices=True)
    if len(mine) < FEWEST_COMMON:
        return len(mine), None
    ends, duration = own.end[mine], float(np.median(own.end[mine] - own.start[mine]))
    line = _line(ends, ends - reference.end[others])
    longer = max(duration, float(np.median(reference.end[others] - reference.start[others])))
    periods = np.maximum(own.period[mine], reference.period[others])
    period = int(periods[periods > 0].min()) if periods.any() else 0
    return len(mine), line._replace(collectives=len(mine), duration=longer, period=period)


def align(ranks: Sequence[Collectives], reference: int) -> tuple[dict[int, Clock], dict[int, Unaligned]]:
    """Aligns the clocks of ranks with that of the reference; returns the clocks by rank, and the ranks that cannot be aligned.

    A rank with too few collectives in common with the reference is aligned with another aligned rank, over the fewest steps.
    """
    clocks = {reference: Clock()}
    unaligned = {rank: Unaligned(0, reference, None) for rank in range(len(ranks)) if rank != reference}
    level = [reference]
    while level and unaligned:
        reached = []
        for by in level:
            for rank, before in list(unaligned.items()):
                count, clock_fit = fit(ranks[rank], ranks[by])
                if clock_fit is not None and clock_fit.is_useful:
                    clocks[rank] = _through(clock_fit, clocks[by], by)
                    del unaligned[rank]
                    reached.append(rank)
                elif count > before.most:
                    unaligned[rank] = Unaligned(count, by, clock_fit)
        level = reached
    return clocks, unaligned


def _through(clock_fit: ClockFit, clock: Clock, by: int) -> Clock:
    """The clock of a rank that is aligned with rank ``by``; errors of several steps count as independent."""
    error, largest = math.hypot(clock_fit.error, clock.error), clock_fit.largest + clock.largest
    return Clock((clock_fit.line, *clock.lines), error, largest, clock_fit.collectives, by)


def _line(times: Integers, differences: Integers) -> ClockFit:
    """Fits a line to the differences of two clocks."""
    origin, base = int(np.sort(times)[len(times) // 2]), int(differences[0])
    x, y = (times - origin) / 1e9, (differences - base).astype(np.float64)
    drift, steep = _drift(x, y)
    rest = y - drift * x
    middle = float(np.median(rest))
    error, largest = _spread(rest), float(np.abs(rest - middle).max())
    return ClockFit(ClockLine(base + round(middle), drift / 1e9, origin), error, largest, 0, 0.0, steep / 1e9)


def _drift(x: Floats, y: Floats) -> tuple[float, float]:
    """The slope, 0 if it is not significant: the median of the slopes between all pairs of segments (Theil 1950, Sen 1968).

    Returns 0 and the slope if it is impossible for a clock.
    """
    if len(x) < _FEWEST_OF_DRIFT or x.min() == x.max():
        return 0.0, 0.0
    order = np.argsort(x, kind="stable")
    segments = min(len(x), _MOST_SEGMENTS)
    at, value = (np.array([np.median(part) for part in np.array_split(column[order], segments)]) for column in (x, y))
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
