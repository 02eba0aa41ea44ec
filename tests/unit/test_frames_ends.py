"""The tracer of calls in interpreters that end, are interrupted, or lose the recording on the way."""

import gc
import logging
import signal
import sys
import threading

import pytest
from frame_runs import printed, run
from frame_trees import masked, recorded, recording, tree

from examples import one_in
from otel_torchprof._native.recorder import recorder_stats
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions

START = """
import atexit, os, sys, threading, _thread
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions

def leaf():
    return len("leaf")

def endless():
    while True:
        leaf()

record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
"""

ENDS = {
    "end": ("record.start(); leaf()", 0, ""),
    "sys.exit": ("record.start(); leaf(); sys.exit(3)", 3, ""),
    "os._exit": ("record.start(); leaf(); os._exit(4)", 4, ""),
    "exception": ("record.start(); leaf(); raise SystemExit('said')", 1, "said\n"),
    "in a call of a call": (
        "def exits(): leaf(); sys.exit(5)\nrecord.start()\nlist(map(lambda _: exits(), [1]))",
        5,
        "",
    ),
    "daemon threads": (
        (
            "threading.Thread(target=endless, daemon=True).start()\nrecord.start()\n"
            "threading.Thread(target=endless, daemon=True).start()"
        ),
        0,
        "",
    ),
    "threads of _thread": ("record.start()\nfor _ in range(3): _thread.start_new_thread(endless, ())\nleaf()", 0, ""),
    "thread that goes on after main": (
        (
            "record.start()\n"
            "threading.Thread(target=lambda main=threading.main_thread(): (main.join(), leaf(), record.stop())).start()"
        ),
        0,
        "",
    ),
    "exit handlers before and after": (
        "atexit.register(leaf)\nrecord.start()\natexit.register(leaf)\natexit.register(record.stop)",
        0,
        "",
    ),
    "starts in an exit handler": ("atexit.register(lambda: (record.start(), leaf()))", 0, ""),
    "starts in the last exit handler": (
        (
            "first = ProfileSegment(RecordingOptions(operators=False, frames=True)); first.start(); first.stop()\n"
            "atexit._clear(); atexit.register(record.start)"
        ),
        0,
        "",
    ),
    "finalizers at the end": (
        (
            "class Calls:\n    def __del__(self, leaf=leaf): leaf()\n"
            "kept, in_module = Calls(), Calls(); sys.kept = kept; cycle = [Calls()]; cycle.append(cycle)\nrecord.start()"
        ),
        0,
        "",
    ),
    "recording kept by a module": ("sys.kept = record; record.start(); leaf()", 0, ""),
    "generator left open": (
        (
            "def generates():\n    try:\n        yield leaf()\n    finally:\n        leaf()\n"
            "record.start(); left = generates(); next(left)"
        ),
        0,
        "",
    ),
    "recording in a thread that is left": (
        (
            "go = threading.Event()\n"
            "def works():\n    record.start()\n    go.set()\n    endless()\n"
            "threading.Thread(target=works, daemon=True).start()\ngo.wait()\nleaf()"
        ),
        0,
        "",
    ),
}


@pytest.mark.parametrize("ending", one_in(2, ENDS))
def test_interpreter_that_ends_while_calls_are_recorded(ending):
    """However the program ends, it ends with its own status and says what it would say without the recording."""
    program, status, errors = ENDS[ending]
    done = run(START + program)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", errors)


def test_unhandled_exception():
    """The traceback of a program that fails while recorded is that of a program that is not."""
    fails = "def fails(): raise KeyError('own')\nlist(map(lambda _: fails(), [1]))\n"
    done = run(START + "record.start()\n" + fails)
    plain = run(START + "\n" + fails)
    assert done.returncode == plain.returncode == 1
    assert done.stderr == plain.stderr
    assert "KeyError: 'own'" in done.stderr


def test_main_module_is_read_after_the_end():
    """An exit handler that was registered first, and so runs last, reads the recording whole."""
    words = printed(
        START.replace(
            "import atexit",
            "import atexit\natexit.register(lambda: print(len(record.batch()) > 3, end=' '))\nimport atexit",
            1,
        )
        + "atexit.register(lambda: (record.stop(), print(sys.getprofile(), end=' ')))\nrecord.start()\nleaf()\nleaf()\n"
    )
    assert words == ["None", "True"]


def _leaf():
    return len("leaf")


def test_signal_handler_in_python():
    """What a signal's handler calls is inside the call that it interrupted; an exception from there ends what it leaves."""

    def handler(*_):
        _leaf()
        raise InterruptedError

    def waits():
        while True:
            signal.raise_signal(signal.SIGUSR1)

    def program():
        for _ in range(3):
            with pytest.raises(InterruptedError):
                waits()
        _leaf()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        lines = tree(recorded(program), "program")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sum(line.endswith("handler") for line in lines) == 3
    assert [line.endswith("._leaf") for line in lines].count(True) == 4
    assert lines[-2:] == ["._leaf", "..<built-in function len>"]


