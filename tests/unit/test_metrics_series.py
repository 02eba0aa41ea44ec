"""The instruments: what a reader of metrics gets, from sums and figures that are given."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from opentelemetry import metrics as otel_metrics
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch_metrics import data_points, points, value

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.phases import Part, Segment
from otel_torchprof._columns.schema import Kind
from otel_torchprof._export.ledger import Entries
from otel_torchprof._export.queue import ExportQueue
from otel_torchprof._instrument import operator_metrics
from otel_torchprof._instrument.operator_metrics import STEP_BUCKETS, ThinnedDurations, TorchMetrics, metrics_of
from otel_torchprof._instrument.recorder_metrics import ExporterFigures, RecorderFigures, exporter_figures
from otel_torchprof._model.phases import PhaseTimes, exclusive_times
from otel_torchprof._model.step_spans import StepSpan, Trace
from otel_torchprof._process.deadline import Deadline
from otel_torchprof.health import QueueStats


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader) -> MeterProvider:
    return MeterProvider([reader], shutdown_on_exit=False)


@pytest.fixture
def metrics(provider) -> TorchMetrics:
    return metrics_of(provider)


def one_operator(**more) -> Batch:
    return Batch.of({"name": [1], "start": [0], "end": [2_000_000_000]}, ["", "aten::mm"], **more)


def test_operators(reader, metrics):
    """Calls, and times in seconds, by the operator's name; those of devices only where devices are."""
    metrics.add(one_operator())
    about = {"torch.op.name": "aten::mm"}
    assert points(reader, "torch.op.calls") == [(about, 1)]
    assert points(reader, "torch.op.time") == [(about, 2.0)]
    assert points(reader, "torch.op.self_time") == [(about, 2.0)]
    assert points(reader, "torch.op.device.time") == []
    timed = {"event": [1], "duration": [500_000_000], "stream": [0], "start": [0], "device_type": [1]}
    metrics.add(one_operator(devices={**timed, "device_index": [0]}))
    assert points(reader, "torch.op.device.time") == [(about, 0.5)]
    assert points(reader, "torch.op.device.self_time") == [(about, 0.5)]


def test_steps_and_times(reader, metrics):
    """Steps and seconds are told apart by whether operators were recorded in them; there are none before there are any."""
    assert points(reader, "torch.steps") == points(reader, "otel_torchprof.sampling.time") == []
    metrics.add_step(sampled=True)
    metrics.add_step(sampled=False)
    metrics.add_step(sampled=False)
    metrics.times = lambda: (1.0, 9.0)
    assert points(reader, "torch.steps") == [({"torch.sampled": True}, 1), ({"torch.sampled": False}, 2)]
    metrics.end()
    metrics.times = lambda: (0.5, 0.5)
    assert [time for _, time in points(reader, "otel_torchprof.sampling.time")] == [1.5, 9.5]


def test_what_is_recorded_is_fetched_first(reader, metrics):
    """A reader gets what was recorded up to the moment at which it reads, in every metric."""
    metrics.refresh = lambda: (metrics.add(one_operator()), metrics.durations.record(1.0, None))
    found = {point[0]["torch.op.name"]: point[1] for point in points(reader, "torch.op.calls")}
    assert found == {"aten::mm": 1}
    assert value(reader, "torch.step.duration").count == 2  # this was the second reading


def test_durations_of_steps(reader, metrics):
    """They are a histogram in seconds, whose buckets suit 1 ms to 100 s, and never below 0."""
    for seconds in (0.0005, 0.03, 250.0, -1.0):
        metrics.durations.record(seconds, None)
    point = value(reader, "torch.step.duration")
    assert tuple(point.explicit_bounds) == STEP_BUCKETS
    assert (point.bucket_counts[0], point.bucket_counts[-1], point.count, point.min) == (2, 1, 4, 0.0)
    assert list(point.exemplars) == []


def test_exemplars_point_to_the_span_of_the_loop(reader, metrics):
    """A duration that is recorded with the context of a sampled span has an exemplar with its ids."""
    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("epoch") as span:
        context = trace.set_span_in_context(span)
    metrics.durations.record(0.1, context)
    (exemplar,) = value(reader, "torch.step.duration").exemplars
    own = span.get_span_context()
    assert (exemplar.trace_id, exemplar.span_id, exemplar.value) == (own.trace_id, own.span_id, 0.1)


