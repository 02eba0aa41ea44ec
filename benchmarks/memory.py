"""Memory per event: in the recorder's buffer, and of the process until the averages are there.

Each measurement is a process of its own, so that nobody profits from memory that somebody else has left behind.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from typing import Any

import peers
from children import environment, memory, memory_at_a_new_peak
from harness import KINETO, OURS, Budget, Row, Settings, rows

_EVENTS = {OURS: 1_000_000, KINETO: 100_000}
_ROUNDS = 3


def measure(settings: Settings) -> list[Row]:
    """Plain operators, from a C++ loop."""
    rounds = settings.rounds_or(_ROUNDS)
    found = {who: [_in_new_process(who) for _ in range(rounds)] for who in _EVENTS}
    buffers = {OURS: [each["buffer"] for each in found[OURS]]}
    peaks = {who: [each["peak"] for each in results] for who, results in reversed(found.items())}
    return [
        *rows("buffer, per plain operator event", "B", buffers, {OURS: Budget(plus=64)}),
        *rows("memory at the peak after averages, per event", "B", peaks, {OURS: Budget(plus=160)}),
    ]


def _in_new_process(who: str) -> dict[str, float]:
    command = [sys.executable, __file__, who, peers.library()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(who: str, path: str) -> dict[str, float]:
    from recorders import kineto, ours

    count, work = _EVENTS[who], peers.load(path).peers_operators
    recorder: Any = ours if who == OURS else kineto
    _record_and_average(recorder, work, 1_000)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_at_a_new_peak()
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
