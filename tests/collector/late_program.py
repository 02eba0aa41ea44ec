"""One of four ranks under torchrun, of which one is late: sends metrics by OTLP until a file ``stop`` is there.

Usage: late_program.py FOLDER ENDPOINT
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from waits_program import arrive

import otel_torchprof as otp


def main(folder: Path, endpoint: str) -> None:
    """Trains, as far as metrics can tell."""
    dist.init_process_group("gloo")
    resource = Resource({"service.name": "ranks"}).merge(otp.rank_resource())
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint), export_interval_millis=500)
    meters = MeterProvider([reader], resource=resource)
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(otp.TorchSpanProcessor(schedule_delay_millis=500))
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=tracers, meter_provider=meters, detail="steps")
    ends = torch.zeros(1)
    for step in itertools.count():
        next(iter(torch.utils.data.DataLoader([torch.ones(2)] * 4)))
        arrive(step)
        ends.fill_(float((folder / "stop").exists()))
        dist.all_reduce(ends)
        instrumentor.step()
        if ends.item():
            break
    instrumentor.uninstrument()
    meters.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
