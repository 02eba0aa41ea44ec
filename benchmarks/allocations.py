"""What ``profile_memory`` costs per event of the allocator: an allocation, or a block freed.

Once as an operator is measured, over a run without any profiler, and once what it adds to a profiler that runs anyway.
The latter contains what torch itself does for whoever wants to be told: it looks up the size of each block under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
from typing import TYPE_CHECKING, Any

import peers
from harness import (
    EMPTY,
    KINETO,
    NONE,
    OURS,
    Budget,
    Row,
    Settings,
    against_nothing,
    no_collections,
    rows,
    share_above_floor,
    timed,
)
from recorders import empty_reporter, kineto, ours
from workloads import adds, allocations

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Contestant = Callable[[bool], AbstractContextManager[Any]]
    """Makes the profiler of one run, with memory or without."""

_WARM_UP = 200
_FROM_PYTHON, _FROM_CPP = 400, 4_000
_BLOCKS = 7
_ROUNDS = 100


def measure(settings: Settings) -> list[Row]:
    """From Python loops of operators and of small tensors, and from a C++ loop of nothing but allocations."""
    rounds = settings.rounds_or(_ROUNDS)
    recorders = {OURS: functools.partial(ours, memory=True), KINETO: functools.partial(kineto, memory=True)}
    whole = against_nothing(lambda recorder: _run(_adds, _FROM_PYTHON, recorder()), recorders, rounds)
    table = rows("one operator with memory, per allocation event", "ns", whole, {OURS: Budget(KINETO, 0.4)})
    for name, work, count in (
        ("Python loop", allocations, _FROM_PYTHON),
        ("C++ loop", peers.load().peers_allocations, _FROM_CPP),
    ):
        added = _added(functools.partial(_run, work, count), rounds)
        what = f"added by profile_memory, per allocation event, {name}"
        table += [*rows(what, "ns", added), share_above_floor(what, added, 0.25)]
    return table


def _adds(count: int) -> None:
    """Each addition allocates its result, and gives the one before back."""
    adds(count // 2)


def _nothing(_memory: bool) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _empty(memory: bool) -> AbstractContextManager[Any]:
    return empty_reporter() if memory else contextlib.nullcontext()


_CONTESTANTS: dict[str, Contestant] = {
    NONE: _nothing,
    EMPTY: _empty,
    OURS: lambda memory: ours(memory=memory),
    KINETO: lambda memory: kineto(memory=memory),
}


def _added(run: Callable[[AbstractContextManager[Any]], float], rounds: int) -> dict[str, list[float]]:
    """What each adds to itself without memory, in every round, in an order that turns."""
    added: dict[str, list[float]] = {who: [] for who in _CONTESTANTS}
    order = list(_CONTESTANTS)
    with no_collections():
        for make in _CONTESTANTS.values():
            run(make(True))
        for _ in range(rounds):
            order.append(order.pop(0))
            for who in order:
                base = run(_CONTESTANTS[who](False))
                added[who].append(run(_CONTESTANTS[who](True)) - base)
            gc.collect()
    return added


def _run(work: Callable[[int], object], count: int, profiler: AbstractContextManager[Any]) -> float:
    with profiler:
        work(_WARM_UP)
        return statistics.median(timed(lambda: work(count), count) for _ in range(_BLOCKS))
