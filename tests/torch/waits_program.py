"""One of four ranks under torchrun, of which one calls each collective last: writes how long each has waited.

Usage: waits_program.py FOLDER
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp

LATE, STEPS, HELD = 2, 5, 0.02


def arrive(step: int) -> float:
    """Calls a collective, the late rank when all others have; for how many seconds at least it has let them wait."""
    store, rank, total = dist.distributed_c10d._get_default_store(), dist.get_rank(), torch.ones(4)
    others = [f"{step}/{other}" for other in range(dist.get_world_size()) if other != LATE]
    if rank != LATE:
        work = dist.all_reduce(total, async_op=True)
        store.set(f"{step}/{rank}", "called")
        work.wait()
        return 0.0
    store.wait(others)
    begin = time.monotonic()
    while time.monotonic() - begin < HELD:
        torch.ones(64, 64).mm(torch.ones(64, 64))
    held = time.monotonic() - begin
    dist.all_reduce(total)
    return held


def waits(reader: InMemoryMetricReader) -> list[tuple[str, int, float]]:
    """Group, number and sum of the waits of each series."""
    metrics = [
        metric
        for of_resource in reader.get_metrics_data().resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "torch.collective.wait.duration"
    ]
    points = [point for metric in metrics for point in metric.data.data_points]
    return [(str(point.attributes["torch.collective.group"]), point.count, point.sum) for point in points]


def main(path: str) -> None:
    """Trains, as far as metrics can tell."""
    dist.init_process_group("gloo")
    rooted = dist.new_group()
    reader = InMemoryMetricReader()
    meters, tracers = MeterProvider([reader], shutdown_on_exit=False), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(otp.TorchSpanProcessor())
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=tracers, meter_provider=meters, detail="steps")
    for _ in range(2):
        instrumentor.step()
    tracers.force_flush()  # the first steps are known, and so collectives are timed from now on
    held = 0.0
    for step in range(STEPS):
        held += arrive(step)
        dist.broadcast(torch.ones(4), 0, group=rooted)
        instrumentor.step()
    tracers.force_flush()
    found = {
        "held": held,
        "waits": waits(reader),
        "state": instrumentor.health.sources.get("collectives"),
    }
    (Path(path) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    instrumentor.uninstrument()
    dist.destroy_process_group()
