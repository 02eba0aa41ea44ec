"""Labels as decorators of functions, generators, coroutines and async generators: they run as without, inside their label."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref

import pytest
from frame_trees import no_collections
from hypothesis import given
from hypothesis import strategies as st
from label_trees import tree

import otel_torchprof as otp
from otel_torchprof import record_function


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


# ---- driven by chance: what comes out is what comes out without the label ----


def steps(left_by):
    """A generator that yields what it gets, goes on after a ValueError, and yields even when it is closed, if told so.

    The class of what leaves it, or None, is appended to a list.
    """

    def generator():
        got, stubborn = None, False
        with contextlib.ExitStack() as around:
            around.push(lambda error, *_: left_by.append(error))
            try:
                while got != "end":
                    with record_function("inside"):
                        pass
                    try:
                        got = yield ("got", got)
                    except ValueError:
                        got = yield "caught"
                    stubborn = stubborn or got == "stubborn"
                    if got == "fail":
                        raise KeyError(got)
            finally:
                with record_function("finally"):
                    pass
                if stubborn:
                    yield "ignores"
        return "result"

    return generator


def finish(running):
    """Closes a generator, twice if it ignores it: as garbage it would be closed within the profile of another example."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            running.close()


def async_steps():
    """The same as an async generator, which waits in between."""
    inner = steps([])

    async def generator():
        running = inner()
        value = next(running)
        try:
            while True:
                try:
                    await asyncio.sleep(0)
                    got = yield value
                except ValueError as error:  # noqa: PERF203 - each round of its own
                    value = running.throw(error)
                else:
                    try:
                        value = running.send(got)
                    except StopIteration:
                        return
        finally:
            finish(running)

    return generator


MOVES = st.lists(
    st.sampled_from(["next", "send", "end", "fail", "stubborn", "throw ValueError", "throw KeyError", "close"]),
    max_size=6,
)


def driven(running, moves):
    """What a generator answers to each move, the class of what it raises too; outside of its label."""
    answers = []
    for move in moves:
        with record_function("meanwhile"):
            pass
        try:
            answers.append(_moved(running, move))
        except BaseException as error:  # noqa: BLE001 - whatever comes out
            answers.append((type(error), getattr(error, "value", None)))
    return answers


def _moved(running, move):
    if move.startswith("throw"):
        return running.throw({"ValueError": ValueError, "KeyError": KeyError}[move.split()[1]]())
    return running.close() if move == "close" else next(running) if move == "next" else running.send(move)


async def async_driven(running, moves):
    answers = []
    for move in moves:
        with record_function("meanwhile"):
            pass
        try:
            if move.startswith("throw"):
                answers.append(
                    await running.athrow({"ValueError": ValueError, "KeyError": KeyError}[move.split()[1]]())
                )
            else:
                answers.append(
                    await (running.aclose() if move == "close" else running.asend(None if move == "next" else move))
                )
        except BaseException as error:  # noqa: BLE001 - whatever comes out
            answers.append(type(error))
    await running.aclose()
    return answers


def check(prof, moves):
    """All that ran is inside the one label, except what others did meanwhile; it has the error that it was left by, and ended."""
    lines = tree(prof)
    assert lines.count("meanwhile") == len(moves)
    own = [line for line in lines if line != "meanwhile"]
    assert all(line.startswith(("generator", "generator/inside", "generator/finally")) for line in own)
    assert [line.split(" ")[0] for line in own].count("generator") == bool(own)
    assert not any(line.endswith("...") for line in own)


@given(MOVES, st.booleans())
def test_generators(moves, delegated):
    """A decorated generator passes on values, sent values, exceptions, its end and its result, and is no parent while it waits."""
    left_by = []

    def started(generator):
        def outer():
            return (yield from generator())

        return outer() if delegated else generator()

    plain = started(steps(left_by))
    expected = driven(plain, moves)
    finish(plain)
    labelled = record_function("generator")(steps([]))
    with otp.profile(operators=False) as prof:
        running = started(labelled)
        answers = driven(running, moves)
        finish(running)
    assert answers == expected
    check(prof, moves)
    marked = [line for line in tree(prof) if "!" in line]
    assert marked == [f"generator !{error.__name__}" for error in left_by if error not in {None, GeneratorExit}]


