"""What a recording has to undo when it ends, whatever interrupts that."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_torchprof as otp
from otel_torchprof._export.queue import Deadline, ExportQueue
from otel_torchprof._native.recorder import recorder_stats
from otel_torchprof._process.cleanup import CleanupStack, _close_all, close_due, without_waiting

LONG = 60


class _Owner:
    """Something that starts and stops."""


class _Interrupted:
    """A function that is cut off the first time."""

    def __init__(self, done):
        self.done, self.calls = done, 0

    def __call__(self):
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        self.done.append("interrupted")


def test_last_pushed_is_called_first():
    """Functions are called once each, in reverse order, and the stack is empty then."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)
    for number in range(3):
        stack.push(lambda number=number: done.append(number))
    stack.close()
    stack.close()
    assert done == [2, 1, 0]
    assert stack.is_empty


def test_interrupted_close_is_completed_by_whatever_comes_next():
    """The function that was cut off, and those behind it, are called when something else starts or stops."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)
    stack.push(lambda: done.append("first"))
    stack.push(_Interrupted(done))
    close_due()
    assert done == []
    with pytest.raises(KeyboardInterrupt):
        stack.close()
    close_due()
    assert done == ["interrupted", "first"]
    assert stack.is_empty


def test_interrupted_finalizer_is_completed_at_once(monkeypatch):
    """Python swallows an interrupt in a finalizer; what it left undone is done all the same, though nothing may start or stop after it."""
    swallowed, dropped, done = [], [], []
    monkeypatch.setattr("sys.unraisablehook", swallowed.append)
    owner = _Owner()
    stack = CleanupStack(owner, lambda: dropped.append(1))
    stack.push(_Interrupted(done))
    del owner
    gc.collect()
    assert ([each.exc_type for each in swallowed], dropped, done) == ([KeyboardInterrupt], [1], ["interrupted"])


def test_error_of_one_function_keeps_no_other_from_being_called(caplog):
    """The first error is raised once all are called, or logged where somebody else closes."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)

    def fail():
        raise ValueError("the reason")

    stack.push(lambda: done.append("last"))
    stack.push(fail)
    with pytest.raises(ValueError, match="the reason"):
        stack.close()
    assert done == ["last"]
    stack.push(fail)
    stack.push(_Interrupted(done))
    with pytest.raises(KeyboardInterrupt):
        stack.close()
    close_due()
    assert "the reason" in caplog.text
    assert stack.is_empty


def test_close_inside_of_a_close():
    """A function during which the stack is closed again, as a finalizer may do, is not called a third time."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)

    def nested():
        done.append("nested")
        if len(done) == 1:
            stack.close()

    stack.push(lambda: done.append("first"))
    stack.push(nested)
    stack.close()
    assert done == ["nested", "nested", "first"]


def test_what_a_function_stops_does_not_close_its_own_stack():
    """A function may stop something else, which closes what is due: not the stack that is being closed."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)
    stack.push(lambda: (close_due(), done.append(1)))
    stack.close()
    assert done == [1]


def test_second_thread_waits_for_the_first():
    """Whoever calls close() returns when everything is undone, and close_due() does not wait for a close that runs."""
    owner, done = _Owner(), []
    entered, go_on = threading.Event(), threading.Event()
    stack = CleanupStack(owner)
    stack.push(lambda: (entered.set(), go_on.wait(60), done.append("slow")))
    first = threading.Thread(target=stack.close)
    first.start()
    assert entered.wait(60)
    close_due()
    assert done == []
    second = threading.Thread(target=stack.close)
    second.start()
    go_on.set()
    second.join(60)
    first.join(60)
    assert (done, stack.is_empty) == (["slow"], True)


@pytest.mark.parametrize("amid", ["a close", "a start"])
def test_a_finalizer_waits_for_nobody(amid):
    """What closes a stack amid another close or a start, as a finalizer may, does not wait for a thread that may wait for it."""
    owner, others, lock, began, done = _Owner(), _Owner(), threading.Lock(), threading.Event(), []

    def needs_the_lock():
        began.set()
        with lock:
            done.append("closed")

    stack, other = CleanupStack(owner), CleanupStack(others)
    stack.push(needs_the_lock)
    thread = threading.Thread(target=stack.close)
    with lock:
        thread.start()
        assert began.wait(LONG)
        if amid == "a start":
            without_waiting(stack.close)()
        else:
            other.push(stack.close)
            other.close()
        assert done == []
        close_due()
    thread.join(LONG)
    assert (done, stack.is_empty) == (["closed"], True)


