"""From the stop of a profile to the rows of its averages, and to a single event."""

from __future__ import annotations

import random
from typing import Any

from harness import KINETO, OURS, Budget, Recorder, Row, Settings, in_turn, rows, timed
from recorders import kineto, ours
from workloads import small_training

_TRAINING_STEPS = 400
_TOUCHES = 1_000
_ROUNDS = 15


def measure(settings: Settings) -> list[Row]:
    """Averages and events of a training of one small layer, some 40 events a step."""
    rounds = settings.rounds_or(_ROUNDS)
    averages = in_turn({KINETO: lambda: _averages(kineto), OURS: lambda: _averages(ours)}, rounds)
    shapes = in_turn(
        {KINETO: lambda: _averages(kineto, shapes=True), OURS: lambda: _averages(ours, shapes=True)}, rounds
    )
    events = in_turn({KINETO: _all_events, OURS: _touch}, rounds)
    limit = {OURS: Budget(KINETO, 1 / 250)}
    return [
        *rows("stop to key_averages(), per event", "ns", averages, limit),
        *rows("the same by input shapes", "ns", shapes),
        *rows("first touch of events()[i]", "ns", {f"{KINETO}: all events, each": events[KINETO], OURS: events[OURS]}),
    ]


def _recorded(recorder: Recorder, **arguments: Any) -> Any:
    with recorder(**arguments) as prof:
        small_training(_TRAINING_STEPS)
    return prof


def _averages(recorder: Recorder, *, shapes: bool = False) -> float:
    prof = _recorded(recorder, shapes=shapes)
    took = timed(lambda: prof.key_averages(group_by_input_shape=shapes))
    return took / len(prof.function_events)


def _all_events() -> float:
    """Torch makes all of them when the first is asked for."""
    prof = _recorded(kineto)
    took = timed(lambda: prof.function_events[0].name)
    return took / len(prof.function_events)


def _touch() -> float:
    """An event here and there, with its name and time, once the columns are there."""
    events = _recorded(ours).events()
    chosen = random.Random(0).sample(range(len(events)), _TOUCHES)  # noqa: S311 - which events, not a secret

    def touch() -> None:
        for index in chosen:
            event = events[index]
            _ = event.name, event.cpu_time_total

    return timed(touch, _TOUCHES)
