"""The tracer of calls by sys.monitoring, beside other tools and without a trace of itself afterwards."""

from __future__ import annotations

import contextlib
import cProfile
import os
import sys
import threading

import pytest
from frame_trees import printed_by, recorded, recording, tree

from otel_torchprof._native.ffi import python_sources
from otel_torchprof._record.frame_filter import FrameFilter

pytestmark = pytest.mark.skipif(
    not python_sources.monitors_calls, reason="sys.monitoring is there since Python 3.12; before, a profile function is"
)

NAME = "otel_torchprof"
NUMBERS = (3, 4, 2, 1, 5)
"""Of tools, in the order in which they are taken."""
monitoring = getattr(sys, "monitoring", None)


def _leaf():
    return len("leaf")


def _tools():
    return {number: name for number in range(6) if (name := monitoring.get_tool(number)) is not None}


@contextlib.contextmanager
def _tool(number, name="other"):
    """Another tool, of which nothing is left afterwards."""
    monitoring.use_tool_id(number, name)
    try:
        yield
    finally:
        monitoring.set_events(number, 0)
        for event in (monitoring.events.PY_START, monitoring.events.PY_RETURN):
            monitoring.register_callback(number, event, None)
        monitoring.free_tool_id(number)


def _events(*names):
    """A set of events."""
    return sum(getattr(monitoring.events, name) for name in names)


CALLS = ("PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND")
FUNCTIONS = ("CALL", "RAISE", "C_RETURN", "C_RAISE")


# ---- the tool ----


def test_a_tool_while_calls_are_recorded_and_none_afterwards():
    """Between start and stop there is a tool of our name that is called back; afterwards neither it nor a callback."""
    with recording():
        assert _tools() == {NUMBERS[0]: NAME}
        assert monitoring.get_events(NUMBERS[0]) & ~_events("C_RETURN", "C_RAISE") == _events(*CALLS, "CALL", "RAISE")
    assert _tools() == {}
    with _tool(NUMBERS[0]):
        assert monitoring.get_events(NUMBERS[0]) == 0
        for event in (*CALLS, *FUNCTIONS):
            assert monitoring.register_callback(NUMBERS[0], getattr(monitoring.events, event), None) is None
    assert sys.getprofile() is None


@pytest.mark.parametrize("taken", range(1, len(NUMBERS)))
def test_the_next_free_number(taken):
    """Numbers that other tools have are left to them."""
    with contextlib.ExitStack() as tools:
        for number in NUMBERS[:taken]:
            tools.enter_context(_tool(number))
        assert tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]
        assert _tools() == dict.fromkeys(NUMBERS[:taken], "other")


def test_no_number_is_free():
    """Where other tools have every number there are no calls, and health names them."""
    with contextlib.ExitStack() as tools:
        for number in NUMBERS:
            tools.enter_context(_tool(number, f"tool{number}"))
        with recording() as record:
            _leaf()
        assert _tools() == {number: f"tool{number}" for number in NUMBERS}
    assert len(record.batch()) == 0
    assert record.health().notes == (
        "frames off: every tool of sys.monitoring is in use: tool1, tool2, tool3, tool4, tool5",
    )


def test_another_tool_is_called_back_as_before():
    """A tool that was there, and one that comes meanwhile, have their events before, during and after a recording."""
    seen = {number: [] for number in (0, 5)}

    def follow(number):
        def started(code, _offset):
            seen[number].append(code.co_name)

        monitoring.register_callback(number, monitoring.events.PY_START, started)
        monitoring.set_events(number, monitoring.events.PY_START)

    with _tool(0), _tool(5):
        follow(0)
        with recording(frame_filter=FrameFilter(include=["nothing"])) as record:
            _leaf()
            follow(5)
            _leaf()
        _leaf()
    assert len(record.batch()) == 0
    assert [seen[number].count("_leaf") for number in (0, 5)] == [3, 2]


@pytest.mark.parametrize("first", ["recording", "cProfile"])
def test_beside_cprofile(first):
    """CProfile and a recording have all the calls both, whichever of them starts first."""
    profiler = cProfile.Profile()
    with contextlib.ExitStack() as running:
        if first == "cProfile":
            running.enter_context(profiler)
        record = running.enter_context(recording())
        if first == "recording":
            running.enter_context(profiler)
        _leaf()
    assert tree(record.batch(), "_leaf") == [".<built-in function len>"]
    assert [entry.callcount for entry in profiler.getstats() if entry.code is _leaf.__code__] == [1]


