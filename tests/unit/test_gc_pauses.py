"""Pauses of Python's garbage collector among the calls."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading

import pytest
from frame_trees import calls, masked, names_of, recorded, recording, tree

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._model.frames import collection_generation
from otel_torchprof._native.ffi import python_sources
from otel_torchprof._native.recorder import Session

OLDEST = "gc.collect: generation 2"


@pytest.fixture(autouse=True)
def _only_collections_of_the_test():
    gc.collect()
    gc.disable()
    others = gc.callbacks[:]  # Hypothesis has one, for good, from its first test on
    gc.callbacks.clear()
    yield
    assert python_sources.on_collection not in gc.callbacks
    gc.callbacks[:] = others
    gc.enable()


class Garbage:
    """In a cycle, so that only a collection can free it; calls a function when that happens."""

    def __init__(self, last_words):
        self._cycle = self
        self._last_words = last_words

    def __del__(self):
        self._last_words()


def _collect(generation=2):
    gc.collect(generation)


def _nothing():
    """What a finalizer calls."""


def pauses(batch):
    """The names of all pauses."""
    return [
        name
        for name in (batch.names[name] for name in batch.columns["name"].tolist())
        if collection_generation(name) is not None
    ]


def test_where_they_happen():
    """A collection is a call inside the function that it interrupts, with its generation; finalizers are inside of it."""

    def program():
        Garbage(_nothing)
        for generation in range(3):
            _collect(generation)

    gc.collect()  # what others have left has no finalizers to run here
    batch = recorded(program)
    assert tree(batch, "program")[1:] == [
        *("._collect", "..<built-in function collect>", "...gc.collect: generation 0"),
        *("....__del__", "....._nothing"),
        *("._collect", "..<built-in function collect>", "...gc.collect: generation 1"),
        *("._collect", "..<built-in function collect>", "...gc.collect: generation 2"),
    ]
    rows = [row for row, name in enumerate(batch.columns["name"].tolist()) if batch.names[name].startswith("gc.")]
    assert (batch.columns["kind"][rows] == Kind.FRAME).all()
    assert not batch.columns["fwd_thread"][rows].any()
    assert not batch.columns["flags"][rows].any()


def test_automatic_ones():
    """Collections that the interpreter begins by itself are there, each with its own generation."""
    reported = []

    def callback(phase, info):
        if phase == "stop":
            reported.append(info["generation"])

    def program():
        gc.callbacks.append(callback)
        gc.enable()
        kept = [[] for _ in range(20_000)]
        gc.disable()
        gc.callbacks.remove(callback)
        return kept

    batch = recorded(program)
    assert len(reported) > 1
    assert [collection_generation(name) for name in pauses(batch)] == reported


def test_the_first_thing_that_a_thread_does():
    """Where a collection is the first that a thread has in a recording, it is inside what runs there, and not around it."""
    ready, go, freed = threading.Event(), [], []

    def last_words():
        _nothing()
        freed.append(True)

    def work():
        Garbage(last_words)
        junk = []
        ready.set()
        while not go:  # no call: that would be the first thing
            pass
        while not freed:
            junk = [junk]

    thresholds = gc.get_threshold()
    worker = threading.Thread(target=work, name="worker")
    worker.start()
    ready.wait()
    try:
        with recording() as record:
            gc.set_threshold(50_000)
            gc.enable()
            go.append(True)
            worker.join()
            gc.disable()
    finally:
        gc.set_threshold(*thresholds)
    calls = tree(record, "work", "worker")
    assert calls[0] in {f".gc.collect: generation {generation}" for generation in range(3)}
    assert calls[1:4] == ["..__del__", "...last_words", "...._nothing"]


def test_only_where_calls_are_wanted():
    """A recording without calls has none, and nothing is asked of the interpreter; one of modules alone has none either."""
    record = otp.profile(operators=False)
    record.start()
    assert python_sources.on_collection not in gc.callbacks
    gc.collect()
    record.stop()
    assert len(record.columns["id"]) == 0
    assert pauses(recorded(gc.collect, frames=otp.FrameFilter(modules_only=True))) == []
    assert pauses(recorded(gc.collect, frames=otp.FrameFilter(include=["nothing"]))) == [OLDEST]
    assert pauses(recorded(gc.collect, frames=otp.FrameFilter(min_duration=1000.0))) == []


def test_another_thread():
    """A collection is on the thread that collects."""

    def collects():
        gc.collect()

    def program():
        thread = threading.Thread(target=collects)
        thread.start()
        thread.join()

    batch = recorded(program)
    assert tree(batch, "collects") == [".<built-in function collect>", f"..{OLDEST}"]
    names = names_of(batch)
    assert batch.columns["thread"][names.index(OLDEST)] == batch.columns["thread"][names.index("collects")]
    assert batch.columns["thread"][names.index(OLDEST)] != batch.columns["thread"][names.index("program")]


def test_several_recordings():
    """Recordings that run at once have the collections of their own time, and the last of them takes all away."""
    with recording() as outer:
        _collect(0)
        with recording() as inner:
            assert gc.callbacks.count(python_sources.on_collection) == 1
            _collect(1)
        assert python_sources.on_collection in gc.callbacks
        _collect(2)
    assert pauses(outer) == [f"gc.collect: generation {n}" for n in range(3)]
    assert pauses(inner) == ["gc.collect: generation 1"]


def test_a_recording_that_ends_in_a_collection():
    """A collection that goes on after the recording ends with it, unfinished; what comes later is not inside of it."""
    record = calls()
    Garbage(record.stop)
    record.start()
    gc.collect()
    batch = record
    (row,) = (row for row, name in enumerate(batch.columns["name"].tolist()) if batch.names[name] == OLDEST)
    assert Flag(batch.columns["flags"].item(row)) & Flag.UNFINISHED
    with recording() as later:
        _nothing()
    assert pauses(later) == []
    with recording() as third:
        gc.collect()
    assert pauses(third) == [OLDEST]


def test_one_of_two_recordings_ends_in_a_collection():
    """A collection goes on for a recording that goes on, with what comes later beside it."""
    with recording() as outer:
        inner = calls()
        Garbage(inner.stop)
        inner.start()
        _collect()
        _nothing()
    assert pauses(inner) == pauses(outer) == [OLDEST]
    batch = outer
    names = names_of(batch)
    pause, later = names.index(OLDEST), names.index("_nothing")
    assert not batch.columns["flags"][pause]
    assert batch.columns["end"][pause] <= batch.columns["start"][later]
    assert batch.columns["parent"][later] < pause


def test_a_recording_that_begins_in_a_collection():
    """A collection that was there before the recording is not in it, and its end ends nothing else."""
    record = calls()
    Garbage(record.start)
    gc.collect()
    _nothing()
    _collect(1)
    record.stop()
    batch = record
    assert pauses(batch) == ["gc.collect: generation 1"]
    names = names_of(batch)
    assert not batch.columns["flags"][names.index("_nothing")]


def test_a_recording_that_another_thread_ends_in_a_collection():
    """A recording that is stopped by another thread, while this one collects, has the collection until then."""
    record = calls()

    def last_words():
        thread = threading.Thread(target=record.stop)
        thread.start()
        thread.join()

    Garbage(last_words)
    record.start()
    gc.collect()
    batch = record
    assert pauses(batch) == [OLDEST]
    with recording() as later:
        gc.collect()
        _nothing()
    names = names_of(later)
    assert names.count(OLDEST) == 1
    assert later.columns["parent"][names.index("_nothing")] < names.index(OLDEST)


def test_another_recording_that_another_thread_ends_in_a_collection():
    """A session whose own sources have not started yet has the collection whole, though the last that wants collections ends in it."""
    record, beginning = calls(), Session(1 << 20)

    def last_words():
        with otp.record_function("label"):
            thread = threading.Thread(target=record.stop)
            thread.start()
            thread.join()

    Garbage(last_words)
    record.start()
    beginning.start()
    gc.collect()
    beginning.stop()
    batch = beginning.final_batch()
    names = [batch.names[name] for name in batch.columns["name"].tolist()]
    pause, label = names.index(OLDEST), names.index("label")
    assert batch.columns["start"][pause] < batch.columns["start"][label]
    assert batch.columns["end"][label] < batch.columns["end"][pause]
    assert not batch.columns["flags"][pause]
    with recording():
        pass
    assert python_sources.on_collection not in gc.callbacks


def test_what_others_do_to_the_list():
    """Callbacks of others stay, and one who empties the list loses the pauses and nothing else."""
    reported = []

    def others(phase, _info):
        reported.append(phase)

    gc.callbacks.append(others)
    try:
        assert pauses(recorded(gc.collect)) == [OLDEST]
        assert gc.callbacks == [others]
        with recording() as record:
            gc.callbacks.clear()
            gc.collect()
        assert pauses(record) == []
    finally:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(others)
    assert reported == ["start", "stop"]
    assert python_sources.on_collection(3, {}) is python_sources.on_collection() is None
    with recording() as record:
        python_sources.on_collection("start", {})
        python_sources.on_collection("start", {"generation": "x"})
        python_sources.on_collection("start", None)
        python_sources.on_collection("start", {"generation": 1})
        python_sources.on_collection("start", {"generation": 7})
        python_sources.on_collection("stop", {})
        python_sources.on_collection("stop", {})
    assert pauses(record) == ["gc.collect: generation 1", "gc.collect: generation 7"]


def test_labels_in_finalizers():
    """A label in a finalizer has the finalizer in its stack, then the pause, then what was interrupted; trace and averages too."""

    def last_words():
        with otp.record_function("last words"):
            pass

    with otp.profile(operators=False, with_stack=True) as prof:
        Garbage(last_words)
        _collect()
    (event,) = (event for event in prof.events() if event.name == "last words")
    assert [masked(entry) for entry in event.stack[:5]] == [
        *("last_words", "__del__", OLDEST, "<built-in function collect>", "_collect")
    ]
    (pause,) = (event for event in prof.events() if event.name == OLDEST)
    assert pause.is_python_function
    assert "last words" in prof.key_averages().table()
    assert "last words" in [span.name for span in prof.spans()]


def test_in_the_chrome_trace(tmp_path):
    """A pause is a slice of the Chrome trace as calls are."""
    with otp.profile(operators=False, with_stack=True) as prof:
        _collect()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (slice_,) = (event for event in events if event.get("name") == OLDEST)
    assert (slice_["ph"], slice_["cat"]) == ("X", "python_function")


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("gc.collect: generation 2", 2),
        ("gc.collect: generation 0", 0),
        ("gc.collect: generation ", None),
        ("gc.collect: generation x", None),
        ("<built-in function collect>", None),
        ("2", None),
    ],
)
def test_generations(name, generation):
    """The generation stands in the name."""
    assert collection_generation(name) == generation


FORKS = """
import gc, os, sys
import otel_torchprof as otp
from otel_torchprof._native.ffi import python_sources

