"""What every benchmark needs: interleaved rounds, differences to the run next door, rows of the table.

A machine drifts by more than what is measured here, so no two contestants are compared across time: each run of one is
set against a run without it that comes immediately before, and the median of these differences is what counts. The same
difference between two runs without anything (A/A) is the noise that is left.

A cost may be a pair: wall time and the processor time of the process, which a busy machine lengthens less.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

_Cost = TypeVar("_Cost")
Recorder = Callable[[], AbstractContextManager[Any]]
"""Makes what observes the work of one run."""

NONE = "none, twice (A/A)"
EMPTY = "empty callback"
OURS = "otel-torchprof"
KINETO = "Kineto"
_DRAWS = 2000


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    quick: bool = False
    rounds: int | None = None
    pythons: Sequence[str] = ()
    """Other interpreters, with what benchmarks of theirs need."""

    def rounds_or(self, usual: int) -> int:
        """How many rounds a benchmark takes whose usual number is given."""
        return self.rounds or (max(usual // 5, 3) if self.quick else usual)


class Budget(NamedTuple):
    """An upper limit: ``times`` what a peer takes, plus ``plus``."""

    peer: str = ""
    times: float = 1.0
    plus: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table: what one contestant took."""

    what: str
    contestant: str
    values: Sequence[float]
    unit: str
    budget: Budget | None = None
    peer: float = 0.0
    """The median of the budget's peer."""
    absent: str = ""
    """Why there are no values."""
    processor: Sequence[float] = ()
    """The same in processor time, where it was taken."""
    is_estimate: bool = False
    """The values are draws of one figure: where the budget lies within 95 % of them, it is undecided."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the budget is kept; None without one, and where an estimate leaves it open."""
        if self.budget is None:
            return None
        limit = self.budget.times * self.peer + self.budget.plus
        if self.is_estimate and self._range()[0] < limit < self._range()[1]:
            return None
        return self.median <= limit

    def _range(self) -> tuple[float, float]:
        """The quartiles; of an estimate the ends of its 95 % interval."""
        parts = statistics.quantiles(self.values, n=40 if self.is_estimate else 4, method="inclusive")
        return parts[0], parts[-1]

    def cells(self) -> tuple[str, ...]:
        """As :data:`HEAD` has them."""
        if self.absent:
            return (self.what, self.contestant, *[""] * (len(HEAD) - 3), f"not measured: {self.absent}")
        spread = lowest = ""
        if len(self.values) > 1:
            spread = " .. ".join(map(number, self._range()))
            lowest = "" if self.is_estimate else number(float(np.percentile(self.values, 10)))
        processor = f"{number(statistics.median(self.processor))} {self.unit}" if len(self.processor) else ""
        verdict = {None: "undecided" if self.budget else "", True: "met", False: "**missed**"}[self.met]
        value = f"{number(self.median)} {self.unit}"
        return (self.what, self.contestant, value, lowest, spread, processor, self._ratio(), self._limit(), verdict)

    def _ratio(self) -> str:
        if self.budget is None or not self.budget.peer or self.peer <= 0:
            return ""
        ratio = self.median / self.peer
        if 0 < ratio < 0.1:
            return f"1/{1 / ratio:.0f}"
        return f"{ratio:.2f}x"

    def _limit(self) -> str:
        if self.budget is None:
            return ""
        peer, times, plus = self.budget
        if not peer:
            return f"<= {number(plus)} {self.unit}"
        factor = "" if times == 1 else f"1/{1 / times:.0f} of " if times < 0.1 else f"{times:.2f}x "
        return f"<= {factor}{peer}" + (f" + {number(plus)} {self.unit}" if plus else "")


HEAD = ("what", "who", "median", "p10", "quartiles", "processor", "ratio", "budget", "")


