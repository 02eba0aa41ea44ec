"""Calls once they are recorded: the memory that they take, and how long it takes to stop and to write them down."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import call_workloads as workloads
import tracers
from children import memory, memory_at_a_new_peak, memory_without_garbage, once
from harness import KINETO, OURS, Row, Settings, file_in_memory, no_collections, quiet, rows, timed
from recorders import kineto

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

_CALLS = 200_000
_ROUNDS = 3
_WHO = (KINETO, tracers.VIZTRACER, OURS)
_STOP = "stopping, per call"
_JSON = "stop to Chrome JSON, per call"
_BUFFER = "buffer, per call"
_RECORDING = "memory while calls are recorded, per call"
_PEAK = "memory at the peak until Chrome JSON of calls is written, per call"
_UNITS = {_STOP: "ns", _JSON: "ns", _BUFFER: "B", _RECORDING: "B", _PEAK: "B"}


def measure(settings: Settings) -> list[Row]:
    """Empty Python functions in a loop."""
    rounds = settings.rounds_or(_ROUNDS)
    found: dict[str, list[dict[str, float]]] = {who: [] for who in _WHO}
    for _ in range(rounds):
        for who, results in found.items():
            results.append(once(__file__, who))
    table: list[Row] = []
    for figure, unit in _UNITS.items():
        values = {who: [each[figure] for each in results if figure in each] for who, results in found.items()}
        table += rows(figure, unit, {who: costs for who, costs in values.items() if costs})
    return table


# ---- in a process of one contestant's ----


def _here(who: str) -> dict[str, float]:
    _take(who, 1_000)
    memory_without_garbage()
    with no_collections():
        taken = _take(who, _CALLS)
    return {figure: value / _CALLS for figure, value in taken.items()}


def _take(who: str, count: int) -> dict[str, float]:
    """What it takes for all of the calls together."""
    before = memory_at_a_new_peak()
    with _recorder(who, count) as recorder:
        workloads.empty_calls(count)
        recording = memory("VmRSS") - before
        begin = time.perf_counter_ns()
    stopping = time.perf_counter_ns() - begin
    write = recorder.save if who == tracers.VIZTRACER else recorder.export_chrome_trace
    with quiet(), file_in_memory() as path:
        writing = timed(lambda: write(path))
    if who == OURS and recorder.health.recorded < count:
        raise RuntimeError(f"calls were not recorded: {recorder.health}")
    took = {_STOP: stopping, _JSON: stopping + writing, _RECORDING: recording, _PEAK: memory("VmHWM") - before}
    return took | ({_BUFFER: recorder.health.memory_bytes} if who == OURS else {})


def _recorder(who: str, count: int) -> AbstractContextManager[Any]:
    if who == tracers.VIZTRACER:
        return _viztracer(count)
    return tracers.profile() if who == OURS else kineto(with_stack=True)


@contextlib.contextmanager
def _viztracer(count: int) -> Iterator[Any]:
    """With room for so many calls, and some more."""
    tracer = tracers.new_viztracer(count + 1_000)
    tracer.start()
    try:
        yield tracer
    finally:
        tracer.stop()


if __name__ == "__main__":
    print(json.dumps(_here(sys.argv[1])))
