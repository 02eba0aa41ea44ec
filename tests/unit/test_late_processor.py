"""A TorchSpanProcessor that is added after ``instrument()``, and an ``instrument()`` after another: both count from then on."""

from __future__ import annotations

import inspect
import logging
import re
import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import new_provider

import otel_torchprof as otp
from otel_torchprof import config
from otel_torchprof._instrument import default_processor
from otel_torchprof._instrument.default_processor import DefaultProcessor
from otel_torchprof._instrument.options import Options
from otel_torchprof._instrument.zero_code import ZeroCodeInstrumentor
from otel_torchprof._native.recorder import recorder_stats

LONG = 60
LABELS = {"detail": "modules", "skip_dep_check": True}


class Kept(InMemorySpanExporter):
    """Has the names of what came, and whether it was shut down."""

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.get_finished_spans()]


@pytest.fixture
def by_default(monkeypatch):
    """What gets torch's spans where the provider has no processor of ours."""
    exporter = Kept()
    monkeypatch.setattr(default_processor, "exporters_from_environment", lambda: [exporter])
    return exporter


@pytest.fixture(autouse=True)
def undone():
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()
    assert recorder_stats().sessions == 0


def label(name: str) -> None:
    with otp.record_function(name):
        pass


def added(provider: TracerProvider) -> tuple[otp.TorchSpanProcessor, Kept]:
    exporter = Kept()
    processor = otp.TorchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    return processor, exporter


@pytest.fixture
def provider():
    made = TracerProvider(shutdown_on_exit=False)
    otp.TorchInstrumentor().instrument(tracer_provider=made, **LABELS)
    yield made
    made.shutdown()


def test_it_gets_what_follows(by_default, provider):
    """What was sent before stays where it was sent; all that follows goes to the new one, with the averages so far, and adds up."""
    label("before")
    assert provider.force_flush()
    processor, exporter = added(provider)
    label("after")
    assert provider.force_flush()
    assert (by_default.names, exporter.names) == (["before"], ["after"])
    assert by_default._stopped
    assert {row.key for row in processor.key_averages()} == {"before", "after"}
    assert otp.TorchInstrumentor().health == processor.health
    assert (processor.health.sources["recording"], processor.health.recorded) == ("on", 1)


@pytest.mark.parametrize("end", ["shutdown", "uninstrument", "shutdown_within"])
def test_a_program_that_is_too_short_for_a_look(by_default, provider, end):
    """What was recorded before the processor is even noticed goes to it too, whoever ends the recording."""
    label("before")
    processor, exporter = added(provider)
    label("after")
    if end == "shutdown_within":  # as at SIGTERM
        otp.TorchInstrumentor()._processor.shutdown_within(LONG)
        processor.shutdown_within(LONG)
    else:
        (provider.shutdown if end == "shutdown" else otp.TorchInstrumentor().uninstrument)()
        processor.force_flush()
    assert (by_default.names, exporter.names) == ([], ["before", "after"])


def test_it_is_found_without_a_flush(by_default, provider, monkeypatch):
    """The thread that drains looks for it by itself, and hands over to the thread of the new one."""
    left = threading.Event()
    leave = DefaultProcessor.leave
    monkeypatch.setattr(DefaultProcessor, "leave", lambda self: (leave(self), left.set()))
    _, exporter = added(provider)
    assert left.wait(LONG)
    label("after")
    assert provider.force_flush()
    assert (by_default.names, exporter.names) == ([], ["after"])


def test_what_waits_for_its_step_comes_along(by_default, provider):
    """Events that are held for the end of their step are counted, and sent, by the processor that is there at its end."""
    otp.TorchInstrumentor().step()
    label("held")
    otp.TorchInstrumentor()._processor.refresh()
    processor, exporter = added(provider)
    otp.TorchInstrumentor().step()
    assert provider.force_flush()
    health = processor.health
    waiting = sum(queue.waiting_spans for queue in health.exporters.values())
    sent = sum(queue.exported_spans for queue in health.exporters.values())
    spans = health.spans
    lost = sum(spans.get(what, 0) for what in ("not_sampled", "filtered", "failed", "aggregated", "collapsed"))
    held = spans.get("detail_dropped", 0) + spans.get("buffered", 0)
    assert health.recorded + spans.get("added", 0) + spans.get("parts", 0) == lost + held + sent + waiting
    assert "held" in exporter.names


