"""``detail="metrics"`` without any torch: who switches it on and off, and what the loop's thread is spared."""

from __future__ import annotations

import functools
import logging
import threading
import time

import pytest
from opentelemetry import metrics as otel_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from threaded import in_threads
from torch_metrics import data_points, points, value

import otel_torchprof as otp
from otel_torchprof._export import draining
from otel_torchprof._instrument import instrumentor, metrics_instrumentation
from otel_torchprof._instrument.metrics_instrumentation import MetricsInstrumentation
from otel_torchprof._instrument.operator_metrics import has_sdk, metrics_of
from otel_torchprof._native.recorder import Session, recorder_stats
from otel_torchprof._process import process_changes
from otel_torchprof._record import recording
from otel_torchprof._record.step_marks import StepTracker

LONG = 30


class Library:
    """A stand-in for what records torch's operators: keeps account of who observes."""

    def __init__(self) -> None:
        self.observing = 0
        self.times = 0
        self.fails = False
        self.refused = threading.Event()

    def observe(self, _session, _wants=None):
        if self.fails:
            self.refused.set()
            raise otp.TorchLibraryError("torch refused to register an observer of its operators")
        self.observing += 1
        self.times += 1
        return self

    def stop(self) -> None:
        self.observing -= 1


@pytest.fixture
def library(monkeypatch) -> Library:
    """Torch is there, and its library, as far as anybody sees."""
    found = Library()

    def imported(_name, action):
        action(None)
        return lambda: None

    monkeypatch.setattr(recording, "when_imported", imported)
    monkeypatch.setattr(metrics_instrumentation.OptimizerHooks, "install_bare", lambda _self, _hook: None)
    monkeypatch.setattr(metrics_instrumentation.torch_library, "load", lambda: found)
    monkeypatch.setattr(metrics_instrumentation, "event_cost", lambda _library: 1e-7)
    return found


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """No torch, unless a test has one; whatever it leaves switched on is switched off again."""
    monkeypatch.setattr(recording, "when_imported", lambda _name, _action: lambda: None)
    monkeypatch.setattr(draining, "_LOOK_SECONDS", 0.005)
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()
    assert recorder_stats().sessions == 0


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader) -> MeterProvider:
    return MeterProvider([reader], shutdown_on_exit=False)


def instrument(provider=None, **options) -> MetricsInstrumentation:
    otp.TorchInstrumentor().instrument(
        meter_provider=provider, **{"detail": "metrics", "skip_dep_check": True, **options}
    )
    return otp.TorchInstrumentor()._running


def steps_until(condition) -> None:
    """Makes steps, each of which waits a little as for data, until something has happened.

    A loop that releases the GIL for moments only has it back before another thread is awake, which it then keeps from running.
    """
    deadline, data = time.monotonic() + LONG, threading.Event()
    while not condition():
        data.wait(0.001)
        otp.TorchInstrumentor().step()
        assert time.monotonic() < deadline, otp.TorchInstrumentor().health


def test_steps_without_torch(provider, reader):
    """Steps that the program tells of are counted and measured where there is no torch; health says what is off."""
    instrument(provider)
    for _ in range(5):
        otp.TorchInstrumentor().step()
    assert points(reader, "torch.steps") == [({"torch.sampled": True}, 0), ({"torch.sampled": False}, 5)]
    assert value(reader, "torch.step.duration").count >= 1
    health = otp.TorchInstrumentor().health
    assert {name: state for name, state in health.sources.items() if name != "gpus"} == {
        "recording": "on",
        "steps": "off: torch is not imported",
        "operators": "off: torch is not imported",
    }
    otp.TorchInstrumentor().uninstrument()
    assert otp.TorchInstrumentor().health.sources == {"recording": "off: not instrumented"}


def test_it_observes_in_turn(provider, library):
    """Torch's library is asked to observe again and again, once at a time, and in the end no more."""
    instrument(provider, overhead=0.1)
    most = []
    steps_until(lambda: most.append(library.observing) or library.times >= 3)
    assert set(most) == {0, 1}
    otp.TorchInstrumentor().uninstrument()
    assert library.observing == 0


def test_all_is_observed_where_all_is_allowed(provider, library, reader):
    """With an overhead of 1 the library observes once, from the begin to the end."""
    instrument(provider, overhead=1)
    for _ in range(100):
        otp.TorchInstrumentor().step()
    assert (library.times, library.observing) == (1, 1)
    assert points(reader, "torch.steps")[0] == ({"torch.sampled": True}, 100)
    assert value(reader, "torch.step.duration").count == 99
    assert data_points(reader, "otel_torchprof.overhead") == []


