"""What recording adds to a training step of a small GPT-2: forward, backward and AdamW."""

from __future__ import annotations

import functools

from harness import EMPTY, KINETO, OURS, Budget, Recorder, Row, Settings, against_nothing, rows, timed
from recorders import empty_callback, kineto, ours
from workloads import gpt2_step

_ROUNDS = 40
_WARM_UP = 5
_SHAPES = ", with shapes"
_STACKS = ", with shapes and stacks"


def measure(settings: Settings) -> list[Row]:
    """In percent of the step without a profiler, one step at a time."""
    step = gpt2_step()
    for _ in range(_WARM_UP):
        step()

    def run(recorder: Recorder) -> float:
        with recorder():
            step()  # fills the caches that starting and stopping somebody has emptied
            return timed(step)

    contestants: dict[str, Recorder] = {EMPTY: empty_callback, OURS: ours, KINETO: kineto}
    contestants |= {
        OURS + _SHAPES: functools.partial(ours, shapes=True),
        KINETO + _SHAPES: functools.partial(kineto, shapes=True),
        OURS + _STACKS: functools.partial(ours, shapes=True, with_stack=True),
        KINETO + _STACKS: functools.partial(kineto, shapes=True, with_stack=True),
    }
    added = against_nothing(run, contestants, settings.rounds_or(_ROUNDS), percent=True)
    budgets = {
        OURS: Budget(KINETO, 0.5),
        OURS + _SHAPES: Budget(KINETO + _SHAPES, 0.5),
        OURS + _STACKS: Budget(KINETO + _STACKS, 0.3),
    }
    return rows("GPT-2 training step, added time", "%", added, budgets)
