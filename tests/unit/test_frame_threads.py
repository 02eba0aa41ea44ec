"""The tracer of calls across threads and processes."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from frame_trees import masked, recorded, recording, tree

from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions


def _leaf():
    return len("leaf")


def test_stop_on_another_thread():
    """Stopped by another thread, the tracer is off on the one that started it."""
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    record.start()
    _leaf()
    stopper = threading.Thread(target=record.stop)
    stopper.start()
    stopper.join()
    assert sys.getprofile() is None
    assert tree(record.batch(), "_leaf") == [".<built-in function len>"]


class _Worker:
    """A thread that does what it is told."""

    def __init__(self) -> None:
        self._go, self._done = threading.Event(), threading.Event()
        self._task = None
        self.thread = threading.Thread(target=self._serve, name="worker")
        self.thread.start()

    def _serve(self):
        while True:
            self._go.wait()
            self._go.clear()
            if self._task is None:
                return
            self._task()
            self._done.set()

    def do(self, task):
        self._done.clear()
        self._task = task
        self._go.set()
        self._done.wait(30)

    def end(self):
        self._task = None
        self._go.set()
        self.thread.join(30)


def test_thread_that_exists_at_the_start_is_traced():
    """A thread that was there has its calls in the recording, below what was on its stack, and is left clean."""
    worker = _Worker()
    after = []
    try:
        batch = recorded(lambda: worker.do(_leaf))
        worker.do(lambda: after.append(sys.getprofile()))
        again = recorded(lambda: worker.do(_leaf))
    finally:
        worker.end()
    for each in (batch, again):
        assert tree(each, "_serve", "worker").count("._leaf") == 1
        assert tree(each, "run", "worker")[0] == "._serve"
    assert after == [None]


@pytest.mark.parametrize("all_threads", [False, True])
def test_threads_that_start_later(all_threads):
    """A thread that starts meanwhile is traced, whether all threads are wanted or not."""

    def program():
        thread = threading.Thread(target=_leaf, name="later")
        thread.start()
        thread.join()

    batch = recorded(program, all_threads=all_threads)
    assert "._leaf" in tree(batch, "run")
    assert threading.getprofile() is None


def test_forked_child_is_not_traced():
    """A child that is forked meanwhile has no profile function, and can record for itself."""
    with recording() as record:
        child = os.fork()
        if child == 0:
            clean = sys.getprofile() is None and tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]
            os._exit(0 if clean else 1)
        _, status = os.waitpid(child, 0)
        _leaf()
    assert os.waitstatus_to_exitcode(status) == 0
    assert "_leaf" in [masked(record.batch().names[name]) for name in record.batch()["name"].tolist()]


def test_interpreter_that_ends_while_calls_are_recorded():
    """A program that ends in the middle of a recording, with a daemon thread at work, ends as it would without it."""
    program = """
        import threading
        from otel_torchprof._record.recording import ProfileSegment
        from otel_torchprof._record.source import RecordingOptions

        def work():
            while True:
                len("busy")

        threading.Thread(target=work, daemon=True).start()
        record = ProfileSegment(RecordingOptions(operators=False, frames=True, all_threads=True))
        record.start()
        threading.Thread(target=work, daemon=True).start()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
