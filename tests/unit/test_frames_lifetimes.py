"""What the tracer of calls holds goes neither before its last use nor after the interpreter."""

import contextlib
import sys
import threading

import pytest
from frame_runs import printed
from frame_trees import calls, names_of, recorded, recording, tree

from otel_torchprof import FrameFilter
from otel_torchprof._native import frames
from otel_torchprof._native.ffi import python_sources


def _leaf():
    return len("leaf")


class _Meddling(FrameFilter):
    """Does something as soon as it is asked about a function."""

    def meddle(self, name, action):
        object.__setattr__(self, "awaited", name)
        object.__setattr__(self, "action", action)
        return self

    @property
    def judges_code(self):
        return True

    def decide(self, code, _module_name, /):
        action = self.action
        if action is not None and code.co_name == self.awaited:
            object.__setattr__(self, "action", None)
            action()
        return True


@contextlib.contextmanager
def running(work):
    """A thread that has begun to work before a profile is there, and goes on to its end behind the block."""
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(lambda: (begun.set(), go_on.wait()),))
    thread.start()
    begun.wait()
    yield
    go_on.set()
    thread.join()


def _meddled(work, name, action, **options):
    """A profile, when a thread has ended that does something as soon as it tells of a function that it runs."""
    prof = calls(frames=_Meddling().meddle(name, lambda: action(prof)), **options)
    with running(work):
        prof.start()
    return prof


def test_recording_that_is_replaced_while_a_thread_joins_it():
    """A thread that is about to tell of what it runs goes on in the next recording, as the one that it was."""
    next_one = calls()

    def work(wait):
        wait()
        _leaf()

    _meddled(work, "work", lambda first: (first.stop(), next_one.start()))
    next_one.stop()
    assert "_leaf" in names_of(next_one)


def test_recording_that_is_stopped_while_a_thread_joins_it():
    """A thread that is about to tell of what it runs tells the rest of it to nobody."""

    def outer(wait):
        inner(wait)

    def inner(wait):
        wait()

    _meddled(outer, "outer", lambda first: first.stop()).stop()
    assert not python_sources.stop_frames(0)


def test_return_while_another_recording_comes_and_goes():
    """A recording that comes and goes while a thread is asked for names takes no event of the one that was there."""

    def returns(wait):
        wait()

    def after():
        _leaf()

    def work(wait):
        returns(wait)
        after()

    prof = _meddled(work, "work", lambda _: recorded(bool), all_threads=True)
    prof.stop()
    found = tree(prof, "work")
    assert [name for name in found if name.endswith(("returns", "after", "_leaf"))] == [".returns", ".after", ".._leaf"]


def test_pause_of_a_thread_whose_recording_another_one_stopped():
    """It harms nothing, and once it is over the thread is in the next recording."""
    again = []

    def work(wait):
        _leaf()
        wait()
        frames.pause()
        frames.resume()
        again.append(recorded(_leaf))

    with running(work), recording():
        pass
    assert "_leaf" in names_of(again[0])


def test_c_thread_that_python_knows_again_and_again():
    """What is finalized with the thread's variables is called when nothing is known of the thread any more."""
    program = """
        import ctypes, threading
        from frame_trees import calls
        from otel_torchprof._native.ffi import python_sources

        library = ctypes.CDLL(None)
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        key, thread, variables = ctypes.c_uint(), ctypes.c_ulong(), threading.local()
        ended = []

        class Finalized:
            def __del__(self):
                leaf()

        def leaf():
            return len("leaf")

        def again(_):
            leaf()
            variables.finalized = Finalized()
            ended.append(1)
            if len(ended) % 4:  # as often as the system calls it when a thread ends
                library.pthread_setspecific(key, ctypes.c_void_p(1))
            return 0

        called = function(again)
        library.pthread_key_create(ctypes.byref(key), called)
        record = calls()
        record.start()
        for _ in range(10):
            library.pthread_create(ctypes.byref(thread), None, called, None)
            library.pthread_join(thread, None)
        record.stop()
        print(len(ended), python_sources.errors())
    """
    assert printed(program) == ["40", "0"]


def _places(count):
    yield count
    yield count


def _others(count):
    yield count
    yield count


def _identities(batch, name):
    rows = zip(names_of(batch), batch.columns["fwd_thread"].tolist(), strict=True)
    return {identity for each, identity in rows if each == name}


def test_generator_that_begins_unseen_where_another_was():
    """A generator whose beginning is not seen has no number of one that had its frame before."""

    def program():
        seen = _places(1)
        next(seen)
        del seen
        frames.pause()
        unseen = _others(2)  # where the other one was
        next(unseen)
        frames.resume()
        next(unseen)

    batch = recorded(program)
    assert len(_identities(batch, "_places")) == len(_identities(batch, "_others")) == 1
    assert not _identities(batch, "_places") & _identities(batch, "_others")


