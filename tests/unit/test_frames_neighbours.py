"""The tracer of calls beside other tools that follow a program: named, never displaced, and served as without it."""

import cProfile
import pstats
import sys
import threading

import pytest
from frame_runs import printed
from frame_trees import masked, recorded, recording, tree

from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions

USES_MONITORING = sys.version_info >= (3, 12)


def _leaf():
    return len("leaf")


def _work():
    for _ in range(5):
        _leaf()


def _counts(profiler):
    """Calls by function's name, as cProfile has them."""
    return {key[2]: value[1] for key, value in pstats.Stats(profiler).stats.items()}


def _names(batch):
    return [masked(batch.names[name]) for name in batch["name"].tolist()]


def test_cprofile_around_a_recording():
    """CProfile counts what it counts without us; the recording has the calls, or says whose way it would be in."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with recording() as record:
            _work()
        _work()
    finally:
        profiler.disable()
    assert _counts(profiler)["_leaf"] == 10
    if _names(record.batch()).count("_leaf") != 5:
        assert record.health().notes == ("frames off: sys.setprofile is in use by cProfile.Profile",)
        assert _names(record.batch()) == []


def test_cprofile_inside_a_recording():
    """CProfile counts what it counts without us; the recording has all calls, or says that it was cut short."""
    profiler = cProfile.Profile()
    with recording() as record:
        _work()
        profiler.enable()
        _work()
        profiler.disable()
        _work()
    assert _counts(profiler)["_leaf"] == 5
    if _names(record.batch()).count("_leaf") == 15:
        assert record.health().notes == ()
    else:
        assert _names(record.batch()).count("_leaf") == 5
        assert record.health().notes == ("frames were cut short on 1 threads: another tool profiled them",)
    assert tree(recorded(_work), "_work").count("._leaf") == 5


def test_cprofile_before_and_after():
    """Neither leaves anything that the next one would trip over, in whatever order they run."""
    for _ in range(3):
        profiler = cProfile.Profile()
        profiler.runcall(_work)
        assert _counts(profiler)["_leaf"] == 5
        assert tree(recorded(_work), "_work").count("._leaf") == 5


class _Lines:
    """A trace function such as a debugger's or a coverage tool's: which lines of this file ran."""

    def __init__(self):
        self.seen = []

    def note_line(self, frame, event, _argument):
        if frame.f_code is _leaf.__code__:
            self.seen.append(event)
        return self.note_line


LINES = ["call", "line", "return"]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_trace_function(when):
    """A trace function sees every line that it would see without us, stays, and is in no recording; all calls are."""
    lines, was = _Lines(), sys.gettrace()
    if when == "before":
        sys.settrace(lines.note_line)
    try:
        with recording() as record:
            if when == "inside":
                sys.settrace(lines.note_line)
            _work()
            assert sys.gettrace() == lines.note_line
        assert sys.gettrace() == lines.note_line
    finally:
        sys.settrace(was)
    assert lines.seen == LINES * 5
    assert _names(record.batch()).count("_leaf") == 5
    assert _names(record.batch()).count("note_line") == 0


def test_profile_function_of_threads_that_is_set_meanwhile():
    """A function for the threads to come that is given to `threading` meanwhile is called there, and is there after the stop."""
    seen = []

    def hook(_frame, event, _argument):
        seen.append(event)

    try:
        with recording(all_threads=True):
            threading.setprofile(hook)
            thread = threading.Thread(target=_leaf)
            thread.start()
            thread.join()
        assert threading.getprofile() is hook
    finally:
        threading.setprofile(None)
    assert seen.count("c_call") >= 1


def test_trace_function_of_threads():
    """A trace function for the threads to come sees their lines beside us."""
    lines, was = _Lines(), threading.gettrace()
    threading.settrace(lines.note_line)
    try:
        with recording(all_threads=True) as record:
            thread = threading.Thread(target=_leaf)
            thread.start()
            thread.join()
        assert threading.gettrace() == lines.note_line
    finally:
        threading.settrace(was)
    assert lines.seen == LINES
    assert _names(record.batch()).count("_leaf") == 1


def test_tool_on_another_thread():
    """A thread that another tool profiles stays with it, is told of in health, and all others are recorded."""
    seen, set_up, go, done = [], threading.Event(), threading.Event(), threading.Event()

    def hook(_frame, event, _argument):
        seen.append(event)

    def taken():
        sys.setprofile(hook)
        set_up.set()
        go.wait(30)
        _leaf()
        done.set()
        assert sys.getprofile() is hook

    thread = threading.Thread(target=taken, name="taken")
    thread.start()
    set_up.wait(30)
    with recording(all_threads=True) as record:
        seen.clear()
        go.set()
        done.wait(30)
        thread.join()
        _leaf()
    assert "c_call" in seen
    assert tree(record.batch(), "_leaf").count(".<built-in function len>") in {1, 2}
    if not USES_MONITORING:
        assert record.health().notes == ("frames off on 1 threads that another tool profiles",)


@pytest.mark.skipif(USES_MONITORING, reason="a profile function is in nobody's way from Python 3.12 on")
def test_torchs_tracer_is_refused_in_torchs_words():
    """Where torch's tracer is active on the thread, health says so in the words of torch's own refusal."""
    tracer = type("TraceContext", (), {"__call__": lambda *_: None, "__module__": "builtins"})()
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    sys.setprofile(tracer)
    try:
        record.start()
        record.stop()
        assert sys.getprofile() is tracer
    finally:
        sys.setprofile(None)
    (note,) = record.health().notes
    assert note.startswith(
        "frames off: There is already an active Python tracer. Refusing to register profile functions."
    )
    assert note.endswith(" sys.setprofile is in use by torch.profiler")


def test_viztracer():
    """VizTracer around or inside a recording keeps the thread, and has its events."""
    pytest.importorskip("viztracer", reason="VizTracer is not installed")
    enclosing, inside, after = printed("""
        import logging
        from frame_trees import recorded, recording, tree
        from viztracer import VizTracer

        logging.disable(logging.WARNING)

        def leaf():
            return len("leaf")

        def seen(tracer):
            tracer.parse()
            return sum(str(event.get("name")).startswith("leaf (") for event in tracer.data["traceEvents"])

        around, inside = VizTracer(verbose=0), VizTracer(verbose=0)
        around.start()
        with recording() as record:
            leaf()
        leaf()
        around.stop()
        around = seen(around)
        with recording() as record:
            leaf()
            inside.start()
            leaf()
            inside.stop()
            leaf()
        print(around, seen(inside), len(tree(recorded(leaf), "leaf")))
    """)
    assert (enclosing, inside, after) == ("2", "1", "1")


@pytest.mark.skipif(not USES_MONITORING, reason="sys.monitoring came with Python 3.12")
def test_other_tools_of_sys_monitoring():
    """A tool of sys.monitoring's gets its events beside us, with its own set of events, before, during and after."""
    monitoring = sys.monitoring
    tool, seen = 4, []
    monitoring.use_tool_id(tool, "neighbour")
    try:
        monitoring.register_callback(tool, monitoring.events.PY_START, lambda code, _: seen.append(code.co_name))
        monitoring.set_events(tool, monitoring.events.PY_START)
        with recording() as record:
            _work()
        assert monitoring.get_events(tool) == monitoring.events.PY_START
        _work()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    assert seen.count("_leaf") == 10
    assert _names(record.batch()).count("_leaf") == 5


@pytest.mark.skipif(not USES_MONITORING, reason="sys.monitoring came with Python 3.12")
def test_every_tool_of_sys_monitoring_is_taken():
    """Where no tool of sys.monitoring's is left, the recording has the calls by other means or says why it has none."""
    monitoring = sys.monitoring
    taken = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
    for tool in taken:
        monitoring.use_tool_id(tool, f"neighbour {tool}")
    try:
        with recording() as record:
            _work()
        assert [monitoring.get_tool(tool) for tool in taken] == [f"neighbour {tool}" for tool in taken]
    finally:
        for tool in taken:
            monitoring.free_tool_id(tool)
    if _names(record.batch()).count("_leaf") != 5:
        assert [note.split(":")[0] for note in record.health().notes] == ["frames off"]
    assert tree(recorded(_work), "_work").count("._leaf") == 5
