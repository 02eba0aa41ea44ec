"""``stream``: what was recorded goes out while it is recorded, and nothing of it stays."""

from __future__ import annotations

import gc
import json
import sys
import threading
import tracemalloc
from pathlib import Path

import forked_programs
import pytest
from chrome_files import events_in, slices
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import new_provider

import otel_torchprof as otp
from otel_torchprof._instrument.live_recording import LiveRecording
from otel_torchprof._native.recorder import CHUNK_BYTES, Session, recorder_stats

LONG = 60
BYTES_OF_LABEL = 48
"""Of records: its begin, and its end."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves a recording."""
    yield
    assert recorder_stats().sessions == 0


def label(name: str) -> None:
    with otp.record_function(name):
        pass


def test_what_is_recorded_is_in_the_file_at_the_end(tmp_path):
    """Labels of a block are slices of the trace and rows of the averages; after the block nothing is recorded."""
    with otp.stream(otp.ChromeTraceExporter(tmp_path / "t.json"), detail="modules") as streamed:
        for name in ("a", "b", "a"):
            label(name)
        assert streamed.health.sources["recording"] == "on"
    label("late")
    assert sorted(event["name"] for event in slices(events_in(tmp_path / "t.json"))) == ["a", "a", "b"]
    assert {average.key: average.count for average in streamed.key_averages()} == {"a": 2, "b": 1}
    health = streamed.health
    assert (health.sources["recording"], health.sources["labels"]) == ("off: stopped", "on")
    assert (health.recorded, dict(health.dropped)) == (3, {})


class Exported(InMemorySpanExporter):
    """Says when something has come."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = threading.Event()

    def export(self, spans):
        found = super().export(spans)
        self.has_come.set()
        return found


def test_a_small_memory_limit_is_not_waited_for(monkeypatch):
    """Where a quarter of what the recorder may hold waits, it is taken at once, however long the schedule is and however much a drain takes."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    exporter = Exported()
    with otp.stream(exporter, detail="modules", memory_limit=1 << 20) as streamed:
        for _ in range((600 << 10) // BYTES_OF_LABEL):
            label("often")
        assert exporter.has_come.wait(LONG)
        assert dict(streamed.health.dropped) == {}


def test_steps_of_the_program(tmp_path):
    """Each step() ends a trace, and a flush sends those that have ended."""
    exporter = InMemorySpanExporter()
    with otp.stream(exporter) as streamed:
        for _ in range(3):
            label("forward")
            streamed.step()
        assert streamed.flush()
        assert streamed.steps == 3
        spans = [span for span in exporter.get_finished_spans() if span.name == "torch.step"]
        assert [span.attributes["torch.step.number"] for span in spans] == [0, 1, 2]
        assert len({span.context.trace_id for span in spans}) == 3


def test_an_exception_leaves_a_whole_file(tmp_path):
    """What was recorded until then is written, the label that it left is marked, and the exception goes on."""
    recording = otp.stream(otp.ChromeTraceExporter(tmp_path / "t.json"))
    with pytest.raises(ZeroDivisionError), recording, otp.record_function("failing"):
        1 / 0  # noqa: B018
    [event] = slices(events_in(tmp_path / "t.json"))
    assert event["name"] == "failing"
    assert event["args"]["status"] == "ERROR"


def held_after(streamed: otp.stream, rounds: int) -> int:
    """Bytes that Python and numpy hold once so many rounds of labels have been sent."""
    for _ in range(rounds):
        for number in range(2_000):
            label(f"operator {number % 10}")
        streamed.step()
        assert streamed.flush()
    assert streamed._processor.figures().buffer_bytes <= 2 * CHUNK_BYTES
    assert all(stats.waiting_spans == 0 for stats in streamed.health.exporters.values())
    with streamed._processor._drainer.draining:  # nobody has a batch in hand
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


def test_a_slice_that_fails_sends_no_step_twice(monkeypatch):
    """Steps that wait for a later slice are sent once, also where the slice before it failed."""
    exporter, failures = InMemorySpanExporter(), [True]
    # Else another drain may have the slice that fails.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setattr(LiveRecording, "is_due", False)
    with otp.stream(exporter, detail="modules") as streamed:
        recording = streamed._instrumentation._live
        drain, spans = recording._recording.batches.drain, recording._spans

        def failing(*arguments, **keywords):
            if failures:
                raise MemoryError(failures.pop())
            return spans(*arguments, **keywords)

        monkeypatch.setattr(recording._recording.batches, "drain", lambda _: drain(CHUNK_BYTES))
        monkeypatch.setattr(recording, "_spans", failing)
        for _ in range(20):
            for number in range(500):
                label(f"label {number}")
            streamed.step()
        assert not streamed.flush()
    numbers = [
        span.attributes["torch.step.number"] for span in exporter.get_finished_spans() if span.name == "torch.step"
    ]
    assert not failures
    assert len(numbers) == len(set(numbers)) >= 20


def test_a_stop_without_time_counts_every_event(monkeypatch):
    """What a stop takes and what it throws away are together what was recorded, an open label too."""
    exporter = InMemorySpanExporter()
    with otp.stream(exporter, detail="modules") as streamed:
        session = streamed._instrumentation._live._recording.batches
        drain = session.drain
        monkeypatch.setattr(session, "drain", lambda _: drain(CHUNK_BYTES))
        with otp.record_function("open"):
            for number in range(10_000):
                label(f"label {number % 10}")
            streamed.stop(timeout=0)
    health = streamed.health
    assert 0 < health.dropped["deadline"] < 10_001
    assert health.recorded + health.dropped["deadline"] == 10_001


def test_memory_does_not_grow(tmp_path, monkeypatch):
    """After ten times as many events no more is held: nowhere in Python or numpy, in the recorder, or in a queue."""
    # A scheduled drain that ends while we measure has a batch in the variables of its thread, more than what is allowed below.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv(
        "OTEL_TORCHPROF_SAMPLING", "false"
    )  # samples come by time, and wait for a step that may have been
    tracemalloc.start()
    try:
        exporter = otp.ChromeTraceExporter(tmp_path / "t.json", steps_per_file=2, max_files=2)
        with otp.stream(exporter) as streamed:
            before = held_after(streamed, 3)
            grown = held_after(streamed, 30) - before
            collections = sum(row.count for row in streamed.key_averages() if row.key == "torch.phase.gc")
            assert streamed.health.recorded == 66_000 + collections
    finally:
        tracemalloc.stop()
    assert grown < 60_000  # a byte per event
    assert len(list(tmp_path.iterdir())) == 2


