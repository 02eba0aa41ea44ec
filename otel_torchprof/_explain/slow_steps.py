"""The slowest steps, and what they had that others had not."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .findings import time, trained
from .steps import COUNTERS, PLACE_OF

if TYPE_CHECKING:
    from .steps import Rank

_SHOWN = 5
_SLOWER = 1.5
"""Medians: below that, a step is no slow one."""
_LEAST = 0.1
"""Of what a slow step took beyond the median: less is not worth a word."""
_MORE = 10
"""Times as many as usual: fewer page faults or context switches are not worth a word."""
_MOST_COMPARED = 2000


class SlowStep(NamedTuple):
    """One of the slowest."""

    rank: str
    number: int
    seconds: float
    differences: tuple[str, ...]
    """What it had that others had not, the largest first."""


def slowest(ranks: list[Rank]) -> tuple[SlowStep, ...]:
    """The slowest training steps of all ranks, after the warm-up."""
    found = []
    for rank in ranks:
        places = np.flatnonzero(trained(rank))
        if not len(places):
            continue
        median = float(np.median(rank.seconds[places]))
        slow = places[np.argsort(-rank.seconds[places], kind="stable")][:_SHOWN]
        found += [
            SlowStep(rank.name, int(rank.number[step]), float(rank.seconds[step]), _differences(rank, places, step))
            for step in slow.tolist()
            if rank.seconds[step] > _SLOWER * median
        ]
    return tuple(sorted(found, key=lambda step: -step.seconds)[:_SHOWN])


def _differences(rank: Rank, places: np.ndarray, step: int) -> tuple[str, ...]:
    excess = float(rank.seconds[step] - np.median(rank.seconds[places]))
    columns = {phase: rank.phases[:, place] for phase, place in PLACE_OF.items()} | {
        "not known" if rank.is_derived else "unattributed": rank.unattributed,
        "runnable but not running": rank.runnable,
    }
    found = {name: float(column[step] - np.median(column[places])) for name, column in columns.items()}
    compared = [rank.operators[place] for place in places[:: -(-len(places) // _MOST_COMPARED)].tolist()]
    for each in rank.operators[step]:
        usual = np.median([sum(other.seconds for other in others if other.name == each.name) for others in compared])
        found[each.name] = each.seconds - float(usual)
    largest = sorted((name for name in found if found[name] >= _LEAST * excess), key=lambda name: -found[name])
    counted = [
        f"{rank.counters[step, place]:.0f} {name}"
        for place, name in enumerate(COUNTERS)
        if rank.counters[step, place] > _MORE * max(1.0, float(np.median(rank.counters[places, place])))
    ]
    return (*(f"{time(found[name])} more in {name}" for name in largest[:_SHOWN]), *counted)