def test_exemplars_point_to_spans_of_steps(reader, metrics):
    """Steps that have spans are recorded once each, with the ids of those that are sent."""
    of_step = {"segment": Segment.STEP}
    sent = StepSpan(3, Trace(5, True, True), 7, 1_000_000_000, 3_000_000_000, None, None, thread=1, **of_step)
    kept = StepSpan(4, Trace(6, True, False), 8, 0, 20_000_000_000, None, None, thread=1, **of_step)
    elsewhere = StepSpan(3, Trace(9, True, True), 10, 0, 10, None, None, **of_step)
    metrics.durations.record_spans([sent, kept, elsewhere], metrics.waits)
    point = value(reader, "torch.step.duration")
    assert (point.count, point.sum) == (2, 22.0)
    assert [(each.trace_id, each.span_id) for each in point.exemplars] == [(5, 7)]


def test_phases_of_steps(reader, metrics):
    """Each step adds what each of its phases took on the loop's thread, and the rest; segments that are no steps add nothing."""
    columns = {"start": [0, 0], "end": [300_000, 10**9], "kind": [Kind.PHASE] * 2, "fwd_thread": [Part.NEXT] * 2}
    batch = Batch.of({**columns, "thread": [0, 1]}, [""], (RecordedThread(1, 1, 1), RecordedThread(2, 2, 2)))
    times = PhaseTimes()
    times.add(exclusive_times(batch, np.full(2, -1), np.zeros(2, np.int64), 1), 0)
    about = {"thread": 1, "phases": times}
    step = StepSpan(3, Trace(5, True, True), 7, 0, 1_000_000, None, None, segment=Segment.STEP, **about)
    between = StepSpan(-1, Trace(6, True, True), 8, 0, 10**10, None, None, segment=Segment.EVALUATION, **about)
    metrics.durations.record_spans([step, between], metrics.waits)
    found = {point.attributes["torch.phase.name"]: point for point in data_points(reader, "torch.phase.duration")}
    assert value(reader, "torch.step.duration").sum == 1e-3
    assert {name: point.sum for name, point in found.items()} == pytest.approx({"data": 3e-4, "unattributed": 7e-4})
    assert [(each.trace_id, each.span_id) for each in found["data"].exemplars] == [(5, 7)]
    bounds = found["data"].explicit_bounds
    assert (bounds[0], bounds[-1], len(bounds)) == (1e-5, 1000.0, 25)
    assert all(1.9 < after / before < 2.6 for before, after in itertools.pairwise(bounds))


def test_durations_cost_no_more_than_their_share(reader, metrics, monkeypatch):
    """When recording a duration costs a tenth of a step, no more than a tenth of the allowed share is overdrawn; all are where all is allowed."""
    clock = iter(range(10**6))
    monkeypatch.setattr(operator_metrics.time, "thread_time", lambda: next(clock) * 1e-4)
    thinned = ThinnedDurations(metrics.durations, 0.01, 0.0)
    for step in range(10_000):
        thinned.record([(step * 1e-3, 1e-3, trace.set_span_in_context(trace.INVALID_SPAN))])
    assert 900 <= value(reader, "torch.step.duration").count <= 1100
    everything = ThinnedDurations(metrics.durations, 1.0, 0.0)
    everything.record([(0.0, 1e-3, trace.set_span_in_context(trace.INVALID_SPAN))] * 5000)
    assert value(reader, "torch.step.duration").count >= 5900


def test_how_the_recorder_does(reader, metrics):
    """Events, losses by reason, memory and the measured share; spans under OpenTelemetry's own names."""
    dropped = {"queue_full": 3, "outage": 2, "no_response": 1}
    stats = QueueStats(5, 2, dropped, 4, 500, 7.5, "UNAVAILABLE", 11, {"outage": 1, "no_response": 1}, 1)
    exporters = (ExporterFigures("a.B/0", "a.B", stats, 100),)
    figures = RecorderFigures(Entries(10, {"evicted": 6}, {}), 1000, 2000, 0.007, exporters)
    metrics.recorder.source = lambda: figures
    assert points(reader, "otel_torchprof.events.recorded") == [({}, 10)]
    assert points(reader, "otel_torchprof.events.dropped") == [({"error.type": "evicted"}, 6)]
    assert points(reader, "otel_torchprof.buffer.usage") == [({}, 1000)]
    assert points(reader, "otel_torchprof.buffer.limit") == [({}, 2000)]
    assert points(reader, "otel_torchprof.overhead") == [({}, 0.007)]
    about = {"otel.component.name": "a.B/0", "otel.component.type": "a.B"}
    exported = points(reader, "otel.sdk.exporter.span.exported")
    failed = {"export_failed": 1, "rejected": 1, "outage": 1, "no_response": 1}
    assert exported == [(about, 5), *(({**about, "error.type": reason}, count) for reason, count in failed.items())]
    assert points(reader, "otel.sdk.exporter.span.inflight") == [(about, 2)]
    kind = "otel_torchprof.TorchSpanProcessor"
    queue = {"otel.component.name": f"{kind}/a.B/0", "otel.component.type": kind}
    processed = points(reader, "otel.sdk.processor.span.processed")
    assert processed == [(queue, 11), ({**queue, "error.type": "queue_full"}, 4)]
    assert points(reader, "otel.sdk.processor.span.queue.size") == [(queue, 4)]
    assert points(reader, "otel.sdk.processor.span.queue.capacity") == [(queue, 100)]
    metrics.recorder.source = None
    assert points(reader, "otel_torchprof.events.recorded") == []


