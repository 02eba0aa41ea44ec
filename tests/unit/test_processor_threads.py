"""TorchSpanProcessor when things go on at the same time, go wrong, or never end; and in forked children."""

from __future__ import annotations

import logging
import threading

import pytest
from forked import in_child
from live_batches import Event
from live_recordings import Hanging, Recording, attached, names
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._export.queue import THREAD_NAME
from otel_torchprof._process import threads

LONG = 60


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def running():
    """Processors that are shut down after the test, when nothing hangs any more."""
    found = []
    yield found
    for processor in found:
        processor.shutdown()


@pytest.fixture
def in_a_drain(recording, running):
    """A way to have a drain of the recording hang, and the moment when one does."""
    begun, let_go = threading.Event(), threading.Event()
    outlasted = []

    def hang() -> None:
        begun.set()
        outlasted.append(not let_go.wait(LONG))

    recording.meanwhile = hang
    yield begun
    assert not any(outlasted), "somebody waited for the drain"
    let_go.set()


def test_one_recording_may_follow_another_while_that_is_drained(recording, exporter):
    """Who detaches during a drain comes back, though the next recording was attached meanwhile; that one is drained then."""
    before = set(threading.enumerate())
    processor = attached(recording, exporter, schedule_delay_millis=1)
    following = Recording()
    leaving = threading.Thread(target=processor.detach, daemon=True)

    def follow() -> None:
        recording.meanwhile = bool
        leaving.start()
        leaving.join(0.2)
        processor.attach(following)

    recording.meanwhile = follow
    assert following.drained.wait(LONG)
    leaving.join(LONG)
    assert not leaving.is_alive()
    assert recording.finished
    processor.shutdown()
    assert following.finished
    assert set(threading.enumerate()) <= before


def test_a_flush_never_raises(recording, exporter):
    """When the recorder cannot be drained, a flush says False, and the application's spans come with the next one."""
    provider = TracerProvider(shutdown_on_exit=False)
    processor = attached(recording, exporter, sdk_spans=True)
    provider.add_span_processor(processor)
    provider.get_tracer("test").start_span("request").end()
    recording.fails = 1
    assert provider.force_flush() is False
    assert names(exporter) == []
    assert provider.force_flush() is True
    assert names(exporter) == ["request"]
    provider.shutdown()


@pytest.mark.parametrize("timeout", [0, 50])
def test_a_flush_does_not_wait_for_ever_for_another_drain(recording, running, in_a_drain, timeout):
    """A flush whose time is over while another drain hangs says False."""
    processor = attached(recording, schedule_delay_millis=1)
    running.append(processor)
    assert in_a_drain.wait(LONG)
    assert processor.force_flush(timeout) is False


def test_a_shutdown_keeps_its_deadline_when_a_drain_hangs(recording, exporter, in_a_drain, caplog):
    """A drain that never ends (a sampler that waits) is left behind: the recording is stopped, the exporters are shut down."""
    processor = attached(recording, exporter, schedule_delay_millis=1)
    assert in_a_drain.wait(LONG)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        processor.shutdown_within(0.1)
    assert (recording.stopped, recording.finished) == (True, False)
    assert "not all events were taken" in caplog.text
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:  # on which the exporter is shut down, where there is no time left
            thread.join(LONG)
    assert exporter.export(()) is SpanExportResult.FAILURE


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_shutdown_that_is_interrupted_can_be_called_again(recording, exporter, error):
    """A signal handler that raises while the recording stops ends the shutdown; a second one does all of it, at once."""
    stop = recording.stop

    def interrupted() -> None:
        recording.stop = stop
        raise error

    recording.stop = interrupted
    processor = attached(recording, exporter)
    recording.waiting.append((Event("mm", 0, 10),))
    with pytest.raises(error):
        processor.shutdown()
    again = threading.Thread(target=processor.shutdown, daemon=True)
    again.start()
    again.join(10)
    assert not again.is_alive()
    assert names(exporter) == ["mm"]


def test_exporters_are_shut_down_when_stopping_fails(recording, exporter, caplog):
    """Whatever the recording raises when it is stopped, the exporters are shut down, and the caller sees nothing; nor waits who calls again."""

    def fail() -> None:
        raise OSError("cannot stop")

    recording.stop = fail
    processor = otp.TorchSpanProcessor(exporter)
    processor.attach(recording)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        processor.shutdown()
    assert "cannot stop" in caplog.text
    assert exporter.export(()) is SpanExportResult.FAILURE
    again = threading.Thread(target=processor.detach, daemon=True)
    again.start()
    again.join(10)  # a third of what a shutdown may take
    assert not again.is_alive()


