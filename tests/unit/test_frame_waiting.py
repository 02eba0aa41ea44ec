"""Threads that make no call and no return while calls are recorded: their stacks are there all the same."""

from __future__ import annotations

import _thread
import sys
import threading
from pathlib import Path

import frame_trees
import pytest
from frame_trees import by_profile_function, masked, recorded, recording
from waiting_threads import Gate, rows_of_thread, waiting

import otel_torchprof
from otel_torchprof import FrameFilter
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions


def _outer(gate):
    _inner(gate)
    len("after")


def _inner(gate):
    gate.wait()


OWN = ["_outer", "_inner", "wait"]
THREADS = ["_bootstrap", "_bootstrap_inner", "run"]
"""What ``threading`` has on the stack of each of its threads."""


def names_of(rows):
    """The names of rows, without paths."""
    return [masked(row["name"]) for row in rows]


def waited(program=_outer, **options):
    """The rows of a thread that waits all the time."""
    with waiting(program):
        batch = recorded(lambda: len("busy"), frames=FrameFilter(**options))
    return rows_of_thread(batch)


def is_chain(rows):
    """Whether each row is directly around the next one, and nothing around the first."""
    return [row["parent"] for row in rows] == [-1, *(row["row"] for row in rows[:-1])]


@pytest.mark.parametrize("time", range(3))
def test_thread_that_only_waits(time):
    """A thread that waits shows its stack from the start to the stop, unfinished and without error; each time anew."""
    with waiting(_outer) as (_, thread), recording() as record:
        record.stop()
        batch = record
    rows = rows_of_thread(batch)
    assert (names_of(rows), is_chain(rows)) == ([*THREADS, *OWN], True), time
    info = {(row["start"], row["end"], row["flags"], row["kind"], row["error_type"]) for row in rows}
    assert info == {(record.health.start_ns, record.health.stop_ns, Flag.UNFINISHED, Kind.FRAME, 0)}
    functions = {event.function.qualified_name for event in record.events() if event.function}
    assert {f"{__name__}._outer", f"{__name__}._inner"} <= functions
    of_thread = batch.threads[rows[0]["thread"]]
    assert (of_thread.ident, of_thread.os_tid) == (thread.ident, thread.native_id)
    ids = batch.columns["id"].tolist()
    assert len(set(ids)) == len(ids)


def test_names_are_those_of_a_thread_that_goes_on():
    """What a thread shows that waits, up to 128 calls, is what it shows when it goes on late: names, lines, generators, from the start."""

    def deep(gate, depth=200):
        if depth:
            deep(gate, depth - 1)
        else:
            list(numbers(gate))

    def numbers(gate):
        yield 1
        gate.wait()

    def shown(rows):
        return [(row["name"], row["fwd_thread"] > 0) for row in rows]

    with waiting(deep) as (gate, thread):
        still = rows_of_thread(recorded(lambda: len("busy")))
        with recording() as record:
            len("busy")
            before = now_ns()
            gate.open()
            thread.join(30)
    late = [row for row in rows_of_thread(record) if row["start"] < before]
    assert shown(late) == shown(still)
    assert names_of(still) == ["deep"] * 126 + ["numbers", "wait"]
    assert [masked(name) for name, is_generator in shown(still) if is_generator] == ["numbers"]
    assert is_chain(late)
    assert is_chain(still)
    assert all(row["start"] >= record.health.start_ns and row["end"] > before for row in late)


def test_thread_that_is_born_meanwhile():
    """Nothing of a thread that is born after the start, and waits, begins before its birth."""
    with recording() as record:
        born = now_ns()
        with waiting(_outer):
            record.stop()
    rows = rows_of_thread(record)
    assert [name for name in names_of(rows) if name in OWN] == OWN
    assert all(row["start"] >= born for row in rows)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"include": [__name__]}, ["_outer", "_inner"]),
        ({"exclude": ["threading", "waiting_threads"]}, ["_outer", "_inner"]),
        ({"exclude": [__name__]}, [*THREADS, "wait"]),
        ({"modules_only": True}, []),
        ({"max_depth": 1}, [*THREADS, *OWN]),
        ({"min_duration": 3600.0}, [*THREADS, *OWN]),
        ({"c_functions": False}, [*THREADS, *OWN]),
    ],
)
def test_filters(options, left):
    """A filter leaves out of it what it leaves out elsewhere; neither depth nor duration count for what is open all the time."""
    rows = waited(**options)
    assert (names_of(rows), is_chain(rows)) == (left, True) if left else not rows