@given(MOVES)
def test_async_generators(moves):
    """A decorated async generator passes on what is sent, thrown, awaited and its end; its label waits off the stack."""
    expected = asyncio.run(async_driven(async_steps()(), moves))
    labelled = record_function("generator")(async_steps())
    with otp.profile(operators=False) as prof:
        assert asyncio.run(async_driven(labelled(), moves)) == expected
    check(prof, moves)


def test_generators_that_ignore_their_closing(prof):
    """One that yields when it is closed goes on, inside its label; close() returns what it returns, since Python 3.13."""

    def stubborn():
        try:
            yield 1
        except GeneratorExit:
            yield "ignores"
        with record_function("inside"):
            pass
        try:
            yield 2
        except GeneratorExit:
            return "result"

    def answers(function):
        running = function()
        return [*driven(running, ["next", "close", "next"]), running.close()]

    expected = answers(stubborn)
    with prof:
        assert answers(record_function("generator")(stubborn)) == expected
    assert expected[:3] == [1, (RuntimeError, None), 2]
    assert tree(prof) == ["meanwhile", "generator", "meanwhile", "meanwhile", "generator/inside"]


class ThrownError(Exception):
    """One that can be weakly referenced."""


def _generator():
    with contextlib.suppress(ThrownError):
        yield
    raise KeyError


async def _coroutine():
    with contextlib.suppress(ThrownError):
        await asyncio.sleep(0)
    raise KeyError


async def _async_generator():
    with contextlib.suppress(ThrownError):
        yield
    raise KeyError


@pytest.mark.parametrize("function", [_generator, _coroutine, _async_generator])
def test_what_is_thrown_into_one_is_gone_once_it_is_caught(function):
    """It is no context of what is raised afterwards, and nothing keeps it, and with it all that its traceback holds."""
    running = record_function("label")(function)()
    is_async = hasattr(running, "asend")
    thrown = ThrownError()
    kept = weakref.ref(thrown)
    with no_collections():
        with contextlib.suppress(StopIteration):  # what asend() is left by
            (running.asend(None) if is_async else running).send(None)
        try:
            running.athrow(thrown).send(None) if is_async else running.throw(thrown)
        except KeyError as error:
            context = error.__context__
        assert context is None
        del thrown, running
        assert kept() is None


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


# ---- coroutines ----


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
        with record_function("around"):
            return await asyncio.gather(task(2, "a"), task(3, "b"), record_function("other")(task)(1, "c"))

    with prof:
        assert asyncio.run(main()) == ["a", "b", "c"]
    found = [line.removeprefix("around/") for line in tree(prof)]
    inside = [f"task/{n}" for n in ("a0", "a1", "b0", "b1", "b2")]
    assert sorted(found) == sorted(["around", "task", "task", "other", "other/task", "other/task/c0", *inside])


def test_cancelled_and_abandoned_tasks(prof):
    """A cancelled task's label is an error, with its finally blocks inside; one that is thrown away while it waits just ends."""

    @record_function("task")
    async def task():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with record_function("finally"):
                pass

    @record_function("abandoned")
    async def abandoned():
        await asyncio.sleep(0)

    async def main():
        running = asyncio.create_task(task())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with prof:
        asyncio.run(main())
        running = abandoned()
        running.send(None)
        running.close()
        with record_function("after"):
            pass
    assert tree(prof) == ["task !asyncio.exceptions.CancelledError", "task/finally", "abandoned", "after"]


def test_decorated_kinds_stay_what_they_are():
    """For inspect it is the kind of function that it was before."""

    async def coroutine():
        pass

    assert inspect.isgeneratorfunction(record_function("x")(steps([])))
    assert inspect.iscoroutinefunction(record_function("x")(coroutine))
    assert inspect.isasyncgenfunction(record_function("x")(async_steps()))


def test_what_closing_a_coroutine_raises():
    """It has the contexts that it has without a label: the GeneratorExit of the close, once."""

    async def stubborn():
        try:
            await asyncio.sleep(0)
        finally:
            raise KeyError

    def contexts(function):
        running, found = function(), []
        running.send(None)
        with pytest.raises(KeyError) as raised:
            running.close()
        error = raised.value.__context__
        while error is not None:
            found.append(type(error))
            error = error.__context__
        return found

    assert contexts(record_function("labelled")(stubborn)) == contexts(stubborn) == [GeneratorExit]
