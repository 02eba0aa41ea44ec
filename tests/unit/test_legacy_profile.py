"""Profiles of the legacy engine, with labels alone: their texts, errors and files; beginning, ending, nesting, carrying on."""

from __future__ import annotations

import gc
import io
import json
import logging
import os

import pytest
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof import legacy
from otel_torchprof._native.recorder import recorder_stats
from otel_torchprof._profile import legacy_state as state
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions
from otel_torchprof.errors import ExportError, TorchProfError
from otel_torchprof.legacy import EventKind, LegacyEvent, ProfilerConfig, ProfilerDisableOptions, RecordProfile


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


# ---- profiles on their threads ----

CONFIG = ProfilerConfig()


def texts(lists):
    """Marks and begins as names, ends as ``end``."""
    return [["end" if e.kind() == "pop" else e.name() for e in events] for events in lists]


def whole(*names):
    """The list of a thread that was profiled from start to stop."""
    return ["__start_profile", *[text for name in names for text in (name, "end")], "__stop_profile"]


def on_another_thread(function):
    """Runs a function to its end on a thread of its own and returns what it returned or raised."""
    found = []

    def target():
        try:
            found.append(function())
        except Exception as error:  # noqa: BLE001 - what the test looks at
            found.append(error)

    in_threads(target)
    return found[0]


def test_between_its_marks():
    """A profile has what ran between its marks on its thread; times and threads of the marks fit."""
    label("before")
    legacy.enable_profiler_legacy(CONFIG)
    label("a")
    on_another_thread(lambda: label("elsewhere"))
    label("b")
    lists = legacy.disable_profiler_legacy()
    label("after")
    assert texts(lists) == [whole("a", "b")]
    assert len({e.thread_id() for e in lists[0]}) == 1
    times = [e.start_us() for e in lists[0]]
    assert times == sorted(times)


def test_on_a_thread_only_once():
    """A second enable on the same thread is torch's error; on another thread it is a profile of its own."""
    legacy.enable_profiler_legacy(CONFIG)
    with pytest.raises(TorchProfError, match="Profiler is already enabled on this thread"):
        legacy.enable_profiler_legacy(CONFIG)

    def other():
        legacy.enable_profiler_legacy(CONFIG)
        label("other")
        return legacy.disable_profiler_legacy()

    assert texts(on_another_thread(other)) == [whole("other")]
    assert texts(legacy.disable_profiler_legacy()) == [whole()]


def test_nothing_to_disable():
    """Disabling and adding need a profile on the calling thread."""
    with pytest.raises(TorchProfError, match="Can't disable profiler when it's not running"):
        legacy.disable_profiler_legacy()
    with pytest.raises(TorchProfError, match="Profiler must be enabled"):
        legacy.add_event_list([])
    legacy.enable_profiler_legacy(CONFIG)
    assert isinstance(on_another_thread(legacy.disable_profiler_legacy), TorchProfError)
    legacy.disable_profiler_legacy()


@pytest.mark.parametrize(("config", "error"), [(object(), TypeError), (ProfilerConfig(6), TorchProfError)])
def test_what_cannot_be_enabled(config, error):
    """A config that cannot be read, or of another engine, is refused."""
    with pytest.raises(error, match=r"ProfilerConfig|KINETO"):
        legacy.enable_profiler_legacy(config)


def test_an_unknown_state():
    """A state that torch does not have is refused when the config is made."""
    with pytest.raises(ValueError, match="77"):
        ProfilerConfig(77)


def test_without_clean_up():
    """It hands out what has ended so far and goes on; what was open then comes whole with the next lists."""
    going_on = ProfilerDisableOptions(cleanup_tls_state=False)
    legacy.enable_profiler_legacy(CONFIG)
    with otp.record_function("open"):
        label("a")
        first = legacy.disable_profiler_legacy(going_on)
    label("b")
    second = legacy.disable_profiler_legacy(going_on)
    assert texts(first) == [whole("a")]
    assert texts(second) == [["open", "end", "b", "end", "__stop_profile"]]
    assert texts(legacy.disable_profiler_legacy()) == [["__stop_profile"]]


def test_without_consolidation():
    """It leaves the thread and hands out nothing; another thread that carries the profile does, once it is there."""

    def continuation():
        legacy.add_event_list([LegacyEvent(EventKind.PUSH, "far", 1, cpu_ns=1)], 3)
        return legacy.disable_profiler_legacy(ProfilerDisableOptions(cleanup_tls_state=False))

    legacy.enable_profiler_legacy(CONFIG)
    label("a")
    carried = legacy.wrap_propagate_state(continuation)
    assert legacy.disable_profiler_legacy(ProfilerDisableOptions(consolidate=False)) == []
    with pytest.raises(TorchProfError):
        legacy.disable_profiler_legacy()
    label("after")
    lists = on_another_thread(carried)
    assert texts(lists) == [["__start_profile", "a", "end"], ["__stop_profile"], ["far"]]
    assert isinstance(on_another_thread(legacy.disable_profiler_legacy), TorchProfError)


