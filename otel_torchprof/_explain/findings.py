"""A finding: a verdict with its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._encode.table import format_time

from .advice import ADVICE, HARMLESS
from .rules import RULES
from .steps import PLACE_OF

if TYPE_CHECKING:
    from .arrays import Flags, Floats, Integers
    from .steps import Rank

_HIGH, _MEDIUM = 0.4, 0.2
_MOST_RESAMPLED = 2000
"""Steps: of more, every so many-th is drawn from."""


class Finding(NamedTuple):
    """One verdict."""

    verdict: str
    severity: str
    """What it costs: ``high``, ``medium``, ``low``, or ``none`` for what is no fault."""
    confidence: str
    """How sure it is: ``firm`` or ``tentative``."""
    is_note: bool
    """It is too small for a verdict."""
    share: float
    """Of the time that was looked at."""
    recoverable_seconds: float
    """At most this much of the recording, without the cause."""
    evidence: tuple[str, ...]
    next_action: str
    check: str
    """What would show that it is wrong."""
    ranks: tuple[str, ...] = ()
    """Those of which it is true; empty where there is one."""

    @property
    def sentence(self) -> str:
        """One line."""
        return f"{self.verdict}: {self.share:.0%} {ADVICE[self.verdict].meaning}"


def finding(
    verdict: str, share: float, recoverable: float, evidence: tuple[str, ...], *, steps: int, is_note: bool
) -> Finding:
    """A finding with its advice; severity by its share, confidence by how many steps it is from."""
    severity = "high" if share >= _HIGH else "medium" if share >= _MEDIUM else "low"
    advice = ADVICE[verdict]
    return Finding(
        verdict,
        "none" if verdict in HARMLESS else severity,
        "firm" if steps >= RULES.firm_steps else "tentative",
        is_note,
        share,
        recoverable,
        evidence,
        advice.next_action,
        advice.check,
    )


def trained(rank: Rank) -> Flags:
    """The training steps after the warm-up."""
    return rank.is_training & (np.cumsum(rank.is_training) > RULES.warm_up_steps)


def steady(rank: Rank) -> Flags:
    """Those of them that did not compile."""
    return trained(rank) & (rank.phases[:, PLACE_OF["compile"]] <= RULES.recompiling_share * rank.seconds)


def with_runnable(rank: Rank, chosen: Flags) -> Flags:
    """Those of the chosen steps of which it is known how long they were ready to run; none where that is less than half of them."""
    known = chosen & ~np.isnan(rank.runnable)
    return known if 2 * int(known.sum()) >= int(chosen.sum()) else np.zeros_like(chosen)


def busy_share(rank: Rank, chosen: Flags) -> float:
    """Share of the time ready to run: of most steps, or of all together, as far as that is sure; 0 where it is not known."""
    known = with_runnable(rank, chosen)
    if not known.any():
        return 0.0
    runnable, seconds = rank.runnable[known], rank.seconds[known]
    return max(float(np.median(runnable / seconds)), whole_time(runnable, seconds)[1])


def median_share(seconds: Floats, of_steps: Floats) -> tuple[float, float, float]:
    """The median of the shares of steps, and the 95 % interval of it: the bootstrap's."""
    thinned = (seconds / of_steps)[:: _thinning(seconds)]
    low, high = np.percentile(np.median(thinned[_drawn(len(thinned))], axis=1), (2.5, 97.5))
    return float(np.median(seconds / of_steps)), float(low), float(high)


def whole_time(seconds: Floats, of_steps: Floats) -> tuple[float, float, float]:
    """The share of all steps together, likewise: of what some steps have much of and others nothing, a median says little."""
    part, whole = (each[:: _thinning(seconds)] for each in (seconds, of_steps))
    drawn = _drawn(len(part))
    low, high = np.percentile(part[drawn].sum(axis=1) / whole[drawn].sum(axis=1), (2.5, 97.5))
    return float(seconds.sum() / of_steps.sum()), float(low), float(high)


def _thinning(seconds: Floats) -> int:
    return -(-len(seconds) // _MOST_RESAMPLED)


def _drawn(count: int) -> Integers:
    return np.random.default_rng(RULES.seed).integers(0, count, (RULES.resamples, count))


def time(seconds: float) -> str:
    """A duration in words."""
    return format_time(seconds * 1e6)
