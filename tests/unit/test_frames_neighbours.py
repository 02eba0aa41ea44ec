"""The tracer of calls beside other tools that follow a program: named, never displaced, and served as without it."""

import contextlib
import cProfile
import logging
import pstats
import sys
import threading

import pytest
from frame_runs import printed
from frame_trees import by_profile_function, calls, names_of, recorded, recording, tree

from otel_torchprof import record_function

USES_MONITORING = sys.version_info >= (3, 12)
LINES = ["call", "line", "return"]


def _leaf():
    return len("leaf")


def _work():
    for _ in range(5):
        _leaf()


def _on_a_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def _calls_in(prof):
    return names_of(prof).count("_leaf")


@pytest.mark.parametrize("when", ["around", "inside", "after"])
def test_cprofile(when):
    """CProfile counts what it counts without us, and the recording has all calls, or says in whose way it would be."""
    profiler = cProfile.Profile()
    with contextlib.ExitStack() as running:
        if when == "around":
            running.enter_context(profiler)
        prof = running.enter_context(recording())
        _work()
        if when == "inside":
            running.enter_context(profiler)
            _work()
    if when == "after":
        profiler.runcall(_work)
    assert {key[2]: value[1] for key, value in pstats.Stats(profiler).stats.items()}["_leaf"] == 5
    notes, found = prof.health.notes, _calls_in(prof)
    if USES_MONITORING or when == "after":
        assert (found, notes) == (10 if when == "inside" else 5, ())
    elif when == "around":
        assert (found, notes) == (0, ("frames off: sys.setprofile is in use by cProfile.Profile",))
    else:
        assert (found, notes) == (5, ("frames were cut short on 1 threads: another tool profiled them",))
    assert tree(recorded(_work), "_work").count("._leaf") == 5


class _Lines:
    """A trace function such as a debugger's or a coverage tool's: which lines of this file ran."""

    def __init__(self):
        self.seen = []

    def note_line(self, frame, event, _argument):
        if frame.f_code is _leaf.__code__:
            self.seen.append(event)
        return self.note_line


@pytest.mark.parametrize("when", ["before", "inside"])
def test_trace_function(when):
    """A trace function sees every line that it would see without us, here and on threads to come, stays, and is in no recording."""
    lines, was, of_threads = _Lines(), sys.gettrace(), threading.gettrace()
    with contextlib.ExitStack() as running:
        running.callback(threading.settrace, of_threads)
        running.callback(sys.settrace, was)
        if when == "before":
            sys.settrace(lines.note_line)
        threading.settrace(lines.note_line)
        with recording(all_threads=True) as prof:
            if when == "inside":
                sys.settrace(lines.note_line)
            _work()
            _on_a_thread(_leaf)
            assert sys.gettrace() == lines.note_line
        assert (sys.gettrace(), threading.gettrace()) == (lines.note_line, lines.note_line)
    assert lines.seen == LINES * 6
    assert _calls_in(prof) == 6
    assert names_of(prof).count("note_line") == 0


def hook_into(seen):
    """A profile function that notes its events."""

    def hook(_frame, event, _argument):
        seen.append(event)

    return hook


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("whose", ["this thread's", "of threads to come"])
def test_profile_function(when, whose, caplog):
    """Another tool's function stays, is told of all, and health says what is not recorded; from Python 3.12 on all is."""
    seen, module = [], threading if whose == "of threads to come" else sys
    hook, prof = hook_into(seen), calls(all_threads=True)
    with caplog.at_level(logging.WARNING, "otel_torchprof"), contextlib.ExitStack() as running:
        running.callback(module.setprofile, None)
        if when == "before":
            module.setprofile(hook)
        prof.start()
        if when == "inside":
            module.setprofile(hook)
        with record_function("label"):
            _on_a_thread(_leaf) if module is threading else _leaf()
        prof.stop()
        assert module.getprofile() is hook
    assert {"call", "return", "c_call", "c_return"} <= set(seen)
    assert names_of(prof).count("label") == 1
    name = f"{__name__}.hook_into.<locals>.hook"
    if USES_MONITORING:
        assert (prof.health.notes, _calls_in(prof)) == ((), 1)
    elif (whose, when) == ("this thread's", "before"):
        assert names_of(prof) == ["label"]
        assert prof.health.notes == (f"frames off: sys.setprofile is in use by {name}",)
        assert name in caplog.text
    elif whose == "this thread's":
        assert prof.columns["parent"][names_of(prof).index("label")] == -1
        assert prof.health.notes == ("frames were cut short on 1 threads: another tool profiled them",)
    elif when == "before":
        assert prof.health.notes == (f"frames off on threads that start later: {name} profiles them",)


def test_tool_on_another_thread():
    """A thread that another tool profiles stays with it, is told of in health, and all others are recorded."""
    seen, set_up, go, done = [], threading.Event(), threading.Event(), threading.Event()
    hook = hook_into(seen)

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
    with recording(all_threads=True) as prof:
        seen.clear()
        go.set()
        done.wait(30)
        thread.join()
        _leaf()
    assert "c_call" in seen
    assert tree(prof, "_leaf").count(".<built-in function len>") in {1, 2}
    if not USES_MONITORING:
        assert prof.health.notes == ("frames off on 1 threads that another tool profiles",)


@by_profile_function
@pytest.mark.parametrize("thread", ["this", "another"])
def test_profile_function_that_is_put_back(thread):
    """What a tool saves of ours and puts back, on its own thread or another, does no harm, and calls are recorded from there on."""

    def other(before):
        sys.setprofile(before)
        _leaf()

    def program():
        before = sys.getprofile()
        if thread == "this":
            sys.setprofile(None)
            sys.setprofile(before)
        else:
            _on_a_thread(other, before)
        _leaf()

    assert [name.lstrip(".") for name in tree(recorded(program), "program")][-2:] == [
        "_leaf",
        "<built-in function len>",
    ]


@by_profile_function
def test_profile_function_that_is_put_back_too_late_goes():
    """What was saved while calls were recorded, and is put back when they are not any more, takes itself away."""
    with recording():
        before = sys.getprofile()
    sys.setprofile(before)
    _leaf()
    assert sys.getprofile() is None


_REFUSES = """
    import logging, sys
    from frame_trees import calls

    logging.disable(logging.CRITICAL)
    refuses, tool = False, getattr(sys, "monitoring", None)

    def hook(event, args):
        if refuses and event.startswith(("sys.setprofile", "sys.monitoring")):
            raise RuntimeError("no")

    def called():
        return len("x"), sys.getprofile(), tool and tool.get_tool(3)

    sys.addaudithook(hook)
    prof = calls(all_threads=True)
    prof.start()
    refuses = True
    prof.stop()
    refuses = False
    called()
    assert called() == (1, None, None)
    refuses = True
    another = calls(all_threads=True)
    another.start()
    assert called() == (1, None, None)
    another.stop()
    print(another.health.notes[0].replace(" ", "_"))
"""


def test_audit_hook_that_forbids_it():
    """Where an audit hook refuses, the program goes on: at the start the recording goes without calls, at the stop they end."""
    assert printed(_REFUSES) == ["frames_off:_the_interpreter_refused:_RuntimeError('no')"]


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
        with recording():
            leaf()
        leaf()
        around.stop()
        around = seen(around)
        with recording():
            leaf()
            inside.start()
            leaf()
            inside.stop()
            leaf()
        print(around, seen(inside), len(tree(recorded(leaf), "leaf")))
    """)
    assert (enclosing, inside, after) == ("2", "1", "1")