def test_a_refusal_does_not_reach_the_loop(provider, library, caplog):
    """When torch refuses the observer the step goes on, operators are off from then on, and health and one warning say why."""
    library.fails = True
    running = instrument(provider, overhead=0.1)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        steps_until(lambda: running.health.sources["operators"].startswith("off: torch refused"))
        steps_until(lambda: "torch refused" in caplog.text)
        for _ in range(100):
            otp.TorchInstrumentor().step()
    assert caplog.text.count("not counted, steps are: torch refused") == 1


def test_a_refusal_without_steps(provider, library, caplog, monkeypatch):
    """When torch refuses where there are no steps, that is logged once, and the thread that drains continues."""
    looks = threading.Semaphore(0)
    monkeypatch.setattr(metrics_instrumentation, "has_sdk", lambda _provider: looks.release() or True)
    monkeypatch.setattr(StepTracker, "expects_steps", lambda _self: False)
    library.fails = True
    running = instrument(provider, overhead=0.1)
    assert library.refused.wait(LONG)
    while looks.acquire(blocking=False):
        pass
    assert looks.acquire(timeout=LONG)
    otp.TorchInstrumentor().uninstrument()
    assert running.health.sources["operators"].startswith("off: torch refused")
    assert [record.message.partition(" refused")[0] for record in caplog.records] == [
        "torch's operators are not counted, steps are: torch"
    ]


def test_a_refusal_where_all_is_observed(provider, library):
    """With an overhead of 1 a refusal does not reach who instruments, or imports torch."""
    library.fails = True
    running = instrument(provider, overhead=1)
    assert running.health.sources["operators"].startswith("off: torch refused")
    assert running.health.notes == ()


def test_the_loop_waits_for_nobody(provider, library):
    """While another thread has the lock, steps are noted and nothing is switched; afterwards both go on."""
    running = instrument(provider, overhead=0.1)
    steps_until(lambda: library.times >= 1)
    has_it, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with running._lock:
            has_it.set()
            let_go.wait(LONG)

    holder = threading.Thread(target=hold)
    holder.start()
    assert has_it.wait(LONG)
    before = library.times, library.observing
    for _ in range(1000):
        otp.TorchInstrumentor().step()
    assert (library.times, library.observing) == before
    let_go.set()
    holder.join(LONG)
    steps_until(lambda: library.times > before[0])


def test_nobody_to_tell(library, monkeypatch):
    """As long as no MeterProvider is set, or one that nobody reads, nothing is recorded; once there is a reader it is."""
    waiting = type("_ProxyMeterProvider", (), {})()
    current = [waiting]
    monkeypatch.setattr(metrics_instrumentation.otel_metrics, "get_meter_provider", lambda: current[0])
    assert not has_sdk(waiting)
    looked = threading.Semaphore(0)
    look = MetricsInstrumentation._look
    monkeypatch.setattr(MetricsInstrumentation, "_look", lambda self: (look(self), looked.release())[0])
    instrument(overhead=0.1)
    for provider in (waiting, MeterProvider(shutdown_on_exit=False)):
        current[0] = provider
        for _ in range(3):
            assert looked.acquire(timeout=LONG)
            otp.TorchInstrumentor().step()
    assert library.times == 0
    current[0] = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    steps_until(lambda: library.times > 0)


