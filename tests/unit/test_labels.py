"""Labels of this package, without torch's operators."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import pytest

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag
from otel_torchprof.labels import record_function


def tree(prof):
    """Each event as ``outer/inner``, followed by the class of the exception that left it and whether it is unfinished."""
    names, columns = prof.names, prof.columns
    paths = []
    for name, parent, error, flags in zip(
        *(columns[column].tolist() for column in ("name", "parent", "error_type", "flags")), strict=True
    ):
        path = f"{paths[parent].split(' ')[0]}/{names[name]}" if parent >= 0 else names[name]
        path += f" !{names[error]}" if flags & Flag.ERROR else ""
        paths.append(path + (" ..." if flags & Flag.UNFINISHED else ""))
    return paths


@pytest.fixture
def prof():
    """A profile of labels; the test starts and stops it."""
    return otp.profile(operators=False)


def test_nesting_and_reentrance(prof):
    """One label may be open several times at once; each time is an event of its own."""
    label = record_function("again")
    with prof, record_function("outer"), label, label, label:
        pass
    assert tree(prof) == ["outer", "outer/again", "outer/again/again", "outer/again/again/again"]


def test_ends_in_the_order_of_begins(prof):
    """Misnested labels end each where their own end was called."""
    first, second = record_function("first"), record_function("second")
    with prof:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with record_function("within second"):
            pass
        second.__exit__(None, None, None)
    assert tree(prof) == ["first", "first/second", "first/second/within second"]
    ends = dict(zip((prof.names[name] for name in prof.columns["name"]), prof.columns["end"], strict=True))
    assert ends["first"] <= ends["within second"] <= ends["second"]


@pytest.mark.parametrize("all_threads", [False, True])
def test_one_label_shared_by_threads(all_threads):
    """A label that two threads are in at the same time ends on each when that thread leaves it, recorded there or not."""
    prof, label = otp.profile(operators=False, all_threads=all_threads), record_function("shared")
    inside, outside = threading.Barrier(2), threading.Barrier(2)

    def other():
        with label:
            inside.wait()
        with record_function("after"):
            outside.wait()

    thread = threading.Thread(target=other)
    with prof:
        thread.start()  # which enters first is left to chance: both orders have to be right
        with label:
            inside.wait()
            outside.wait()
            with record_function("still inside"):
                pass
        thread.join()
    expected = ["shared", "shared/still inside"]
    assert sorted(tree(prof)) == sorted([*expected, "shared", "after"] if all_threads else expected)


@pytest.mark.parametrize("first_in", ["here", "there"])
def test_a_shared_label_of_which_one_thread_is_recorded(prof, first_in):
    """Whoever enters or leaves first, the thread that is not recorded neither ends the other's event nor keeps it open."""
    label = record_function("shared")

    def elsewhere(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    enter, leave = label.__enter__, lambda: label.__exit__(None, None, None)
    with prof:
        for function in (
            (enter, lambda: elsewhere(enter)) if first_in == "here" else (lambda: elsewhere(enter), enter)
        ):
            function()
        elsewhere(leave)
        with record_function("inside"):
            pass
        leave()
    assert tree(prof) == ["shared", "shared/inside"]


def test_a_label_left_on_another_thread():
    """A label may be left on another thread than it was entered; it ends then, and what follows is not inside it."""
    prof, label = otp.profile(operators=False), record_function("handed over")
    with prof:
        label.__enter__()
        thread = threading.Thread(target=label.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with record_function("after"):
            pass
    assert tree(prof) == ["handed over", "after"]
    assert prof.columns["flags"].tolist() == [Flag.ASYNC, 0]


def test_exceptions(prof):
    """An exception is not swallowed, marks each event that it leaves, and names its class."""

    class OurError(Exception):
        pass

    with prof:
        with pytest.raises(OurError), record_function("outer"), record_function("inner"):
            raise OurError
        with contextlib.suppress(KeyboardInterrupt), record_function("interrupted"):
            raise KeyboardInterrupt
    error = f"{__name__}.test_exceptions.<locals>.OurError"
    assert tree(prof) == [f"outer !{error}", f"outer/inner !{error}", "interrupted !KeyboardInterrupt"]


def test_open_at_the_stop_and_at_the_start(prof):
    """A label over the start is not recorded, and its end harms nothing; one over the stop ends there, unfinished."""
    before, over = record_function("before"), record_function("over")
    before.__enter__()
    prof.start()
    with record_function("inside"):
        pass
    before.__exit__(None, None, None)
    over.__enter__()
    prof.stop()
    over.__exit__(None, None, None)
    assert tree(prof) == ["inside", "over ..."]
    assert prof.columns["end"][1] == prof._require().times()[1]
    with otp.profile(operators=False) as after, record_function("after"):
        pass
    assert tree(after) == ["after"]


NAMES = ["", "größer 🙂", "with\0zero", "a" * (1 << 20)]


@pytest.mark.parametrize("name", NAMES, ids=["empty", "unicode", "zero", "long"])
def test_names(prof, name):
    """Any str is a name and comes back as it was, whatever is in it."""
    with prof, record_function(name):
        pass
    assert [event.name for event in prof.events()] == [name]
    assert prof.table()
    assert b"".join(prof.to_otlp())


def test_a_name_with_a_lone_surrogate(prof, tmp_path):
    """A str that has no UTF-8 is recorded and written out as valid text all the same."""
    with prof, record_function("a\ud800b"):
        pass
    assert prof.events()[0].name == "a���b"
    prof.export_chrome_trace(tmp_path / "trace.json")
    (tmp_path / "trace.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [b"bytes", None, 7])
def test_a_name_must_be_a_str(prof, name):
    """What is no str is refused with a TypeError, and nothing stays open."""
    with prof:
        with pytest.raises(TypeError), record_function(name):
            pass
        with record_function("after"):
            pass
    assert tree(prof) == ["after"]


def test_an_exit_without_an_enter(prof):
    """Leaving a label that was never entered does nothing."""
    with prof:
        record_function("never entered").__exit__(None, None, None)
    assert tree(prof) == []


def test_deep_recursion(prof):
    """Two thousand labels inside one another: 1,024 are recorded, the rest is counted, and all ends well."""
    with prof, contextlib.ExitStack() as stack:
        for depth in range(2000):
            stack.enter_context(record_function(f"{depth}"))
    assert len(prof.events()) == 1024
    assert prof.health.dropped == {"depth": 976}
    assert not any("..." in line for line in tree(prof))
    with otp.profile(operators=False) as after, record_function("after"):
        pass
    assert tree(after) == ["after"]


def test_garbage_collection_within_labels(prof):
    """Labels that finalizers open while the collector runs inside a label are its children."""

    class Finalized:
        def __del__(self):
            with record_function("finalizer"):
                pass

    with prof, record_function("outer"):
        cycle = Finalized()
        cycle.itself = cycle
        del cycle
        gc.collect()
    assert tree(prof) == ["outer", "outer/finalizer"]


# ---- as a decorator ----


def test_functions_and_methods(prof):
    """A decorated function keeps its name, and each call is an event, on exceptions too."""

    class Model:
        @record_function("forward")
        def forward(self, x, *, fail=False):
            """Adds one."""
            if fail:
                raise ValueError
            return x + 1

    assert Model.forward.__name__ == "forward"
    assert Model.forward.__doc__ == "Adds one."
    with prof:
        assert Model().forward(1) == 2
        with pytest.raises(ValueError):
            Model().forward(1, fail=True)
    assert tree(prof) == ["forward", "forward !ValueError"]


def test_generators(prof):
    """A decorated generator passes on values, sent values, exceptions and its result, and is no parent while it waits."""

    @record_function("generator")
    def generator():
        with record_function("start"):
            pass
        got = yield 1
        try:
            yield got * 2
        except ValueError:
            with record_function("handler"):
                yield 3
        return "result"

    def outer():
        result = yield from generator()
        assert result == "result"

    with prof:
        running = outer()
        assert next(running) == 1
        with record_function("meanwhile"):
            pass
        assert running.send(21) == 42
        assert running.throw(ValueError) == 3
        with pytest.raises(StopIteration):
            next(running)
    assert tree(prof) == ["generator", "generator/start", "meanwhile", "generator/handler"]


def test_generators_that_end_early(prof):
    """Closing a generator runs its finally inside the label and is no error; an exception out of it is one."""

    @record_function("generator")
    def generator():
        try:
            yield 1
        finally:
            with record_function("finally"):
                pass

    with prof:
        running = generator()
        next(running)
        running.close()
        running = generator()
        next(running)
        with pytest.raises(KeyError):
            running.throw(KeyError())
        list(generator())
    assert tree(prof) == [
        "generator",
        "generator/finally",
        "generator !KeyError",
        "generator/finally",
        "generator",
        "generator/finally",
    ]


def test_a_generator_that_ignores_its_end(prof):
    """A generator that yields when it is closed fails as it does without the label."""

    @record_function("generator")
    def generator():
        try:
            yield 1
        except GeneratorExit:
            yield 2

    with prof:
        running = generator()
        next(running)
        with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
            running.close()
    assert tree(prof) == ["generator !RuntimeError"]


def test_interleaved_tasks(prof):
    """Tasks that take turns do not become each other's parents, however they are suspended."""

    @record_function("task")
    async def task(turns, name):
        for turn in range(turns):
            with record_function(f"{name}{turn}"):
                pass
            await asyncio.sleep(0)
        return name

    async def main():
        return await asyncio.gather(task(2, "a"), task(3, "b"), task(1, "c"))

    with prof:
        assert asyncio.run(main()) == ["a", "b", "c"]
    assert sorted(tree(prof)) == sorted(["task"] * 3 + [f"task/{n}" for n in ("a0", "a1", "b0", "b1", "b2", "c0")])


def test_parents_of_interleaved_tasks_are_their_own(prof):
    """Inside decorated tasks each label hangs under its own task's label."""

    def labelled(name):
        @record_function(name)
        async def task():
            for _ in range(3):
                with record_function(f"in {name}"):
                    pass
                await asyncio.sleep(0)

        return task()

    async def main():
        with record_function("around"):
            await asyncio.gather(labelled("x"), labelled("y"))

    with prof:
        asyncio.run(main())
    found = tree(prof)
    assert found.count("around") == 1
    assert sum(line.endswith("x/in x") for line in found) == sum(line.endswith("y/in y") for line in found) == 3


def test_cancelled_and_failing_tasks(prof):
    """A cancelled task's label is an error of class CancelledError; finally blocks run inside it."""

    @record_function("task")
    async def task():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with record_function("finally"):
                pass

    async def main():
        running = asyncio.create_task(task())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with prof:
        asyncio.run(main())
    assert tree(prof) == ["task !asyncio.exceptions.CancelledError", "task/finally"]


def test_async_generators(prof):
    """A decorated async generator passes on what is sent, thrown and awaited; its label waits off the stack."""

    @record_function("stream")
    async def stream():
        with record_function("start"):
            await asyncio.sleep(0)
        got = yield 1
        try:
            yield got
        except ValueError:
            yield "caught"
        await asyncio.sleep(0)
        with record_function("end"):
            pass

    async def main():
        running = stream()
        values = [await anext(running)]
        with record_function("meanwhile"):
            pass
        values += [await running.asend("sent"), await running.athrow(ValueError())]
        values += [value async for value in running]
        return values

    with prof:
        assert asyncio.run(main()) == [1, "sent", "caught"]
    assert tree(prof) == ["stream", "stream/start", "meanwhile", "stream/end"]


def test_async_generators_that_are_closed(prof):
    """Closing an async generator awaits its finally inside the label, off the stack meanwhile, and is no error."""

    @record_function("stream")
    async def stream():
        try:
            yield 1
        finally:
            with record_function("before"):
                pass
            await asyncio.sleep(0)
            with record_function("after"):
                pass

    async def main():
        running = stream()
        await anext(running)
        closing = asyncio.create_task(running.aclose())
        await asyncio.sleep(0)
        with record_function("meanwhile"):
            pass
        await closing

    with prof:
        asyncio.run(main())
    assert tree(prof) == ["stream", "stream/before", "meanwhile", "stream/after"]


def test_a_coroutine_that_is_never_awaited_to_its_end(prof):
    """A coroutine that is thrown away while it waits ends its label; nothing stays open behind it."""

    @record_function("abandoned")
    async def abandoned():
        await asyncio.sleep(0)

    with prof:
        running = abandoned()
        running.send(None)
        running.close()
        with record_function("after"):
            pass
    assert tree(prof) == ["abandoned", "after"]


def test_decorated_kinds_stay_what_they_are():
    """inspect sees the kind of function that was decorated."""
    import inspect

    @record_function("x")
    def generator():
        yield

    @record_function("x")
    async def coroutine():
        pass

    @record_function("x")
    async def async_generator():
        yield

    assert inspect.isgeneratorfunction(generator)
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isasyncgenfunction(async_generator)
