"""Which rank the others wait for, from the same collectives on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import PHASES

from .abstentions import STRAGGLERS, Abstention
from .findings import finding, steady, time, trained
from .rules import RULES
from .steps import PLACE_OF

if TYPE_CHECKING:
    from .arrays import Floats, Integers
    from .findings import Finding
    from .steps import Rank

_NORMAL = 1.4826
"""A median deviation as a standard deviation: a few ends that a busy machine delayed do not count."""


def straggler(ranks: list[Rank]) -> tuple[list[Finding], list[Abstention]]:
    """The late rank, if there is one; or why that cannot be told."""
    if not ranks[1:]:
        return [], []
    common = _common(ranks)
    if len(common) < RULES.fewest_collectives:
        reason = (
            f"{len(common)} collectives with the same number on all ranks, and {RULES.fewest_collectives} are needed"
        )
        way_out = "record all ranks with this package, detail ops; Kineto's traces do not number collectives"
        return [], [Abstention(STRAGGLERS, reason, way_out, of_levels_only=True)]
    starts, error = _aligned(ranks, common)
    last = starts.argmax(axis=1)
    late = int(np.bincount(last, minlength=len(ranks)).argmax())
    others = np.delete(starts, late, axis=1)
    lateness = starts[:, late] - np.median(others, axis=1)
    share_last, median = float(np.mean(last == late)), float(np.median(lateness[last == late]))
    step_time = float(np.sum(ranks[late].seconds[trained(ranks[late])]))
    cost = _cost(ranks[late], np.array(common)[last == late, late], lateness[last == late])
    share = cost / step_time if step_time else 0.0
    holds = share_last >= RULES.last_share and median > RULES.alignment_errors * error and share >= RULES.lateness_share
    if not holds:
        return [], []
    evidence = (
        f"{ranks[late].name} comes last to {share_last:.0%} of {len(common)} collectives, by {time(median)} as a median",
        f"the clocks are aligned to {time(error)}",
        *_phase_before(ranks, late),
    )
    found = finding(
        "straggler", share, cost, evidence, steps=min(int(steady(rank).sum()) for rank in ranks), is_note=False
    )
    return [found._replace(ranks=(ranks[late].name,))], []


def _cost(rank: Rank, places: Integers, lateness: Floats) -> float:
    """Seconds that the others wait: of each step the longest wait, since collectives of a step overlap."""
    if rank.collectives is None:
        return 0.0
    steps = np.searchsorted(rank.start, rank.collectives.start[places], side="right")
    longest = np.zeros(len(rank.start) + 1)
    np.maximum.at(longest, steps, lateness)
    return float(longest.sum())


def _common(ranks: list[Rank]) -> list[list[int]]:
    """Of each collective that all ranks have, after the warm-up: its place on each of them."""
    places = []
    for rank in ranks:
        chosen = np.flatnonzero(trained(rank))
        begin = int(rank.start[chosen[0]]) if len(chosen) else 1 << 62
        collectives = rank.collectives
        keys = collectives.keys if collectives else []
        places.append({key: at for at, key in enumerate(keys) if collectives and collectives.start[at] >= begin})
    shared = set(places[0]).intersection(*places[1:])
    return [[each[key] for each in places] for key in sorted(shared)]


def _aligned(ranks: list[Rank], common: list[list[int]]) -> tuple[Floats, float]:
    """When each rank came to each collective, in seconds on one clock, and that clock's error.

    No rank leaves a collective of all before the last has come: their ends are the same moment, but for the error.
    """
    columns = [rank.collectives for rank in ranks]
    at = np.array(common)
    begin = min(int(each.start.min()) for each in columns if each)
    starts = np.stack([(each.start[at[:, r]] - begin) / 1e9 for r, each in enumerate(columns) if each], axis=1)
    ends = np.stack([(each.end[at[:, r]] - begin) / 1e9 for r, each in enumerate(columns) if each], axis=1)
    differences = ends - np.median(ends, axis=1)[:, None]
    offsets = np.median(differences, axis=0)
    return starts - offsets, _NORMAL * float(np.median(np.abs(differences - offsets)))


def _phase_before(ranks: list[Rank], late: int) -> tuple[str, ...]:
    """The phase that takes longer on the late rank than on the others."""
    medians = np.array([np.median(rank.phases[steady(rank)], axis=0) for rank in ranks if steady(rank).any()])
    if len(medians) < len(ranks):
        return ()
    excess = medians[late] - np.median(np.delete(medians, late, axis=0), axis=0)
    excess[PLACE_OF["collective"]] = 0
    longest = int(excess.argmax())
    if excess[longest] <= 0:
        return ()
    return (f"before that it spends {time(float(excess[longest]))} a step more than the others in {PHASES[longest]}",)
