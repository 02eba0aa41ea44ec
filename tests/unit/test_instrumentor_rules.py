"""TorchInstrumentor without any torch: who may call it when, and what is left when something goes wrong."""

from __future__ import annotations

import logging
import threading

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.trace import NonRecordingSpan, ProxyTracerProvider, SpanContext, TraceFlags
from providers import new_provider
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._instrument.instrumentation import Instrumentation
from otel_torchprof._native.recorder import CHUNK_BYTES, Session, recorder_stats
from otel_torchprof._record.contexts import ContextTable

LONG = 60
LABELS = {"detail": "modules", "skip_dep_check": True}


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """Whatever a test has left switched on is switched off again."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()
    assert recorder_stats().sessions == 0


def label(name: str) -> None:
    with otp.record_function(name):
        pass


def is_on(processor: otp.TorchSpanProcessor) -> bool:
    return processor.health.sources["recording"] == "on"


def test_several_threads_may_instrument_at_once():
    """Of many threads that instrument at the same moment one does, and one uninstrument undoes it."""
    provider = new_provider(otp.TorchSpanProcessor())
    in_threads(*[lambda: otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)] * 8)
    assert recorder_stats().sessions == 1
    otp.TorchInstrumentor().uninstrument()


def test_after_a_providers_shutdown_another_may_follow(caplog):
    """The shutdown of a provider has ended it all: the next instrument() begins anew, without an uninstrument() between."""
    following = otp.TorchSpanProcessor()
    first, second = new_provider(otp.TorchSpanProcessor()), new_provider(following)
    otp.TorchInstrumentor().instrument(tracer_provider=first, **LABELS)
    first.shutdown()
    with caplog.at_level(logging.WARNING):
        otp.TorchInstrumentor().instrument(tracer_provider=second, **LABELS)
    assert is_on(following)
    assert caplog.text == ""
    second.shutdown()


def test_a_start_that_fails_leaves_nothing():
    """When there is no room for a recording, instrument() says so, and nothing of it stays; with room it works."""
    sessions = [Session(CHUNK_BYTES) for _ in range(16)]
    for session in sessions:
        session.start()
    provider, threads = new_provider(), set(threading.enumerate())
    with pytest.raises(otp.NativeError, match="16 recordings"):
        otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)
    assert otp.TorchInstrumentor()._own is None
    assert set(threading.enumerate()) <= threads
    for session in sessions:
        session.stop()
        session.drain()
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)
    provider.shutdown()


def test_a_provider_that_comes_when_nobody_waits_any_more(monkeypatch):
    """Uninstrumented at the very moment at which the provider is there: nothing is instrumented afterwards."""
    instrumentor, answers = otp.TorchInstrumentor(), iter([ProxyTracerProvider(), None])

    def come_too_late():
        answer = next(answers, provider)
        if answer is None:
            instrumentor.uninstrument()
            return provider
        return answer

    provider = new_provider(otp.TorchSpanProcessor())
    monkeypatch.setattr(trace, "get_tracer_provider", come_too_late)
    instrumentor.instrument(**LABELS)
    for thread in threading.enumerate():
        if thread.name == "otel-torchprof-wait":
            thread.join(LONG)
    assert recorder_stats().sessions == 0


def test_a_processor_may_follow_its_provider(monkeypatch):
    """A program that sets its provider late and adds its processors right after that has its TorchSpanProcessor found."""
    answers, found = iter([ProxyTracerProvider()]), threading.Event()
    provider, processor = new_provider(), otp.TorchSpanProcessor()

    def look():
        answer = next(answers, provider)
        if answer is provider:
            found.set()
        return answer

    monkeypatch.setattr(trace, "get_tracer_provider", look)
    otp.TorchInstrumentor().instrument(**LABELS)
    assert found.wait(LONG)
    provider.add_span_processor(processor)
    for thread in threading.enumerate():
        if thread.name == "otel-torchprof-wait":
            thread.join(LONG)
    assert is_on(processor)
    provider.shutdown()


def test_a_late_start_that_fails_is_logged(monkeypatch, caplog):
    """What goes wrong when the provider comes later is in the log, and the thread that waited for it ends quietly."""
    answers = iter([ProxyTracerProvider()])

    def fail(*_, **__):
        raise OSError("no start")

    monkeypatch.setattr(trace, "get_tracer_provider", lambda: next(answers, new_provider()))
    monkeypatch.setattr(Instrumentation, "__init__", fail)
    with caplog.at_level(logging.ERROR, "otel_torchprof"):
        otp.TorchInstrumentor().instrument(**LABELS)
        for thread in threading.enumerate():
            if thread.name == "otel-torchprof-wait":
                thread.join(LONG)
    assert "no start" in caplog.text


@pytest.mark.parametrize("group", [SynchronousMultiSpanProcessor, lambda: ConcurrentMultiSpanProcessor(2)])
@pytest.mark.parametrize("nested", [False, True], ids=["the provider's", "one of its processors"])
def test_the_processor_is_found_in_groups(group, nested):
    """A TorchSpanProcessor is found in whatever groups of processors the provider has, and its spans arrive there."""
    processor, processors = otp.TorchSpanProcessor(), group()
    processors.add_span_processor(processor)
    provider = (
        new_provider(processors) if nested else TracerProvider(shutdown_on_exit=False, active_span_processor=processors)
    )
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)
    assert is_on(processor)
    with provider.get_tracer("test").start_as_current_span("request"):
        label("work")
    assert {average.key for average in processor.key_averages()} == {"request", "work"}
    provider.shutdown()
    assert not is_on(processor)


def test_nothing_is_astray_around_the_beginning_and_the_end(monkeypatch):
    """Whatever other threads do while it is switched on or off is recorded with the span that it is in, or not at all."""
    processor = otp.TorchSpanProcessor()
    provider = new_provider(processor)

    def beside(method):
        def call(table):
            with provider.get_tracer("test").start_as_current_span("request"):
                label("before")
                result = method(table)
                label("after")
            return result

        return call

    for name in ("follow", "unfollow"):
        monkeypatch.setattr(ContextTable, name, beside(getattr(ContextTable, name)))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)
    label("inside")
    otp.TorchInstrumentor().uninstrument()
    assert {average.key for average in processor.key_averages()} - {"request"} == {"inside"}


def test_remote_parents_are_not_remembered():
    """What runs under spans of other processes leaves nothing behind in this one: their own times are not worked out here."""
    processor = otp.TorchSpanProcessor()
    provider = new_provider(processor)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, **LABELS)
    for number in range(1, 10):
        remote = NonRecordingSpan(SpanContext(number, number, is_remote=True, trace_flags=TraceFlags(1)))
        token = otel_context.attach(trace.set_span_in_context(remote))
        label("work")
        otel_context.detach(token)
    assert [(average.key, average.count) for average in processor.key_averages()] == [("work", 9)]
    assert processor._child_times == {}
    provider.shutdown()
