"""TorchSpanProcessor between a recording and exporters; the recording is a stand-in here."""

from __future__ import annotations

import gc
import logging
import threading

import numpy as np
import pytest
from forked import in_child
from live_batches import Event
from live_recordings import Hanging, Recording, attached, names
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from providers import new_provider
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._export.queue import THREAD_NAME
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._record.contexts import ContextTable

LONG = 60


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def test_a_flush_takes_and_sends_what_there_is(recording, exporter):
    """force_flush drains the recording and has every exporter send it."""
    other = InMemorySpanExporter()
    processor = attached(recording, exporter, other)
    recording.waiting.append((Event("mm", 0, 10),))
    assert processor.force_flush()
    assert names(exporter) == names(other) == ["mm"]
    processor.shutdown()


def test_it_drains_on_schedule(recording, exporter):
    """Without anybody asking, what was recorded is sent after the scheduled delay."""
    recording.waiting.append((Event("mm", 0, 10),))
    processor = attached(recording, exporter, schedule_delay_millis=1)
    assert recording.drained.wait(60)
    processor.shutdown()
    assert names(exporter) == ["mm"]


def test_a_flush_keeps_its_deadline(recording):
    """An exporter that hangs costs no more than the time that was given, and the answer is False."""
    hanging = Hanging()
    processor = attached(recording, hanging)
    recording.waiting.append((Event("mm", 0, 10),))
    assert processor.force_flush(50) is False
    assert not hanging.outlasted
    hanging.let_go.set()
    processor.shutdown()


def test_a_shutdown_sends_the_rest_once(recording, exporter):
    """Shutdown stops the recording, sends what is left and shuts exporters down; a second one does nothing."""
    processor = attached(recording, exporter)
    recording.waiting.append((Event("mm", 0, 10),))
    processor.shutdown()
    processor.shutdown()
    assert recording.finished
    assert names(exporter) == ["mm"]
    assert exporter.export(()) is SpanExportResult.FAILURE
    assert processor.health.sources["recording"] == "off: not instrumented"


def test_a_drain_that_fails_is_not_the_last(recording, exporter, caplog):
    """An error in the drain thread is logged, and the next drain comes."""
    recording.fails = 1
    recording.waiting.append((Event("mm", 0, 10),))
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        processor = attached(recording, exporter, schedule_delay_millis=1)
        assert recording.drained.wait(60)
    processor.shutdown()
    assert names(exporter) == ["mm"]
    assert "no memory for a drain" in caplog.text


def test_spans_of_the_application_are_in_the_averages(recording):
    """A span's own time is without its children and without torch's work inside; a remote parent is nobody's child's."""
    processor = attached(recording)
    provider = new_provider(processor)
    tracer = provider.get_tracer("test")
    outer = tracer.start_span("outer", start_time=0)
    with otel_trace.use_span(outer):
        inner = tracer.start_span("inner", start_time=10)
    inner.end(30)
    outer.end(100)
    recording.inside = {inner.get_span_context().span_id: 5}
    sums = {a.key: (a.count, a.cpu_time_total, a.self_cpu_time_total) for a in processor.key_averages()}
    assert sums == {"inner": (1, 0.02, 0.015), "outer": (1, 0.1, 0.08)}
    provider.shutdown()


def test_spans_of_the_application_that_wait_are_nothing_to_the_garbage_collector(recording):
    """Where no exporter takes them, an ended span is freed at once, and the collector goes through nothing of what is kept."""
    processor = attached(recording)
    provider = new_provider(processor)
    tracer, table = provider.get_tracer("test"), ContextTable()

    def requests(count):
        for _ in range(count):
            with tracer.start_as_current_span("request"):
                table.resolve()
        gc.collect()
        return len(gc.get_objects())

    before = requests(10)
    assert requests(1000) < before + 100
    assert table.size == 1010
    assert processor.key_averages()[0].count == 1010
    provider.shutdown()


