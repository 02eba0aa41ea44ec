"""What the tests of the standard variables have: the variables, receivers, programs, and what arrived of them."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configured_programs import STEPS, InTurn
from fault_server import LONG, GrpcReceiver, HttpReceiver
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from fault_server import Tls

OTLP = "OTEL_EXPORTER_OTLP_"
GRPC, HTTP = "grpc", "http/protobuf"
PROTOCOLS = (GRPC, HTTP)
SPANS = 2
"""Of a profile of one step."""
DURATION = "torch.step.duration"
CHECKS: dict[str, Callable[[str, Given], None]] = {}


def proves(*names: str) -> Callable[[Any], Any]:
    """Marks what is to hold of these variables."""

    def decorator(check: Callable[[str, Given], None]) -> Callable[[str, Given], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return decorator


@dataclass
class Given:
    """What a test has."""

    monkeypatch: pytest.MonkeyPatch
    exits: contextlib.ExitStack
    tls: Tls
    programs: dict[str, Any]

    def set(self, **environment: object) -> None:
        for name, value in environment.items():
            self.monkeypatch.setenv(name, str(value))

    def receiver(self, protocol: str, **options: Any) -> Any:
        return self.exits.enter_context((GrpcReceiver if protocol == GRPC else HttpReceiver)(**options))

    def before_the_general(self, name: str, value: object, other: object) -> None:
        """Sets it, and where it is that of one signal the general one to something else."""
        general = name.replace("TRACES_", "").replace("METRICS_", "")
        self.set(**{general: other, name: value})

    def exporter(self, **options: Any) -> otp.OTLPExporter:
        made = otp.OTLPExporter(**options)
        self.exits.callback(made.shutdown)
        return made

    def instrument(self, *exporters: SpanExporter, **options: Any) -> TracerProvider:
        """A provider made as a program does; it is gone after the test."""
        provider = TracerProvider(shutdown_on_exit=False, id_generator=InTurn())
        self.exits.callback(provider.shutdown)
        if exporters:
            provider.add_span_processor(otp.TorchSpanProcessor(*exporters))
        otp.TorchInstrumentor().instrument(
            tracer_provider=provider, **{"detail": "steps", "skip_dep_check": True, **options}
        )
        return provider

    def metrics(self, exporter: MetricExporter) -> MeterProvider:
        """Instruments, makes steps and sends their metrics."""
        provider = MeterProvider([PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False)
        self.exits.callback(provider.shutdown)
        self.instrument(Kept(), meter_provider=provider)
        steps()
        return provider


class Kept(SpanExporter):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.came = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def export(self, spans):
        self.batches.append([span.name for span in spans])
        self.came.set()
        self.may_go_on.wait(LONG)
        return SpanExportResult.SUCCESS

    @property
    def names(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


class KeptMetrics(MetricExporter):
    """Keeps how long each export may take."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float] = []
        self.came = threading.Semaphore(0)

    def export(self, metrics_data, timeout_millis=10_000, **_):
        self.timeouts.append(timeout_millis)
        self.came.release()
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000) -> bool:
        return True

    def shutdown(self, timeout_millis=30_000, **_) -> None:
        """Nothing to close."""


def steps(number: int = STEPS) -> None:
    for _ in range(number):
        otp.TorchInstrumentor().step()


def profile(number: int = 1) -> otp.profile:
    """A profile of steps with a label each."""
    with otp.profile(operators=False) as prof:
        for _ in range(number):
            with otp.record_function("label"):
                pass
            prof.step()
    return prof


@contextlib.contextmanager
def before_the_end_of(receiver):
    """Does not wait for as long as a receiver is silent."""
    yield
    assert not receiver.outlasted


def spans_in(body: bytes) -> list[Any]:
    found = ExportTraceServiceRequest.FromString(body).resource_spans
    return [span for resource in found for scope in resource.scope_spans for span in scope.spans]


def resource_in(body: bytes, kind: Any = ExportTraceServiceRequest) -> dict[str, str]:
    (found,) = getattr(
        kind.FromString(body), "resource_spans" if kind is ExportTraceServiceRequest else "resource_metrics"
    )
    return {item.key: item.value.string_value for item in found.resource.attributes}


def metrics_in(arrived: list[Any]) -> dict[str, Any]:
    """The last of each."""
    return {
        metric.name: metric
        for each in arrived
        for resource in ExportMetricsServiceRequest.FromString(each.body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def sent(given: Given, prof: otp.profile) -> list[Any]:
    """The spans of a profile as a receiver sees them: they are encoded from columns, by no code of the SDK."""
    receiver = given.receiver(HTTP)
    with given.monkeypatch.context() as changed:
        changed.setenv(f"{OTLP}TRACES_PROTOCOL", HTTP)
        changed.setenv(f"{OTLP}TRACES_ENDPOINT", receiver.url)
        prof.export(given.exporter())
    return [span for arrived in receiver.arrived for span in spans_in(arrived.body)]
