"""What the instrumentation adds to a service that leaves it on, its exporter at work: per training step, per request."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from typing import TYPE_CHECKING

import torch
from harness import NONE, OURS, Budget, Recorder, Row, Settings, in_abba, rows, timed
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from receiver import Receiver
from recorders import instrumented
from workloads import gpt2_step, small_model

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DELAY_MILLIS = 500
"""Between two exports, instead of 5 s: every round has one, in each of which there is more to do than a tenth."""
_STEPS = 20
_ROUNDS = 8
_WARM_UP = 2
"""Steps after which the default detail has seen where a step ends, and asks modules no more."""
_REQUESTS = 2_000
_REQUESTS_WARM_UP = 100
_REQUESTS_ROUNDS = 12
_REQUEST_LIMIT = 10.0
_COLLECTED_REQUESTS = 20_000
_COLLECTION_ROUNDS = 3
_LIMIT_PERCENT = 1.0
_FLOOR = "torch's hooks, which do nothing"


def measure(settings: Settings) -> list[Row]:
    """The GPT-2 training step in percent, then requests to a small model in microseconds, with and without what garbage takes."""
    with Receiver() as receiver:
        provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
        exporter = otp.OTLPExporter(endpoint=receiver.grpc)
        provider.add_span_processor(otp.TorchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MILLIS))
        table = [*_training(provider, settings), *_serving(provider, settings)]
        provider.shutdown()
        if not receiver.take().spans:
            raise RuntimeError("no span has arrived: what was measured is not what is always on")
    return table


def _contestants(provider: TracerProvider) -> dict[str, Recorder]:
    details = ("steps", "modules", "ops")
    return {f"{OURS}, {detail}": functools.partial(instrumented, provider, detail) for detail in details}


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    """Torch's hooks before and after the forward of each module, which do nothing: the floor of every tool that uses them."""
    modules = torch.nn.modules.module
    handles = [
        modules.register_module_forward_pre_hook(lambda *_: None),
        modules.register_module_forward_hook(lambda *_: None),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _training(provider: TracerProvider, settings: Settings) -> list[Row]:
    step = gpt2_step()

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    def run(recorder: Recorder) -> float:
        with recorder():
            steps(_WARM_UP)
            provider.force_flush()  # the first export, by which torch's hooks are as they then stay
            steps(1)
            # Of so few, an interrupt would spoil the mean. The share of an export is in the one or two steps that it runs beside.
            return statistics.median(timed(step) for _ in range(_STEPS))

    added = in_abba(run, _contestants(provider), settings.rounds_or(_ROUNDS), percent=True)
    return rows("GPT-2 training step, always on", "%", added, {f"{OURS}, steps": Budget(plus=_LIMIT_PERCENT)})


def _serving(provider: TracerProvider, settings: Settings) -> list[Row]:
    tracer, request = provider.get_tracer("benchmark"), small_model()

    def requests(count: int) -> None:
        for _ in range(count):
            with tracer.start_as_current_span("request"):
                request()

    def run(recorder: Recorder) -> float:
        with recorder(), torch.inference_mode():
            requests(_REQUESTS_WARM_UP)
            return timed(lambda: requests(_REQUESTS), _REQUESTS) / 1_000

    contestants = _contestants(provider)
    added = in_abba(run, {_FLOOR: _hooks, **contestants}, settings.rounds_or(_REQUESTS_ROUNDS))
    budgets = {f"{OURS}, ops": Budget(plus=_REQUEST_LIMIT)}
    table = rows("request to a model of 4 modules, added time", "us", added, budgets)
    collected = {
        who: [_collections(recorder, requests) for _ in range(_COLLECTION_ROUNDS)]
        for who, recorder in {NONE: contextlib.nullcontext, **contestants}.items()
    }
    return [*table, *rows("request to a model of 4 modules, collections of garbage", "us", collected)]


def _collections(recorder: Recorder, requests: Callable[[int], None]) -> float:
    """What the garbage collector takes of a request, in microseconds: of the time in the row above it has no part."""
    took = 0

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal took
        took += time.perf_counter_ns() if phase == "stop" else -time.perf_counter_ns()

    with recorder(), torch.inference_mode():
        requests(_REQUESTS_WARM_UP)
        gc.collect()
        gc.callbacks.append(note)
        try:
            requests(_COLLECTED_REQUESTS)
        finally:
            gc.callbacks.remove(note)
    return took / _COLLECTED_REQUESTS / 1_000