_INTERRUPTED = """
    import gc, linecache, logging, sys, threading
    import otel_torchprof as otp
    from frame_trees import recorded, tree
    from otel_torchprof._native.recorder import recorder_stats

    logging.disable(logging.WARNING)

    def leaf():
        return len("leaf")

    class Interrupts:
        # At a line of the package, counted from 0. Not where a block of `with` is left: the interpreter looks for signals
        # before and after that, not in between.
        def __init__(self, at):
            self.left, self.where = at, ""

        def __call__(self, frame, event, argument):
            path, line = frame.f_code.co_filename, frame.f_lineno
            if "otel_torchprof" not in path:
                return None
            if event == "line" and not linecache.getline(path, line).strip().startswith("with "):
                if self.left == 0:
                    self.left, self.where = -1, f"{path}:{line}"
                    raise KeyboardInterrupt
                self.left -= self.left > 0
            return self

    def profile():
        return otp.profile(with_stack=True, operators=False, all_threads=True)

    def interrupted(method, at):
        interrupts = Interrupts(at)
        sys.settrace(interrupts)
        try:
            method()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return interrupts.where

    with profile():  # what is done once in a process is done
        leaf()
    gc.collect()
    gc.freeze()  # collections are quick from here on
    sys.unraisablehook = lambda unraisable: None  # where a finalizer is interrupted
    at, where = 0, "somewhere"
    while where:
        prof = profile()
        if "MOMENT" != "start":
            prof.start()
        cycle = [prof] if "MOMENT" == "finalizer" else []
        cycle.append(cycle)
        method = gc.collect if "MOMENT" == "finalizer" else getattr(prof, "MOMENT")
        if "MOMENT" == "finalizer":
            del prof
        del cycle
        where = interrupted(method, at)
        del method
        leaf()
        if "THEN" in ("another", "again"):
            prof.stop() if "THEN" == "again" else recorded(leaf)
            clean = (sys.getprofile(), threading.getprofile()) == (None, None)
        else:
            del prof
            gc.collect()
            clean = (sys.getprofile(), threading.getprofile(), recorder_stats().sessions) == (None, None, 0)
        if not clean or tree(recorded(leaf), "leaf") != [".<built-in function len>"]:
            print("interrupted_at", where)
            break
        at += 1
    print("done" if at > 30 else at)
"""


@pytest.mark.parametrize(
    ("moment", "then"),
    [("start", "dropped"), ("stop", "dropped"), ("stop", "again"), ("finalizer", "another")],
)
def test_interrupt_at_any_line_of_a_start_or_stop(moment, then):
    """A KeyboardInterrupt at whatever line leaves nothing, once the profile is dropped or stopped again, or another one has run."""
    assert printed(_INTERRUPTED.replace("MOMENT", moment).replace("THEN", then)) == ["done"]


def test_recording_that_is_dropped_says_so(caplog):
    """A recording that is dropped without stop() takes the tracer away, and the log says what was lost and how to keep it."""
    record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
    record.start()
    _leaf()
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        del record
        gc.collect()
    assert (sys.getprofile(), threading.getprofile()) == (None, None)
    assert recorder_stats().sessions == 0
    assert [message.split(",")[0] for message in caplog.messages] == ["a profile was dropped while it recorded"]


def test_recording_that_is_stopped_or_refused_says_nothing(caplog):
    """Neither a recording that ended nor one that never began speaks when it is dropped."""
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        recorded(_leaf)
        ProfileSegment(RecordingOptions(operators=False, frames=True))
        gc.collect()
    assert caplog.messages == []


def test_two_that_overlap():
    """Of two recordings that overlap each has what was called in its own time, and the tracer goes with the last."""
    first, second = (ProfileSegment(RecordingOptions(operators=False, frames=True)) for _ in range(2))

    def one():
        _leaf()

    def both():
        _leaf()

    def two():
        _leaf()

    first.start()
    one()
    second.start()
    both()
    first.stop()
    two()
    second.stop()
    assert sys.getprofile() is None
    for record, expected in ((first, ["one", "both"]), (second, ["both", "two"])):
        batch = record.batch()
        names = [masked(batch.names[name]) for name in batch["name"].tolist()]
        assert [name for name in names if name in {"one", "both", "two"}] == expected


def test_started_twice_stopped_twice():
    """A profile that runs refuses to start again and goes on; a second stop does nothing."""
    import otel_torchprof as otp

    prof = otp.profile(with_stack=True, operators=False)
    prof.start()
    with pytest.raises(RuntimeError, match="not reentrant"):
        prof.start()
    _leaf()
    prof.stop()
    prof.stop()
    assert sys.getprofile() is None
    assert [masked(event.name) for event in prof.events()].count("_leaf") == 1


def test_two_hundred_recordings_are_alike():
    """The tracer is in the same state after each stop: each of two hundred recordings of one program has the same tree."""
    trees = set()
    for _ in range(200):
        with recording() as record:
            _leaf()
        trees.add(tuple(tree(record.batch(), "_leaf")))
    assert trees == {(".<built-in function len>",)}
