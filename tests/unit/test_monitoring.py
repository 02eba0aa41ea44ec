"""The tracer of calls by sys.monitoring: beside other tools, what it costs and what exceptions are, and no trace of it afterwards."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter

import pytest
from frame_trees import names_of, recorded, recording, tree

from otel_torchprof import FrameFilter
from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.ffi import python_sources

pytestmark = pytest.mark.skipif(
    not python_sources.monitors_calls, reason="sys.monitoring is there since Python 3.12; before, a profile function is"
)

NAME = "otel_torchprof"
EVERYTHING_OFF = FrameFilter(include=["nothing.at.all"])
NUMBERS = (3, 4, 2, 1, 5)
"""Of tools, in the order in which they are taken."""
monitoring = getattr(sys, "monitoring", None)


def _leaf():
    return len("leaf")


def _tools():
    return {number: name for number in range(6) if (name := monitoring.get_tool(number)) is not None}


@contextlib.contextmanager
def _tool(number, name="other"):
    """Another tool, of which nothing is left afterwards."""
    monitoring.use_tool_id(number, name)
    try:
        yield
    finally:
        monitoring.set_events(number, 0)
        for event in (monitoring.events.PY_START, monitoring.events.PY_RETURN):
            monitoring.register_callback(number, event, None)
        monitoring.free_tool_id(number)


def _events(*names):
    """A set of events."""
    return sum(getattr(monitoring.events, name) for name in names)


CALLS = ("PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND")
FUNCTIONS = ("CALL", "RAISE", "C_RETURN", "C_RAISE")


def test_a_tool_while_calls_are_recorded_and_none_afterwards():
    """Between start and stop there is a tool of our name that is called back; afterwards neither it nor a callback."""
    with recording():
        assert _tools() == {NUMBERS[0]: NAME}
        assert monitoring.get_events(NUMBERS[0]) & ~_events("C_RETURN", "C_RAISE") == _events(*CALLS, "CALL", "RAISE")
    assert _tools() == {}
    with _tool(NUMBERS[0]):
        assert monitoring.get_events(NUMBERS[0]) == 0
        for event in (*CALLS, *FUNCTIONS):
            assert monitoring.register_callback(NUMBERS[0], getattr(monitoring.events, event), None) is None
    assert sys.getprofile() is None


@pytest.mark.parametrize("taken", range(1, len(NUMBERS) + 1))
def test_the_next_free_number(taken):
    """Numbers that other tools have are left to them; where these have every one there are no calls, and health names them."""
    with contextlib.ExitStack() as tools:
        for number in NUMBERS[:taken]:
            tools.enter_context(_tool(number, f"tool{number}"))
        prof = recorded(_leaf)
        assert _tools() == {number: f"tool{number}" for number in NUMBERS[:taken]}
    if taken < len(NUMBERS):
        assert tree(prof, "_leaf") == [".<built-in function len>"]
    else:
        names = "tool1, tool2, tool3, tool4, tool5"
        assert prof.health.notes == (f"frames off: every tool of sys.monitoring is in use: {names}",)
        assert names_of(prof) == []


def test_another_tool_is_called_back_as_before():
    """A tool that was there, and one that comes meanwhile, have their events before, during and after a recording."""
    seen = {number: [] for number in (0, 5)}

    def follow(number):
        def started(code, _offset):
            seen[number].append(code.co_name)

        monitoring.register_callback(number, monitoring.events.PY_START, started)
        monitoring.set_events(number, monitoring.events.PY_START)

    with _tool(0), _tool(5):
        follow(0)
        with recording(frames=FrameFilter(include=["nothing"])) as record:
            _leaf()
            follow(5)
            _leaf()
        _leaf()
    assert names_of(record) == []
    assert [seen[number].count("_leaf") for number in (0, 5)] == [3, 2]


def test_a_tool_whose_callbacks_raise():
    """What another tool raises ends the calls that it leaves, also where the interpreter then tells nobody else of their end."""

    class Stop(Exception):  # noqa: N818 - no error
        pass

    def raises(*_event):
        raise Stop

    def program():
        with contextlib.suppress(Stop):
            outer()
        _leaf()

    def outer():
        return len("x")

    events = monitoring.events
    with _tool(0), recording() as record:
        for event in (events.PY_START, events.PY_RETURN, events.C_RETURN):
            monitoring.register_callback(0, event, raises)
            monitoring.set_local_events(0, outer.__code__, event if event != events.C_RETURN else events.CALL)
            program()
            monitoring.set_local_events(0, outer.__code__, 0)
        monitoring.register_callback(0, events.C_RETURN, None)
    lines = [line for line in tree(record, "program") if "_leaf" in line]
    assert lines == ["._leaf"] * 3


def test_callback_that_comes_late():
    """A callback that somebody has kept, and calls when nothing is recorded, or calls with anything, raises nothing."""
    kept = {}
    with recording():
        for event in (*CALLS, *FUNCTIONS):
            bit = getattr(monitoring.events, event)
            kept[event] = monitoring.register_callback(NUMBERS[0], bit, None)
            monitoring.register_callback(NUMBERS[0], bit, kept[event])
        for arguments in ((), (None,) * 4, (_leaf.__code__, -1, len, [])):
            assert [callback(*arguments) for callback in kept.values()] == [None] * len(kept)
    for callback in kept.values():
        assert callback(_leaf.__code__, 0, len, []) is None
        assert callback() is None
    assert tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]


# ---- errors ----


def _errors(batch):
    """The errors of all calls that have one, by function, in the order of their begin."""
    names = names_of(batch)
    rows = batch.columns["error_type"].nonzero()[0].tolist()
    assert rows == [row for row, flags in enumerate(batch.columns["flags"].tolist()) if flags & Flag.ERROR]
    return [(names[row], batch.names[batch.columns["error_type"][row]]) for row in rows]


class _OwnError(ValueError):
    pass


def test_errors_of_c_functions():
    """A C function has the class of what it raises, its own or what Python that it calls raises, and a finalizer does no harm."""

    class AtTheEnd:
        def __del__(self):
            _leaf()

    def raises(_value):
        raise _OwnError

    def program():
        for function, argument, options in (
            ([].pop, 0, {}),
            (len, AtTheEnd(), {}),
            (next, iter([]), {}),
            (max, [1, 2], {"key": raises}),
        ):
            with contextlib.suppress(Exception):
                function(argument, **options)

    own = f"{__name__}._OwnError"
    assert _errors(recorded(program)) == [
        ("<built-in method pop of list object>", "IndexError"),
        ("<built-in function len>", "TypeError"),
        ("<built-in function next>", "StopIteration"),
        ("<built-in function max>", own),
        ("raises", own),
    ]


def test_error_that_nobody_says_the_type_of():
    """Where the interpreter does not tell of the exception that a C function raised, it is an error of another kind."""

    def outer():
        with contextlib.suppress(IndexError):
            [].pop()

    with recording() as record:
        callback = monitoring.register_callback(NUMBERS[0], monitoring.events.RAISE, None)
        outer()
        monitoring.register_callback(NUMBERS[0], monitoring.events.RAISE, callback)
    assert _errors(record) == [("<built-in method pop of list object>", "_OTHER")]


def test_error_whose_name_cannot_be_had():
    """What a class raises when it is asked for its name does not reach the program, and it is an error of another kind."""

    class Nameless(type):
        def __getattribute__(cls, name):
            if name in {"__module__", "__qualname__"}:
                raise ValueError(name)
            return super().__getattribute__(name)

    class Error(Exception, metaclass=Nameless):
        pass

    def fails():
        raise Error

    def program():
        with contextlib.suppress(Error):
            fails()

    assert _errors(recorded(program)) == [("fails", "_OTHER")]


def test_method_that_is_called_with_another_object():
    """A method of a class of C that is given no object of it is not called, and is no call."""

    def program():
        for arguments in ((), (3,), ([], 3)):
            with contextlib.suppress(TypeError):
                list.append(*arguments)
            with contextlib.suppress(TypeError):
                list.append(3, 4)

    names = Counter(tree(recorded(program), "program"))
    assert names[".<built-in method append of list object>"] == 1


# ---- filters ----


@contextlib.contextmanager
def _counting(functions, *names):
    """How often we are called back from functions, by event and function."""
    codes = [function.__code__ for function in functions]
    counts = Counter()

    def counted(event, callback):
        def count(code, *rest):
            if code in codes:
                counts[event, code.co_name] += 1
            return callback(code, *rest)

        return count

    for name in names:
        event = getattr(monitoring.events, name)
        callback = monitoring.register_callback(NUMBERS[0], event, None)
        monitoring.register_callback(NUMBERS[0], event, counted(name, callback))
    yield counts


def test_excluded_code_is_not_called_back():
    """What is left out calls back a few times at most, however often it is called, returns and calls C functions."""

    def excluded():
        return len([_leaf() for _ in range(10)])

    def segments():
        for _ in range(10):
            yield len("x")

    with recording(frames=EVERYTHING_OFF) as record:
        names = ("PY_START", "PY_RESUME", "PY_RETURN", "PY_YIELD", "CALL")
        with _counting((excluded, segments, _leaf), *names) as counts:
            for _ in range(1000):
                excluded()
                list(segments())
    assert names_of(record) == []
    assert max(counts.values()) <= 3
    assert counts["PY_START", "_leaf"] > 0
    assert counts["CALL", "segments"] > 0


def test_what_was_left_out_comes_back():
    """What one recording leaves out is in another that starts meanwhile or later, and it goes on where it runs already."""

    def program():
        _leaf()

    def both():
        _leaf()
        with recording(frames=FrameFilter(include=[__name__], c_functions=False)) as everything:
            program()
        program()
        return everything

    with recording(frames=EVERYTHING_OFF) as nothing:
        program()
        everything = both()
    assert tree(everything, "both") == [".program", ".._leaf"]
    assert names_of(nothing) == []
    assert tree(recorded(program), "program") == ["._leaf", "..<built-in function len>"]


def test_no_c_functions_no_events():
    """Where no recording wants C functions the interpreter does not tell of them, and does again with one that does."""
    events = monitoring.events
    with recording(frames=FrameFilter(c_functions=False)) as without:
        assert monitoring.get_events(NUMBERS[0]) & events.CALL == 0
        with recording() as with_functions:
            assert monitoring.get_events(NUMBERS[0]) & events.CALL
            _leaf()
        assert monitoring.get_events(NUMBERS[0]) & (events.CALL | events.RAISE) == 0
        assert monitoring.get_events(NUMBERS[0]) & events.PY_START
    assert tree(with_functions, "_leaf") == [".<built-in function len>"]
    assert tree(without, "_leaf") == []


@pytest.fixture
def module_class(monkeypatch):
    """What stands for ``torch.nn.Module``."""

    class Module:
        def __call__(self, *arguments):
            return self.forward(*arguments)

    torch = types.ModuleType("torch")
    torch.__file__ = __file__
    torch.nn = types.SimpleNamespace(Module=Module)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.nn", torch.nn)
    return Module


def test_modules_alone(module_class):
    """With modules alone only the code around their calls is watched, not even others' starts; errors end them too."""

    class Net(module_class):
        def forward(self, value):
            return _leaf() // value

    net, events, code = Net(), monitoring.events, module_class.__call__.__code__
    with recording(frames=FrameFilter(modules_only=True)) as record:
        assert monitoring.get_events(NUMBERS[0]) == events.PY_UNWIND
        assert monitoring.get_local_events(NUMBERS[0], code) == events.PY_START | events.PY_RETURN
        net(1)
        with contextlib.suppress(ZeroDivisionError):
            net(0)
        with recording() as everything:
            net(1)
        assert monitoring.get_events(NUMBERS[0]) == events.PY_UNWIND
    monitoring.use_tool_id(NUMBERS[0], "test")
    assert monitoring.get_local_events(NUMBERS[0], code) == 0
    monitoring.free_tool_id(NUMBERS[0])
    batch = record
    assert [batch.names[name] for name in batch.columns["name"].tolist()] == ["nn.Module: Net_0"] * 3
    assert _errors(batch) == [("nn.Module: Net_0", "ZeroDivisionError")]
    assert tree(everything, "nn.Module: Net_0") == [".forward", ".._leaf", "...<built-in function len>"]