def test_each_exporter_has_counters_of_its_own():
    """Two exporters of one class have different names, so that the counters of the second do not continue, or reset, those of the first."""
    queues = [ExportQueue(InMemorySpanExporter()) for _ in range(2)]
    first, second = exporter_figures(queues, 10)
    assert first.name != second.name
    assert first.type == second.type == f"{InMemorySpanExporter.__module__}.InMemorySpanExporter"
    assert exporter_figures(queues, 10) == [first, second]
    for queue in queues:
        queue.shutdown(Deadline.after(60))


def test_one_set_of_instruments_per_provider(provider, caplog):
    """A provider that is asked again has the same instruments, another its own; the SDK does not warn of any made twice."""
    found = metrics_of(provider)
    assert metrics_of(provider) is found
    assert metrics_of(MeterProvider(shutdown_on_exit=False)) is not found
    assert caplog.text == ""


def test_a_provider_that_is_gone_is_forgotten():
    """The instruments of a provider go with it."""
    before = len(operator_metrics._of_providers)
    found = MeterProvider(shutdown_on_exit=False)
    metrics_of(found)
    assert len(operator_metrics._of_providers) == before + 1
    del found
    gc.collect()
    assert len(operator_metrics._of_providers) <= before


def test_the_global_provider_may_come_later(monkeypatch, reader, provider):
    """Instruments of the global provider that were made before there was one show in the one that is set then."""
    monkeypatch.setattr(operator_metrics, "_global", None)
    internal = otel_metrics._internal
    monkeypatch.setattr(internal, "_METER_PROVIDER", None)
    monkeypatch.setattr(internal, "_METER_PROVIDER_SET_ONCE", type(internal._METER_PROVIDER_SET_ONCE)())
    monkeypatch.setattr(internal, "_PROXY_METER_PROVIDER", internal._ProxyMeterProvider())
    early = metrics_of(None)
    early.add(one_operator())
    otel_metrics.set_meter_provider(provider)
    assert metrics_of(None) is metrics_of(provider) is early
    assert points(reader, "torch.op.calls") == [({"torch.op.name": "aten::mm"}, 1)]


def test_two_readers_get_the_same():
    """What one reader has read is there for another one as well."""
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    provider = MeterProvider(readers, shutdown_on_exit=False)
    metrics_of(provider).add(one_operator())
    for _ in range(2):
        for each in readers:
            assert points(each, "torch.op.calls") == [({"torch.op.name": "aten::mm"}, 1)]


def test_another_number_of_operators_begins_anew(reader, metrics):
    """The number that is told apart holds from the begin of a recording; the same one keeps what there is."""
    metrics.add(one_operator())
    metrics.begin(50)
    assert points(reader, "torch.op.calls") != []
    metrics.begin(10)
    assert points(reader, "torch.op.calls") == []


def test_a_forked_child_begins_anew(reader, metrics, monkeypatch):
    """What the parent counted is not the child's."""
    metrics.add(one_operator())
    metrics.add_step(sampled=True)
    metrics.times = lambda: (1.0, 1.0)
    metrics.recorder.source = lambda: RecorderFigures(Entries(1, {}, {}), 0, 0)
    operator_metrics.after_fork_in_child()
    names = ("torch.op.calls", "torch.steps", "otel_torchprof.sampling.time", "otel_torchprof.events.recorded")
    assert [points(reader, name) for name in names] == [[]] * 4
