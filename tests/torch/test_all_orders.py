"""A profile, an instrumentation, a stream and metrics in one process, begun and ended in every order."""

from __future__ import annotations

import itertools
import threading

import pytest

from examples import one_in

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from providers import new_provider  # noqa: E402
from torch_metrics import points  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._instrument.metrics_instrumentation import MetricsInstrumentation  # noqa: E402
from otel_torchprof._instrument.operator_metrics import metrics_of  # noqa: E402
from otel_torchprof._native.recorder import recorder_stats  # noqa: E402
from otel_torchprof._record.source import RecordingOptions  # noqa: E402


class Profile:
    """Collects."""

    def __init__(self):
        self._profile = otp.profile()
        self.start, self.stop = self._profile.start, self._profile.stop

    def found(self) -> int:
        return sum(event.name == "aten::neg" for event in self._profile.events())


class Service:
    """Ships."""

    def __init__(self):
        self._exporter = Collecting()
        self._provider = new_provider(otp.TorchSpanProcessor(self._exporter))

    def start(self):
        otp.TorchInstrumentor().instrument(tracer_provider=self._provider, detail="ops", skip_dep_check=True)

    def stop(self):
        otp.TorchInstrumentor().uninstrument()
        self._provider.shutdown()

    def found(self) -> int:
        return sum(span.name == "aten::neg" for span in self._exporter.spans)


class Stream:
    """Writes."""

    def __init__(self):
        self._exporter = Collecting()
        self._stream = otp.stream(self._exporter, detail="ops")
        self.start, self.stop = self._stream.start, self._stream.stop

    def found(self) -> int:
        return sum(span.name == "aten::neg" for span in self._exporter.spans)


class Metrics:
    """Adds up."""

    def __init__(self):
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self._metrics = MetricsInstrumentation(
            metrics_of(provider), provider, overhead=1.0, memory_limit=64 << 20, recording=RecordingOptions()
        )
        self.start, self.stop = self._metrics.start, self._metrics.stop

    def found(self) -> int:
        calls = points(self._reader, "torch.op.calls")
        return sum(count for attributes, count in calls if attributes["torch.op.name"] == "aten::neg")


CONSUMERS = (Profile, Service, Stream, Metrics)


@pytest.mark.parametrize("begins", one_in(4, itertools.permutations(range(4))), ids=str)
def test_each_has_what_happened_while_it_ran(monkeypatch, begins):
    """Whatever the order in which they end: neither less nor more, and afterwards nothing of any is left."""
    monkeypatch.setattr("otel_torchprof._record.step_marks._optimizer_classes", lambda: iter(()))
    x, before = torch.ones(2), threading.active_count()
    for ends in itertools.permutations(range(4)):
        consumers = [consumer() for consumer in CONSUMERS]
        expected = [0] * 4
        running: set[int] = set()
        for number in (*begins, *ends):
            if number in running:
                consumers[number].stop()
            else:
                consumers[number].start()
            running ^= {number}
            x.neg()
            for each in running:
                expected[each] += 1
        assert [consumer.found() for consumer in consumers] == expected, ends
        assert recorder_stats().sessions == 0
    assert threading.active_count() <= before + 1
