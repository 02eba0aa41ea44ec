"""Memory per event: in the recorder's buffer, and of the process until the averages are there."""

from __future__ import annotations

import json
import sys
from typing import Any

import peers
from children import memory, memory_without_garbage, once
from harness import KINETO, OURS, Budget, Row, Settings, rows

_EVENTS = {OURS: 1_000_000, KINETO: 100_000}
_ROUNDS = 3


def measure(settings: Settings) -> list[Row]:
    """Plain operators, from a C++ loop."""
    rounds = settings.rounds_or(_ROUNDS)
    found = {who: [once(__file__, who, peers.library()) for _ in range(rounds)] for who in _EVENTS}
    buffers = {OURS: [each["buffer"] for each in found[OURS]]}
    peaks = {who: [each["peak"] for each in results] for who, results in reversed(found.items())}
    return [
        *rows("buffer, per plain operator event", "B", buffers, {OURS: Budget(plus=64)}),
        *rows("memory at the peak after averages, per event", "B", peaks, {OURS: Budget(plus=160)}),
    ]


def _child(who: str, path: str) -> dict[str, float]:
    from recorders import kineto, ours

    count, work = _EVENTS[who], peers.load(path).peers_operators
    recorder: Any = ours if who == OURS else kineto
    _record_and_average(recorder, work, 1_000)
    before = memory_without_garbage()
    prof = _record_and_average(recorder, work, count)
    found = {"peak": (memory("VmHWM") - before) / count}
    if who == OURS:
        found["buffer"] = prof.health.memory_bytes / count
    return found


def _record_and_average(recorder: Any, work: Any, count: int) -> Any:
    with recorder() as prof:
        work(count)
    if hasattr(prof, "events"):
        prof.events()
    prof.key_averages()
    return prof


if __name__ == "__main__":
    print(json.dumps(_child(*sys.argv[1:])))
