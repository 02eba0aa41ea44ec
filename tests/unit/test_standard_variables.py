"""Each standard variable on the way of torch's own spans and metrics: from a program that sets it to a real receiver.

What a variable does is in ``docs/settings.md``; its rows are the tests here, one each.
"""

from __future__ import annotations

import contextlib

import configured_programs
import pytest
from certificates import make_tls
from configured_programs import STEPS
from fault_server import HttpReceiver
from opentelemetry import context, trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

import otel_torchprof as otp
from otel_torchprof._export.unknown_variables import SECTIONS

pytest.register_assert_rewrite("given_variables", "variables_of_metrics", "variables_of_traces")

import variables_of_metrics  # noqa: E402
import variables_of_traces  # noqa: E402
from given_variables import CHECKS, GRPC, HTTP, OTLP, SPANS, Given, Kept, profile, proves, resource_in, steps  # noqa: E402

__all__ = ["variables_of_metrics", "variables_of_traces"]


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What programs that change no code said, and what arrived of them."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "sdk.json").write_text('{"from": "file"}')
    with HttpReceiver() as spans, HttpReceiver() as metrics, HttpReceiver() as none, HttpReceiver() as of_file:
        plain = {
            "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi,asgi",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            f"{OTLP}PROTOCOL": HTTP,
        }
        nowhere = {**plain, f"{OTLP}ENDPOINT": none.url.removesuffix("/v1/traces")}
        everything = {
            **plain,
            "OTEL_SERVICE_NAME": "trainer",
            "OTEL_RESOURCE_ATTRIBUTES": "team=a%20b",
            "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "place",
            "OTEL_TRACES_SAMPLER": "traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.5",
            "OTEL_PYTHON_ID_GENERATOR": "in-turn",
            f"{OTLP}PROTOCOL": GRPC,
            f"{OTLP}TRACES_PROTOCOL": HTTP,
            f"{OTLP}METRICS_PROTOCOL": HTTP,
            f"{OTLP}TRACES_ENDPOINT": spans.url,
            f"{OTLP}METRICS_ENDPOINT": metrics.url.replace("traces", "metrics"),
        }
        said = configured_programs.run(
            folder,
            {
                "on": everything,
                "disabled": {**nowhere, "OTEL_SDK_DISABLED": " True "},
                "none": {**nowhere, "OTEL_TRACES_EXPORTER": "None", "OTEL_METRICS_EXPORTER": "none"},
                "not torch": {**nowhere, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "fastapi, asgi, torch"},
                "file": {
                    **plain,
                    "OTEL_CONFIG_FILE": str(folder / "sdk.json"),
                    f"{OTLP}TRACES_ENDPOINT": of_file.url,
                },
                "later": {"PROGRAM": "meters_later", "OTEL_TRACES_EXPORTER": "none"},
            },
        )
        assert none.arrived == []
        yield {**said, "spans": spans.arrived, "metrics": metrics.arrived, "spans of file": of_file.arrived}


@pytest.fixture
def given(monkeypatch, tls, programs):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # which the library under OpenTelemetry's exporter puts first
        monkeypatch.delenv(name, raising=False)
    with contextlib.ExitStack() as exits:
        yield Given(monkeypatch, exits, tls, programs)
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()


@proves("OTEL_SDK_DISABLED")
def no_telemetry(name: str, given: Given) -> None:
    said = given.programs["disabled"]
    assert said["recording"] == "off: the TracerProvider is switched off"
    assert (said["averages"], said["spans"]) == (["label"], ["torch.profile", "label"])
    assert said["exported"] == 0
    assert said["warnings"] == ["OTEL_SDK_DISABLED is true: spans are not handed to exporters"]
    given.set(**{name: "TRUE"})
    for detail in ("steps", "metrics"):  # where no provider is set, and none that will be records anything
        otp.TorchInstrumentor().instrument(detail=detail, skip_dep_check=True)
        assert otp.TorchInstrumentor().health.sources == {"recording": f"off: {name} is true"}
        otp.TorchInstrumentor().uninstrument()
    given.set(**{name: "1"})
    assert profile().export(Kept()) == SPANS


@proves("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS")
def resource(name: str, given: Given) -> None:
    key, value, text = {
        "OTEL_SERVICE_NAME": ("service.name", "trainer", "trainer"),
        "OTEL_RESOURCE_ATTRIBUTES": ("team", "a b", "team=a%20b"),
        "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": ("place", "here", ""),
    }[name]
    for arrived in given.programs["spans"]:
        assert resource_in(arrived.body)[key] == value
    for arrived in given.programs["metrics"]:
        assert resource_in(arrived.body, ExportMetricsServiceRequest)[key] == value
    key, value, text = (key, value, text) if text else ("process.runtime.name", "cpython", "process")
    given.set(**{name: text})
    exporter = Kept()
    exporter.export = lambda spans: exporter.batches.append([span.resource.attributes[key] for span in spans])
    provider = given.instrument(exporter)
    steps(1)
    provider.force_flush()
    assert profile().spans()[0].resource.attributes[key] == value
    assert set(exporter.names) == {value}


@proves("OTEL_CONFIG_FILE")
def described_by_a_file(name: str, given: Given) -> None:
    (warning,) = given.programs["file"]["warnings"]
    assert "they go to those that OTEL_TRACES_EXPORTER names" in warning
    (arrived,) = given.programs["spans of file"]
    assert "torch.step" in arrived.names
    assert resource_in(arrived.body)["from"] == "file"


@proves("OTEL_PROPAGATORS")
def whoever_extracted_the_parent(name: str, given: Given) -> None:
    given.set(**{name: "none"})
    exporter = Kept()
    provider = given.instrument(exporter, detail="modules")
    remote = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(1))
    exporter.export = lambda spans: exporter.batches.append([span.parent for span in spans])
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(remote)))
    with otp.record_function("label"):
        pass
    context.detach(token)
    provider.force_flush()
    assert exporter.names == [remote]


@proves("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS")
def not_instrumented(name: str, given: Given) -> None:
    assert given.programs["not torch"]["recording"] == "off: not instrumented"
    assert given.programs["on"]["recording"] == "on"


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_variable(name, given):
    """It does what its row in the documentation says."""
    CHECKS[name](name, given)


def test_every_documented_variable_has_its_test():
    """The rows of the table and the tests are of the same variables, once each."""
    documented = [name for rows in SECTIONS.values() for row in rows for name in row.names]
    assert sorted(documented) == sorted(CHECKS)


def test_a_meter_provider_may_come_later(programs):
    """Steps have no metrics as long as no MeterProvider is set, and have them from then on, without a word to the instrumentor."""
    assert programs["later"] == {"before": 0, "after": STEPS}
