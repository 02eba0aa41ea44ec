"""``legacy.profile`` and ``legacy.RecordProfile``: their texts, errors and files; with labels alone."""

from __future__ import annotations

import io
import json
import logging

import pytest

import otel_torchprof as otp
from otel_torchprof import legacy
from otel_torchprof._profile import legacy_state as state
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions
from otel_torchprof.errors import ExportError, TorchProfError
from otel_torchprof.legacy import EventKind, LegacyEvent, RecordProfile


@pytest.fixture(autouse=True)
def _labels_alone(monkeypatch):
    """No torch, and nothing is left running."""

    def recording(*_):
        return ProfileSegment(RecordingOptions(operators=False))

    monkeypatch.setattr(state, "_recording", recording)
    yield
    assert state._states() == []


def label(name):
    """One event."""
    with otp.record_function(name):
        pass


READERS = [
    lambda p: p.table(),
    lambda p: p.key_averages(),
    lambda p: p.total_average(),
    lambda p: p.self_cpu_time_total,
    lambda p: p.export_stacks("no file"),
    lambda p: p.export_chrome_trace("no file"),
]


@pytest.mark.parametrize("read", READERS)
def test_reading_too_early(read):
    """What is read before the end is torch's error."""
    prof = legacy.profile()
    with pytest.raises(RuntimeError, match="Profiler didn't finish running"):
        read(prof)
    with prof, pytest.raises(RuntimeError, match="Profiler didn't finish running"):
        read(prof)


def test_reading(tmp_path):
    """Afterwards there are events, averages, a table, totals and a trace."""
    with legacy.profile() as prof:
        with otp.record_function("outer"):
            label("inner")
        label("inner")
    assert [e.name for e in prof.function_events] == ["outer", "inner", "inner"]
    assert {a.key: a.count for a in prof.key_averages()} == {"outer": 1, "inner": 2}
    assert prof.total_average().count == 3
    assert prof.self_cpu_time_total == pytest.approx(sum(e.self_cpu_time_total for e in prof.function_events))
    assert "outer" in prof.table(sort_by="cpu_time_total")
    assert prof.table() == str(prof)
    assert repr(prof) == repr(prof.function_events)
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert [each["name"] for each in json.loads((tmp_path / "trace.json").read_text())] == ["outer", "inner", "inner"]


def test_texts_before_the_end():
    """Unfinished, it shows itself as torch's does."""
    prof = legacy.profile()
    assert repr(prof) == "<unfinished profiler_legacy.profile>"
    assert str(prof) == "<unfinished profile.profiler_legacy.profile>"


def test_only_once():
    """It is for one use."""
    prof = legacy.profile()
    with prof, pytest.raises(RuntimeError, match="Profiler context manager is not reentrant"):
        prof.__enter__()
    with pytest.raises(RuntimeError, match="Profiler context manager is not reentrant"):
        prof.__enter__()


def test_not_inside_another():
    """Inside another one it is torch's error, and the other one is not harmed; it may be entered later."""
    inner = legacy.profile()
    with legacy.profile() as outer:
        with pytest.raises(RuntimeError, match="Profiler is already enabled on this thread"), inner:
            pass
        label("a")
    with inner:
        label("b")
    assert [[e.name for e in prof.function_events] for prof in (outer, inner)] == [["a"], ["b"]]


def test_disabled():
    """Disabled, it records nothing."""
    with legacy.profile(enabled=False) as prof:
        label("a")
    assert prof.function_events is None


