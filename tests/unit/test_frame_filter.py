"""Which calls are to be recorded: the filter alone, what it takes out of batches, and profiles; see also test_frames_random.py."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
from frame_runs import printed
from frame_trees import names_of, recorded, recording

import otel_torchprof as otp
from otel_torchprof import FrameFilter
from otel_torchprof._columns.batch import Batch, OpenEvents
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._model.frames import ShortFrames
from otel_torchprof._native import frames
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions
from otel_torchprof.errors import forget_warnings


def code_in(path):
    """The code of a function of a file."""
    return compile("", path, "exec")


@pytest.fixture(autouse=True)
def _warned_of_nothing():
    forget_warnings()


LINEAR = ("/env/lib/site-packages/torch/nn/modules/linear.py", "torch.nn.modules.linear")
TRAIN = ("/home/me/project/src/train.py", "__main__")
FROZEN = ("<frozen importlib._bootstrap>", "importlib._bootstrap")
NAMELESS = ("<string>", None)


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        ("torch", [LINEAR]),
        ("torch.nn", [LINEAR]),
        ("torch.nn.modules.linear", [LINEAR]),
        ("torch.n", []),
        ("nn", []),
        ("__main__", [TRAIN]),
        ("importlib", [FROZEN]),
        ("torch.*", [LINEAR]),
        ("*.nn", [LINEAR]),
        ("*", [LINEAR, TRAIN, FROZEN, NAMELESS]),
        ("<*", [FROZEN, NAMELESS]),
        ("*/site-packages/*", [LINEAR]),
        ("site-packages/torch", [LINEAR]),
        ("site-packages/tor", []),
        ("packages/torch", []),
        ("/env", [LINEAR]),
        ("/env/", [LINEAR]),
        ("env/lib", [LINEAR]),
        ("/lib", []),
        ("train.py", [TRAIN]),
        ("src/train.py", [TRAIN]),
        ("./src/", [TRAIN]),
        ("*rain.p*", [TRAIN]),
        ("src/*.py", [TRAIN]),
        ("~/project", [TRAIN]),
        ("/home/*/project/src/train.py", [TRAIN]),
        ("src.train", []),
        ("t+.py", []),
    ],
)
def test_what_an_entry_stands_for(monkeypatch, entry, fits):
    """A module stands for itself and what is in it, a path for a file or all below it, a glob for whatever it fits."""
    monkeypatch.setenv("HOME", "/home/me")
    included, excluded = FrameFilter(include=[entry]), FrameFilter(exclude=[entry])
    for function in (LINEAR, TRAIN, FROZEN, NAMELESS):
        code = code_in(function[0])
        assert included.decide(code, function[1]) is (function in fits)
        assert excluded.decide(code, function[1]) is (function not in fits)


def test_a_relative_file_name(tmp_path, monkeypatch):
    """A file that the interpreter knows by a relative path is where that leads to."""
    monkeypatch.chdir(tmp_path)
    assert FrameFilter(include=[str(tmp_path)]).decide(code_in("train.py"), "__main__")


def test_excluded_of_what_is_included():
    """What is excluded goes, though it is included; what has neither stays."""
    chosen = FrameFilter(include=("torch", "train.py"), exclude=["torch.nn"])
    assert not chosen.decide(code_in(LINEAR[0]), LINEAR[1])
    assert chosen.decide(code_in("/env/torch/optim/sgd.py"), "torch.optim.sgd")
    assert chosen.decide(code_in(TRAIN[0]), TRAIN[1])
    assert not chosen.decide(code_in("/env/numpy/core.py"), "numpy.core")
    assert chosen.judges_code
    assert not FrameFilter(max_depth=3).judges_code
    assert FrameFilter().decide(code_in(TRAIN[0]), None)


def test_a_filter_is_a_value():
    """Filters that were given the same are equal, work as keys, and survive pickling and replacement."""
    one = FrameFilter(include=["torch"], exclude={"numpy"}, max_depth=2, min_duration=1, c_functions=False)
    other = FrameFilter(("torch",), ("numpy",), 2, 1.0, False)
    assert {one: 1}[other] == 1
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - our own
    assert not pickle.loads(pickle.dumps(one)).decide(code_in(TRAIN[0]), "numpy")  # noqa: S301
    assert replace(one, include=()).decide(code_in(TRAIN[0]), "__main__")
    assert "include=('torch',)" in repr(one)
    assert "_included" not in repr(one)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"include": "torch"}, TypeError, "include is 'torch'; it must be a list of module names"),
        ({"exclude": 3}, TypeError, "exclude is 3; it must be a list"),
        ({"exclude": [b"torch"]}, TypeError, r"exclude is \[b'torch'\]; b'torch' is no str"),
        ({"include": [""]}, ValueError, r"include is \[''\]; '' is none of .*: module names .*globs"),
        ({"include": ["torch..nn"]}, ValueError, "'torch..nn' is none of"),
        ({"include": ["torch nn"]}, ValueError, "'torch nn' is none of"),
        ({"include": ["/"]}, ValueError, "'/' is none of"),
        ({"max_depth": 0}, ValueError, "max_depth is 0; it must be a whole number of calls, from 1 "),
        ({"max_depth": 1 << 31}, ValueError, "max_depth is 2147483648; "),
        ({"max_depth": True}, TypeError, "max_depth is True; it must be a whole number"),
        ({"max_depth": 1.5}, TypeError, "max_depth is 1.5; "),
        ({"min_duration": -1}, ValueError, "min_duration is -1; it must be a number of seconds, 0 or more"),
        ({"min_duration": float("nan")}, ValueError, "min_duration is nan; "),
        ({"min_duration": float("inf")}, ValueError, "min_duration is inf; "),
        ({"min_duration": "1ms"}, TypeError, "min_duration is '1ms'; it must be a number of seconds"),
        ({"c_functions": 0}, TypeError, "c_functions is 0; it must be True or False"),
        ({"modules_only": "yes"}, TypeError, "modules_only is 'yes'; "),
    ],
)
def test_what_is_refused(arguments, error, text):
    """What is no filter is refused with a message that names it, its value and what is allowed."""
    with pytest.raises(error, match=text):
        FrameFilter(**arguments)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_profile_with_no_filter(enabled):
    """What is given in a filter's place is named, also where no calls are recorded."""
    with pytest.raises(TypeError, match=r"frames is 'torch'; it must be a FrameFilter\(include=, exclude=, .*or None"):
        otp.profile(operators=False, with_stack=enabled, frames="torch")


