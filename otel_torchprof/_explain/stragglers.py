"""Which rank the others wait for, from the same collectives on several ranks."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import PHASES
from otel_torchprof._trace_files.alignment import fit

from .abstentions import STRAGGLERS, Abstention, Leaves
from .findings import finding, steady, time, trained
from .rules import RULES
from .steps import PLACE_OF

if TYPE_CHECKING:
    from otel_torchprof._trace_files.collectives import Collectives

    from .arrays import Floats
    from .findings import Finding
    from .steps import Rank


def straggler(ranks: list[Rank]) -> tuple[list[Finding], list[Abstention]]:
    """The late rank, if there is one; or why that cannot be told."""
    if not ranks[1:]:
        return [], []
    common = _common(ranks)
    count = len(common[0].key)
    if count < RULES.fewest_collectives:
        reason = f"{count} collectives with the same number on all ranks, and {RULES.fewest_collectives} are needed"
        way_out = "record all ranks with this package, detail ops; Kineto's traces do not number collectives"
        return [], [Abstention(STRAGGLERS, reason, way_out, Leaves.SINGLE_STEPS)]
    starts, error = _aligned(common)
    waited = _waits(starts) > RULES.alignment_errors * error
    if int(waited.sum()) < RULES.fewest_collectives:
        return [], []
    common, starts = [each.chosen(waited) for each in common], starts[waited]
    last = starts.argmax(axis=1)
    late = int(np.bincount(last, minlength=len(ranks)).argmax())
    others = np.delete(starts, late, axis=1)
    lateness = starts[:, late] - np.median(others, axis=1)
    share_last, median = float(np.mean(last == late)), float(np.median(lateness[last == late]))
    step_time = float(np.sum(ranks[late].seconds[trained(ranks[late])]))
    cost = _cost(ranks[late], common[late].chosen(last == late), lateness[last == late])
    share = cost / step_time if step_time else 0.0
    if share_last < RULES.last_share or share < RULES.lateness_share:
        return [], []
    evidence = (
        f"{ranks[late].name} comes last to {share_last:.0%} of those {len(last)} of {count} collectives that others wait in",
        f"it comes {time(median)} later than the others, as a median",
        f"the clocks are aligned to {time(error)}",
        *_phase_before(ranks, late),
    )
    found = finding(
        "straggler", share, cost, evidence, steps=min(int(steady(rank).sum()) for rank in ranks), is_note=False
    )
    return [found._replace(ranks=(ranks[late].name,))], []


def _waits(starts: Floats) -> Floats:
    """How much later than most the last rank came to each collective: none waits long in those that follow at once on another."""
    found: Floats = starts.max(axis=1) - np.median(np.sort(starts, axis=1)[:, :-1], axis=1)
    return found


def _cost(rank: Rank, late: Collectives, lateness: Floats) -> float:
    """Seconds that the others wait: of each step the longest wait, since collectives of a step overlap."""
    steps = np.searchsorted(rank.start, late.start, side="right")
    longest = np.zeros(len(rank.start) + 1)
    np.maximum.at(longest, steps, lateness)
    return float(longest.sum())


def _common(ranks: list[Rank]) -> list[Collectives]:
    """By rank, the collectives that all have after the warm-up; the same ones in the same order."""
    found = [_after_warm_up(rank) for rank in ranks]
    keys = reduce(np.intersect1d, (each.key for each in found))
    return [each.chosen(np.isin(each.key, keys)) for each in found]


def _after_warm_up(rank: Rank) -> Collectives:
    chosen = np.flatnonzero(trained(rank))
    begin = int(rank.start[chosen[0]]) if len(chosen) else 1 << 62
    return rank.collectives.chosen(rank.collectives.start >= begin)


def _aligned(common: list[Collectives]) -> tuple[Floats, float]:
    """When each rank came to each collective, in seconds on the first one's clock, and the largest error of the others' clocks."""
    first, *others = common
    begin = int(first.start.min())
    starts, errors = [(first.start - begin) / 1e9], []
    for each in others:
        _, found = fit(each, first)
        if found is not None:  # as it is: explain wants more collectives than a clock does
            starts.append(found.line.seconds(each.start, begin))
            errors.append(found.error / 1e9)
    return np.stack(starts, axis=1), max(errors)


def _phase_before(ranks: list[Rank], late: int) -> tuple[str, ...]:
    """The phase that takes longer on the late rank than on the others."""
    medians = np.array([_medians(rank) for rank in ranks if steady(rank).any()])
    if len(medians) < len(ranks):
        return ()
    excess = medians[late] - np.median(np.delete(medians, late, axis=0), axis=0)
    excess[PLACE_OF["collective"]] = 0
    longest = int(excess.argmax())
    if excess[longest] <= 0:
        return ()
    return (
        f"before that it spends {time(float(excess[longest]))} a step more than the others in {(*PHASES, 'no phase')[longest]}",
    )


def _medians(rank: Rank) -> Floats:
    """Seconds of each phase in a step, and last of what is in none."""
    found: Floats = np.median(np.column_stack((rank.phases, rank.unattributed))[steady(rank)], axis=0)
    return found