def test_recording_that_a_debugger_starts():
    """Calls are recorded from a start inside a function of sys.settrace on, where the interpreter tells of none."""
    record = calls()

    def debugger(frame, _event, _argument):
        if frame.f_code is _leaf.__code__:
            sys.settrace(None)
            record.start()

    def program():
        _leaf()
        _other()

    def _other():
        _leaf()

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        program()
    finally:
        sys.settrace(before)
        record.stop()
    assert tree(record, "program")[-3:] == ["._other", ".._leaf", "...<built-in function len>"]


_STOPS_INSIDE = """
    from frame_trees import calls

    class Stops(type):
        def __getattribute__(cls, name):
            prof.stop()
            return super().__getattribute__(name)

    class Made(list, metaclass=Stops):
        pass

    made, prof = Made(), calls()
    prof.start()
    made.append(1)
    print(len(prof.columns["id"]) > 0)
"""


def test_recording_that_is_stopped_while_a_name_is_made():
    """Making the name of a call can run the program's own code (a metaclass here), and that can stop the recording."""
    assert printed(_STOPS_INSIDE) == ["True"]


_TIMED_OUT = """
    import signal
    from frame_trees import calls
    from otel_torchprof import FrameFilter

    class TimedOut(Exception):
        pass

    def handler(*_):
        raise TimedOut

    class Slow(FrameFilter):
        def decide(self, code, module_name):
            if code.co_name == "watched":
                signal.raise_signal(signal.SIGUSR1)
                for _ in range(100):
                    pass  # where the handler runs
            return True

    def watched():
        return 1

    signal.signal(signal.SIGUSR1, handler)
    record = calls(frames=Slow(include=["nothing"]))
    record.start()
    try:
        watched()
        for _ in range(100000):
            pass
        print("lost")
    except TimedOut:
        print("raised")
    record.stop()
    print(len(record.columns['id']) > 0)
"""


def test_what_a_handler_of_a_signal_raises_reaches_the_program():
    """A handler that runs while the filter decides raises in the program, as it would have without a recording."""
    assert printed(_TIMED_OUT) == ["raised", "True"]


_IN_A_FINALIZER = """
    import gc, os, sys, threading
    from frame_trees import calls, names_of

    class Trash:
        def __init__(self):
            self.cycle = self
        def __del__(self):
            action(first, second)

    def stop(first, second):
        first.stop()

    def stop_elsewhere(first, second):
        thread = threading.Thread(target=first.stop)
        thread.start()
        thread.join()

    def restart(first, second):
        first.stop()
        second.start()
        leaf()

    def displace(first, second):
        sys.setprofile(other)

    def stop_and_displace(first, second):
        first.stop()
        sys.setprofile(other)

    def other(*_):
        pass

    def leaf():
        return len("leaf")

    def called():
        return leaf()

    def program():
        Trash()
        gc.enable()
        called()  # the interpreter allocates its frame's object to report it, and that collects
        gc.disable()
        called()

    for action in (stop, stop_elsewhere, restart, displace, stop_and_displace):
        if child := os.fork():  # each in a process of its own, which ends as any other
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # else each child says it again
            continue
        gc.disable()
        gc.collect()
        gc.set_threshold(1)
        first, second = (calls() for _ in range(2))
        first.start()
        program()
        displaced = sys.getprofile() is other
        sys.setprofile(None)
        for record in (first, second):
            if record.is_running:
                record.stop()
        found = names_of(second) if action is restart else []
        print(action.__name__, displaced, found.count("called"), found.count("leaf"))
        break
"""
_ENDED = (
    *("stop", "False", "0", "0", "0", "stop_elsewhere", "False", "0", "0", "0", "restart", "False", "2", "3", "0"),
    *("displace", "True", "0", "0", "0", "stop_and_displace", "True", "0", "0", "0"),
)
"""For each: whether the other tool's function is there, calls that the second recording has, and the status."""


@pytest.mark.skipif(
    python_sources.monitors_calls,
    reason="no allocation of a frame reports a call since Python 3.12; the finalizer runs elsewhere",
)
def test_recording_that_a_finalizer_ends_while_a_call_is_reported(monkeypatch):
    """The interpreter still reports the call, to an object that nobody freed, and another tool's function stays."""
    monkeypatch.setenv("PYTHONMALLOC", "debug")  # freed memory is overwritten
    assert tuple(printed(_IN_A_FINALIZER, is_new=True)) == _ENDED


def test_threads_that_end_leave_nothing_in_the_tracer():
    """Recording threads that come and go, started and stopped again and again, holds as much memory after 2,000 as after 500."""
    program = """
        import gc, sys, threading
        from frame_trees import calls
        def leaf():
            return len("leaf")

        def work():
            leaf()

        def cycles(count):
            for _ in range(count):
                record = calls()
                record.start()
                threads = [threading.Thread(target=work) for _ in range(10)]
                for thread in threads:
                    thread.start()
                record.stop()
                for thread in threads:
                    thread.join()
                record
                del record

        def blocks():
            gc.collect()  # or it is by chance how much of what is freed in cycles is there
            return sys.getallocatedblocks()

        cycles(50)
        before = blocks()
        cycles(150)
        print(blocks() - before < 1000)  # of 1,500 threads
    """
    assert printed(program) == ["True"]
