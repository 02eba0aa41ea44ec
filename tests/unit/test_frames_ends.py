"""The tracer of calls in interpreters that end, are interrupted, or lose the recording on the way."""

import gc
import logging
import sys
import threading

import pytest
from frame_runs import printed, run
from frame_trees import calls, recorded

from examples import one_in
from otel_torchprof._native.recorder import recorder_stats

START = """
import atexit, gc, os, sys, threading, _thread
import otel_torchprof as otp

def leaf():
    return len("leaf")

def endless():
    while True:
        leaf()

def profile():
    return otp.profile(operators=False, with_stack=True, all_threads=True)

prof = profile()
"""
_WAITS_WHILE_IT_IS_NAMED = """
inside = threading.Event()

class Waiting(type):
    def __getattribute__(cls, name):
        if name == "__mro__" and threading.current_thread() is not threading.main_thread():
            inside.set()
            threading.Event().wait()
        return type.__getattribute__(cls, name)

class Numbers(list, metaclass=Waiting):
    pass

prof.start()
threading.Thread(target=lambda: Numbers().append(1), daemon=True).start()
assert inside.wait(30)
"""
ENDS = {
    "end": "prof.start(); leaf()",
    "sys.exit": "prof.start(); leaf(); sys.exit(3)",
    "os._exit": "prof.start(); leaf(); os._exit(4)",
    "exception": "prof.start(); leaf(); raise SystemExit('said')",
    "in a call of a call": "def exits(): leaf(); sys.exit(5)\nprof.start()\nlist(map(lambda _: exits(), [1]))",
    "daemon threads": "\n".join(
        ("threading.Thread(target=endless, daemon=True).start()", "prof.start()") * 2,
    ).removesuffix("\nprof.start()"),
    "threads of _thread": "prof.start()\nfor _ in range(3): _thread.start_new_thread(endless, ())\nleaf()",
    "thread that goes on after main": (
        "prof.start()\n"
        "threading.Thread(target=lambda main=threading.main_thread(): (main.join(), leaf(), prof.stop())).start()"
    ),
    "exit handlers before and after": (
        "atexit.register(leaf)\nprof.start()\natexit.register(leaf)\natexit.register(prof.stop)"
    ),
    "starts in an exit handler": "atexit.register(lambda: (prof.start(), leaf()))",
    "starts in the last exit handler": (
        "first = profile(); first.start(); first.stop()\natexit._clear(); atexit.register(prof.start)"
    ),
    "finalizers at the end": (
        "class Calls:\n    def __del__(self, leaf=leaf): leaf()\n"
        "kept, in_module = Calls(), Calls(); sys.kept = kept; cycle = [Calls()]; cycle.append(cycle)\nprof.start()"
    ),
    "recording kept by a module": "sys.kept = prof; prof.start(); leaf()",
    "generator left open": (
        "def generates():\n    try:\n        yield leaf()\n    finally:\n        leaf()\n"
        "prof.start(); sys.left = left = generates(); next(left)"
    ),
    "recording in a thread that is left": (
        "go = threading.Event()\ndef works():\n    prof.start()\n    go.set()\n    endless()\n"
        "threading.Thread(target=works, daemon=True).start()\ngo.wait()\nleaf()"
    ),
    "while a function is named": _WAITS_WHILE_IT_IS_NAMED,
}
DROPPED = "a profile was dropped while it recorded"
SAID = {"sys.exit": (3, ""), "os._exit": (4, ""), "exception": (1, "said\n"), "in a call of a call": (5, "")}
"""The status and the errors of those that have any."""


BY_THE_INTERPRETER = {"end", "finalizers at the end", "recording kept by a module", "generator left open"}
"""What ends with the last modules: they are in a new interpreter, the others in one that is forked."""


def ended(program, *, is_new=False):
    """The status of a program and its words on standard error, without those on a profile that nobody has stopped."""
    done = run(program, is_new=is_new)
    assert not done.stdout
    return done.returncode, "".join(line for line in done.stderr.splitlines(True) if not line.startswith(DROPPED))


@pytest.mark.parametrize("ending", one_in(2, ENDS))
def test_interpreter_that_ends_while_calls_are_recorded(ending):
    """However the program ends, it ends with its own status and says what it would say without the recording."""
    assert ended(START + ENDS[ending], is_new=ending in BY_THE_INTERPRETER) == SAID.get(ending, (0, ""))


def test_unhandled_exception():
    """The traceback of a program that fails while recorded is that of a program that is not."""
    fails = "def fails(): raise KeyError('own')\nlist(map(lambda _: fails(), [1]))\n"
    status, said = ended(START + "prof.start()\n" + fails)
    assert (status, said) == ended(START + "\n" + fails)
    assert status == 1
    assert "KeyError: 'own'" in said


def test_main_module_is_read_after_the_end():
    """An exit handler that was registered first, and so runs last, reads the recording whole."""
    first = "import atexit\natexit.register(lambda: print(len(prof.columns['id']) > 3, end=' '))\n"
    last = "atexit.register(lambda: (prof.stop(), print(sys.getprofile(), end=' ')))\nprof.start()\nleaf()\nleaf()\n"
    assert printed(first + START + last) == ["None", "True"]


_INTERRUPTED = """
    import gc, linecache, logging, sys, threading
    from frame_trees import calls, recorded, tree
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

    recorded(leaf, all_threads=True)  # what is done once in a process is done
    gc.collect()
    gc.freeze()  # collections are quick from here on
    sys.unraisablehook = lambda unraisable: None  # where a finalizer is interrupted
    at, where = 0, "somewhere"
    while where:
        prof = calls(all_threads=True)
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


def test_profile_that_is_dropped_says_so(caplog):
    """A profile that is dropped without stop() takes the tracer away and the log says so; one that ended or never began is silent."""

    def leaf():
        return len("leaf")

    prof = calls(all_threads=True)
    prof.start()
    leaf()
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        del prof
        gc.collect()
        assert (sys.getprofile(), threading.getprofile(), recorder_stats().sessions) == (None, None, 0)
        recorded(leaf)
        calls()
        gc.collect()
    assert [message.split(",")[0] for message in caplog.messages] == [DROPPED]
