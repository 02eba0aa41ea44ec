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
"""Most resampled steps; of more, every n-th is used."""


class Finding(NamedTuple):
    """One verdict."""

    verdict: str
    severity: str
    """Cost of the fault: ``high``, ``medium``, ``low``, or ``none`` for a verdict that is not a fault."""
    confidence: str
    """``firm`` or ``tentative``."""
    is_note: bool
    """Whether it is too small for a verdict."""
    share: float
    """Share of the examined time."""
    recoverable_seconds: float
    """Upper limit of the seconds that the recording would be shorter without the cause."""
    evidence: tuple[str, ...]
    next_action: str
    check: str
    """Observation that would refute the verdict."""
    ranks: tuple[str, ...] = ()
    """Ranks with this verdict; empty if there is one rank."""

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        return f"{self.verdict}: {self.share:.0%} {ADVICE[self.verdict].meaning}"


def finding(
    verdict: str, share: float, recoverable: float, evidence: tuple[str, ...], *, steps: int, is_note: bool
) -> Finding:
    """Makes a finding with its advice; severity comes from its share, confidence from the number of steps."""
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
    """Selects the training steps after the warm-up that did not compile."""
    return trained(rank) & (rank.phases[:, PLACE_OF["compile"]] <= RULES.recompiling_share * rank.seconds)


def with_runnable(rank: Rank, chosen: Flags) -> Flags:
    """Selects the chosen steps whose runnable time is known; none if that is less than half of them."""
    known = chosen & ~np.isnan(rank.runnable)
    return known if 2 * int(known.sum()) >= int(chosen.sum()) else np.zeros_like(chosen)


def busy_share(rank: Rank, chosen: Flags) -> float:
    """Returns the share of time ready to run: of most steps, or the lower limit for all together; 0 if unknown."""
    known = with_runnable(rank, chosen)
    if not known.any():
        return 0.0
    runnable, seconds = rank.runnable[known], rank.seconds[known]
    return max(float(np.median(runnable / seconds)), whole_time(runnable, seconds)[1])


def median_share(seconds: Floats, of_steps: Floats) -> tuple[float, float, float]:
    """Returns the median share of steps and its 95 % bootstrap interval."""
    thinned = (seconds / of_steps)[:: _thinning(seconds)]
    low, high = np.percentile(np.median(thinned[_drawn(len(thinned))], axis=1), (2.5, 97.5))
    return float(np.median(seconds / of_steps)), float(low), float(high)


def whole_time(seconds: Floats, of_steps: Floats) -> tuple[float, float, float]:
    """Returns the share of all steps together and its interval, for times that few steps have.

    A median says little of these.
    """
    part, whole = (each[:: _thinning(seconds)] for each in (seconds, of_steps))
    drawn = _drawn(len(part))
    low, high = np.percentile(part[drawn].sum(axis=1) / whole[drawn].sum(axis=1), (2.5, 97.5))
    return float(seconds.sum() / of_steps.sum()), float(low), float(high)


def _thinning(seconds: Floats) -> int:
    return -(-len(seconds) // _MOST_RESAMPLED)


def _drawn(count: int) -> Integers:
    return np.random.default_rng(RULES.seed).integers(0, count, (RULES.resamples, count))


def time(seconds: float) -> str:
    """Formats a duration."""
    return format_time(seconds * 1e6)
