"""What recording adds to one operator, while it runs. Starting, stopping and reading are not in it.

Run as a program it is one process of the measurement: ``python benchmarks/operators.py ROUNDS``.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import peers
from children import answer, in_processes
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
    timed_twice,
)
from recorders import empty_callback, kineto, ours
from workloads import adds

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP = 200
_COUNT = 200
_BLOCKS = 7
"""The median of so many blocks makes a run: an interrupt spoils one of them, not the run."""
_ROUNDS = 240
_BUDGETS = {
    "one operator, Python loop": Budget(KINETO, 0.37),
    "one operator, C++ loop": Budget(EMPTY, plus=15),
    "one operator, Python loop, with shapes": Budget(KINETO, 0.38),
    "one operator, C++ loop, with shapes": Budget(KINETO, 0.38),
}


def measure(settings: Settings) -> list[Row]:
    """Small additions from a Python loop and a C++ loop, each without shapes and with."""
    found = in_processes(__file__, settings.rounds_or(_ROUNDS))
    table: list[Row] = []
    for what, budget in _BUDGETS.items():
        table += rows(what, "ns", found[what], {OURS: budget})
        if "shapes" not in what:
            table.append(share_above_floor(what, found[what], 0.1))
    return table


def _contestants(shapes: bool) -> dict[str, Recorder]:
    recorders = {EMPTY: empty_callback, OURS: ours, KINETO: kineto}
    return {who: functools.partial(recorder, shapes=shapes) for who, recorder in recorders.items()}


def _run(work: Callable[[int], object]) -> Callable[[Recorder], Any]:
    def run(recorder: Recorder) -> Any:
        with recorder():
            work(_WARM_UP)
            return np.median([timed_twice(lambda: work(_COUNT), _COUNT) for _ in range(_BLOCKS)], axis=0)

    return run


def main(rounds: int) -> None:
    """Says what each contestant added in every round, by what was measured."""
    found = {}
    for what in _BUDGETS:
        work = adds if "Python" in what else peers.load().peers_additions
        added = against_nothing(_run(work), _contestants("shapes" in what), rounds)
        found[what] = {who: np.array(values).tolist() for who, values in added.items()}
    answer(found)


if __name__ == "__main__":
    main(int(sys.argv[1]))
