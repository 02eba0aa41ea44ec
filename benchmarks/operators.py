"""What recording adds to one operator, while it runs. Starting, stopping and reading are not in it."""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING

import peers
from harness import (
    EMPTY,
    KINETO,
    OURS,
    Budget,
    Recorder,
    Row,
    Settings,
    against_nothing,
    rows,
    share_above_floor,
    timed,
)
from recorders import empty_callback, kineto, ours
from workloads import adds

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP = 200
_FROM_PYTHON, _FROM_CPP = 200, 2_000
_BLOCKS = 7
"""The median of so many blocks makes a run: an interrupt spoils one of them, not the run."""
_ROUNDS = 200


def measure(settings: Settings) -> list[Row]:
    """From a Python loop and a C++ loop, each without shapes and with."""
    rounds = settings.rounds_or(_ROUNDS)
    table: list[Row] = []
    for shapes in (False, True):
        suffix = ", with shapes" if shapes else ""
        budget = Budget(KINETO, 0.4 if shapes else 0.3)
        added = against_nothing(_run(adds, _FROM_PYTHON), _contestants(shapes), rounds)
        table += rows(f"one operator, Python loop{suffix}", "ns", added, {OURS: budget})
        if not shapes:
            table.append(share_above_floor("one operator, Python loop", added, 0.1))
        budget = Budget(KINETO, 0.4) if shapes else Budget(EMPTY, plus=50)
        added = against_nothing(_run(peers.load().peers_operators, _FROM_CPP), _contestants(shapes), rounds)
        table += rows(f"one operator, C++ loop{suffix}", "ns", added, {OURS: budget})
    return table


def _contestants(shapes: bool) -> dict[str, Recorder]:
    recorders = {EMPTY: empty_callback, OURS: ours, KINETO: kineto}
    return {who: functools.partial(recorder, shapes=shapes) for who, recorder in recorders.items()}


def _run(work: Callable[[int], object], count: int) -> Callable[[Recorder], float]:
    def run(recorder: Recorder) -> float:
        with recorder():
            work(_WARM_UP)
            return statistics.median(timed(lambda: work(count), count) for _ in range(_BLOCKS))

    return run
