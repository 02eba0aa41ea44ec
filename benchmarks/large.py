"""One long profile with shapes: five million events, and what it takes to read them; and one that may not hold them all.

Torch's
profiler, which would need some 30 GB and three minutes for as many, is asked for its cost per event on fewer.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from children import memory, memory_without_garbage, once
from harness import KINETO, OURS, Budget, Row, Settings, file_in_memory, rows, timed

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS = {OURS: 125_000, KINETO: 1_250}
"""Of the training of one small layer, some 40 events each."""
_LIMIT = 2 << 30
_CEILING = 128 << 20
"""What the second profile may hold: an eighth of what would be there."""
_ROUNDS = 3
_STAGES = {
    "stop to key_averages() with shapes recorded, per event": Budget(KINETO, 1 / 250),
    "the same by input shapes": None,
    "table() of all averages": None,
    "Chrome JSON with shapes, per event": Budget(KINETO, 1 / 4),
}


def measure(settings: Settings) -> list[Row]:
    """Reading, memory, and the ceiling."""
    steps = {who: count // 10 if settings.quick else count for who, count in _STEPS.items()}
    rounds = settings.rounds_or(_ROUNDS)
    found = {who: [once(__file__, who, str(count), str(_LIMIT)) for _ in range(rounds)] for who, count in steps.items()}
    table: list[Row] = []
    for stage, budget in _STAGES.items():
        costs = {who: [each[stage] for each in found[who]] for who in (KINETO, OURS)}
        table += rows(f"{_events(found[OURS]):,} events: {stage}", "ns", costs, {OURS: budget} if budget else None)
    peaks = {who: [each["peak"] for each in found[who]] for who in (KINETO, OURS)}
    table += rows("memory at the peak after averages by shape, per event", "B", peaks)
    held = [once(__file__, OURS, str(steps[OURS]), str(_CEILING)) for _ in range(rounds)]
    return [*table, *_ceiling(held)]


def _events(found: list[dict[str, float]]) -> int:
    return int(found[0]["events"])


def _ceiling(held: list[dict[str, float]]) -> list[Row]:
    buffer = {OURS: [each["buffer"] / 2**20 for each in held]}
    produced = {OURS: [each["events"] + each["dropped"] for each in held]}
    limit = {OURS: Budget(plus=_CEILING / 2**20)}
    return [
        *rows(f"buffer of a profile that may hold {_CEILING >> 20} MiB", "MiB", buffer, limit),
        *rows("the events that it recorded and dropped", "", produced),
    ]


def _child(who: str, steps: int, limit: int) -> dict[str, float]:
    from recorders import kineto, ours
    from workloads import small_training

    arguments: dict[str, Any] = {"memory_limit": limit} if who == OURS else {}
    recorder: Callable[..., Any] = ours if who == OURS else kineto
    with recorder(shapes=True, **arguments) as warm:
        small_training(10)
    warm.key_averages()
    before = memory_without_garbage()
    with recorder(shapes=True, **arguments) as prof:
        small_training(steps)
    return _read(prof, before)


def _read(prof: Any, before: int) -> dict[str, float]:
    stages = list(_STAGES)
    took = {stages[0]: timed(prof.key_averages)}
    took[stages[1]] = timed(lambda: prof.key_averages(group_by_input_shape=True))
    count = len(prof.function_events)
    averages = prof.key_averages(group_by_input_shape=True)
    took[stages[2]] = timed(lambda: averages.table(row_limit=-1)) * count  # once, however many events there are
    peak = (memory("VmHWM") - before) / count
    with file_in_memory() as path:
        took[stages[3]] = timed(lambda: prof.export_chrome_trace(path))
    found = {stage: nanoseconds / count for stage, nanoseconds in took.items()} | {"events": count, "peak": peak}
    if hasattr(prof, "health"):
        found |= {"buffer": prof.health.memory_bytes, "dropped": sum(prof.health.dropped.values())}
    return found


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