def test_a_profile_that_nobody_ends():
    """One that was left without consolidation stops recording when the last who could consolidate it is gone."""
    gc.collect()
    running = recorder_stats().sessions
    legacy.enable_profiler_legacy(CONFIG)
    carried = legacy.wrap_propagate_state(lambda: None)
    legacy.disable_profiler_legacy(ProfilerDisableOptions(consolidate=False))
    assert recorder_stats().sessions == running + 1
    del carried
    gc.collect()
    assert recorder_stats().sessions == running


def test_wrapping_gives_back():
    """What a wrapped function finds and leaves behind on a thread stays inside it."""
    legacy.enable_profiler_legacy(CONFIG)
    nothing = legacy.wrap_propagate_state(legacy.disable_profiler_legacy)
    with legacy.TLSLegacyProfilerGuard(CONFIG):
        label("inner")
        lists = nothing()
    assert texts(lists) == [whole()]
    assert texts(on_another_thread(nothing)) == [["__stop_profile"]]
    assert isinstance(on_another_thread(legacy.disable_profiler_legacy), TorchProfError)
    assert texts(legacy.disable_profiler_legacy()) == [["__stop_profile"]]


def test_a_scope_overrides_and_gives_back():
    """A scope takes its block from the one around it, however deep; a label around it stays whole."""
    kept = {}
    with legacy.TLSLegacyProfilerGuard(CONFIG, lambda lists: kept.update(outer=texts(lists))):
        label("a")
        with otp.record_function("across"):
            with legacy.TLSLegacyProfilerGuard(CONFIG, lambda lists: kept.update(inner=texts(lists))):
                label("b")
                with legacy.TLSLegacyProfilerGuard(CONFIG, lambda lists: kept.update(innermost=texts(lists))):
                    label("c")
                label("d")
            label("e")
    assert kept == {
        "outer": [["__start_profile", "a", "end", "across", "e", "end", "end", "__stop_profile"]],
        "inner": [whole("b", "d")],
        "innermost": [whole("c")],
    }


def test_a_scope_ends_as_it_is_told():
    """Options of a scope are those of disabling: without consolidation the callback gets nothing."""
    got = []
    with legacy.TLSLegacyProfilerGuard(CONFIG, got.append, ProfilerDisableOptions(consolidate=False)):
        label("a")
    assert got == [[]]


def test_a_callback_that_fails(caplog):
    """What a callback raises is logged; the program goes on, as does an exception of the block."""

    def failing(_lists):
        raise ValueError("from the callback")

    with caplog.at_level(logging.ERROR, "otel_torchprof"):
        with legacy.TLSLegacyProfilerGuard(CONFIG, failing):
            pass
        with pytest.raises(KeyError), legacy.TLSLegacyProfilerGuard(CONFIG, failing):
            raise KeyError
    assert [record.getMessage() for record in caplog.records] == ["Got error processing profiler events"] * 2


def far_away():
    """What another process recorded."""
    legacy.enable_profiler_legacy(CONFIG)
    label("far")
    return [e.to_ivalue() for events in legacy.disable_profiler_legacy() for e in events]


def test_events_of_another_process():
    """They come out as a list of their own, remote and of their node, and are function events of the profile."""
    sent = far_away()
    with legacy.profile() as prof:
        label("near")
        legacy.add_event_list([LegacyEvent.from_ivalue(values) for values in sent], from_node_id=5)
        legacy.add_event_list([LegacyEvent.from_ivalue(values) for values in sent])
    assert sorted((e.name, e.node_id, e.is_remote) for e in prof.function_events) == [
        ("far", -1, True),
        ("far", 5, True),
        ("near", -1, False),
    ]


def test_a_fork_inside_a_scope():
    """A child profiles nothing, and leaves the blocks without an error; its parent's profiles are as they were."""
    guard, prof = legacy.TLSLegacyProfilerGuard(CONFIG), legacy.profile()
    with prof, guard:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(TorchProfError, match="not running"):
                    legacy.disable_profiler_legacy()
                guard.__exit__(None, None, None)
                prof.__exit__(None, None, None)
                code = 0 if prof.function_events is None else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(prof.function_events) == 0


def test_the_switch(monkeypatch):
    """Where the package is switched off there are marks and nothing else."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    legacy.enable_profiler_legacy(CONFIG)
    label("a")
    assert texts(legacy.disable_profiler_legacy()) == [whole()]
