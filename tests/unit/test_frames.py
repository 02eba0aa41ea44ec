"""The tracer of calls: what is recorded, on which threads, and that it leaves nothing behind."""

import gc
import logging
import sys
import threading
import types
import weakref

import pytest
from frame_trees import by_profile_function, flags_of, masked, recorded, recording, tree

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._record.labels import record_function
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions


def _leaf():
    return len("leaf")


def _recursive(depth):
    return _recursive(depth - 1) if depth else _leaf()


def _failing(depth):
    if depth == 0:
        raise ValueError(depth)
    _failing(depth - 1)


def _generator():
    yield 1
    _leaf()
    yield 2


def test_calls_of_python_and_c_functions_nest():
    """Functions, C functions, and Python functions called by these appear in the order and the nesting of the calls."""

    def program():
        _recursive(2)
        sorted([2, 1], key=abs)
        max([1, 2], key=lambda value: -value)

    assert tree(recorded(program), "program") == [
        "._recursive",
        ".._recursive",
        "..._recursive",
        "...._leaf",
        ".....<built-in function len>",
        ".<built-in function sorted>",
        ".<built-in function max>",
        "..<lambda>",
        "..<lambda>",
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 tells no profile function of these calls")
def test_c_functions_that_are_bound_to_an_object_are_calls():
    """A method object with a C function or a method of a C class inside is recorded as that; one with a class or a wrong object is not."""
    length, upper = types.MethodType(len, [1]), types.MethodType(str.upper, "a")
    number, fails, wrong = types.MethodType(int, "1"), types.MethodType(len, 1), types.MethodType(str.upper, 1)

    def program():
        length()
        upper()
        number()
        types.MethodType(_leaf, 1)
        try:
            fails()
        except TypeError:
            abs(1)
        try:
            wrong()
        except TypeError:
            abs(1)

    assert tree(recorded(program), "program") == [
        ".<built-in function len>",
        ".<built-in method upper of str object>",
        ".<built-in function len>",
        ".<built-in function abs>",
        ".<built-in function abs>",
    ]


def test_names_have_the_line_of_the_function_and_the_short_path():
    """A function is named by its file below sys.path, the line where it is defined, and its name."""
    batch = recorded(_leaf)
    line = _leaf.__code__.co_firstlineno
    assert f"test_frames.py({line}): _leaf" in [batch.names[name] for name in batch["name"].tolist()]


def test_events_are_frames():
    """All that is recorded without operators and labels is of the kind FRAME, with no autograd number."""
    batch = recorded(_leaf)
    assert set(batch["kind"].tolist()) == {Kind.FRAME}
    assert set(batch["sequence_nr"].tolist()) == {-1}


def test_exception_ends_the_frames_it_leaves():
    """Ten frames that an exception leaves have ended, so that what comes next is beside and not inside them."""

    def program():
        with pytest.raises(ValueError, match="0"):
            _failing(9)
        _leaf()

    batch = recorded(program)
    assert flags_of(batch, "_failing") == [Flag.ERROR] * 10
    assert "._leaf" in tree(batch, "program")


def test_c_function_that_raises_ends():
    """A C function that raises has ended, as one that returns."""

    def program():
        with pytest.raises(ValueError, match="not in list"):
            [].index(1)
        _leaf()

    assert "._leaf" in tree(recorded(program), "program")


def test_each_segment_of_a_generator_is_a_call():
    """A generator appears once for each time that it runs, with the line at which it goes on."""

    def program():
        for _ in _generator():
            pass

    batch = recorded(program)
    assert tree(batch, "program") == [
        "._generator",
        "._generator",
        ".._leaf",
        "...<built-in function len>",
        "._generator",
    ]
    first = _generator.__code__.co_firstlineno
    lines = [
        name.split("(")[1].split(")")[0]
        for name in map(batch.names.__getitem__, batch["name"].tolist())
        if "): _generator" in name
    ]
    assert lines == [str(first), str(first + 1), str(first + 3)]


def test_recursion_to_the_limit():
    """A thousand frames deep, each frame is recorded or counted as dropped."""

    def program():
        with pytest.raises(RecursionError):
            _recursive(10**6)

    with recording() as record:
        program()
    batch = record.batch()
    produced = len(batch) + sum(batch.dropped.values())
    assert produced > sys.getrecursionlimit() - 100
    assert tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]