def test_a_name_that_raises_harms_nobody(recording, exporter):
    """A span may be named by any object: where its text is an error, ending it is none, and nothing that was recorded is lost."""

    class Name:
        def __str__(self):
            raise ValueError("no text")

    processor = attached(recording, exporter)
    provider = new_provider(processor)
    provider.get_tracer("test").start_span(Name()).end()
    recording.waiting.append((Event("mm", 0, 10),))
    assert processor.force_flush()
    assert names(exporter) == ["mm"]
    assert [average.key for average in processor.key_averages()] == ["(Name)"]
    provider.shutdown()


@pytest.mark.parametrize(("sdk_spans", "expected"), [(None, []), (False, []), (True, ["request"])])
def test_spans_of_the_application_are_sent_only_where_asked(recording, exporter, sdk_spans, expected):
    """By default an exporter gets torch's spans only: the application's own processor sends the others."""
    provider = new_provider(attached(recording, exporter, sdk_spans=sdk_spans))
    provider.get_tracer("test").start_span("request").end()
    assert provider.force_flush()
    assert names(exporter) == expected
    provider.shutdown()


def test_a_chrome_file_holds_the_applications_spans_too(recording, tmp_path):
    """A Chrome trace without the requests would be half a picture: it gets both."""
    path = tmp_path / "trace.json"
    provider = new_provider(attached(recording, otp.ChromeTraceExporter(path)))
    recording.waiting.append((Event("mm", 0, 10),))
    provider.get_tracer("test").start_span("request").end()
    provider.shutdown()
    text = path.read_text()
    assert '"mm"' in text
    assert '"request"' in text


def test_unsampled_spans_are_sent_nowhere(recording, exporter):
    """With sdk_spans=True, what the sampler refused stays out."""
    provider = new_provider(attached(recording, exporter, sdk_spans=True), sampler=ALWAYS_OFF)
    provider.get_tracer("test").start_span("request").end()
    provider.shutdown()
    assert names(exporter) == []


def test_health_tells_what_happened(recording, exporter):
    """Health counts events, losses by reason and spans per exporter, and prints."""
    processor = attached(recording, exporter)
    recording.waiting.append((Event("mm", 0, 10), Event("add", 20, 30)))
    processor.force_flush()
    health = processor.health
    assert (health.recorded, health.dropped, health.sources["recording"]) == (2, {"evicted": 1}, "on")
    assert health.exporters["0 InMemorySpanExporter"].exported_spans == 2
    assert "2 events recorded, dropped: 1 (evicted)" in str(health)
    processor.shutdown()


def test_a_flush_takes_slices_until_it_began(recording, exporter):
    """A flush hands on slice after slice of what was there when it began, and is not held up by what comes meanwhile."""
    processor = attached(recording, exporter)
    recording.waiting += [(Event(name, 0, 10),) for name in ("first", "second", "third", "later")]
    recording.watermarks = [1, 2, now_ns() + 10**12, 3]
    assert processor.force_flush()
    assert names(exporter) == ["first", "second", "third"]
    assert recording.watermarks == [3]
    processor.shutdown()


def test_spans_behind_others_wait_in_memory_of_their_own(recording):
    """What waits for a backend that hangs shares no memory with the drain that brought it; what goes at once is not copied."""
    hanging = Hanging()
    processor = attached(recording, hanging)
    brought = []
    drain = recording.drain
    recording.drain = lambda: brought.append(drain()) or brought[-1]
    recording.waiting += [(Event("first", 0, 10),), (Event("second", 0, 10),)]
    processor.force_flush(50)
    processor.force_flush(50)
    (waiting,) = [stats.waiting_spans for stats in processor.health.exporters.values()]
    hanging.let_go.set()
    processor.shutdown()
    tables = [spans.table for spans in hanging.got]
    of_drains = [spans.table for drained in brought for spans in drained.sent]
    shared = [np.shares_memory(mine.start, its.start) for mine, its in zip(tables, of_drains, strict=True)]
    assert (waiting, shared) == (2, [True, False])


def test_a_drain_that_is_behind_says_so(recording, exporter):
    """Health tells how old the events are that were taken last, until nothing is left."""
    processor = attached(recording, exporter)
    recording.watermarks = [now_ns() - 3 * 10**9]
    before_each = []
    recording.meanwhile = lambda: before_each.append(processor.health.notes)
    assert processor.force_flush()
    first, second = before_each
    assert (first, processor.health.notes) == ((), ())
    assert any("taken last were 3." in note for note in second)
    processor.shutdown()