def test_a_stack_that_is_used_again_is_not_due():
    """What is pushed after a close is not undone for a close that came too late for the one before, and left it to nobody."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)
    stack.push(lambda: done.append("first"))
    stack.close()
    stack._closing = True  # as a second thread leaves it that comes right before the first has let go of the lock
    stack.push(lambda: done.append("second"))
    close_due()
    assert done == ["first"]
    stack.close()
    assert done == ["first", "second"]


def test_forked_child_has_nothing_to_undo():
    """What the parent has started is the parent's to stop; the child's own is stopped in the child."""
    owner, done = _Owner(), []
    stack = CleanupStack(owner)
    stack.push(lambda: done.append("parent's"))
    pid = os.fork()
    if pid == 0:
        stack.push(lambda: done.append("child's"))
        stack.close()
        os._exit(0 if done == ["child's"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stack.close()
    assert done == ["parent's"]


def test_all_stacks_are_closed_at_exit(caplog):
    """An error in one does not keep the others from being closed."""
    owners, done = [_Owner(), _Owner()], []
    for owner in owners:
        CleanupStack(owner).push(lambda: (done.append(1), 1 / 0))
    _close_all()
    assert len(done) == 2
    assert caplog.text.count("division by zero") == 2


def test_recording_whose_cleanup_fails_is_readable():
    """The stop raises what a function raised; everything is stopped then, and what was recorded is there."""
    prof = otp.profile(operators=False)
    prof.start()
    with otp.record_function("kept"):
        pass
    prof._segments._running.recording.cleanup.push(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prof.stop()
    prof.stop()
    assert [event.name for event in prof.events()] == ["kept"]
    assert recorder_stats().sessions == 0


def _inside(calls, function):
    """Calls it inside of so many calls."""
    return _inside(calls - 1, function) if calls else function()


def test_stop_without_room_on_the_stack_is_completed_by_the_next():
    """Wherever the interpreter's limit of recursion ends a stop, nothing is lost, and a second stop does the rest."""
    limit, cut_off = sys.getrecursionlimit(), 0
    for calls in range(limit - 150, limit):
        prof = otp.profile(operators=False, with_stack=True)
        prof.start()
        with otp.record_function("kept"):
            pass
        try:
            _inside(calls, prof.stop)
        except RecursionError:
            cut_off += 1
        prof.stop()
        assert [event.name for event in prof.events() if event.name == "kept"] == ["kept"]
        assert recorder_stats().sessions == 0
        assert sys.getprofile() is None
    assert cut_off > 0


def test_a_function_that_fills_the_stack_by_itself_is_not_called_again():
    """Its RecursionError is one like any other: those pushed before it are called, and then it is raised, once."""

    def endless():
        return endless()

    class Owner:
        pass

    owner, called = Owner(), []
    stack = CleanupStack(owner)
    stack.push(lambda: called.append("first"))
    stack.push(endless)
    with pytest.raises(RecursionError):
        stack.close()
    assert called == ["first"]
    assert stack.is_empty


@pytest.mark.parametrize("steps", [0, 1])
def test_stop_when_a_trace_is_ready(steps):
    """What is called when a trace is ready may stop the profile; it is called once for each trace."""
    calls = []

    def ready(prof):
        calls.append(1)
        prof.stop()

    with otp.profile(operators=False, on_trace_ready=ready, schedule=lambda _step: otp.ProfilerAction.RECORD) as prof:
        for _ in range(steps):
            prof.step()
    assert len(calls) == 1


def test_forked_child_stops_a_profile_that_a_thread_was_reading():
    """Locks of a profile that a thread of the parent held are free in a forked child."""
    prof = otp.profile(operators=False)
    with prof:
        pass
    with prof._segments.reading, prof._segments.stopping, prof._segments._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            prof.start()
            prof.stop()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_interrupt_while_a_flush_waits():
    """Who interrupts a flush gets the KeyboardInterrupt, also where it comes when the lock is released for the wait."""

    class Interrupted(threading.Condition):
        def wait(self, _timeout=None):
            self.release()
            raise KeyboardInterrupt

    queue = ExportQueue(InMemorySpanExporter())
    queue._changed = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        queue._wait(lambda: False, Deadline.after(60))


def test_no_stop_waits_for_the_lock_of_threading():
    """In threading.enumerate() garbage may be collected, and a finalizer stop what another thread is stopping: it waits for that one."""
    profile, begin, ended = otp.profile(all_threads=True), threading.Event(), threading.Event()

    def stop() -> None:
        begin.wait(LONG)
        profile.stop()
        ended.set()

    thread = threading.Thread(target=stop)
    thread.start()
    profile.start()
    with threading._active_limbo_lock:
        begin.set()
        assert ended.wait(LONG)
    thread.join(LONG)
