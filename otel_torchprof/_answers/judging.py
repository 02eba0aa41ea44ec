"""Judges the share of a candidate: as measured and, beside a busy machine, without the time in which the thread had no processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .advice import fitting
from .findings import (
    HARMLESS,
    RULES,
    WAITING,
    Abstention,
    Leaves,
    busy_share,
    finding_for,
    median_share,
    span,
    steady,
    time,
    whole_time,
    with_runnable,
)
from .steps import PLACE_OF

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Flags, Floats

    from .findings import Finding
    from .steps import Rank


class Candidate(NamedTuple):
    """A possible verdict, and its seconds in each step."""

    verdict: str
    seconds: Floats
    evidence: tuple[str, ...] = ()
    comes_in_bursts: bool = False
    """Whether some steps have much of it and others none: with four workers of a loader, every fourth step waits for data."""
    blocked: Floats | None = None
    """Part of the seconds in which the thread was blocked, so that it was not ready to run; None for none."""
    of_other_ranks: Floats | None = None
    """Part of the seconds in which other ranks were ready to run and had no processor; None for none."""
    name: str = ""
    """The operator, if it is one."""
    is_busy_itself: bool = False
    """Whether time ready to run is what it consists of, as far as it can: a device that waits while the host has no processor."""


class _Share(NamedTuple):
    """A share of step time and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_bound(self) -> bool:
        return self.value >= RULES.bound_share and self.low >= RULES.bound_lower


def blocked_in_waits(rank: Rank) -> Floats:
    """Seconds of each step in which the thread was blocked in phases that wait; 0 if unknown."""
    waits = rank.phases[:, [PLACE_OF[phase] for phase in WAITING]].sum(axis=1)
    least: Floats = np.minimum(waits, np.nan_to_num(rank.blocked))
    return least


def blocked_elsewhere(rank: Rank) -> Floats:
    """Seconds of each step in which the thread was blocked in no phase that waits; 0 if unknown."""
    rest: Floats = np.nan_to_num(rank.blocked) - blocked_in_waits(rank)
    return rest


def judged(rank: Rank, candidate: Candidate, chosen: Flags) -> Finding | Abstention | None:
    """The verdict or note on a candidate; a reason for none if it depends on a busy machine; None if its share is small.

    Args:
        rank: the rank.
        candidate: what is judged.
        chosen: mask of the steps that are judged.
    """
    chosen = chosen & ~np.isnan(candidate.seconds)
    if not chosen.any():
        return None
    measured = _share(candidate, candidate.seconds[chosen], rank.seconds[chosen])
    known = with_runnable(rank, chosen)
    is_busy = candidate.verdict != "machine-busy" and busy_share(rank, chosen) > RULES.most_runnable
    if not is_busy or not known.any():
        return _finding(rank, candidate, chosen, measured) if measured.value >= RULES.note_share else None
    return _beside_others(rank, candidate, chosen, measured, known)


def _share(candidate: Candidate, seconds: Floats, of_steps: Floats) -> _Share:
    return _Share(*(whole_time if candidate.comes_in_bursts else median_share)(seconds, of_steps))


def _finding(rank: Rank, candidate: Candidate, chosen: Flags, share: _Share) -> Finding:
    seconds, of_steps = candidate.seconds[chosen], rank.seconds[chosen]
    typical = np.mean if candidate.comes_in_bursts else np.median
    count, total = int(chosen.sum()), int(steady(rank).sum())
    seconds_of_step = float(typical(seconds))
    others = f" (of {total}: spikes, or steps without this time, are left out)" if count < total else ""
    which = "as a mean" if candidate.comes_in_bursts else "as medians"
    evidence = (
        f"{share.value:.0%} of {count} steady steps{others}, 95 % interval {span(share.low, share.high)}",
        f"{time(seconds_of_step)} of {time(float(typical(of_steps)))} a step, {which}",
        *candidate.evidence,
    )
    advice = fitting(candidate.verdict, rank, chosen)
    if candidate.name:
        advice = advice._replace(meaning=f"of step time is the operator {candidate.name}")
    finding = finding_for(
        candidate.verdict,
        share.value,
        float(seconds.sum()),
        evidence,
        steps=count,
        advice=advice,
        is_note=not share.is_bound,
    )
    at_stake = seconds_of_step if finding.recoverable_seconds else 0.0
    return finding._replace(name=candidate.name, step_seconds=at_stake)


def _beside_others(
    rank: Rank, candidate: Candidate, chosen: Flags, measured: _Share, known: Flags
) -> Finding | Abstention | None:
    """Judges a candidate by three shares: as measured, and without time ready to run, in proportion and at most.

    The first and the last make a firm verdict; the second makes a tentative one, if the last does too or its interval is above the bound.
    """
    seconds, of_steps, runnable = candidate.seconds[known], rank.seconds[known], rank.runnable[known]
    blocked = np.zeros_like(seconds) if candidate.blocked is None else candidate.blocked[known]
    others = np.zeros_like(seconds) if candidate.of_other_ranks is None else candidate.of_other_ranks[known]
    active = np.maximum(seconds - blocked, 0)
    most = np.minimum(runnable, active)
    ready = of_steps - np.minimum(np.nan_to_num(rank.blocked[known]), of_steps)
    in_proportion = runnable * np.minimum(active / np.maximum(ready, 1e-12), 1)
    taken = most if candidate.is_busy_itself else np.minimum(in_proportion, most)
    rest = np.maximum(of_steps - runnable - others, 1e-12)
    corrected = _share(candidate, np.maximum(seconds - taken - others, 0), rest)
    least = _share(candidate, np.maximum(seconds - most - others, 0), rest)
    if max(measured.value, corrected.value) < RULES.note_share:
        return None
    is_firm = measured.is_bound and least.is_bound
    is_tentative = corrected.low >= RULES.bound_share or (corrected.is_bound and least.is_bound)
    if (measured.is_bound or corrected.is_bound) and not (is_firm or is_tentative):
        without = f"{span(corrected.low, corrected.high)} without the time in which the machine was busy"
        what = f"{candidate.verdict}, {candidate.name}," if candidate.name else candidate.verdict
        reason = f"{what} depends on the machine: {measured.value:.0%} of step time, {without}"
        way_out = "record while nothing else runs"
        if candidate.verdict in HARMLESS:
            return None
        return Abstention(rank.name, reason, way_out, Leaves.OTHERS, candidate.verdict)
    without = f"{corrected.value:.0%} without the time in which the machine was busy"
    finding = _finding(rank, candidate, chosen, measured)
    points = min(_share(candidate, taken + others, of_steps).value, measured.value)
    caveat = busy_caveat(points)
    if corrected.is_bound and not measured.is_bound:
        caveat = f", {without}"
    share_of_machine = float(runnable.sum() / of_steps.sum())
    how = f"the loop's thread was ready to run for {share_of_machine:.0%} of the time, and other threads had the processors"
    return finding._replace(
        is_note=not corrected.is_bound,
        confidence=finding.confidence if is_firm else "tentative",
        statement=finding.statement + caveat,
        busy_share=points,
        evidence=(*finding.evidence, f"{how}; {without}, {least.value:.0%} if all of it fell here"),
    )


_LEAST_POINTS = 0.005
"""Least part of step time in a caveat."""


def busy_caveat(share: float) -> str:
    """The end of a sentence on a part of step time that is due to a busy machine; empty if it is small."""
    points = f"{100 * share:.0f}"
    return (
        f", of which {points} point{' is' if points == '1' else 's are'} the busy machine"
        if share >= _LEAST_POINTS
        else ""
    )
