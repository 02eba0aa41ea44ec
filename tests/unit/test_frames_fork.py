"""The tracer of calls and processes that come from this one: off and clean there, and here as if nothing had been."""

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
from frame_runs import printed
from frame_trees import names_of, recorded, recording, tree

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
LEN = [".<built-in function len>"]


def _leaf():
    return len("leaf")


def tools():
    """The tools of ``sys.monitoring``, where there is that."""
    monitoring = getattr(sys, "monitoring", None)
    return [] if monitoring is None else [name for number in range(6) if (name := monitoring.get_tool(number))]


def records_for_itself():
    """0 where this process is untraced and can record, twice."""
    clean = True
    for _ in range(2):
        clean = clean and (sys.getprofile(), threading.getprofile(), tools()) == (None, None, [])
        clean = clean and tree(recorded(_leaf, all_threads=True), "_leaf") == LEN
    return 0 if clean and tools() == [] else 1


def forked(in_child=records_for_itself):
    """The exit status of a child that does something."""
    child = os.fork()
    if child == 0:
        os._exit(in_child())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("all_threads", [False, True])
def test_fork_in_the_middle_of_nested_calls(all_threads):
    """A child leaves the calls in which it was forked, records for itself and ends; the parent's calls are whole."""
    statuses = []

    def nested(depth):
        child = nested(depth - 1) if depth else os.fork()
        _leaf()
        return child

    def program():
        child = nested(9)
        if child == 0:
            os._exit(records_for_itself())
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        _leaf()

    prof = recorded(program, all_threads=all_threads)
    assert statuses == [0]
    lines = tree(prof, "program")
    assert [lines.count("." * depth + "nested") for depth in range(1, 11)] == [1] * 10
    assert [lines.count("." * depth + "_leaf") for depth in range(1, 12)] == [1] * 11


def test_fork_in_a_thread():
    """The thread that forks is the only one in the child, which is clean; in the parent both threads go on."""
    statuses = []

    def forks():
        statuses.append(forked())
        _leaf()

    def program():
        thread = threading.Thread(target=forks)
        thread.start()
        thread.join()
        _leaf()

    prof = recorded(program, all_threads=True)
    assert statuses == [0]
    assert "._leaf" in tree(prof, "forks")
    assert "._leaf" in tree(prof, "program")


def test_forks_while_other_threads_call():
    """Children that are forked while other threads are in the middle of calls are clean, each of them, and so are their children."""
    end = threading.Event()

    def works():
        while not end.is_set():
            _leaf()

    def child_of_child():
        with recording(all_threads=True):
            status = forked()
        return status or records_for_itself()

    workers = [threading.Thread(target=works) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        # Calls come by the million, which would take half a minute to look at.
        with recording(all_threads=True, memory_limit=1 << 22) as prof:
            statuses = [forked(in_child) for in_child in (records_for_itself, records_for_itself, child_of_child)]
    finally:
        end.set()
        for worker in workers:
            worker.join()
    assert statuses == [0] * 3
    assert "_leaf" in names_of(prof)


def test_child_that_goes_on_with_its_parents_recording():
    """A child that stops, drops or reads what its parent records gets an error or nothing, and ends as it wants to."""
    words = printed("""
        import gc, os
        from frame_trees import recorded, recording, tree
        from otel_torchprof.errors import NativeError

        def leaf():
            return len("leaf")

        with recording(all_threads=True) as prof:
            child = os.fork()
            if child == 0:
                try:
                    prof.stop()
                except NativeError:
                    pass
                del prof
                gc.collect()
                os._exit(7 if tree(recorded(leaf), "leaf") else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            leaf()
        print(status, len(tree(prof, "leaf")))
    """)
    assert words == ["7", "1"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(method):
    """A process of multiprocessing's, however it is started, is untraced, records for itself and ends with 0."""
    context = multiprocessing.get_context(method)
    with recording(all_threads=True) as prof:
        process = context.Process(target=_ends_with_its_status)
        process.start()
        process.join(60)
        _leaf()
    assert process.exitcode == 0
    assert tree(prof, "_leaf") == LEN


def _ends_with_its_status():
    raise SystemExit(records_for_itself())


def test_program_that_is_run_after_python_in_the_child():
    """What subprocess runs between fork and exec, Python code too, does not reach the recording."""
    with recording(all_threads=True) as prof:
        done = subprocess.run(["/bin/sh", "-c", "exit 5"], preexec_fn=_leaf, check=False)
        _leaf()
    assert done.returncode == 5
    assert tree(prof, "_leaf") == LEN