def test_calls_of_this_package_are_left_out():
    """Functions of this package are not there, nor what they call, unless that is a function of the program's."""
    labelled = otel_torchprof.record_function("label")(_inner)
    assert names_of(waited(labelled))[len(THREADS) :] == ["_inner", "wait"]

    path = Path(otel_torchprof.__file__).with_name("made_up.py")
    namespace = {}
    exec(compile("def own(gate):\n    gate.wait()", path, "exec"), namespace)  # noqa: S102 - the test's own text
    assert names_of(waited(namespace["own"])) == THREADS


def test_recording_inside_another():
    """A thread that goes on in an outer recording and waits in an inner one is whole in both."""
    second = Gate()

    def twice(gate):
        gate.wait()
        list(second.calls())

    with waiting(twice) as (gate, _), recording() as outer:
        gate.open()
        second.reached()
        inner = recorded(lambda: len("busy"))
        outer.stop()
        second.open()
    assert names_of(rows_of_thread(inner)) == [*THREADS, "twice"]
    both = names_of(rows_of_thread(outer))
    assert (both.count("twice"), both[: len(THREADS)]) == (1, THREADS)


def test_many_threads_that_come_and_go():
    """Threads that end while others wait are not mixed up with them, nor are those that wait with one another."""
    with recording() as record:
        pass
    gates = [Gate() for _ in range(20)]
    threads = [threading.Thread(target=_outer, args=(gate,), name=f"many {at}") for at, gate in enumerate(gates)]
    for thread, gate in zip(threads, gates, strict=True):
        thread.start()
        gate.reached()
    with recording() as record:
        for gate, thread in list(zip(gates, threads, strict=True))[::2]:
            gate.open()
            thread.join(30)
    for gate in gates[1::2]:
        gate.open()
    for thread in threads[1::2]:
        thread.join(30)
    for at in range(20):
        rows = rows_of_thread(record, f"many {at}")
        names = names_of(rows)
        assert ([name for name in names if name in OWN], "<built-in function len>" in names) == (OWN, at % 2 == 0)
        assert {bool(row["flags"] & Flag.UNFINISHED) for row in rows} == {at % 2 == 1}


def test_threads_in_any_state():
    """Stacks are looked at while threads begin and end; whatever was seen of them is a chain of calls."""
    enough = threading.Event()

    def restless():
        while not enough.is_set():
            thread = threading.Thread(target=lambda: len("short"), name="short")
            thread.start()
            thread.join()

    threads = [threading.Thread(target=restless, name="restless") for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with waiting(_outer):
            batches = [recorded(lambda: None) for _ in range(50)]
    finally:
        enough.set()
        for thread in threads:
            thread.join(30)
    for batch in batches:
        assert names_of(rows_of_thread(batch)) == [*THREADS, *OWN]
        parents = batch.columns["parent"]
        assert (parents < range(len(parents))).all()
        assert (batch.columns["thread"][parents[parents >= 0]] == batch.columns["thread"][parents >= 0]).all()


def test_live_recording_leaves_it_out():
    """A recording that is read while it runs has nothing of threads that wait."""
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    with waiting(_outer):
        record.start()
        assert not rows_of_thread(record.drain())
        record.stop()
        assert not rows_of_thread(record.drain())


def test_thread_that_python_does_not_know():
    """A thread that ``threading`` did not start is there where the interpreter knows the system's id of it; else left out."""
    gate, ids = Gate(), []

    def unnamed():
        ids.append((threading.get_ident(), threading.get_native_id()))
        gate.wait()
        ended.release()

    ended = threading.Lock()
    ended.acquire()
    _thread.start_new_thread(unnamed, ())
    gate.reached()
    batch = recorded(lambda: len("busy"))
    gate.open()
    assert ended.acquire(timeout=30)
    found = [(thread.ident, thread.os_tid) for thread in batch.threads if thread.ident == ids[0][0]]
    assert found in ([ids[0]], [])
    assert (len(found) == 1) == ("unnamed" in frame_trees.names_of(batch))


@by_profile_function
def test_thread_of_another_tool():
    """A thread that another tool's profile function watches has nothing: nobody knows what it called."""

    def watched(gate):
        sys.setprofile(lambda *_: None)
        _outer(gate)
        sys.setprofile(None)

    assert not waited(watched)
