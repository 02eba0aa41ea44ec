"""Whose detail is kept: decided when a step, or what is a step where there are none, has ended."""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from otel_torchprof._spans.limits import Budget

WINDOW = 200
"""Durations that a new one is compared with."""
ENOUGH = 20
"""Of them that have to be known before a quantile of them decides."""
_ENOUGH_FOR_MEDIAN = 3
"""Of which one may be that of a warm-up, without being the median."""
_MEDIANS = 3
"""Medians above which one is slow before: noise of a busy machine seldom triples a duration, a stall worth a look does."""
_MOST_NAMES = 1000


class Rules(NamedTuple):
    """What becomes of what was recorded; see :class:`~otel_torchprof.SpanPolicy`."""

    budget: Budget
    keep_all: bool = True
    quantile: float | None = None
    limit_ns: int | None = None


class SlowOnes:
    """Tells what is slow, among others of its name. For one thread at a time; memory is bounded.

    Args:
        quantile: of recent durations, above which one is slow; while there are too few of its name to tell, above three times their
            median. None: no such rule.
        limit_ns: from which on it is, whatever the others took; None: no such rule.
    """

    def __init__(self, quantile: float | None, limit_ns: int | None) -> None:
        self._quantile = quantile
        self._limit_ns = limit_ns
        self._recent: OrderedDict[str, _Recent] = OrderedDict()

    def takes(self, name: str, duration_ns: int) -> bool:
        """Whether it is slow; from now on it is one of the recent ones. Some microseconds."""
        recent = self._recent.get(name)
        if recent is None:
            recent = self._recent[name] = _Recent()
            if len(self._recent) > _MOST_NAMES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        above = self._quantile is not None and recent.is_above(duration_ns, self._quantile)
        recent.add(duration_ns)
        return above or (self._limit_ns is not None and duration_ns >= self._limit_ns)


class _Recent:
    """The last durations, in order of time and in order of length."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, duration: int) -> None:
        self._latest.append(duration)
        bisect.insort(self._sorted, duration)
        if len(self._latest) > WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    def is_above(self, duration: int, quantile: float) -> bool:
        """Whether it is above the quantile; above a multiple of the median as long as that would be the longest one, a warm-up maybe."""
        known = len(self._sorted)
        at = int(quantile * known)
        if known >= ENOUGH and at < known - 1:
            return duration > self._sorted[at]
        return known >= _ENOUGH_FOR_MEDIAN and duration > _MEDIANS * self._sorted[(known - 1) // 2]
