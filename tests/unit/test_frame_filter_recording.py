"""Filters while calls are recorded: what the tracer leaves out."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING

import pytest
from frame_runs import printed
from frame_trees import masked, recorded, recording, tree

from otel_torchprof._columns.schema import Flag
from otel_torchprof._native import frames
from otel_torchprof._record.frame_filter import FrameFilter
from otel_torchprof.profiler import profile

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

LIBRARY = """
def library_outer(inner):
    return library_helper(inner)

def library_helper(inner):
    oct(7)
    return inner()
"""


def module_of(name, path):
    """A module with the functions of a library, as if it stood in a file."""
    module = types.ModuleType(name)
    exec(compile(LIBRARY, path, "exec"), module.__dict__)  # noqa: S102 - the test's own text
    return module


FIRST = module_of("first.part", "/lib/first/part.py")
SECOND = module_of("second", "/lib/second.py")


def _program():
    """Calls of this file, of both libraries, and of C."""
    FIRST.library_outer(_between)


def _between():
    return SECOND.library_outer(_mine)


def _mine():
    """A function of this file that calls C."""
    return hex(7)


def recorded_with(**options) -> Batch:
    """What is recorded of the program."""
    with recording(frame_filter=FrameFilter(**options)) as record:
        _program()
    return record.batch()


def names_of(batch):
    """The names of the program's calls, without paths."""
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    return [name for name in names if name in ALL]


LIBRARYS = ["library_outer", "library_helper", "<built-in function oct>"]
OWN = ["_program", "_between", "_mine", "<built-in function hex>"]
ALL = ["_program", *LIBRARYS, "_between", *LIBRARYS, "_mine", "<built-in function hex>"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ALL),
        ({"include": [__name__]}, OWN),
        ({"include": [__file__]}, OWN),
        ({"include": ["first"]}, LIBRARYS),
        ({"include": ["/lib/*"]}, LIBRARYS * 2),
        (
            {"exclude": ["first", "second.py"]},
            OWN,
        ),
        ({"include": ["/lib"], "exclude": ["first"]}, LIBRARYS),
        ({"include": ["nothing.at.all"]}, []),
        ({"c_functions": False}, [name for name in ALL if "<" not in name]),
        ({"include": ["second"], "c_functions": False}, ["library_outer", "library_helper"]),
    ],
)
def test_what_is_left(options, left):
    """What is excluded is not recorded, with the C functions that it calls; what it calls otherwise is judged by itself."""
    assert names_of(recorded_with(**options)) == left


def test_where_what_is_left_hangs():
    """A call hangs under the nearest call around it that is recorded."""
    batch = recorded_with(exclude=["first", "*second*"])
    assert tree(batch, "_program") == ["._between", ".._mine", "...<built-in function hex>"]


def test_depth():
    """At most so many calls are open around each other, not counting those that were on the stack at the start."""

    def deepest(batch):
        depth = []
        for parent, flags in zip(batch["parent"].tolist(), batch["flags"].tolist(), strict=True):
            was_open = flags & Flag.UNFINISHED
            depth.append(0 if was_open else 1 if parent < 0 else depth[parent] + 1)
        return max(depth)

    assert deepest(recorded_with(include=[__name__, "/lib"])) > 4
    assert deepest(recorded_with(include=[__name__, "/lib"], max_depth=4)) == 4
    assert deepest(recorded_with(include=["/lib"], max_depth=1)) == 1
    assert names_of(recorded_with(include=["/lib"], max_depth=1)) == ["library_outer"]
    assert names_of(recorded_with(include=["/lib"], max_depth=2)) == ["library_outer", "library_helper"]


def test_depth_after_an_exception():
    """Calls that an exception leaves count no longer: the next ones are recorded as deep as before."""

    def fail():
        raise ValueError

    with recording(frame_filter=FrameFilter(include=["/lib"], max_depth=2)) as record:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                FIRST.library_outer(fail)
        FIRST.library_outer(_mine)
    assert names_of(record.batch()) == ["library_outer", "library_helper"] * 4


def test_depth_when_another_recording_comes_and_goes():
    """What counts for a recording's depth is what it has recorded, whoever else begins or ends inside of that."""

    def program():
        with recording(frame_filter=FrameFilter(max_depth=5)):
            FIRST.library_outer(_mine)
        FIRST.library_outer(_mine)

    record = recorded(program, frame_filter=FrameFilter(include=[__name__], max_depth=1))
    assert "library_outer" not in names_of(record)
    assert "_mine" not in names_of(record)


def test_depth_beside_a_recording_of_more():
    """Calls that are recorded for others only do not count."""
    with recording(), recording(frame_filter=FrameFilter(include=["/lib"], max_depth=2)) as limited:
        FIRST.library_outer(_mine)
    assert names_of(limited.batch()) == ["library_outer", "library_helper"]


