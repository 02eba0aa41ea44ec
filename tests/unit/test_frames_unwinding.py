"""The tracer of calls where calls do not simply return: exceptions, too much recursion, generators, tasks, greenlets."""

import asyncio
import sys
from collections import Counter

import pytest
from frame_trees import flags_of, masked, recorded, recording, tree

from otel_torchprof._columns.schema import Flag

GENERATORS = 100
ROUNDS = 5


def _leaf():
    return len("leaf")


LEAF = ("_leaf", "<built-in function len>")


def lines_below(batch, within):
    """What was called in a function, without the dots."""
    return [line.lstrip(".") for line in tree(batch, within)]


def _raise_through(depth):
    if depth == 0:
        raise KeyError(depth)
    _leaf()
    _raise_through(depth - 1)


def test_exception_through_ten_frames():
    """Ten frames that an exception leaves are nested in each other, ended and not unfinished; what comes after is beside them."""

    def program():
        for _ in range(3):
            with pytest.raises(KeyError):
                _raise_through(9)
            _leaf()

    batch = recorded(program)
    lines = tree(batch, "program")
    for depth in range(10):
        assert lines.count("." * (depth + 1) + "_raise_through") == 3
    assert lines.count("._leaf") == 3
    assert not any(flag & Flag.UNFINISHED for flag in flags_of(batch, "_raise_through"))


def test_exception_from_a_c_function_through_python_and_back():
    """Python called by C called by Python, left by an exception, is ended at each of its layers."""

    def fails(_item):
        raise ValueError

    def program():
        with pytest.raises(ValueError):  # noqa: PT011 - its own
            sorted([2, 1], key=fails)
        _leaf()

    lines = tree(recorded(program), "program")
    assert lines[lines.index(".<built-in function sorted>") + 1] == "..fails"
    assert lines[-2:] == ["._leaf", "..<built-in function len>"]


def _deep(depth):
    if depth:
        _deep(depth - 1)


def test_deeper_than_the_recorder_goes():
    """Of 3,000 nested calls those beyond the recorder's depth are counted as lost for their depth; all else is right."""
    before = sys.getrecursionlimit()

    def program():
        _deep(2999)
        _leaf()

    sys.setrecursionlimit(5000)
    try:
        with recording() as record:
            program()
    finally:
        sys.setrecursionlimit(before)
    batch, dropped = record.batch(), record.health().dropped
    assert set(dropped) == {"depth"}
    lines = tree(batch, "program")
    assert sum(line.endswith("_deep") for line in lines) + dropped["depth"] == 3000
    assert dropped["depth"] > 1900
    assert lines[-2:] == ["._leaf", "..<built-in function len>"]
    assert all(line == "." * depth + "_deep" for depth, line in enumerate(lines[:-2], 1))


def _endless():
    _endless()


def test_recursion_error_is_caught_and_forgotten():
    """RecursionError comes as it would without the tracer, three times over, and calls after it are where they belong."""

    def program():
        for _ in range(3):
            with pytest.raises(RecursionError):
                _endless()
            _leaf()

    lines = tree(recorded(program), "program")
    assert lines.count("._leaf") == 3
    assert lines.count("._endless") == 3


def _inner(number):
    for _ in range(ROUNDS):
        _leaf()
        yield number


def _outer(number):
    yield from _inner(number)


def test_a_hundred_generators_interleaved():
    """Each segment of each generator has its own inner generator's segment and the one call that was made in it."""

    def program():
        generators = [_outer(number) for number in range(GENERATORS)]
        while generators:
            generators = [each for each in generators if next(each, None) is not None]

    batch = recorded(program)
    segments = GENERATORS * (ROUNDS + 1)
    assert Counter(lines_below(batch, "_outer")) == {
        "_inner": segments,
        "_leaf": GENERATORS * ROUNDS,
        "<built-in function len>": GENERATORS * ROUNDS,
    }
    assert sum(line.endswith("_outer") for line in lines_below(batch, "program")) == segments
    assert not any(flag & Flag.UNFINISHED for flag in [*flags_of(batch, "_outer"), *flags_of(batch, "_inner")])


def test_generators_that_are_closed_thrown_into_or_left():
    """A generator that is ended from outside, or never, leaves nothing open behind."""

    def program():
        thrown, closed, left = _outer(1), _outer(2), _outer(3)
        for each in (thrown, closed, left):
            next(each)
        closed.close()
        with pytest.raises(KeyError):
            thrown.throw(KeyError())
        del left
        _leaf()

    batch = recorded(program)
    assert tree(batch, "program")[-2:] == ["._leaf", "..<built-in function len>"]
    assert not any(flag & Flag.UNFINISHED for flag in [*flags_of(batch, "_outer"), *flags_of(batch, "_inner")])


async def _waits():
    _leaf()
    await asyncio.sleep(0)
    _leaf()


async def _task():
    for _ in range(ROUNDS):
        await _waits()


def test_a_hundred_tasks_interleaved():
    """Each segment of a task has the segment of what it awaits inside, with the one call of that segment, and nothing of others."""

    async def main():
        await asyncio.gather(*[_task() for _ in range(GENERATORS)])

    batch = recorded(lambda: asyncio.run(main()))
    found = Counter(lines_below(batch, "_task"))
    assert found["_leaf"] == 2 * GENERATORS * ROUNDS
    assert found["_waits"] == 2 * GENERATORS * ROUNDS
    assert found["_task"] == 0
    lines = tree(batch, "_waits")
    assert set(lines) <= {"._leaf", "..<built-in function len>", ".sleep", "..__sleep0", ".__sleep0"}
    assert lines.count("._leaf") == 2 * GENERATORS * ROUNDS


def test_async_generators_interleaved():
    """Segments of asynchronous generators hold what was called in them."""

    async def generates():
        for _ in range(ROUNDS):
            _leaf()
            await asyncio.sleep(0)
            yield 1

    async def consumes():
        return [each async for each in generates()]

    async def main():
        await asyncio.gather(*[consumes() for _ in range(10)])

    batch = recorded(lambda: asyncio.run(main()))
    assert lines_below(batch, "generates").count("_leaf") == 10 * ROUNDS
    assert lines_below(batch, "consumes").count("generates") >= 10 * ROUNDS
    assert not any(flag & Flag.UNFINISHED for flag in flags_of(batch, "generates"))


def test_greenlets():
    """Greenlets that switch to each other have all their calls, ended, and what is called after them is beside them."""
    greenlet = pytest.importorskip("greenlet", reason="greenlet is not installed")

    def ping():
        for _ in range(ROUNDS):
            _leaf()
            second.switch()
        return "done"

    def pong():
        while True:
            _leaf()
            first.switch()

    first, second = greenlet.greenlet(ping), greenlet.greenlet(pong)

    def program():
        assert first.switch() == "done"
        _leaf()

    batch = recorded(program)
    names = Counter(masked(batch.names[name]) for name in batch["name"].tolist())
    assert (names["ping"], names["pong"], names["_leaf"]) == (1, 1, 2 * ROUNDS + 1)
    assert not any(flag & Flag.UNFINISHED for flag in flags_of(batch, "_leaf"))
    assert not any(flag & Flag.UNFINISHED for flag in flags_of(batch, "ping"))
    assert tree(batch, "_leaf") == [".<built-in function len>"] * (2 * ROUNDS + 1)
    assert tree(recorded(_leaf), "_leaf") == [".<built-in function len>"]
    second.throw()