@pytest.mark.parametrize("made", [otel_metrics.NoOpMeterProvider, MeterProvider])
def test_a_provider_that_is_switched_off(made, monkeypatch):
    """With a MeterProvider that shows nothing to anybody (OTEL_SDK_DISABLED) nothing is recorded."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert instrument(made()) is None


def test_the_providers_shutdown(provider, library):
    """A MeterProvider that is shut down ends it, and it can be switched on again with another one."""
    running = instrument(provider, overhead=1)
    provider.shutdown()
    steps_until(lambda: not running.is_running)
    assert library.observing == 0
    assert instrument(MeterProvider(shutdown_on_exit=False), overhead=1) is not running


def test_a_look_that_fails_is_not_the_last(provider, library, monkeypatch, caplog):
    """What goes wrong in the thread that counts is logged, and it continues."""
    failures = [RuntimeError("first"), RuntimeError("second")]

    def cost(_library) -> float:
        if failures:
            raise failures.pop(0)
        return 1e-7

    monkeypatch.setattr(metrics_instrumentation, "event_cost", cost)
    instrument(provider, overhead=0.1)
    steps_until(lambda: library.times > 0)
    assert not failures
    assert "continues after RuntimeError: first" in caplog.text


def test_a_failing_drain_does_not_reach_the_reader(provider, reader, library, caplog):
    """A reader that asks while events cannot be taken gets what there is; they are counted as lost where they were."""
    running = instrument(provider, overhead=1)

    def fails(_batch):
        raise RuntimeError("no")

    metrics_of(provider).add = fails
    otp.TorchInstrumentor().step()
    assert points(reader, "torch.steps")[0] == ({"torch.sampled": True}, 1)
    assert "taking events from the recorder failed" in caplog.text
    del metrics_of(provider).add
    assert running.health.dropped == {}


def test_a_stop_that_was_interrupted_is_done_by_the_next(provider, reader, library, monkeypatch):
    """An interrupt in the middle of a stop leaves what is left of it, the thread among it, to the next stop."""
    running = instrument(provider, overhead=1)
    otp.TorchInstrumentor().step()
    interrupts = [KeyboardInterrupt()]

    def close_due() -> None:
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(recording, "close_due", close_due)
    with pytest.raises(KeyboardInterrupt):
        otp.TorchInstrumentor().uninstrument()
    assert running._drainer.has_thread
    otp.TorchInstrumentor().uninstrument()
    assert not running._drainer.has_thread
    assert points(reader, "torch.steps")[0][1] == 1


def test_many_threads_step_and_read(provider, reader, library):
    """Loops on several threads, readers and switching off at once: every step is counted, nothing is left."""
    instrument(provider, overhead=0.5)
    begin, raised = threading.Barrier(5), []

    def body(work) -> None:
        try:
            begin.wait(LONG)
            for _ in range(300):
                work()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            raised.append(error)

    works = [otp.TorchInstrumentor().step] * 3 + [lambda: points(reader, "torch.steps")] * 2
    in_threads(*(functools.partial(body, work) for work in works))
    otp.TorchInstrumentor().uninstrument()
    assert raised == []
    assert sum(count for _, count in points(reader, "torch.steps")) == 900
    assert library.observing == 0


def test_too_many_recordings(provider, library):
    """Where 16 recordings run the error says so, and instrumenting works as soon as one of them has been read."""
    others = [Session(1 << 20) for _ in range(16)]
    for other in others:
        other.start()
    with pytest.raises(otp.NativeError, match="16 recordings hold data"):
        instrument(provider)
    for other in others:
        other.stop()
        other.final_batch()
    otp.TorchInstrumentor().uninstrument()
    assert instrument(provider).is_running


def is_taken(lock) -> bool:
    """Whether a thread has a lock, asked on another thread."""
    found = []
    in_threads(lambda: found.append(lock.acquire(blocking=False) and lock.release() is None))
    return found == [False]


def test_forks_on_two_threads(provider, library, monkeypatch):
    """Of two forks at the same time each releases the lock that it took, and no other; whoever is instrumented by then."""
    monkeypatch.setattr(process_changes, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(draining, "_LOOK_SECONDS", 3600)  # nobody else takes the lock
    running = instrument(provider)
    instrumentor._before_fork()
    in_threads(lambda: (instrumentor._before_fork(), instrumentor._after_fork_in_parent()))
    assert is_taken(running._lock)
    monkeypatch.setattr(otp.TorchInstrumentor(), "_running", None)
    instrumentor._after_fork_in_parent()
    assert not is_taken(running._lock)
    monkeypatch.setattr(otp.TorchInstrumentor(), "_running", running)


def test_fork_whose_preparation_was_interrupted(provider, library, monkeypatch):
    """What an interrupt kept from being prepared is not undone: nothing raises, no lock stays taken."""
    monkeypatch.setattr(draining, "_LOOK_SECONDS", 3600)  # nobody else takes the lock
    running = instrument(provider)

    break_off = running._sampler.break_off

    def interrupted(now):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        break_off(now)

    with monkeypatch.context() as patched:
        patched.setattr(running._sampler, "break_off", interrupted)
        with pytest.raises(KeyboardInterrupt):
            instrumentor._before_fork()
    instrumentor._after_fork_in_parent()
    assert not is_taken(running._lock)