def test_depth_beside_others():
    """A greatest depth counts the calls of its own recording, from its own start, whoever else records and whenever."""

    def recorded_beside(begins):
        """With a recording of everything that begins around, inside, or not at all."""
        with contextlib.ExitStack() as others:

            def in_the_middle():
                if begins == "inside":
                    others.enter_context(recording())
                SECOND.library_outer(_mine)

            if begins == "before":
                others.enter_context(recording())
            with recording(frame_filter=FrameFilter(include=["/lib"], max_depth=3)) as record:
                FIRST.library_outer(in_the_middle)
                FIRST.library_outer(_between)
        return names_of(record.batch())

    expected = ["library_outer", "library_helper", "<built-in function oct>", "library_outer"] * 2
    assert {begins: recorded_beside(begins) for begins in ("never", "before", "inside")} == {
        "never": expected,
        "before": expected,
        "inside": expected,
    }


def test_modules_alone():
    """With modules alone no function is recorded, of Python or of C."""
    assert len(recorded_with(modules_only=True)) == 0


def test_filters_of_several_recordings():
    """Recordings that run at once have what their own filter lets through, and the same nesting as alone."""
    with (
        recording() as everything,
        recording(frame_filter=FrameFilter(include=["first"])) as first,
        recording(frame_filter=FrameFilter(exclude=["first", "second"], c_functions=False)) as own,
    ):
        _program()
    assert names_of(everything.batch()) == ALL
    assert names_of(first.batch()) == LIBRARYS
    assert names_of(own.batch()) == ["_program", "_between", "_mine"]
    assert tree(own.batch(), "_program") == ["._between", ".._mine"]


def test_a_function_that_is_open_for_one_and_left_out_for_another():
    """What it calls in C is there for the one, though the other, which came later, has none of it."""
    with recording() as everything, recording(frame_filter=FrameFilter(include=["first"])) as first:
        oct(7)
    assert "<built-in function oct>" in names_of(everything.batch())
    assert names_of(first.batch()) == []


def test_a_filter_on_every_thread():
    """The filter holds on threads that start later, too."""
    with recording(all_threads=True, frame_filter=FrameFilter(include=["second"])) as record:
        thread = threading.Thread(target=_program)
        thread.start()
        thread.join()
    assert names_of(record.batch()) == LIBRARYS


_TOO_DEEP = """
    import contextlib, threading
    from otel_torchprof import FrameFilter
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    made = []
    for number in range(3000):
        names = {}
        exec(f"def function{number}(): return {number}", names)
        made.append(names[f"function{number}"])

    def deep(number):
        made[number]()
        return deep(number + 1)

    def work():
        with contextlib.suppress(RecursionError):
            deep(0)

    nothing = FrameFilter(include=["nowhere"])
    options = RecordingOptions(operators=False, frames=True, all_threads=True, frame_filter=nothing)
    recording = ProfileSegment(options)
    recording.start()
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        pass
    recording.stop()
    print("quiet")
"""


def test_a_filter_that_is_asked_where_calls_are_too_deep():
    """What the filter cannot decide on another thread, for want of depth, the main thread does not hear of."""
    assert printed(_TOO_DEEP) == ["quiet"]


def test_a_filter_holds_for_its_own_recording():
    """A later recording without a filter has what an earlier one left out."""
    assert names_of(recorded_with(include=["nothing"])) == []
    assert names_of(recorded_with()) == ALL


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            {"frames": FrameFilter(include=["no_such"]), "with_stack": True},
            "no function was called that include=['no_such']",
        ),
        ({"frames": FrameFilter(include=["first"])}, "frames off: a filter of calls was given without with_stack=True"),
        ({"frames": FrameFilter(include=["first"]), "with_stack": True}, None),
        ({"frames": FrameFilter(modules_only=True), "with_stack": True}, None),
        ({}, None),
    ],
)
def test_a_filter_that_leaves_nothing_is_told_of(arguments, note):
    """Where there are no calls because of the filter, or without with_stack in spite of it, `health` says so; else nothing."""
    with profile(operators=False, **arguments) as prof:
        _program()
    assert [text.partition(";")[0][: len(note or text)] for text in prof.health.notes] == (
        [] if note is None else [note]
    )


def test_a_pause_holds_for_recordings_that_begin_in_it():
    """A thread that was paused before anybody recorded has no calls until it goes on, whoever begins or ends meanwhile."""
    frames.pause()
    try:
        with recording():
            oct(7)
        with recording() as record:
            hex(1)
            frames.resume()
            frames.pause()
            hex(1)
    finally:
        frames.resume()
    with recording() as later:
        hex(1)
    assert [names_of(found.batch()) for found in (record, later)] == [[], ["<built-in function hex>"]]


def test_c_functions_inside_which_another_recording_begins():
    """They end when they return or raise, for the recording that has them, though the other one has listed their caller since."""

    def begin_another(others):
        others.enter_context(recording())
        raise ValueError

    with contextlib.ExitStack() as others, recording() as record:
        sorted([0], key=lambda _: others.enter_context(recording()) and 0)
        with contextlib.suppress(ValueError):
            sorted([0], key=lambda _: begin_another(others))
        oct(7)
    batch = record.batch()
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    (row,) = (at for at, name in enumerate(names) if name == "<built-in function oct>")
    assert "test_c_functions" in names[batch["parent"][row]]