def test_without_cuda(monkeypatch):
    """Asked for CUDA where there is none it says so in torch's words and goes on with the CPU."""
    monkeypatch.setattr("otel_torchprof._profile.legacy._has_cuda", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available, disabling CUDA profiling"):
        prof = legacy.profile(use_cuda=True)
    assert (prof.use_cuda, prof.profiler_kind) == (False, legacy.ProfilerState.CPU)


def test_its_config():
    """The config says what was asked for; FLOPs need shapes."""
    config = legacy.profile(with_flops=True, profile_memory=True, with_stack=True, with_modules=True).config()
    assert config == legacy.ProfilerConfig(legacy.ProfilerState.CPU, True, True, True, True, True)


def test_stacks_that_were_not_recorded(tmp_path):
    """Stacks can be exported where they were recorded."""
    with legacy.profile() as prof:
        label("a")
    with pytest.raises(AssertionError, match="requires with_stack=True"):
        prof.export_stacks(str(tmp_path / "stacks"))
    prof.with_stack = True
    prof.export_stacks(str(tmp_path / "stacks"))
    assert (tmp_path / "stacks").read_text() == ""


# ---- RecordProfile ----


def check(text, *names):
    """The JSON has these events, in the order of their ends, each complete."""
    slices = json.loads(text)
    assert [each["name"] for each in slices] == list(names)
    for each in slices:
        assert list(each) == ["name", "ph", "ts", "dur", "tid", "pid", "args"]
        assert (each["ph"], each["pid"], each["args"]) == ("X", "CPU Functions", {})
        assert each["ts"] >= 0 <= each["dur"]


def test_to_a_path(tmp_path):
    """The file is there when the block is left."""
    path = tmp_path / "trace.json"
    with RecordProfile(path), otp.record_function('"outer"\n'):
        label("inner")
    check(path.read_text(), "inner", '"outer"\n')


def test_to_a_stream():
    """A stream gets the same, and stays open."""
    stream = io.StringIO()
    with RecordProfile(stream):
        label("a")
    check(stream.getvalue(), "a")
    with RecordProfile(empty := io.StringIO()):
        pass
    check(empty.getvalue())


def test_an_exception_passes_through(tmp_path):
    """What the block raises goes on, and what ran until then is written."""
    path = tmp_path / "trace.json"

    def failing():
        label("a")
        raise KeyError

    with pytest.raises(KeyError), RecordProfile(str(path)):
        failing()
    check(path.read_text(), "a")


def test_inside_another_profile():
    """It takes its block from the profile around it, which goes on."""
    stream = io.StringIO()
    with legacy.profile() as prof:
        with RecordProfile(stream):
            label("inner")
        label("outer")
    check(stream.getvalue(), "inner")
    assert [e.name for e in prof.function_events] == ["outer"]


@pytest.mark.parametrize("path", ["/no/such/folder/trace.json", "/"])
def test_a_file_that_cannot_be_opened(path):
    """It is refused on entry, with its name, and nothing is left running."""
    with pytest.raises(ExportError, match=f"Could not open file: .*'{path}'"), RecordProfile(path):
        pass


def test_a_full_disk():
    """What cannot be written after all is an error at the block's end."""
    with pytest.raises(ExportError, match="cannot write"), RecordProfile("/dev/full"):
        label("a")


def test_events_in_other_hands():
    """A subclass gets the events of all threads, marks and ends included, in place of the file."""
    got = []

    class Keeping(RecordProfile):
        def process_events(self, events):
            got.extend(events)

    with Keeping(stream := io.StringIO()):
        label("a")
    assert [e.kind() for e in got] == ["mark", "push", "pop", "mark"]
    assert stream.getvalue() == ""


def test_processing_that_fails(caplog):
    """Its error is raised at the end of the block, and logged where the block's own exception goes on."""

    class Failing(RecordProfile):
        def process_events(self, events):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), Failing(io.StringIO()):
        pass
    with caplog.at_level(logging.ERROR, "otel_torchprof"), pytest.raises(KeyError), Failing(io.StringIO()):
        raise KeyError
    assert [record.getMessage() for record in caplog.records] == ["the events of RecordProfile were not written"]


def record(kind, name="", handle=0):
    """One event."""
    return LegacyEvent(kind, name, 1, cpu_ns=1000, handle=handle)


START = record(EventKind.MARK, "__start_profile")


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([record(EventKind.PUSH, "a", 1), record(EventKind.POP, "", 1)], "Could not find __start_profile mark"),
        ([], "Could not find __start_profile mark"),
        ([START, record(EventKind.POP, "", 1)], "Unmatched pop event"),
        ([START, record(EventKind.PUSH, "a", 1), *[record(EventKind.POP, "", 1)] * 2], "Unmatched pop event"),
    ],
)
def test_events_that_make_no_sense(events, message):
    """A missing start and an end without a begin are torch's errors, and nothing is written."""
    stream = io.StringIO()
    with pytest.raises(TorchProfError, match=message):
        legacy.write_profiler_events_to_stream(stream, events)
    assert stream.getvalue() == ""
