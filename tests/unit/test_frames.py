"""The tracer of calls: what no program made by chance shows of it, and that it leaves nothing behind."""

import gc
import signal
import sys
import threading
import types
import weakref
from collections import Counter

import pytest
from frame_trees import calls, flags_of, names_of, recorded, recording, tree

from otel_torchprof._columns.schema import Flag, Kind

LEAF = ("._leaf", "..<built-in function len>")


def _leaf():
    return len("leaf")


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


def test_names_and_kinds():
    """A function is named by its file below sys.path, its line and its name; all without operators and labels are calls."""
    prof = recorded(_leaf)
    line = _leaf.__code__.co_firstlineno
    assert f"test_frames.py({line}): _leaf" in [prof.names[name] for name in prof.columns["name"].tolist()]
    assert set(prof.columns["kind"].tolist()) == {Kind.FRAME}
    assert set(prof.columns["sequence_nr"].tolist()) == {-1}


def _deep(depth):
    if depth:
        _deep(depth - 1)


@pytest.mark.parametrize("depth", [2999, 10**6])
def test_deeper_than_the_recorder_goes(depth):
    """Of nested calls those beyond the recorder's depth are counted as lost for it, RecursionError comes as ever, and what follows is right."""
    before, times = sys.getrecursionlimit(), []

    def program():
        for _ in range(3):
            try:
                _deep(depth)
            except RecursionError:
                times.append("too deep")
            _leaf()

    sys.setrecursionlimit(5000)
    try:
        with recording() as prof:
            program()
    finally:
        sys.setrecursionlimit(before)
    lines, dropped = tree(prof, "program"), prof.health.dropped
    assert len(times) == 3 * (depth > 5000)
    assert set(dropped) == {"depth"}
    nested = [line for line in lines if line.endswith("_deep")]
    assert all(line.startswith("." * at + "_deep") for at, line in enumerate(nested[: len(nested) // 3], 1))
    assert 3 * min(depth, 4800) < len(nested) + dropped["depth"] <= 3 * 5000
    assert [line for line in lines if line in LEAF] == [*LEAF] * 3


def test_frames_on_the_stack_are_open_from_start_to_stop():
    """What was called before the start is around all the rest, marked unfinished; this package's own calls are not there."""

    def outer():
        return recorded(_leaf)

    prof = outer()
    here = next(number for number, thread in enumerate(prof.threads) if thread.ident == threading.get_ident())
    rows = (prof.columns["thread"] == here).nonzero()[0].tolist()  # others may wait in something
    names = names_of(prof)
    assert [names[row] for row in rows][-5:] == [
        "test_frames_on_the_stack_are_open_from_start_to_stop",
        "outer",
        "recorded",
        "_leaf",
        "<built-in function len>",
    ]
    assert flags_of(prof, "outer") == [Flag.UNFINISHED]
    assert prof.columns["parent"][rows].tolist() == [-1, *rows[:-1]]


def test_profiles_that_overlap():
    """Each has the stack and what was called in its own time, whichever starts or ends first, and the tracer goes with the last."""
    first, second, inner = calls(), calls(), []

    def one():
        _leaf()

    def both():
        inner.append(recorded(_leaf))

    def two():
        _leaf()

    first.start()
    one()
    second.start()
    both()
    first.stop()
    two()
    second.stop()
    assert sys.getprofile() is None
    for prof, expected in ((first, ["one", "both"]), (second, ["both", "two"])):
        assert [name for name in names_of(prof) if name in {"one", "both", "two"}] == expected
        assert names_of(prof).count("_leaf") == 2
    assert [line.lstrip(".") for line in tree(inner[0], "both")][-2:] == ["_leaf", "<built-in function len>"]


def test_started_twice_stopped_twice():
    """A profile that runs refuses to start again and goes on; a second stop does nothing."""
    prof = calls()
    prof.start()
    with pytest.raises(RuntimeError, match="not reentrant"):
        prof.start()
    _leaf()
    prof.stop()
    prof.stop()
    assert sys.getprofile() is None
    assert names_of(prof).count("_leaf") == 1


_MADE = """
class Made:
    def method(self):
        return [].append(len("x"))

def made():
    return Made().method()
"""


def test_two_hundred_profiles_keep_nothing_alive():
    """Of functions, classes and objects that are made anew for each of 200 profiles none lives, and each has the same tree."""
    points, trees = [], set()
    for _ in range(200):
        space = {}
        exec(_MADE, space)  # noqa: S102 - the test's own text
        points += [weakref.ref(space["made"]), weakref.ref(space["Made"]), weakref.ref(space["made"].__code__)]
        trees.add(tuple(tree(recorded(space["made"]), "made")))
    del space
    gc.collect()
    assert [point() for point in points if point() is not None] == []
    assert trees == {(".method", "..<built-in function len>", "..<built-in method append of list object>")}
    assert sys.getprofile() is None


def test_function_at_a_reused_address_has_its_own_name():
    """Functions that are made and freed in turn, and come to lie at the same place, keep their names apart."""

    def program():
        for number in range(50):
            space = {}
            exec(f"def made_{number}(): pass", space)  # noqa: S102 - the test's own text
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

    lines = [line for line in tree(recorded(program), "program") if not line.startswith("..")]
    assert lines == [".nn.Module: " + name for name in ("Net_0", "Net_1", "Net_2", "Net_3", "Slotted_0", "Net_3")]


def test_signal_handler_in_python():
    """What a signal's handler calls is inside the call that it interrupted; an exception from there ends what it leaves."""

    def handler(*_):
        _leaf()
        raise InterruptedError

    def waits():
        while True:
            signal.raise_signal(signal.SIGUSR1)

    def program():
        for _ in range(3):
            with pytest.raises(InterruptedError):
                waits()
        _leaf()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        lines = tree(recorded(program), "program")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sum(line.endswith("handler") for line in lines) == 3
    assert [line.endswith("._leaf") for line in lines].count(True) == 4
    assert tuple(lines[-2:]) == LEAF


def test_greenlets():
    """Greenlets that run the same functions, each stopped in the midst of them, have all their calls, ended; what follows is beside them."""
    greenlet = pytest.importorskip("greenlet", reason="greenlet is not installed")

    def outer():
        for _ in range(3):
            inner()

    def inner():
        greenlet.getcurrent().parent.switch()
        len("x")

    def program():
        several = [greenlet.greenlet(outer) for _ in range(10)]
        for _ in range(4):
            for each in several:
                each.switch()
        _leaf()

    prof = recorded(program)
    counts = Counter(names_of(prof))
    assert (counts["outer"], counts["inner"], counts["<built-in function len>"]) == (10, 30, 31)
    assert flags_of(prof, "outer") + flags_of(prof, "inner") == [0] * 40
    assert tree(prof, "_leaf") == [".<built-in function len>"]
    assert tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]
