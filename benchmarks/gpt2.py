"""What recording adds to a training step of a small GPT-2: forward, backward and AdamW; and what there is to record in it.

Run as a program it is one process of the measurement: ``python benchmarks/gpt2.py ROUNDS``.
"""

from __future__ import annotations

import functools
import statistics
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
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
    in_turn,
    limited,
    rows,
    share_above_floor,
    timed,
    timed_twice,
    walls,
)
from recorders import empty_callback, kineto, ours
from workloads import gpt2_step

from otel_torchprof._columns.schema import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Step = Callable[[], None]

_ROUNDS = 240
_ROUNDS_WITH_MORE = 4
"""One round in so many also has shapes and stacks, whose shares are not as small."""
_STOP_ROUNDS = 10
_WARM_UP = 5
_SHAPES = ", with shapes"
_STACKS = ", with shapes and stacks"
_IN_EVENTS = ", with shapes and stacks in events"
"""Torch fills the events' stacks only where the recording is told to be verbose; ours are always there."""


def measure(settings: Settings) -> list[Row]:
    """In percent of the step without a profiler, one step at a time; then its parts."""
    found = in_processes(__file__, settings.rounds_or(_ROUNDS))
    what, plain, more = "GPT-2 training step, added time", found["plain"], found["more"]
    table = rows(what, "%", plain, {OURS: Budget(KINETO, 0.45)})
    table.append(share_above_floor(what, plain, 0.15))
    budgets = {
        OURS + _SHAPES: [Budget(KINETO + _SHAPES, 0.5)],
        OURS + _STACKS: [Budget(KINETO + _STACKS, 0.45), Budget(KINETO + _IN_EVENTS, 0.3)],
    }
    table += limited(rows(f"{what} with more", "%", more), budgets)
    step = _warm_step()
    base = statistics.median(found["base"])
    return [*table, *_parts(_counts(step), walls(more), base), *_stops(step, settings)]


def _warm_step() -> Step:
    step = gpt2_step()
    for _ in range(_WARM_UP):
        step()
    return step


def main(rounds: int) -> None:
    """Says what each contestant added in every round, and what the step takes by itself."""
    step = _warm_step()

    def run(recorder: Recorder) -> Any:
        with recorder():
            step()  # fills the caches that starting and stopping somebody has emptied
            return timed_twice(step)

    plain = {EMPTY: empty_callback, OURS: ours, KINETO: kineto}
    few = max(rounds // _ROUNDS_WITH_MORE, 2)
    added = [against_nothing(run, plain, rounds, percent=True), against_nothing(run, _WITH_MORE, few, percent=True)]
    listed = [{who: np.array(values).tolist() for who, values in each.items()} for each in added]
    answer({"plain": listed[0], "more": listed[1], "base": [timed(step) for _ in range(few)]})


_WITH_MORE: dict[str, Recorder] = {
    OURS + _SHAPES: functools.partial(ours, shapes=True),
    KINETO + _SHAPES: functools.partial(kineto, shapes=True),
    OURS + _STACKS: functools.partial(ours, shapes=True, with_stack=True),
    KINETO + _STACKS: functools.partial(kineto, shapes=True, with_stack=True),
    KINETO + _IN_EVENTS: functools.partial(kineto, shapes=True, with_stack=True, verbose=True),
}


def _counts(step: Step) -> dict[str, int]:
    """How many of each sort a step has."""
    with ours(with_stack=True) as prof:
        step()
    columns, names = prof.columns, prof.names
    frames = columns["name"][columns["kind"] == Kind.FRAME].tolist()
    of_c = sum(names[name].startswith("<built-in ") for name in frames)
    operators = int((columns["kind"] == Kind.OPERATOR).sum())
    return {"operators": operators, "Python calls": len(frames) - of_c, "C functions": of_c}


def _parts(counts: Mapping[str, int], added: Mapping[str, list[float]], base: float) -> list[Row]:
    """What there is in a step, and what each of it adds."""
    calls = counts["Python calls"] + counts["C functions"]
    per_operator, per_call = {}, {}
    for who in (OURS, KINETO):
        shapes, stacks = added[who + _SHAPES], added[who + _STACKS]
        per_operator[who] = [percent / 100 * base / counts["operators"] for percent in shapes]
        differences = [more - less for more, less in zip(stacks, shapes, strict=True)]
        per_call[who] = [percent / 100 * base / calls for percent in differences]
    return [
        *rows("GPT-2 training step, what is in it", "", {what: [count] for what, count in counts.items()}),
        *rows("GPT-2 training step, added per operator with shapes", "ns", per_operator),
        *rows("GPT-2 training step, added per call by stacks", "ns", per_call),
    ]


def _stops(step: Step, settings: Settings) -> list[Row]:
    """What the program waits for at the end of a step that was recorded with shapes and stacks."""
    contestants = {who: functools.partial(_stop, step, _WITH_MORE[who + _STACKS]) for who in (KINETO, OURS)}
    costs = in_turn(contestants, settings.rounds_or(_STOP_ROUNDS))
    return rows("GPT-2 training step with shapes and stacks, stopping after it", "ms", costs)


def _stop(step: Step, recorder: Recorder) -> float:
    profiler: Any = recorder()
    profiler.__enter__()
    step()
    return timed(lambda: profiler.__exit__(None, None, None)) / 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]))