def number(value: float) -> str:
    """Three digits, without an exponent."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def rows(
    what: str, unit: str, values: Mapping[str, Sequence[Any]], budgets: Mapping[str, Budget] | None = None
) -> list[Row]:
    """A row per contestant; ``budgets`` by contestant."""
    values, processor = walls(values), processors(values)
    medians = {who: statistics.median(found) for who, found in values.items()}
    budgets = budgets or {}
    made = []
    for who, found in values.items():
        budget = budgets.get(who)
        peer = medians.get(budget.peer, 0.0) if budget else 0.0
        made.append(Row(what, who, found, unit, budget, peer, processor=processor.get(who, ())))
    return made


def walls(values: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """The costs of each contestant; of those that are pairs the wall times."""
    return {who: [cost[0] if np.ndim(cost) else cost for cost in found] for who, found in values.items()}


def processors(values: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """The processor times of each contestant whose costs are pairs."""
    return {who: [cost[1] for cost in found] for who, found in values.items() if np.ndim(found) > 1}


def share_above_floor(what: str, added: Mapping[str, Sequence[Any]], budget: float) -> Row:
    """What we add above an empty callback, of what Kineto adds above it: of what costs anything, the part that is ours.

    Its values are medians of rounds drawn anew with replacement, the same rounds for all three (a bootstrap).
    """
    wall = _shares(walls(added))
    processor = _shares(processors(added)) if processors(added) else []
    what = f"{what}, above the empty callback"
    return Row(what, OURS, wall, f"of {KINETO}", Budget(plus=budget), processor=processor, is_estimate=True)


def _shares(added: Mapping[str, Sequence[float]]) -> list[float]:
    table = np.array([added[who] for who in (EMPTY, OURS, KINETO)])
    rounds = table.shape[1]
    chosen = np.random.default_rng(1).integers(0, rounds, (_DRAWS, rounds))
    floor, ours, kineto = np.median(table[:, chosen], axis=2)
    return ((ours - floor) / (kineto - floor)).tolist()  # type: ignore[no-any-return]


def limited(table: Sequence[Row], budgets: Mapping[str, Sequence[Budget | None]]) -> list[Row]:
    """The rows of one measurement, each once for every budget that its contestant has to keep."""
    medians = {row.contestant: row.median for row in table}
    return [
        replace(row, budget=budget, peer=medians[budget.peer] if budget and budget.peer else 0.0)
        for row in table
        for budget in budgets.get(row.contestant, [None])
    ]


def against_nothing(
    run: Callable[[Recorder], Any], contestants: Mapping[str, Recorder], rounds: int, *, percent: bool = False
) -> dict[str, list[Any]]:
    """What each contestant adds to a run without one, in every round.

    ``run`` does the work once under a recorder and returns its cost. The order turns by one place every round, so that
    nobody always comes after the same other one.
    """
    everybody = {NONE: contextlib.nullcontext, **contestants}
    added: dict[str, list[Any]] = {who: [] for who in everybody}
    with no_collections():
        for recorder in everybody.values():
            run(recorder)  # the first start of each is slow
        order = list(everybody)
        for _ in range(rounds):
            order.append(order.pop(0))
            for who in order:
                base = run(contextlib.nullcontext)
                with_it = run(everybody[who])
                added[who].append((with_it - base) / base * 100 if percent else with_it - base)
            gc.collect()
    return added


def in_abba(
    run: Callable[[Recorder], float], contestants: Mapping[str, Recorder], rounds: int, *, percent: bool = False
) -> dict[str, list[float]]:
    """What each contestant adds to a run without one, in every round of four: without, with, with, without.

    A machine that gets slower or faster at an even pace does so to both, and neither always comes second. For small
    differences, and runs of which there cannot be hundreds.
    """
    added: dict[str, list[float]] = {who: [] for who in (NONE, *contestants)}
    with no_collections():
        for recorder in contestants.values():
            run(recorder)  # the first start of each is slow
        for _ in range(rounds):
            for who, values in added.items():
                recorder = contestants.get(who, contextlib.nullcontext)
                before, first = run(contextlib.nullcontext), run(recorder)
                second, after = run(recorder), run(contextlib.nullcontext)
                added_time, base = (first + second - before - after) / 2, (before + after) / 2
                values.append(added_time / base * 100 if percent else added_time)
                gc.collect()
    return added


def in_turn(contestants: Mapping[str, Callable[[], _Cost]], rounds: int) -> dict[str, list[_Cost]]:
    """What each contestant costs by itself, in every round; each returns its own cost."""
    costs: dict[str, list[_Cost]] = {who: [] for who in contestants}
    with no_collections():
        for measure in contestants.values():
            measure()
        for _ in range(rounds):
            for who, measure in contestants.items():
                costs[who].append(measure())
                gc.collect()
    return costs


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keeps Python's cyclic collector out of what is timed, for everybody alike.

    What is there now is set aside, which makes the collections between the rounds quick.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def timed(work: Callable[[], Any], count: int = 1) -> float:
    """Nanoseconds per piece of work, of which one call does ``count``."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / count


def timed_twice(work: Callable[[], Any], count: int = 1) -> np.ndarray[Any, np.dtype[np.float64]]:
    """As :func:`timed`, and the same in processor time of the process."""
    begin, processor = time.perf_counter_ns(), time.process_time_ns()
    work()
    processor = time.process_time_ns() - processor
    return np.array([time.perf_counter_ns() - begin, processor]) / count


@contextlib.contextmanager
def file_in_memory() -> Iterator[str]:
    """The path of a trace, in memory where there is such a place: what is compared is the writing, not the disk."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield str(Path(folder) / "trace.json")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Sends what native code prints to nowhere: Kineto writes a line for every start and stop."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for target, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, target)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)
