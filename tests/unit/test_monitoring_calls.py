"""What the tracer by sys.monitoring records: errors by their type, generators, filters that cost nothing, threads."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import sys
import threading
import types
from collections import Counter

import pytest
from frame_trees import masked, printed_by, recorded, recording, tree

from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.ffi import python_sources
from otel_torchprof._record.frame_filter import FrameFilter

pytestmark = pytest.mark.skipif(
    not python_sources.monitors_calls, reason="sys.monitoring is there since Python 3.12; before, a profile function is"
)

TOOL = 3
"""The number that ours has where no other tool is."""
monitoring = getattr(sys, "monitoring", None)
EVERYTHING_OFF = FrameFilter(include=["nothing.at.all"])


def _leaf():
    return len("leaf")


def _errors(batch):
    """The errors of all calls that have one, by function, in the order of their begin."""
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    rows = batch["error_type"].nonzero()[0].tolist()
    assert rows == [row for row, flags in enumerate(batch["flags"].tolist()) if flags & Flag.ERROR]
    return [(names[row], batch.names[batch["error_type"][row]]) for row in rows]


class _OwnError(ValueError):
    pass


# ---- errors ----


def test_errors_have_their_type():
    """Each frame and C function that an exception leaves has the exception's class, and what catches it has none."""

    def program():
        with contextlib.suppress(LookupError):
            outer()
        _leaf()

    def outer():
        try:
            fails(1)
        finally:
            _leaf()

    def fails(depth):
        if depth:
            return fails(depth - 1)
        try:
            int("no number")
            [].index(1)
        except ValueError as error:
            raise KeyError from error

    assert _errors(recorded(program)) == [
        ("outer", "KeyError"),
        ("fails", "KeyError"),
        ("fails", "KeyError"),
    ]


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
        callback = monitoring.register_callback(TOOL, monitoring.events.RAISE, None)
        outer()
        monitoring.register_callback(TOOL, monitoring.events.RAISE, callback)
    assert _errors(record.batch()) == [("<built-in method pop of list object>", "_OTHER")]


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


# ---- generators ----


def test_a_generator_is_one_whatever_comes_between():
    """All segments of a generator have its number, others have other ones, also where one takes the place of one that went."""

    def numbered():
        yield 1
        with contextlib.suppress(_OwnError):
            yield 2
        yield 3

    def program():
        several = [numbered() for _ in range(100)]
        for _ in range(2):
            for running in several:
                next(running)
        for running in several:
            running.throw(_OwnError)
        del several, running
        for _ in range(100):
            list(numbered())

    batch = recorded(program)
    rows = [row for row, name in enumerate(batch["name"].tolist()) if masked(batch.names[name]) == "numbered"]
    numbers = [batch["fwd_thread"].item(row) for row in rows]
    first = numbers[:100]
    assert len(set(first)) == 100
    assert min(first) > 0
    assert numbers[100:200] == first
    assert numbers[200:300] == first
    segments = Counter(numbers[300:])
    given_up = [number for number in segments if number in first]
    assert len(segments) - len(given_up) == 100
    assert {count for number, count in segments.items() if number not in first} == {4}


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
        callback = monitoring.register_callback(TOOL, event, None)
        monitoring.register_callback(TOOL, event, counted(name, callback))
    yield counts


def test_excluded_code_is_not_called_back():
    """What is left out calls back a few times at most, however often it is called, returns and calls C functions."""

    def excluded():
        return len([_leaf() for _ in range(10)])

    def segments():
        for _ in range(10):
            yield len("x")

    with recording(frame_filter=EVERYTHING_OFF) as record:
        names = ("PY_START", "PY_RESUME", "PY_RETURN", "PY_YIELD", "CALL")
        with _counting((excluded, segments, _leaf), *names) as counts:
            for _ in range(1000):
                excluded()
                list(segments())
    assert len(record.batch()) == 0
    assert max(counts.values()) <= 3
    assert counts["PY_START", "_leaf"] > 0
    assert counts["CALL", "segments"] > 0


def test_what_was_left_out_comes_back():
    """What one recording leaves out is in another that starts meanwhile or later, and it goes on where it runs already."""

    def program():
        _leaf()

    def both():
        _leaf()
        with recording(frame_filter=FrameFilter(include=[__name__], c_functions=False)) as everything:
            program()
        program()
        return everything

    with recording(frame_filter=EVERYTHING_OFF) as nothing:
        program()
        everything = both()
    assert tree(everything.batch(), "both") == [".program", ".._leaf"]
    assert len(nothing.batch()) == 0
    assert tree(recorded(program), "program") == ["._leaf", "..<built-in function len>"]