def recorded():
    record = otp.profile(operators=False, with_stack=True)
    record.start()
    gc.collect()
    record.stop()
    batch = record
    return [batch.names[name] for name in batch.columns["name"].tolist()].count("gc.collect: generation 2")

class Forks:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        self.__class__.pid = os.fork()

gc.disable()
record = otp.profile(operators=False, with_stack=True)
record.start()
Forks()
gc.collect()
if Forks.pid == 0:
    assert python_sources.on_collection not in gc.callbacks
    assert recorded() == 1
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(Forks.pid, 0)[1]) == 7
record.stop()
assert [record.names[name] for name in record.columns["name"].tolist()].count("gc.collect: generation 2") == 1
assert recorded() == 1
"""

EXITS = """
import gc, threading
import otel_torchprof as otp

class Late:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        sum(map(len, [[], []]))

record = otp.profile(operators=False, with_stack=True)
record.start()
Late()
gc.collect()
Late()
threading.Thread(target=lambda: [gc.collect(0) for _ in iter(int, 1)], daemon=True).start()
"""


@pytest.mark.parametrize("program", [FORKS, EXITS], ids=["forks", "exits"])
def test_process_changes(program):
    """A fork inside a collection leaves the child able to record, and the parent's pause whole; the end of the program is quiet."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0
    assert done.stderr == "" or done.stderr.startswith("a profile was dropped while it recorded")