def test_beside_an_instrumented_service():
    """Both have every label of a request under the request's span, before, while and after the stream runs."""
    exporter, streamed = InMemorySpanExporter(), InMemorySpanExporter()
    provider = new_provider(otp.TorchSpanProcessor(exporter))
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="modules", skip_dep_check=True)
    with provider.get_tracer("app").start_as_current_span("request") as request:
        label("before")
        with otp.stream(streamed, detail="modules"), otp.profile(operators=False) as prof:
            label("while")
        label("after")
    provider.shutdown()
    assert [event.name for event in prof.events()] == ["while"]
    for found, expected in ((exporter, ["before", "while", "after"]), (streamed, ["while"])):
        spans = found.get_finished_spans()
        assert [span.name for span in spans] == expected
        assert {span.parent.span_id for span in spans} == {request.get_span_context().span_id}


def test_calls_from_the_start_where_there_is_no_torch(monkeypatch):
    """Python's calls are recorded without waiting for a torch that is not installed."""
    monkeypatch.setattr("otel_torchprof._instrument.streaming.is_there", lambda name: False)
    exporter = InMemorySpanExporter()
    with otp.stream(exporter, detail="frames", frames=otp.FrameFilter(include=[__name__])) as streamed:
        label("x")
    spans = exporter.get_finished_spans()  # perhaps with collections of garbage
    (outer,) = (span for span in spans if span.name.endswith(": label"))
    (inner,) = (span for span in spans if span.name == "x")
    assert inner.parent == outer.context
    assert streamed.health.sources["frames"] == "on"


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ({"OTEL_TORCHPROF_ENABLED": "false"}, "off: OTEL_TORCHPROF_ENABLED is false"),
        ({"OTEL_SDK_DISABLED": "true"}, "off: the SDK is switched off"),
    ],
)
def test_switched_off(monkeypatch, tmp_path, variable, reason):
    """The switches switch it off, and its health says which."""
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    with otp.stream(otp.ChromeTraceExporter(tmp_path / "t.json")) as streamed:
        label("x")
        streamed.step()
        assert streamed.health.sources == {"recording": reason}
    assert streamed.key_averages() == []
    assert list(tmp_path.iterdir()) == []


def test_arguments_and_starts():
    """A bad argument is named; a stream is started once; a start that fails leaves nothing, and its exporters are shut down."""
    with pytest.raises(ValueError, match="detail is 'metrics'; it must be one of 'steps'"):
        otp.stream(detail="metrics")
    with pytest.raises(TypeError, match="is no SpanExporter"):
        otp.stream("trace.json")
    streamed = otp.stream()
    assert streamed.health.sources == {"recording": "off: not started"}
    with streamed, pytest.raises(otp.TorchProfError, match="make another"):
        streamed.start()
    sessions = [Session(CHUNK_BYTES) for _ in range(16)]
    for session in sessions:
        session.start()
    exporter = InMemorySpanExporter()
    with pytest.raises(otp.NativeError, match="16 recordings"):
        otp.stream(exporter).start()
    assert exporter._stopped
    for session in sessions:
        session.stop()
        session.drain()


FORKS = """
import os, sys, warnings
warnings.simplefilter("ignore")
import otel_torchprof as otp
with otp.stream(otp.ChromeTraceExporter(sys.argv[1]), detail="modules") as streamed:
    with otp.record_function("parent"):
        pass
    if os.fork() == 0:
        with otp.record_function("child"):
            pass
        assert streamed.health.sources["recording"].startswith("off"), streamed.health
        streamed.step()
        sys.exit(0)
    assert os.wait()[1] == 0
"""


def test_a_forked_child_is_not_recorded(tmp_path):
    """A child that leaves the block too, and ends as programs end, writes nothing and does no harm to the parent's file."""
    path = tmp_path / "t.json"
    done = forked_programs.run([sys.executable, "-c", FORKS, path], cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [event["name"] for event in slices(events_in(path))] == ["parent"]
    assert list(tmp_path.iterdir()) == [path]
    json.loads(path.read_text())


@pytest.mark.parametrize("again", ["stop", "another"])
def test_a_stop_that_is_interrupted_is_completed(tmp_path, monkeypatch, again):
    """What an interrupted stop left on is off after the next stop, or once something else has started and stopped; the file is whole."""
    running = otp.stream(otp.ChromeTraceExporter(tmp_path / "t.json"))
    running.start()
    with otp.record_function("kept"):
        pass

    def interrupted(_deadline):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(running._processor, "detach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.stop()
    if again == "another":
        with otp.profile(operators=False):
            pass
    else:
        running.stop()
    assert recorder_stats().sessions == 0
    running.stop()
    [event] = slices(events_in(tmp_path / "t.json"))
    assert event["name"] == "kept"
