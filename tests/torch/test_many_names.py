"""A service that puts ids into the names of its labels, four times as many as are kept."""

from __future__ import annotations

import json
import os

import preloaded

PROGRAM = r"""
import json, threading
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import otel_torchprof as otp
from otel_torchprof._columns.batch import Names
from otel_torchprof._native import recorder


class Exporter(SpanExporter):
    names = frozenset()

    def export(self, spans):
        Exporter.names |= {span.name for span in spans if not span.name.startswith("request ")}
        return SpanExportResult.SUCCESS


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


reader = InMemoryMetricReader()
meters = MeterProvider([reader], shutdown_on_exit=False)
provider = TracerProvider(shutdown_on_exit=False)
processor = otp.TorchSpanProcessor(Exporter(), memory_limit=64 << 20)
provider.add_span_processor(processor)
otp.TorchInstrumentor().instrument(tracer_provider=provider, meter_provider=meters, detail="ops")
tracer, x = provider.get_tracer("service"), torch.ones(2)


def labels(first, last):
    with tracer.start_as_current_span("batch"):
        for number in range(first, last):
            with otp.record_function(f"request {number}"):
                pass


def flush():
    assert provider.force_flush()


def operators(operator):
    with tracer.start_as_current_span("operators"):
        operator(x)
    flush()


for first in range(0, 50_000, 10_000):
    labels(first, first + 10_000)
    flush()
operators(torch.neg)
before = resident()
for first in range(50_000, 120_000, 10_000):
    labels(first, first + 10_000)
    if first % 50_000 == 0:
        flush()
flush()
operators(torch.relu)
looked_at = recorder._known[1].looked_at
operators(torch.relu)  # with no new name
again = recorder._known[1].looked_at - looked_at
with tracer.start_as_current_span("errors"), torch.autograd.profiler.record_function("torch's own label"):
    pass
flush()
[point] = [
    point
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
    if metric.name == "otel_torchprof.names.refused"
    for point in metric.data.data_points
]
stats = recorder.recorder_stats()
print(json.dumps({
    "names": sorted(Exporter.names),
    "notes": [note for note in processor.health.notes if "(other" in note],
    "metric": [dict(point.attributes), point.value],
    "averages": sum(average.count for average in processor.key_averages() if average.key == "(other labels)"),
    "kept": stats.names,
    "grown": resident() - before,
    "looked_at": again,
    "dropped": dict(processor.health.dropped),
}))
otp.TorchInstrumentor().uninstrument()
provider.shutdown()
"""


def test_names_of_labels_beyond_the_limit():
    """Operators keep their names, memory stays, known names are not looked at again, and health and metrics count the labels."""
    done = preloaded.run(PROGRAM, environment=dict(os.environ), filters=("ignore",), timeout=300, has_package=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"(other labels)", "aten::neg", "aten::relu"} <= set(found["names"])
    assert "(other operators)" not in found["names"]
    refused = 120_000 - (1 << 15) + 1  # torch's own label among them
    assert found["dropped"] == {}
    assert found["metric"] == [{"torch.name.kind": "labels"}, refused]
    assert found["notes"] == [
        f"{refused} labels are named '(other labels)': the process has more names of labels than are kept"
    ]
    assert found["averages"] == refused
    assert found["kept"] < (1 << 15) + 100
    assert found["looked_at"] == 0
    assert found["grown"] < 40 << 20  # the spans in hand; a name used to cost 1 KB