def test_what_a_stop_has_no_time_for_is_counted(recording, exporter, caplog):
    """A stop hands on a slice, gives up the rest when its deadline has passed, and counts it."""
    processor = attached(recording, exporter)
    recording.waiting += [(Event("taken", 0, 10),), (Event("lost", 0, 10), Event("lost", 20, 30))]
    recording.watermarks = [1] * 10
    processor.detach(Deadline.after(0))
    assert (processor.health.recorded, processor.health.dropped) == (1, {"evicted": 1, "deadline": 2})
    assert "not all events were taken" in caplog.text
    processor.shutdown()
    assert names(exporter) == ["taken"]


def test_what_a_stop_has_taken_already_is_handed_on(recording, exporter):
    """A stop without time gives up what is in the recorder, and hands on all slices that had waited to be told their step."""
    processor = attached(recording, exporter)
    held = [Recording() for _ in range(3)]
    for number, each in enumerate(held):
        each.waiting, each.service, each.stopped = [(Event(f"held {number}", 0, 10),)], recording.service, True
        each.watermarks = [1] if number < 2 else []
    recording.finish = recording.give_up = lambda: held.pop(0).finish()
    processor.detach(Deadline.after(0))
    processor.shutdown()
    assert names(exporter) == ["held 0", "held 1", "held 2"]


def test_spans_of_the_application_do_not_wait_by_the_thousand(recording, monkeypatch):
    """Where many of them wait for events that wait to be told their step, these are not held any longer."""
    monkeypatch.setattr("otel_torchprof._instrument.processor._MAX_ENDED", 16)
    provider = TracerProvider(shutdown_on_exit=False)
    processor = attached(recording)
    provider.add_span_processor(processor)
    flushes = []
    monkeypatch.setattr(recording, "flush", lambda: flushes.append(len(processor._ended)))
    monkeypatch.setattr(recording, "drain", lambda: None)
    for _ in range(3):
        with provider.get_tracer("test").start_as_current_span("request"):
            processor._hand_on()
    assert flushes == [2]
    processor.shutdown()


def test_spans_of_the_application_wait_for_what_ran_inside(recording, exporter):
    """A span that ended behind a slice is added up with a later one, with the time of what ran in it as its children's."""
    provider = TracerProvider(shutdown_on_exit=False)
    processor = attached(recording)
    provider.add_span_processor(processor)
    span = provider.get_tracer("test").start_span("request", start_time=0)
    span.end(end_time=100)
    recording.watermarks = [50]
    waited = []

    def inside():
        waited.append(bool(processor._ended))
        if len(waited) == 2:
            recording.inside = {span.get_span_context().span_id: 60}

    recording.meanwhile = inside
    (row,) = [row for row in processor.key_averages() if row.key == "request"]
    assert (row.cpu_time_total, row.self_cpu_time_total) == (0.1, 0.04)
    assert waited == [True, True]
    provider.shutdown()


def test_threads_end_with_the_recording(recording, exporter):
    """After detach no drain thread is left, after shutdown no thread at all."""
    before = set(threading.enumerate())
    processor = attached(recording, exporter)
    recording.waiting.append((Event("mm", 0, 10),))
    processor.force_flush()
    processor.detach()
    assert {t.name for t in set(threading.enumerate()) - before} == {"otel-torchprof-export"}
    processor.shutdown()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("http://localhost:4317",), {}, TypeError, "'http://localhost:4317' is no SpanExporter"),
        ((), {"memory_limit": 1}, ValueError, "memory_limit is 1 bytes"),
        ((), {"max_queue_size": -1}, ValueError, "max_queue_size"),
        ((), {"schedule_delay_millis": "soon"}, (TypeError, ValueError), "schedule_delay_millis"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    """A bad argument raises at once, with its name and its value."""
    with pytest.raises(error, match=message):
        otp.TorchSpanProcessor(*arguments, **options)


# ---- things that happen at the same time, fail, or never end; forked children ----


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
    provider = new_provider(otp.TorchSpanProcessor(exporter, sdk_spans=True, schedule_delay_millis=1))
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
