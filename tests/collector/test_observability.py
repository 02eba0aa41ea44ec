"""collector-config.yaml and examples/observability with the real programs: what a training run measured can be read there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import collectors  # noqa: E402
import nvml_stand_in  # noqa: E402
import prometheus_process  # noqa: E402
from collectors import CONFIGURATION, OTELCOL  # noqa: E402
from dashboards import EXAMPLE, promql  # noqa: E402
from fault_server import LONG  # noqa: E402
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics  # noqa: E402
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: E402
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest  # noqa: E402
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: E402
from opentelemetry.sdk.resources import Resource  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = pytest.mark.simulated_device

nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library

DEVICE = "privateuseone"
RESOURCE = Resource({"service.name": "training", "service.instance.id": "run-0", "torch.distributed.rank": 0})
VARIABLES = {"__rate_interval": "5m", "__range": "5m", "job": "training", "instance": ".*", "run": ".*"}


@pytest.fixture(scope="module")
def otelcol():
    binary = OTELCOL.find()
    if binary is None:
        pytest.skip(OTELCOL.missing)
    return binary


class Noting(OTLPMetricExporter):
    """Knows what it sent."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint=endpoint, insecure=True)
        self.sent: list[ExportMetricsServiceRequest] = []

    def export(self, metrics_data, timeout_millis=10_000, **options):
        self.sent.append(encode_metrics(metrics_data))
        return super().export(metrics_data, timeout_millis, **options)


