"""Labels as decorators of functions, generators, coroutines and async generators."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from label_trees import tree

import otel_torchprof as otp
from otel_torchprof._record.labels import record_function


@pytest.fixture
def prof():
    """A profile of labels; the test starts and stops it."""
    return otp.profile(operators=False)


def test_functions_and_methods(prof):
    """A decorated function keeps its name, and each call is an event, on exceptions too."""

    class Model:
        @record_function("forward")
        def forward(self, x, *, fail=False):
            """Adds one."""
            if fail:
                raise ValueError("told to fail")
            return x + 1

    assert Model.forward.__name__ == "forward"
    assert Model.forward.__doc__ == "Adds one."
    with prof:
        assert Model().forward(1) == 2
        with pytest.raises(ValueError, match="told"):
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
    """For inspect it is the kind of function that it was before."""

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