def test_an_exporter_that_hangs_leaves_time_for_the_next(recording, exporter, caplog):
    """At a shutdown each exporter has its share of the time: one that hangs does not have the others given up."""
    hanging = Hanging()
    processor = attached(recording, hanging, exporter)
    recording.waiting.append((Event("mm", 0, 10),))
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        processor.shutdown_within(0.5)
    assert names(exporter) == ["mm"]
    assert "Hanging: 1 waiting spans were dropped" in caplog.text
    assert "InMemorySpanExporter" not in caplog.text
    hanging.let_go.set()


@pytest.mark.parametrize("call", ["force_flush", "key_averages", "shutdown", "detach"])
def test_who_is_called_by_a_drain_may_call_back(recording, exporter, call):
    """What a drain calls (a sampler, a signal handler on its thread) may flush, ask or shut down: nobody waits for itself."""
    processor = attached(recording, exporter)
    called = threading.Event()

    def call_back() -> None:
        recording.meanwhile = bool
        getattr(processor, call)()
        called.set()

    recording.meanwhile = call_back
    flush = threading.Thread(target=processor.force_flush, daemon=True)
    flush.start()
    flush.join(LONG)
    assert called.is_set()
    assert not flush.is_alive()
    processor.shutdown()


def test_without_threads_a_flush_still_sends(recording, exporter, monkeypatch, caplog):
    """Where no thread can be started, as in an interpreter that goes down, the application notices nothing, and flushes work."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(threads.Thread, "start", refuse)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        provider.add_span_processor(attached(recording, exporter, sdk_spans=True))
        provider.get_tracer("test").start_span("request").end()
    assert "there is no thread" in caplog.text
    recording.waiting.append((Event("mm", 0, 10),))
    assert provider.force_flush()
    assert names(exporter) == ["mm", "request"]
    provider.shutdown()


# ---- a provider's only processor ----


def test_the_applications_spans_are_sent_also_when_torch_is_not_instrumented():
    """With sdk_spans=True nothing else sends them: they go out on schedule, without any recording, until the shutdown."""
    sent = threading.Event()

    class Tells(InMemorySpanExporter):
        def export(self, spans):
            result = super().export(spans)
            sent.set()
            return result

    exporter = Tells()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(exporter, sdk_spans=True, schedule_delay_millis=1))
    tracer = provider.get_tracer("test")
    tracer.start_span("on schedule").end()
    assert sent.wait(LONG)
    tracer.start_span("flushed").end()
    assert provider.force_flush()
    tracer.start_span("last").end()
    provider.shutdown()
    tracer.start_span("too late").end()
    assert names(exporter) == ["on schedule", "flushed", "last"]


def test_other_processors_do_nothing_until_torch_is_instrumented(exporter):
    """Without sdk_spans=True and without a recording there is no thread, and spans that end are not kept."""
    before = set(threading.enumerate())
    provider = TracerProvider(shutdown_on_exit=False)
    processor = otp.TorchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    provider.get_tracer("test").start_span("request").end()
    assert len(processor._ended) == 0
    assert set(threading.enumerate()) == before
    provider.shutdown()


# ---- forks ----


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_begins_at_nothing(recording):
    """A child that is forked in the middle of a drain, with every lock taken, works; what the parent counted is the parent's."""
    provider = TracerProvider(shutdown_on_exit=False)
    processor = attached(recording)
    provider.add_span_processor(processor)
    provider.get_tracer("test").start_span("request").end()
    recording.waiting.append((Event("mm", 0, 10),))
    provider.force_flush()
    said = []

    def ask() -> tuple[bool, int, list[str]]:
        return provider.force_flush(), processor.health.recorded, [average.key for average in processor.key_averages()]

    recording.meanwhile = lambda: said.append(in_child(ask))
    with processor.averages._lock:
        in_threads(processor.force_flush)
    assert said == ["(True, 0, [])"]
    recording.meanwhile = bool
    assert ask() == (True, 1, ["request"])
    provider.shutdown()