class Job:
    """A training on the simulated device, instrumented as ``detail`` says; metrics go out when it is told to."""

    def __init__(self, endpoint: str) -> None:
        self.exporter = Noting(endpoint)
        reader = PeriodicExportingMetricReader(self.exporter, export_interval_millis=float("inf"))
        self.meters = MeterProvider([reader], resource=RESOURCE, shutdown_on_exit=False)
        self.tracers = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
        self.spans = otp.OTLPExporter(endpoint)
        self.tracers.add_span_processor(otp.TorchSpanProcessor(self.spans))

    def train(self, detail: str, rounds: int, between=lambda: None, **options) -> None:
        instrumentor = otp.TorchInstrumentor()
        instrumentor.instrument(
            tracer_provider=self.tracers, meter_provider=self.meters, detail=detail, use_device=DEVICE, **options
        )
        try:
            model = torch.nn.Linear(8, 8).to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.ones(2, 8).to(DEVICE)
            for _ in range(rounds):
                for _ in range(50):
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
                assert self.tracers.force_flush()  # which is when durations of steps with spans are known
                assert self.meters.force_flush()
                between()
        finally:
            instrumentor.uninstrument()

    def end(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()


def points(requests) -> Counter[str]:
    """Every point of ours with all that it belongs to."""
    found: Counter[str] = Counter()
    for request in requests:
        for resource in request.resource_metrics:
            if "otelcol" in str(resource.resource):
                continue
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    kind = metric.WhichOneof("data")
                    for point in getattr(metric, kind).data_points:
                        about = (resource.resource, scope.scope, metric.name, metric.unit, kind, point)
                        found[" ".join(str(each) for each in about)] += 1
    return found


def test_real_collector_accepts_the_configuration(otelcol):
    """``otelcol validate`` finds nothing wrong with the file as it is, without any variable."""
    done = subprocess.run([otelcol, "validate", "--config", CONFIGURATION], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_metrics_come_out_behind(otelcol, nvml, simulated, tmp_path):
    """Every point that a training run exported comes out by OTLP/HTTP as it was sent, once, and the Collector's own with them."""
    with collectors.running(OTELCOL, otelcol, tmp_path) as collector:
        job = Job(collector.endpoints["grpc"])
        job.train("metrics", 2, overhead=1)
        job.end()
        expected = points(job.exporter.sent)
        behind = collector.metrics

        def received():
            return [ExportMetricsServiceRequest.FromString(request.body) for request in list(behind.arrived)]

        with behind.came:
            assert behind.came.wait_for(lambda: points(received()).total() >= expected.total(), LONG)
        assert points(received()) == expected
        assert len(expected) > 100
        assert {request.path for request in behind.arrived} == {"/api/v1/otlp/v1/metrics"}
    assert "otelcol_receiver_accepted_metric_points" in str(received())


def test_a_store_that_is_away_loses_nothing_and_holds_up_no_other(otelcol, simulated, tmp_path):
    """While one store is down the other gets its spans; the first gets the same ones when it is back."""
    with collectors.running(OTELCOL, otelcol, tmp_path) as collector:
        well, away = collector.stores
        away.stop()
        job = Job(collector.endpoints["grpc"])
        job.train("ops", 1)
        job.end()
        sent = job.spans.stats.accepted_spans
        assert sent > 500
        for store in (well, away):
            if store is away:
                assert store.arrived == []
                store.start()
            prometheus_process.until(lambda: len(store.names) >= sent, collector.log.read_text)  # noqa: B023 - called here
            assert len(store.names) == sent


def test_the_example_fills_the_stores(otelcol, tmp_path):
    """examples/observability/train.py, as it stands: each store gets the trace of every step, Prometheus its metrics."""
    with collectors.running(OTELCOL, otelcol, tmp_path) as collector:
        command = [sys.executable, str(EXAMPLE / "train.py"), "--steps", "10", "--detail", "steps"]
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoints["grpc"], "RANK": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG, check=False)
        assert done.returncode == 0, done.stderr
        for store in collector.stores:
            with store.came:
                assert store.came.wait_for(lambda: store.names.count("torch.step") >= 10, LONG)  # noqa: B023 - called here
        with collector.metrics.came:
            found = collector.metrics.came.wait_for(
                lambda: b"torch.step.duration" in b"".join(each.body for each in collector.metrics.arrived), LONG
            )
        assert found


def test_every_expression_of_the_dashboards_parses(tmp_path):
    """Promtool takes each as a rule, and finds nothing to say against it."""
    promtool = prometheus_process.promtool()
    if promtool is None:
        pytest.skip(prometheus_process.NO_PROMTOOL)
    rules = [{"record": f"panel_{n}", "expr": query} for n, (_, query) in enumerate(promql(**VARIABLES))]
    file = tmp_path / "rules.json"  # which is YAML as well
    file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.fixture
def store(otelcol, tmp_path):
    """A Prometheus, and a Collector before it."""
    binary = prometheus_process.prometheus()
    if binary is None:
        pytest.skip(prometheus_process.NO_PROMETHEUS)
    with (
        prometheus_process.running(binary, tmp_path) as found,
        collectors.running(OTELCOL, otelcol, tmp_path, found.otlp) as collector,
    ):
        yield found, collector


def test_every_expression_of_the_dashboards_returns_data(store, nvml, simulated):
    """A training run's metrics in a real Prometheus, by OTLP through the Collector: each panel has something to show.

    The GPU is the stand-in for NVML and the device a simulated one; an exemplar leads to a step whose trace was sent.
    """
    nvml.read("data_centre")
    simulated.automatic()
    found, collector = store
    job = Job(collector.endpoints["grpc"])
    energy = iter(range(1_000_000, 10_000_000, 50_000))
    job.train(
        "metrics", 3, lambda: nvml.set("gpu.0.energy", 987_654_321 + next(energy)), overhead=1
    )  # every step counts
    job.train("metrics", 1, overhead=0.5)  # what that costs is known where it is limited
    job.train("ops", 2, policy=otp.SpanPolicy(keep="slow", max_spans=50))
    job.end()

    empty = dict(promql("training", **VARIABLES))

    def all_have_data():
        for panel, query in list(empty.items()):
            if found.values(query):
                del empty[panel]
        return not empty

    prometheus_process.until(all_have_data, lambda: f"nothing in {list(empty)}\n{collector.log.read_text()[-4000:]}")
    panels = dict(promql("training", **VARIABLES))
    assert found.values(panels["Energy per step A"])[0] > 0
    assert found.values(panels["Power A"]) == [412.345]
    assert 0 < found.values(panels["Median step A"])[0] < LONG
    assert max(found.values(panels["Self time by operator A"])) > 0
    assert {panel for panel, query in panels.items() if "Lost" in panel and any(found.values(query))} == set()

    reported = found.ask("query_exemplars", query=panels["Step time, all ranks A"], start="0", end="9999999999")
    traces = {exemplar["labels"]["trace_id"] for series in reported for exemplar in series["exemplars"]}
    assert traces
    prometheus_process.until(lambda: traces <= sent_to(collector.stores[0]), collector.log.read_text)


def sent_to(store) -> set[str]:
    """The ids of the traces that arrived there."""
    requests = [ExportTraceServiceRequest.FromString(request.body) for request in list(store.arrived)]
    return {
        span.trace_id.hex()
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
