"""What each standard variable for metrics does to those of steps, which OpenTelemetry's own exporters send."""

from __future__ import annotations

from fault_server import LONG, silence
from given_variables import (
    DURATION,
    GRPC,
    HTTP,
    OTLP,
    PROTOCOLS,
    Given,
    Kept,
    KeptMetrics,
    before_the_end_of,
    metrics_in,
    proves,
    steps,
)
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from torch_metrics import data_points

import otel_torchprof as otp


@proves("OTEL_METRICS_EXPORTER")
def metrics_of_a_program(name: str, given: Given) -> None:
    assert DURATION in metrics_in(given.programs["metrics"])
    assert given.programs["none"]["gpus"] is None  # nobody asks, so nobody is asked
    assert given.programs["on"]["gpus"] is not None


@proves(f"{OTLP}METRICS_PROTOCOL")
def protocol_of_metrics(name: str, given: Given) -> None:
    found = metrics_in(given.programs["metrics"])[DURATION]  # over HTTP, where the general variable says gRPC
    assert sum(point.count for point in found.histogram.data_points) > 0


@proves(f"{OTLP}METRICS_ENDPOINT")
def endpoint_of_metrics(name: str, given: Given) -> None:
    assert {arrived.path for arrived in given.programs["metrics"]} == {"/v1/metrics"}
    receiver = given.receiver(GRPC)
    given.before_the_general(name, receiver.url, "http://nowhere.invalid")
    given.metrics(GrpcMetricExporter()).force_flush()
    assert DURATION in metrics_in(receiver.arrived)


@proves("OTEL_METRIC_EXPORT_INTERVAL")
def interval(name: str, given: Given) -> None:
    given.set(**{name: "1"})
    exporter = KeptMetrics()
    given.metrics(exporter)
    assert exporter.came.acquire(timeout=LONG)


@proves("OTEL_METRIC_EXPORT_TIMEOUT")
def time_of_metrics(name: str, given: Given) -> None:
    given.set(**{name: "1234", "OTEL_METRIC_EXPORT_INTERVAL": "1"})
    exporter = KeptMetrics()
    given.metrics(exporter)
    assert exporter.came.acquire(timeout=LONG)
    assert 0 < exporter.timeouts[0] <= 1234


@proves("OTEL_METRICS_EXEMPLAR_FILTER")
def exemplars(name: str, given: Given) -> None:
    for value, some in (("trace_based", True), ("always_off", False)):
        given.set(**{name: value})
        reader = InMemoryMetricReader()
        given.instrument(Kept(), meter_provider=MeterProvider([reader], shutdown_on_exit=False))
        steps()
        (found,) = data_points(reader, DURATION)
        assert bool(found.exemplars) is some
        otp.TorchInstrumentor().uninstrument()


@proves(f"{OTLP}METRICS_INSECURE")
def insecure_of_metrics(name: str, given: Given) -> None:
    receiver = given.receiver(GRPC)
    given.before_the_general(name, "true", "false")
    given.set(**{f"{OTLP}METRICS_ENDPOINT": f"localhost:{receiver.port}"})
    given.metrics(GrpcMetricExporter()).force_flush()
    assert DURATION in metrics_in(receiver.arrived)


@proves(f"{OTLP}METRICS_HEADERS", f"{OTLP}METRICS_COMPRESSION")
def how_metrics_are_sent(name: str, given: Given) -> None:
    is_header = name.endswith("HEADERS")
    value, other = ("tenant=a%20b", "tenant=other") if is_header else ("gzip", "none")
    given.before_the_general(name, value, other)
    receiver = given.receiver(HTTP)
    given.set(**{f"{OTLP}METRICS_ENDPOINT": receiver.url})
    given.metrics(HttpMetricExporter()).force_flush()
    assert DURATION in metrics_in(receiver.arrived)
    header, expected = ("tenant", "a b") if is_header else ("content-encoding", "gzip")
    assert {arrived.headers[header] for arrived in receiver.arrived} == {expected}


@proves(f"{OTLP}METRICS_TIMEOUT")
def timeout_of_metrics(name: str, given: Given) -> None:
    receiver = given.receiver(HTTP, turns=[silence])
    given.before_the_general(name, "0.05", LONG)
    given.set(**{f"{OTLP}METRICS_ENDPOINT": receiver.url})
    with before_the_end_of(receiver):
        given.metrics(HttpMetricExporter()).force_flush()
    assert len(receiver.arrived) == 1


@proves(f"{OTLP}METRICS_CERTIFICATE", f"{OTLP}METRICS_CLIENT_KEY", f"{OTLP}METRICS_CLIENT_CERTIFICATE")
def trusted_by_metrics(name: str, given: Given) -> None:
    for protocol, made in zip(PROTOCOLS, (GrpcMetricExporter, HttpMetricExporter), strict=True):
        receiver = given.receiver(protocol, tls=given.tls, client_certificates=name != f"{OTLP}METRICS_CERTIFICATE")
        files = {"CERTIFICATE": "ca.pem", "CLIENT_KEY": "client.key", "CLIENT_CERTIFICATE": "client.pem"}
        for what, file in files.items():
            given.before_the_general(f"{OTLP}METRICS_{what}", given.tls.path(file), given.tls.path("stranger.pem"))
        given.set(**{f"{OTLP}METRICS_ENDPOINT": receiver.url})
        given.metrics(made()).force_flush()
        assert DURATION in metrics_in(receiver.arrived)
        otp.TorchInstrumentor().uninstrument()


@proves(f"{OTLP}METRICS_TEMPORALITY_PREFERENCE", f"{OTLP}METRICS_DEFAULT_HISTOGRAM_AGGREGATION")
def shape_of_metrics(name: str, given: Given) -> None:
    receiver = given.receiver(HTTP)
    given.set(**{f"{OTLP}METRICS_ENDPOINT": receiver.url})
    is_delta = "TEMPORALITY" in name
    given.set(**{name: "delta" if is_delta else "base2_exponential_bucket_histogram"})
    given.metrics(HttpMetricExporter()).force_flush()
    found = metrics_in(receiver.arrived)[DURATION]
    assert found.WhichOneof("data") == ("histogram" if is_delta else "exponential_histogram")
    assert getattr(found, found.WhichOneof("data")).aggregation_temporality == (1 if is_delta else 2)