def test_beside_a_profile_function():
    """A function of sys.setprofile and one of threading.setprofile stay, are told of all, and are in nobody's way."""
    seen = []

    def hook(_frame, event, _argument):
        seen.append(event)

    sys.setprofile(hook)
    threading.setprofile(hook)
    try:
        with recording() as record:
            thread = threading.Thread(target=_leaf, name="later")
            thread.start()
            thread.join()
            _leaf()
        assert sys.getprofile() is hook
        assert threading.getprofile() is hook
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {"call", "return", "c_call", "c_return"} <= set(seen)
    assert record.health().notes == ()
    assert tree(record.batch(), "_leaf").count(".<built-in function len>") == 2


def test_a_tool_whose_callbacks_raise():
    """What another tool raises ends the calls that it leaves, also where the interpreter then tells nobody else of their end."""

    class Stop(Exception):  # noqa: N818 - no error
        pass

    def raises(*_event):
        raise Stop

    def program():
        with contextlib.suppress(Stop):
            outer()
        _leaf()

    def outer():
        return len("x")

    events = monitoring.events
    with _tool(0), recording() as record:
        for event in (events.PY_START, events.PY_RETURN, events.C_RETURN):
            monitoring.register_callback(0, event, raises)
            monitoring.set_local_events(0, outer.__code__, event if event != events.C_RETURN else events.CALL)
            program()
            monitoring.set_local_events(0, outer.__code__, 0)
        monitoring.register_callback(0, events.C_RETURN, None)
    lines = [line for line in tree(record.batch(), "program") if "_leaf" in line]
    assert lines == ["._leaf"] * 3


# ---- where it ends ----


def test_callback_that_comes_late():
    """A callback that somebody has kept, and calls when nothing is recorded, or calls with anything, raises nothing."""
    kept = {}
    with recording():
        for event in (*CALLS, *FUNCTIONS):
            bit = getattr(monitoring.events, event)
            kept[event] = monitoring.register_callback(NUMBERS[0], bit, None)
            monitoring.register_callback(NUMBERS[0], bit, kept[event])
        for arguments in ((), (None,) * 4, (_leaf.__code__, -1, len, [])):
            assert [callback(*arguments) for callback in kept.values()] == [None] * len(kept)
    for callback in kept.values():
        assert callback(_leaf.__code__, 0, len, []) is None
        assert callback() is None
    assert tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]


def test_forked_child_has_no_tool():
    """A child that is forked meanwhile has the parent's tool not, and can become one itself."""
    with recording():
        child = os.fork()
        if child == 0:
            clean = _tools() == {} and tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]
            os._exit(0 if clean and _tools() == {} else 1)
        _, status = os.waitpid(child, 0)
        assert _tools() == {NUMBERS[0]: NAME}
    assert os.waitstatus_to_exitcode(status) == 0


_REFUSES = """
    import logging, sys
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    logging.disable(logging.CRITICAL)
    refuses = False

    def hook(event, args):
        if refuses and event.startswith("sys.monitoring"):
            raise RuntimeError("no")

    sys.addaudithook(hook)
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    record.start()
    refuses = True
    record.stop()
    print(len("x"), sys.monitoring.get_tool(3))
    another = ProfileSegment(RecordingOptions(operators=False, frames=True))
    another.start()
    print(len("x"), sys.monitoring.get_tool(3))
    another.stop()
    print(another.health().notes[0].replace(" ", "_"))
"""


def test_audit_hook_that_forbids_callbacks():
    """Where an audit hook refuses, the program goes on: at the start the recording goes without calls, at the stop they end."""
    assert printed_by(_REFUSES) == ["1", "None", "1", "None", "frames_off:_the_interpreter_refused:_RuntimeError('no')"]


_ENDS = """
    import sys, threading
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    class AtTheEnd:
        def __del__(self):
            len("x")

    def generator():
        try:
            yield 1
        finally:
            len("x")

    def work():
        while True:
            len("busy")

    sys.kept = [AtTheEnd(), generator()]
    next(sys.kept[1])
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    record.start()
    threading.Thread(target=work, daemon=True).start()
    print("end")
"""


def test_interpreter_that_ends_meanwhile():
    """A program that ends while calls are recorded, with finalizers and a busy thread, ends as it would without."""
    assert printed_by(_ENDS) == ["end"]


_IN_ANOTHER = """
    import sys
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    other = interpreters.create()
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    record.start()
    interpreters.run_string(other, "def there(): return len('x')\\nthere()")
    def here(): return len("x")
    here()
    record.stop()
    interpreters.run_string(other, "there()")
    interpreters.destroy(other)
    batch = record.batch()
    names = [batch.names[name] for name in batch["name"].tolist()]
    print(sum("here" in name and "there" not in name for name in names), sum("there" in name for name in names))
"""


def test_another_interpreter_of_the_process():
    """What another interpreter runs on a thread that is traced is no part of the recording."""
    assert printed_by(_IN_ANOTHER) == ["1", "0"]
