"""What the tests of GPU metrics share: a clock, a meter provider whose reader is asked, and what an ideal card gives."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import otel_torchprof as otp
from otel_torchprof._instrument.gpu_metrics import FRESH, METRICS, STATES


class Clock:
    """Seconds that pass when a test lets them, and a little with each look at it where that is wanted."""

    def __init__(self):
        self.now = 1000.0
        self.each = 0.0

    def __call__(self):
        self.now += self.each
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Collector:
    """A meter provider with a reader, and what it collects."""

    def __init__(self, clock):
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.clock = clock

    def collect(self):
        """All metrics by name, a while after the last collection."""
        self.clock.now += 2 * FRESH
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

    def series(self):
        """Values by metric and by what tells series of a metric apart."""
        return {
            (name, *(point.attributes[key] for key in ("hw.name", *METRICS[name].attributes))): point.value
            for name, metric in self.collect().items()
            for point in metric.data.data_points
        }


@pytest.fixture
def collector(clock):
    made = Collector(clock)
    yield made
    made.provider.shutdown()


@pytest.fixture
def watch(collector, clock):
    """Makes started GpuMetrics, and stops them at the end."""
    made = []

    def start(**options):
        metrics = otp.GpuMetrics(collector.provider, clock=clock, **options)
        made.append(metrics)
        return metrics.start()

    yield start
    for metrics in made:
        metrics.stop()


IDEAL = {
    ("hw.gpu.utilization", "GPU 0", "general"): 0.87,
    ("hw.gpu.utilization", "GPU 0", "encoder"): 0.12,
    ("hw.gpu.utilization", "GPU 0", "decoder"): 0.05,
    ("hw.gpu.memory.usage", "GPU 0"): 21380202496,
    ("hw.gpu.memory.limit", "GPU 0"): 85520809984,
    ("hw.gpu.memory.utilization", "GPU 0"): 0.25,
    ("hw.gpu.io", "GPU 0", "receive"): 2345678901234,
    ("hw.gpu.io", "GPU 0", "transmit"): 1234567890123,
    ("hw.temperature", "GPU 0", "GPU"): 54.0,
    ("hw.power", "GPU 0"): 412.345,
    ("hw.energy", "GPU 0"): 987654.321,
    ("hw.errors", "GPU 0", "corrected"): 3,
    ("hw.errors", "GPU 0", "uncorrected"): 0,
    ("hw.status", "GPU 0", "ok"): 1,
    ("hw.status", "GPU 0", "degraded"): 0,
    ("hw.status", "GPU 0", "failed"): 0,
}
FAILED = {("hw.status", "GPU 0", state): int(state == "failed") for state in STATES}
