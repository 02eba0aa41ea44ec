"""No event is lost without a count, whatever raises, interrupts or stops in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from providers import new_provider
from threaded import in_threads

import otel_torchprof as otp

LONG = 60
NEVER_MS = 10**8


class Sink(SpanExporter):
    """Counts."""

    takes_span_lists = True

    def __init__(self):
        self.spans = 0

    def export(self, spans):
        self.spans += len(spans)
        return SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self):
        pass


class Program:
    """Instrumented; counts its labels."""

    def __init__(self, **options: Any) -> None:
        self.exporter = Sink()
        processor = {"schedule_delay_millis": NEVER_MS, **options.pop("processor", {})}
        self.processor = otp.TorchSpanProcessor(self.exporter, **processor)
        self.provider = new_provider(self.processor, **options.pop("provider", {}))
        self.labels = 0
        otp.TorchInstrumentor().instrument(
            tracer_provider=self.provider, detail="modules", skip_dep_check=True, **options
        )

    def work(self, count: int) -> None:
        for _ in range(count):
            with otp.record_function("label"):
                pass
        self.labels += count

    def balanced(self) -> Any:
        """Health, at the end: all labels are in one count, and the exporter has what it is said to have."""
        otp.TorchInstrumentor().uninstrument()
        self.provider.shutdown()
        health = self.processor.health
        (stats,) = health.exporters.values()
        spans = Counter(health.spans)
        came = health.recorded + spans["added"] + spans["parts"] + spans["application"]
        less = sum(
            spans[w]
            for w in ("not_sampled", "filtered", "failed", "aggregated", "collapsed", "detail_dropped", "buffered")
        )
        assert came == less + stats.exported_spans + stats.failed_spans + stats.dropped_spans
        assert health.recorded + sum(health.dropped.values()) == self.labels
        # What the exporter has in its hands when the time is over may have arrived, and is counted as that.
        assert 0 <= self.exporter.spans - stats.exported_spans <= stats.dropped.get("no_response", 0)
        return health


def test_metrics_that_raise_cost_no_span():
    """What the program's own metrics raise, with every step, is logged."""

    class Refusing:
        def should_sample(self, *_: object) -> bool:
            raise ValueError("no exemplars")

    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], exemplar_filter=Refusing(), shutdown_on_exit=False)
    program = Program(meter_provider=meters)
    for _ in range(3):
        program.work(50)
        otp.TorchInstrumentor().step()
        assert program.provider.force_flush()
    assert program.balanced().recorded == 150


@pytest.mark.parametrize("second", ["shutdown", "uninstrument"])
def test_two_stops_at_once(second):
    """The second waits for what the first takes from the recorder, so that the exporter is there for it."""
    program = Program()
    program.work(5_000)
    barrier = threading.Barrier(2)
    calls = [program.provider.shutdown, program.processor.shutdown]
    if second == "uninstrument":
        calls[1] = otp.TorchInstrumentor().uninstrument
    in_threads(*(lambda call=call: (barrier.wait(LONG), call()) for call in calls))
    assert program.balanced().recorded == 5_000
    assert program.exporter.spans >= 5_000


def test_a_shutdown_in_a_handler_of_a_signal_during_a_flush():
    """The flush waits while another thread drains, so the handler's shutdown takes all that there is."""
    program = Program()
    program.work(20_000)
    taken = threading.Event()
    export = program.exporter.export

    def signalling(spans):
        if not taken.is_set():
            taken.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        return export(spans)

    program.exporter.export = signalling
    before = signal.signal(signal.SIGALRM, lambda *_: program.provider.shutdown())
    try:
        program.provider.force_flush()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert program.balanced().recorded == 20_000
    assert program.exporter.spans >= 20_000


def test_a_shutdown_without_time_sends_the_running_step_once():
    """The drain thread takes the rest, and is asked to give it up as well: the second time nothing is left to send."""
    program = Program()
    program.work(10)
    otp.TorchInstrumentor().step()
    program.work(10)
    program.processor.shutdown_within(0)
    health = program.balanced()
    assert health.recorded == 20
    assert health.spans["added"] == len(["torch.job", "torch.step 0", "torch.step 1"])


@pytest.mark.parametrize("asked", ["shutdown", "force_flush"])
def test_a_handler_of_a_signal_that_comes_while_something_is_counted(asked):
    """The drain thread counts too: the handler lets it, and has the lock back afterwards."""
    program = Program()
    program.work(5_000)
    lock, settled = program.processor._ledger.lock, []
    before = signal.signal(signal.SIGALRM, lambda *_: settled.append(getattr(program.provider, asked)()))
    try:
        with lock, lock:
            signal.raise_signal(signal.SIGALRM)
            assert lock._is_owned()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert settled != [False]
    assert program.exporter.spans >= 5_000
    assert program.balanced().dropped == {}


def test_interrupts_while_somebody_waits_for_averages():
    """They reach the program; the drain that it waited for goes on elsewhere, and every event is in the end where it belongs."""
    program, interrupted = Program(), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(40):
            program.work(500)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 * (number + 1))
                program.processor.key_averages()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    assert program.balanced().recorded == program.labels


def test_a_sampler_that_exits():
    """SystemExit in a sampler costs the events that it was asked about, not the thread that drains."""

    class Exits(Sampler):
        exits = True

        def should_sample(self, *arguments, **keywords):
            if self.exits:
                raise SystemExit
            return ALWAYS_ON.should_sample(*arguments, **keywords)

        def get_description(self):
            return "Exits"

    sampler = Exits()
    program = Program(provider={"sampler": sampler})
    program.work(10)
    assert not program.provider.force_flush()
    sampler.exits = False
    program.work(10)
    assert program.provider.force_flush()
    health = program.balanced()
    assert (health.recorded, health.dropped) == (10, {"failed": 10})


def test_an_odd_span_of_the_application():
    """A name that cannot be hashed costs no span: the averages do not say what is sent."""
    program = Program(processor={"sdk_spans": True})
    tracer = program.provider.get_tracer("application")
    for name in ("before", ["odd"], "after"):
        tracer.start_span(name).end()
    program.provider.force_flush()
    assert program.balanced().spans["application"] == program.exporter.spans == 3
