"""What a bad backend does to a training loop, and what our own threads do to one of short steps: percentiles of its step times.

Each backend, and each way to record, has a training process of its own, which stays instrumented throughout; they train in turn.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Child, answer, unused_port
from harness import Budget, Row, Settings, rows, timed
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from receiver import OK, SILENT, UNAVAILABLE, Receiver
from workloads import gpt2_step, transformer_step

import otel_torchprof as otp

_STEPS = 40
"""In a row: more than a second, in which there are some exports."""
_ROUNDS = 8
_WARM_UP, _WARM_UP_AGAIN = 10, 2
"""At the start, and after the others' turns."""
_NONE = "no exporter"
_HEALTHY = "healthy receiver"
_AS_WITHOUT = 1.1
"""Times the same without an exporter: what the 99th percentile of so few steps varies by in itself."""
_SHORT_STEPS = 400
"""In a row, in about two seconds: several times what one drain makes spans of."""
_OFF = "not instrumented"
_SHORT: dict[str, tuple[str, ...]] = {
    _OFF: (),
    f"{_OFF}, again (A/A)": (),
    "`steps`": ("steps",),
    "`steps`, black box `steps`": ("steps", "steps"),
    "`steps`, black box `ops`": ("steps", "ops"),
}
"""The detail and the black box of each way to record."""


def measure(settings: Settings) -> list[Row]:
    """The median, with its quartiles, and high percentiles."""
    return [*_bad_backends(settings), *_short_steps(settings)]


def _short_steps(settings: Settings) -> list[Row]:
    with contextlib.ExitStack() as stack:
        ways = {who: stack.enter_context(Child(__file__, _train_short.__name__, *way)) for who, way in _SHORT.items()}
        times: dict[str, list[float]] = {who: [] for who in ways}
        for child in ways.values():
            child.said()  # it is ready
        for _ in range(settings.rounds_or(_ROUNDS)):
            for who, child in ways.items():
                times[who] += child.ask(str(_SHORT_STEPS))
    budgets = {who: Budget(_OFF, _AS_WITHOUT) for who in times if who != _OFF}
    what = "training step of a small transformer"
    found = rows(f"{what}: median", "ms", times, budgets)
    for percentile in (99, 99.9):  # of the second, three steps or so, there is no budget
        tails = {who: [float(np.percentile(each, percentile))] for who, each in times.items()}
        found += rows(f"{what}: p{percentile}", "ms", tails, budgets if percentile == 99 else {})
    return found


def _bad_backends(settings: Settings) -> list[Row]:
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        healthy, unavailable, silent = (start(Receiver(behaviour)) for behaviour in (OK, UNAVAILABLE, SILENT))
        endpoints = {
            _NONE: ("", ""),
            f"{_NONE}, again (A/A)": ("", ""),
            _HEALTHY: ("grpc", healthy.grpc),
            "answers 503": ("http/protobuf", unavailable.http),
            "never answers": ("grpc", silent.grpc),
            "nobody listens": ("grpc", f"http://127.0.0.1:{unused_port()}"),
        }
        children = {
            who: start(Child(__file__, _train_large.__name__, *endpoint)) for who, endpoint in endpoints.items()
        }
        times = _train(children, settings.rounds_or(_ROUNDS))
    budgets = {who: Budget(_NONE, _AS_WITHOUT) for who in times if who != _NONE}
    tails = {who: [float(np.percentile(found, 99))] for who, found in times.items()}
    what = "GPT-2 training step, every operator sent"
    return [*rows(f"{what}: median", "ms", times, budgets), *rows(f"{what}: p99", "ms", tails, budgets)]


def _train(children: dict[str, Child], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {who: [] for who in children}
    for child in children.values():
        child.said()  # it is ready
    for _ in range(rounds):
        for who, child in children.items():
            found = child.ask(str(_STEPS))
            times[who] += found["times"]
    for who, child in children.items():
        sent = child.ask("0")["sent"]
        if bool(sent) != (who == _HEALTHY):
            raise RuntimeError(f"{who}: {sent} spans were sent")
    return times


def _train_large(protocol: str, endpoint: str) -> None:
    logging.getLogger("otel_torchprof").setLevel(logging.CRITICAL)  # what it says about a bad backend is expected here
    exporters = [otp.OTLPExporter(endpoint=endpoint, protocol=protocol)] if endpoint else []
    processor = otp.TorchSpanProcessor(*exporters)
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops")
    step = gpt2_step()
    for _ in range(_WARM_UP):
        step()
    answer("ready")
    for line in sys.stdin:
        times = [timed(step) / 1e6 for _ in range(_WARM_UP_AGAIN + int(line))]
        answer({"times": times[_WARM_UP_AGAIN:], "sent": _sent(processor)})


def _train_short(detail: str | None = None, box: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if detail:
            provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
            provider.add_span_processor(otp.TorchSpanProcessor(otp.OTLPFileExporter(Path(folder) / "spans.otlp")))
            otp.TorchInstrumentor().instrument(tracer_provider=provider, detail=detail, blackbox=box)
        step = transformer_step()
        for _ in range(_SHORT_STEPS):
            step()
        answer("ready")
        for line in sys.stdin:
            answer([timed(step) / 1e6 for _ in range(_WARM_UP_AGAIN + int(line))][_WARM_UP_AGAIN:])


def _sent(processor: Any) -> int:
    return sum(stats.exported_spans for stats in processor.health.exporters.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {train.__name__: train for train in (_train_large, _train_short)}[sys.argv[1]](*sys.argv[2:])
