"""What a label costs: ``with record_function("x"): pass`` less the loop around it, alone and beside a busy Python thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from harness import OURS, Budget, Recorder, Row, Settings, in_turn, rows
from recorders import kineto, ours
from torch.autograd.profiler import record_function as torch_label

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TORCH = "torch's record_function"
_LIMIT = 1 / 12
_ALONE_SECONDS = 0.005
_BESIDE_SECONDS = 0.1
"""Several of the 5 ms after which a thread that wants Python's lock gets it."""
_ROUNDS, _BESIDE_ROUNDS = 60, 10


def measure(settings: Settings) -> list[Row]:
    """Off and on, alone and beside a busy thread."""
    table: list[Row] = []
    for beside, company in ((False, contextlib.nullcontext), (True, _busy_thread)):
        rounds = settings.rounds_or(_BESIDE_ROUNDS if beside else _ROUNDS)
        seconds = _BESIDE_SECONDS if beside else _ALONE_SECONDS
        for on in (False, True):
            with company():
                costs = in_turn(_contestants(on, seconds), rounds)
            what = f"label, {'on' if on else 'off'}{', beside a busy thread' if beside else ''}"
            table += rows(what, "ns", costs, {OURS: Budget(_TORCH, _LIMIT)})
    return table


def _contestants(on: bool, seconds: float) -> dict[str, Callable[[], float]]:
    return {
        _TORCH: lambda: _cost(torch_label, kineto if on else contextlib.nullcontext, seconds),
        OURS: lambda: _cost(otp.record_function, ours if on else contextlib.nullcontext, seconds),
    }


def _cost(label: Callable[[str], AbstractContextManager[Any]], recorder: Recorder, seconds: float) -> float:
    """Nanoseconds per label, from as many as fit into the time: how many that is differs by a factor of 10,000."""
    with recorder():
        _labels(label, 10)
        done, block = 0, 1
        begin = time.perf_counter_ns()
        while (spent := time.perf_counter_ns() - begin) < seconds * 1e9:
            _labels(label, block)
            done += block
            block = min(block * 2, 1000)
    return spent / done - _loop_cost()


def _labels(label: Callable[[str], AbstractContextManager[Any]], count: int) -> None:
    for _ in itertools.repeat(None, count):
        with label("x"):
            pass


def _loop_cost(count: int = 1000) -> float:
    begin = time.perf_counter_ns()
    for _ in itertools.repeat(None, count):
        pass
    return (time.perf_counter_ns() - begin) / count


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    """Another thread that runs Python and nothing else."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(number * number for number in range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
