"""The source of module events without torch: what it makes of the order of calls, on every interpreter."""

from __future__ import annotations

import threading

import pytest
from followed_calls import is_followed

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.ffi import python_sources
from otel_torchprof._native.recorder import Session


class Module:
    """Is called as torch calls modules."""

    def __init__(self, name, *children, then=None):
        self.name, self.children, self.then = name, children, then

    def wrapped(self, *args, **kwargs):
        return self._call_impl(*args, **kwargs)

    __call__ = wrapped

    def _call_impl(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, x):
        for child in self.children:
            x = child(x)
        if self.then is not None:
            self.then()
        return x


@pytest.fixture
def follow():
    """Follows modules by a table of all that are asked for."""
    names, table = {}, {}

    def find(module, _):
        table[id(module)] = module.name
        names[id(module)] = table
        return table

    python_sources.follow_modules(names, find)
    assert python_sources.follow_calls(Module._call_impl)
    assert is_followed(Module._call_impl)
    yield
    assert python_sources.follow_calls(None)
    assert not is_followed(Module._call_impl)
    python_sources.leave_modules()


def recorded(body):
    """Path of every module, with ``...`` where it is unfinished."""
    session = Session(1 << 22, all_threads=True, kinds=[Kind.MODULE])
    session.start()
    try:
        body()
    finally:
        session.stop()
    batch = session.final_batch()
    paths = []
    for name, parent, flags in zip(*(batch[column].tolist() for column in ("name", "parent", "flags")), strict=True):
        path = f"{paths[parent].split()[0]}/{batch.names[name]}" if parent >= 0 else batch.names[name]
        paths.append(f"{path} ..." if flags & Flag.UNFINISHED else path)
    return paths


def interrupt():
    raise KeyboardInterrupt


def test_modules_in_modules(follow):
    """A module that is called in another one is inside it, however deep; one that is called after it is not."""
    model = Module("a", Module("b", Module("c")), Module("d"))
    paths = ["a", "a/b", "a/b/c", "a/d"]
    assert recorded(lambda: [model(1), model(2)]) == paths * 2


def test_very_deep(follow):
    """A hundred modules inside one another are a hundred levels."""
    model = Module("m0")
    for level in range(1, 100):
        model = Module(f"m{level}", model)
    levels = [path.count("/") for path in recorded(lambda: model(1))]
    assert levels == list(range(100))


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_after_an_interrupt(follow, depth):
    """Modules that an interrupt has left do not hold what comes after, be it called as deep, deeper or less deep than they."""
    model = Module("a", Module("b", then=interrupt))

    def deeper(levels, function):
        return max([levels], key=lambda level: deeper(level - 1, function) if level else function(1))

    def stopped():
        with pytest.raises(KeyboardInterrupt):
            deeper(depth, model)

    def body():
        stopped()
        model.children[0].then = None
        model(1)
        model.children[0].then = interrupt
        stopped()
        stopped()

    left = ["a ...", "a/b ..."]
    assert recorded(body) == [*left, "a", "a/b", *left, *left]


def test_a_thread_that_ends_within_a_module(follow):
    """A thread that an interrupt ends leaves its modules unfinished, and the next thread starts anew."""

    def run():
        with pytest.raises(KeyboardInterrupt):
            Module("a", then=interrupt)(1)

    def body():
        for _ in range(2):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    assert recorded(body) == ["a ..."] * 2


def test_what_find_raises_is_swallowed(follow):
    """When no name can be found the module is no event, nothing is raised, and it is counted."""

    def fail(*_):
        raise RuntimeError("no name")

    before = python_sources.errors()
    python_sources.follow_modules({}, fail)
    assert recorded(lambda: Module("a")(1)) == []
    python_sources.follow_modules({}, lambda *_: "no table")
    assert recorded(lambda: Module("a")(1)) == []
    assert python_sources.errors() == before + 2


def test_a_function_is_what_it_was(follow):
    """A call that is followed gets its arguments, returns and raises as it does otherwise, and its function shows nothing of it."""
    seen = []

    class Any:
        def _call_impl(self, *args, key=1, **kwargs):
            seen.append((args, key, kwargs))
            if not args:
                raise ValueError(key)
            return self

    before = vars(Any._call_impl), Any._call_impl.__code__, Any._call_impl.__defaults__, repr(Any._call_impl)
    assert python_sources.follow_calls(Any._call_impl)  # in place of the other one
    assert (vars(Any._call_impl), Any._call_impl.__code__, Any._call_impl.__defaults__, repr(Any._call_impl)) == before
    owner = Any()
    assert owner._call_impl(1, 2, key=3, more=4) is owner
    with pytest.raises(ValueError, match="5") as raised:
        Any._call_impl(owner, key=5)
    assert [entry.name for entry in raised.traceback] == ["test_a_function_is_what_it_was", "_call_impl"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'self'"):
        Any._call_impl()
    assert seen == [((1, 2), 3, {"more": 4}), ((), 5, {})]


def test_a_module_that_greenlets_leave(follow):
    """Calls of modules on stacks that are swapped end, each once, as far as they can be told."""
    greenlet = pytest.importorskip("greenlet")
    main = greenlet.getcurrent()
    other = greenlet.greenlet(lambda: inner(1))
    outer, inner, last = Module("a", then=other.switch), Module("b", then=main.switch), Module("c")

    def body():
        outer(1)
        other.switch()
        last(1)

    assert recorded(body) == ["a", "a/b ...", "c"]