def test_no_c_functions_no_events():
    """Where no recording wants C functions the interpreter does not tell of them, and does again with one that does."""
    events = monitoring.events
    with recording(frame_filter=FrameFilter(c_functions=False)) as without:
        assert monitoring.get_events(TOOL) & events.CALL == 0
        with recording() as with_functions:
            assert monitoring.get_events(TOOL) & events.CALL
            _leaf()
        assert monitoring.get_events(TOOL) & (events.CALL | events.RAISE) == 0
        assert monitoring.get_events(TOOL) & events.PY_START
    assert tree(with_functions.batch(), "_leaf") == [".<built-in function len>"]
    assert tree(without.batch(), "_leaf") == []


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
    with recording(frame_filter=FrameFilter(modules_only=True)) as record:
        assert monitoring.get_events(TOOL) == events.PY_UNWIND
        assert monitoring.get_local_events(TOOL, code) == events.PY_START | events.PY_RETURN
        net(1)
        with contextlib.suppress(ZeroDivisionError):
            net(0)
        with recording() as everything:
            net(1)
        assert monitoring.get_events(TOOL) == events.PY_UNWIND
    monitoring.use_tool_id(TOOL, "test")
    assert monitoring.get_local_events(TOOL, code) == 0
    monitoring.free_tool_id(TOOL)
    batch = record.batch()
    assert [batch.names[name] for name in batch["name"].tolist()] == ["nn.Module: Net_0"] * 3
    assert _errors(batch) == [("nn.Module: Net_0", "ZeroDivisionError")]
    assert tree(everything.batch(), "nn.Module: Net_0") == [".forward", ".._leaf", "...<built-in function len>"]


# ---- threads ----


def test_threads_however_they_start():
    """A thread that threading knows nothing of is traced too, and ends without a trace."""
    done = threading.Lock()

    def work():
        _leaf()
        done.release()

    def program():
        done.acquire()
        _thread.start_new_thread(work, ())
        with done:
            pass

    batch = recorded(program)
    assert tree(batch, "work")[:2] == ["._leaf", "..<built-in function len>"]
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    thread_of = dict(zip(names, batch["thread"].tolist(), strict=True))
    assert thread_of["work"] != thread_of["program"]


def test_stack_of_another_thread():
    """What is on another thread's stack is open from the start of the recording: up to 128 calls, the innermost."""
    ready, go = threading.Event(), threading.Event()

    def deep(depth):
        if depth:
            return deep(depth - 1)
        ready.set()
        go.wait(30)
        return _leaf()

    thread = threading.Thread(target=deep, args=[300])
    thread.start()
    assert ready.wait(30)
    with recording() as record:
        go.set()
        thread.join(30)
    batch = record.batch()
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    rows = [row for row, name in enumerate(names) if name == "deep"]
    assert 120 < len(rows) <= 128
    assert len({batch["start"].item(row) for row in rows}) == 1
    assert batch["start"][rows[0]] <= batch["start"][names.index("_leaf")]
    assert all((batch["end"][outer] >= batch["end"][inner]) for outer, inner in itertools.pairwise(rows))


_GREENLETS = """
    import re
    from collections import Counter
    import greenlet
    from otel_torchprof._record.recording import ProfileSegment
    from otel_torchprof._record.source import RecordingOptions

    def outer(number):
        for _ in range(3):
            inner(number)

    def inner(number):
        greenlet.getcurrent().parent.switch(number)
        len("x")

    record = ProfileSegment(RecordingOptions(operators=False, frames=True))
    record.start()
    several = [greenlet.greenlet(outer) for _ in range(10)]
    for _ in range(4):
        for number, each in enumerate(several):
            each.switch(number)
    record.stop()
    batch = record.batch()
    names = [re.sub(r".*: ", "", batch.names[name]) for name in batch["name"].tolist()]
    counts = Counter(name for name, flags in zip(names, batch["flags"].tolist()) if flags == 0)
    print(counts["outer"], counts["inner"], counts["<built-in function len>"])
"""


def test_greenlets():
    """Greenlets that run the same functions, each stopped in the midst of them, have all their calls, and all of these end."""
    pytest.importorskip("greenlet")
    assert printed_by(_GREENLETS) == ["10", "30", "30"]