# ---- a second instrument() ----


def test_the_same_again_says_and_changes_nothing(by_default, provider, caplog):
    """Arguments that are in force, and those that are not given, are no reason to begin anew."""
    running = otp.TorchInstrumentor()._running
    with caplog.at_level(logging.INFO):
        otp.TorchInstrumentor().instrument()
        otp.TorchInstrumentor().instrument(detail="modules", overhead=None)
        otp.TorchInstrumentor().instrument(tracer_provider=provider)
    assert otp.TorchInstrumentor()._running is running
    assert caplog.messages == []


def test_another_detail_is_applied(by_default, provider, caplog):
    """The recording begins anew with it, the rest of the arguments stay, and one warning says so."""
    label("before")
    with caplog.at_level(logging.WARNING):
        otp.TorchInstrumentor().instrument(detail="steps")
    assert by_default.names == ["before"]
    assert len(caplog.messages) == 1
    label("not with steps")
    otp.TorchInstrumentor().instrument(detail="modules")
    by_default._stopped = False  # the one exporter of this test was shut down with its processor
    label("after")
    provider.force_flush()
    assert by_default.names == ["before", "after"]


def test_a_bad_argument_changes_nothing(by_default, provider):
    """A second call that is refused leaves the first in force."""
    running = otp.TorchInstrumentor()._running
    with pytest.raises(ValueError, match="detail is 'all'; it must be one of"):
        otp.TorchInstrumentor().instrument(detail="all")
    assert otp.TorchInstrumentor()._running is running


def test_code_over_no_code(by_default, provider, monkeypatch):
    """What a program says itself counts, where ``opentelemetry-instrument`` has begun before."""
    otp.TorchInstrumentor().uninstrument()
    ZeroCodeInstrumentor().instrument(tracer_provider=provider, skip_dep_check=True)
    assert otp.TorchInstrumentor()._running._detail == "steps"
    otp.TorchInstrumentor().instrument(detail="modules")
    assert otp.TorchInstrumentor()._running._detail == "modules"
    ZeroCodeInstrumentor().uninstrument()


def test_a_misspelt_argument_of_a_file(by_default, provider):
    """What a configuration file has for a policy or a filter is compared with what these take."""
    otp.TorchInstrumentor().uninstrument()
    for given, meant in (({"policy": {"evry": 2}}, "every"), ({"frames": {"includes": []}}, "include")):
        with pytest.raises(TypeError, match=f"is no argument of .*; did you mean {meant}"):
            ZeroCodeInstrumentor().instrument(tracer_provider=provider, skip_dep_check=True, **given)


def test_the_signature_is_the_options_own():
    """Editors and ``help()`` see every argument, of one list."""
    found = inspect.signature(otp.TorchInstrumentor().instrument)
    assert list(found.parameters) == list(inspect.signature(Options).parameters)
    assert set(found.parameters) > set(config.InstrumentOptions.__annotations__)
    assert found.parameters["detail"].annotation == "Detail | None"


def test_a_file_is_shared_with_the_application(monkeypatch, tmp_path):
    """Where the application's own exporter writes the file that variables name, it has the spans of both, whoever ends first."""
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_file")
    monkeypatch.setenv("OTEL_TORCHPROF_OTLP_FILE", str(path))
    provider = new_provider(BatchSpanProcessor(otp.OTLPFileExporter()))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)
    with provider.get_tracer("test").start_as_current_span("request"):
        label("label")
    provider.shutdown()
    names = re.findall(r'"name":"(\w+)","kind"', path.read_text())
    assert sorted(names) == ["label", "request"]
    assert list(tmp_path.iterdir()) == [path]
