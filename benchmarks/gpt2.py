"""What recording adds to a training step of a small GPT-2: forward, backward and AdamW; and what there is to record in it."""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

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
)
from recorders import empty_callback, kineto, ours
from workloads import gpt2_step

from otel_torchprof._columns.schema import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Step = Callable[[], None]

_ROUNDS = 40
_STOP_ROUNDS = 10
_WARM_UP = 5
_SHAPES = ", with shapes"
_STACKS = ", with shapes and stacks"
_IN_EVENTS = ", with shapes and stacks in events"
"""Torch fills the events' stacks only where the recording is told to be verbose; ours are always there."""


def measure(settings: Settings) -> list[Row]:
    """In percent of the step without a profiler, one step at a time; then its parts."""
    step = gpt2_step()
    for _ in range(_WARM_UP):
        step()

    def run(recorder: Recorder) -> float:
        with recorder():
            step()  # fills the caches that starting and stopping somebody has emptied
            return timed(step)

    contestants: dict[str, Recorder] = {EMPTY: empty_callback, OURS: ours, KINETO: kineto, **_WITH_MORE}
    rounds = settings.rounds_or(_ROUNDS)
    added = against_nothing(run, contestants, rounds, percent=True)
    budgets = {
        OURS: [Budget(KINETO, 0.5)],
        OURS + _SHAPES: [Budget(KINETO + _SHAPES, 0.5)],
        OURS + _STACKS: [Budget(KINETO + _STACKS, 0.3), Budget(KINETO + _IN_EVENTS, 0.3)],
    }
    table = limited(rows("GPT-2 training step, added time", "%", added), budgets)
    table.append(share_above_floor("GPT-2 training step, added time", added, 0.15))
    base = statistics.median(timed(step) for _ in range(rounds))
    return [*table, *_parts(_counts(step), added, base), *_stops(step, settings)]


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