# ---- the environment ----


def filter_of(monkeypatch, **parts):
    """What a profile is told by parts of the variable."""
    monkeypatch.setenv("OTEL_TORCHPROF_FRAMES", ",".join(f"{name}={value}" for name, value in parts.items()))
    return otp.profile(operators=False, with_stack=True)._segments._options.frame_filter


def test_settings_from_the_environment(monkeypatch):
    """Each part of the variable is a setting of the filter of a profile that is given none; one that is given one has that alone."""
    assert filter_of(monkeypatch) == FrameFilter()
    found = filter_of(
        monkeypatch,
        include=" torch.nn , src/*.py,",
        exclude="numpy",
        max_depth="7",
        min_duration="1e-5",
        c_functions="No",
        modules_only="1",
    )
    assert found == FrameFilter(("torch.nn", "src/*.py"), ("numpy",), 7, 1e-5, False, True)
    given = otp.profile(operators=False, with_stack=True, frames=FrameFilter())
    assert given._segments._options.frame_filter == FrameFilter()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("include", "torch,a b", "'a b' is none of what is allowed: module names"),
        ("exclude", "..", "'..' is none of what is allowed: module names"),
        ("max_depth", "0", "it must be a whole number of calls, from 1 "),
        ("max_depth", "deep", "it must be a whole number of calls"),
        ("min_duration", "1ms", "it must be a number of seconds"),
        ("min_duration", "-1", "0 or more"),
        ("c_functions", "some", "allowed are true and false"),
        ("modules_only", "some", "allowed are true and false"),
    ],
)
def test_a_bad_variable_is_warned_of_once(monkeypatch, caplog, name, value, allowed):
    """A bad value is ignored, with one warning that names variable, value and what is allowed; the others count."""
    other = "max_depth" if name != "max_depth" else "min_duration"
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        found = [filter_of(monkeypatch, **{name: value, other: "3"}) for _ in range(2)]
    assert found == [FrameFilter(**{other: 3})] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"OTEL_TORCHPROF_FRAMES: {name}={value!r} is ignored: ")
    assert allowed in record.getMessage()


def test_variables_are_not_looked_at_without_calls(monkeypatch, caplog):
    """A profile that records no calls says nothing of variables about them."""
    monkeypatch.setenv("OTEL_TORCHPROF_FRAMES", "max_depth=deep")
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        otp.profile(operators=False)
    assert caplog.records == []


# ---- short calls ----


