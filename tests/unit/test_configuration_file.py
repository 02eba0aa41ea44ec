"""OpenTelemetry's declarative configuration: a file says what variables or code would, as far as its loader reads it."""

from __future__ import annotations

import json

import pytest
from forked import in_child
from opentelemetry import trace

import otel_torchprof as otp

configuration = pytest.importorskip("opentelemetry.configuration", reason="needs opentelemetry-configuration")

FILE = """
file_format: "1.0"
resource: {{attributes: [{{name: service.name, value: from-file}}]}}
tracer_provider:
  processors:
    - batch:
        exporter: {exporter}
instrumentation/development:
  python:
    torch: {torch}
"""


@pytest.fixture(autouse=True)
def no_receiver(monkeypatch):
    """Nothing is sent to the network, and what is not in the file is as by default."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")


def ran(folder, monkeypatch, exporter: str, torch: str) -> str:
    """What a program that is configured by such a file says, in a process of its own."""
    path = folder / "otel.yaml"
    path.write_text(FILE.format(exporter=exporter, torch=torch))
    monkeypatch.setenv("OTEL_CONFIG_FILE", str(path))
    loaded = configuration.load_config_file(str(path))  # here: what it imports takes seconds

    def program() -> object:
        configuration.configure_sdk(loaded)
        instrumentor = otp.TorchInstrumentor()
        running = instrumentor._running
        with trace.get_tracer("test").start_as_current_span("request"), otp.record_function("label"):
            pass
        said = None if running is None else (running._detail, running._policy.every, running._policy.keep)
        trace.get_tracer_provider().shutdown()
        return said

    return in_child(program)


def test_arguments_and_a_chrome_file(tmp_path, monkeypatch):
    """Arguments below ``torch`` are those of ``instrument()``, and one Chrome file has the application's spans and torch's."""
    path = tmp_path / "trace.json"
    torch = "{detail: modules, policy: {every: 3, keep: slow}}"
    said = ran(tmp_path, monkeypatch, f"{{chrome: {{path: {path}}}}}", torch)
    assert said == repr(("modules", 3, "slow"))
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"}
    assert names == {"request", "label"}


def test_an_otlp_file(tmp_path, monkeypatch):
    """A file of OTLP has the application's spans and torch's, with the resource of the configuration."""
    path = tmp_path / "trace.jsonl"
    ran(tmp_path, monkeypatch, f"{{otlp_file: {{path: {path}}}}}", "{detail: modules}")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [
        span
        for each in found
        for part in each["resourceSpans"]
        for scope in part["scopeSpans"]
        for span in scope["spans"]
    ]
    assert {span["name"] for span in spans} == {"request", "label"}
    assert all("from-file" in json.dumps(each["resourceSpans"][0]["resource"]) for each in found)


@pytest.mark.parametrize("torch", ["{detial: ops}", "{enabled: false}"])
def test_what_is_wrong_instruments_nothing(tmp_path, monkeypatch, torch):
    """A bad argument is logged by the loader with our message, and the program runs without."""
    assert ran(tmp_path, monkeypatch, "{console: {}}", torch) == "None"