def test_frames_on_the_stack_are_open_from_start_to_stop():
    """What was called before the start is around all the rest, marked unfinished; this package's own calls are not there."""

    def outer():
        return recorded(_leaf)

    batch = outer()
    here = next(number for number, thread in enumerate(batch.threads) if thread.ident == threading.get_ident())
    rows = (batch["thread"] == here).nonzero()[0].tolist()  # others may wait in something
    names = [masked(batch.names[batch["name"].item(row)]) for row in rows]
    assert names[-5:] == [
        "test_frames_on_the_stack_are_open_from_start_to_stop",
        "outer",
        "recorded",
        "_leaf",
        "<built-in function len>",
    ]
    assert flags_of(batch, "outer") == [Flag.UNFINISHED]
    assert batch["parent"][rows].tolist() == [-1, *rows[:-1]]


def test_label_is_inside_the_function_that_enters_it():
    """Labels and calls are one tree."""

    def program():
        with record_function("label"):
            _leaf()

    assert tree(recorded(program), "program") == [".label", ".._leaf", "...<built-in function len>"]


def _other_tool(*event):
    """A profile function."""


@by_profile_function
def test_other_tools_profile_function_stays(caplog):
    """Where another tool profiles, it goes on doing so; the recording goes without calls and says in whose way it would be."""
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        sys.setprofile(_other_tool)
        record.start()
        with record_function("label"):
            _leaf()
        in_use = sys.getprofile()
        record.stop()
        sys.setprofile(None)
    assert in_use is _other_tool
    assert [record.batch().names[name] for name in record.batch()["name"].tolist()] == ["label"]
    assert record.health().notes == ("frames off: sys.setprofile is in use by test_frames._other_tool",)
    assert "test_frames._other_tool" in caplog.text


@by_profile_function
def test_tool_that_takes_over_keeps_the_thread():
    """A tool that sets its profile function meanwhile keeps it beyond our stop, and health says that calls were cut short."""
    seen = []
    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    record.start()
    _leaf()
    sys.setprofile(lambda *event: seen.append(event))
    try:
        with record_function("later"):
            _leaf()
        record.stop()
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert seen
    batch = record.batch()
    later = [batch.names[name] for name in batch["name"].tolist()].index("later")
    assert batch["parent"][later] == -1
    assert record.health().notes == ("frames were cut short on 1 threads: another tool profiled them",)


def test_two_recordings_at_once_both_have_all():
    """One that starts inside another has the stack too, and neither changes what the other has."""

    def inner():
        with recording() as record:
            _leaf()
        return record.batch()

    def outer():
        _leaf()
        batches.append(inner())
        _leaf()

    batches = []
    first = recorded(outer)
    names = [masked(first.names[name]) for name in first["name"].tolist()]
    assert names.count("_leaf") == 3
    assert names.count("inner") == 1
    inside = [line.lstrip(".") for line in tree(batches[0], "outer")]
    assert inside[0] == "inner"
    assert inside.count("_leaf") == 1
    assert sys.getprofile() is None


def _weak_points(make):
    found = make()
    gc.collect()
    return [point() for point in found if point() is not None]


_MADE = """
class Made:
    def method(self):
        return [].append(len("x"))

def made():
    return Made().method()
"""


def test_nothing_is_kept_alive():
    """After two hundred recordings of functions, classes and objects that are made anew each time, none of these lives."""

    def make():
        points = []
        for _ in range(200):
            space = {}
            exec(_MADE, space)  # noqa: S102
            points += [weakref.ref(space["made"]), weakref.ref(space["Made"]), weakref.ref(space["made"].__code__)]
            recorded(space["made"])
        return points

    assert _weak_points(make) == []
    assert sys.getprofile() is None


def test_function_at_a_reused_address_has_its_own_name():
    """Functions that are made and freed in turn, and come to lie at the same place, keep their names apart."""

    def program():
        for number in range(50):
            space = {}
            exec(f"def made_{number}(): pass", space)  # noqa: S102
            space.pop(f"made_{number}")()

    lines = [line for line in tree(recorded(program), "program") if "made_" in line]
    assert lines == [f".made_{number}" for number in range(50)]


def test_module_calls_are_named_after_the_module(monkeypatch):
    """The function around every call of a module bears the module's class and number instead of its own name.

    Numbers count the instances of a class as they are first called, also where one lies at the place of one that has gone.
    """

    class Module:
        def __call__(self):
            return self.forward()

    class Net(Module):
        def forward(self):
            return len("x")

    class Slotted(Module):
        __slots__ = ()

        def forward(self):
            return len("x")

    torch = types.ModuleType("torch")
    torch.__file__ = __file__
    torch.nn = types.SimpleNamespace(Module=Module)
    monkeypatch.setitem(sys.modules, "torch", torch)
    kept = Net()

    def program():
        for _ in range(3):
            Net()()
        kept()
        Slotted()()
        kept()

    calls = [line for line in tree(recorded(program), "program") if not line.startswith("..")]
    assert calls == [".nn.Module: " + name for name in ("Net_0", "Net_1", "Net_2", "Net_3", "Slotted_0", "Net_3")]