def batch_of(rows, **rest):
    """Events from ``(start, end, parent, kind, flags)``."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Batch.of(dict(zip(("start", "end", "parent", "kind", "flags"), columns, strict=True)), [""], **rest)


def test_short_calls_go():
    """Calls below the duration go, what is in them moves to what is around; operators, labels and unfinished calls stay."""
    batch = batch_of(
        [
            (0, 5000, -1, Kind.FRAME, 0),
            (10, 1009, 0, Kind.FRAME, 0),  # too short by a nanosecond
            (20, 30, 1, Kind.OPERATOR, 0),
            (40, 50, 1, Kind.FRAME, 0),
            (41, 42, 3, Kind.LABEL, 0),
            (2000, 3000, 0, Kind.FRAME, 0),  # just long enough
            (4999, 5000, 0, Kind.FRAME, Flag.UNFINISHED),
        ]
    )
    left = ShortFrames(1e-6).without(batch)
    assert left["start"].tolist() == [0, 20, 41, 2000, 4999]
    assert left["parent"].tolist() == [-1, 0, 0, 0, 0]
    assert ShortFrames(0.0).without(batch) is batch


def test_short_calls_across_drains():
    """A call that was told of as open stays; what is in or around one that goes keeps what was around that from before."""
    short = ShortFrames(1e-6)
    first = batch_of(
        [(10, 20, -1, Kind.FRAME, 0), (11, 12, 0, Kind.FRAME, 0), (13, 14, 1, Kind.LABEL, 0)],
        outer_rows=np.array([0], dtype=np.uint64),
        outer_parents=np.array([70], dtype=np.uint64),
        opens=OpenEvents(
            *(
                np.array(column, dtype=dtype)
                for column, dtype in [
                    ([70, 71], np.uint64),
                    ([0, 2], np.uint64),
                    ([5, 6], np.int64),
                    ([0, 0], np.uint32),
                    ([0, 0], np.uint32),
                ]
            )
        ),
    )
    left = short.without(first)
    assert left["start"].tolist() == [13]
    assert (left["parent"].tolist(), left.outer_rows.tolist(), left.outer_parents.tolist()) == ([-1], [0], [70])
    assert left.opens.parent.tolist() == [0, 70]
    second = replace(batch_of([(5, 30, -1, Kind.FRAME, 0), (6, 25, 0, Kind.FRAME, 0), (26, 27, 0, Kind.FRAME, 0)]))
    second.columns["id"][:] = [70, 71, 72]
    assert short.without(second)["id"].tolist() == [70, 71]
    assert len(short.without(second)) == 0


# ---- profiles ----

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


def names_in(prof):
    """The names of the program's calls, without paths."""
    return [name for name in names_of(prof) if name in ALL]


LIBRARYS = ["library_outer", "library_helper", "<built-in function oct>"]
OWN = ["_program", "_between", "_mine", "<built-in function hex>"]
ALL = ["_program", *LIBRARYS, "_between", *LIBRARYS, "_mine", "<built-in function hex>"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"include": [__name__]}, OWN),
        ({"include": [__file__]}, OWN),
        ({"include": ["first"]}, LIBRARYS),
        ({"exclude": ["first", "second.py"]}, OWN),
        ({}, ALL),
    ],
)
def test_what_is_left(options, left):
    """What a module's name, a path or a glob excludes is not recorded, with the C functions that it calls, on threads to come too."""
    with recording(frames=FrameFilter(**options), all_threads=True) as prof:
        _program()
        thread = threading.Thread(target=_program)
        thread.start()
        thread.join()
    assert names_in(prof) == left * 2


def test_short_calls_are_not_drained():
    """A recording that is read while it runs has no calls that are shorter than its filter says."""
    record = ProfileSegment(
        RecordingOptions(operators=False, frames=True, frame_filter=FrameFilter(min_duration=1000.0))
    )
    record.start()
    _mine()
    record.stop()
    flags = record.drain()["flags"]
    assert len(flags)
    assert (flags & Flag.UNFINISHED).all()


def test_depth_when_another_recording_comes_and_goes():
    """What counts for a recording's depth is what it has recorded, whoever else begins or ends inside of that."""

    def program():
        with recording(frames=FrameFilter(max_depth=5)):
            FIRST.library_outer(_mine)
        FIRST.library_outer(_mine)

    record = recorded(program, frames=FrameFilter(include=[__name__], max_depth=1))
    assert names_in(record) == []
    assert names_of(record).count("program") == 1  # what was there at the start does not count


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
            with recording(frames=FrameFilter(include=["/lib"], max_depth=3)) as record:
                FIRST.library_outer(in_the_middle)
                FIRST.library_outer(_between)
        return names_in(record)

    expected = ["library_outer", "library_helper", "<built-in function oct>", "library_outer"] * 2
    assert {begins: recorded_beside(begins) for begins in ("never", "before", "inside")} == {
        "never": expected,
        "before": expected,
        "inside": expected,
    }


def test_a_function_that_is_open_for_one_and_left_out_for_another():
    """What it calls in C is there for the one, though the other, which came later, has none of it."""
    with recording() as everything, recording(frames=FrameFilter(include=["first"])) as first:
        oct(7)
    assert "<built-in function oct>" in names_in(everything)
    assert names_in(first) == []


_TOO_DEEP = """
    import contextlib, threading
    from frame_trees import calls
    from otel_torchprof import FrameFilter

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

    prof = calls(all_threads=True, frames=FrameFilter(include=["nowhere"]))
    prof.start()
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        pass
    prof.stop()
    print("quiet")
"""


def test_a_filter_that_is_asked_where_calls_are_too_deep():
    """What the filter cannot decide on another thread, for want of depth, the main thread does not hear of."""
    assert printed(_TOO_DEEP) == ["quiet"]


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
    with otp.profile(operators=False, **arguments) as prof:
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
    assert [names_in(found) for found in (record, later)] == [[], ["<built-in function hex>"]]


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
    names = names_of(record)
    (row,) = (at for at, name in enumerate(names) if name == "<built-in function oct>")
    assert "test_c_functions" in names[record.columns["parent"][row]]
