"""The recorder and the table of current spans together: each event under the span that was current when it began."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import otel_torchprof as otp
from otel_torchprof._native.recorder import Session
from otel_torchprof._record.contexts import SUPPRESSION_KEYS, ContextTable


@pytest.fixture
def tracer():
    return TracerProvider().get_tracer("test")


@pytest.fixture
def table():
    """A table that the recorder asks."""
    asked = ContextTable()
    asked.follow()
    yield asked
    asked.unfollow()


@contextmanager
def following():
    """Records a block; what it yields has name and context of every event once the block has ended."""
    session, found = Session(1 << 24, all_threads=True, contexts=True), []
    session.start()
    yield found
    session.stop()
    batch = session.final_batch()
    found += [
        (batch.names[name], context) for name, context in zip(batch["name"], batch["context"].tolist(), strict=True)
    ]


def label(name):
    with otp.record_function(name):
        pass


def under(table, tracer, name):
    """A label inside a span of the same name; the number that its event should have."""
    with tracer.start_as_current_span(name):
        label(name)
        return table.resolve()


def test_spans_of_one_thread(table, tracer):
    """Events have the number of the innermost span that is current when they begin, and none where there is none."""
    with following() as events:
        label("before")
        with tracer.start_as_current_span("outer"):
            label("in outer")
            with otp.record_function("around"), tracer.start_as_current_span("inner"):
                label("in inner")
            label("in outer again")
        label("after")
    assert events == [
        ("before", 0),
        ("in outer", 1),
        ("around", 1),
        ("in inner", 2),
        ("in outer again", 1),
        ("after", 0),
    ]


def test_a_span_of_an_earlier_recording_goes(tracer):
    """What ends of an earlier recording's span takes nothing away from a later one that has given the same number."""
    earlier, later = ContextTable(), ContextTable()
    earlier.follow()
    with tracer.start_as_current_span("old") as old:
        assert earlier.resolve() == 1
    earlier.unfollow()
    later.follow()
    with tracer.start_as_current_span("new"):
        assert later.resolve() == 1
        del old
        gc.collect()
        later.begin_drain()
        later.end_drain()
        assert later.get(1) is not None
    later.unfollow()


def test_tasks_that_take_turns(table, tracer):
    """Tasks of one thread that take turns within their spans each get their own events."""

    async def task(name):
        with tracer.start_as_current_span(name):
            number = table.resolve()
            for _ in range(20):
                label(name)
                await asyncio.sleep(0)
        return name, number

    async def tasks():
        return await asyncio.gather(*(task(f"task {i}") for i in range(8)))

    with following() as events:
        numbers = dict(asyncio.run(tasks()))
    assert len(events) == 160
    assert set(events) == set(numbers.items())
    assert len(set(numbers.values())) == 8


def test_a_thread_pool(table, tracer):
    """Threads that serve one span after the other have each event under the right one."""
    with following() as events, ThreadPoolExecutor(4) as pool:
        names = [f"request {i}" for i in range(50)]
        numbers = dict(zip(names, pool.map(lambda name: under(table, tracer, name), names), strict=True))
    assert sorted(events) == sorted(numbers.items())


def test_to_thread_and_back(table, tracer):
    """A thread that is lent to a task is in the task's span for that time only."""

    async def request(name):
        with tracer.start_as_current_span(name):
            await asyncio.to_thread(label, name)
            return name, table.resolve()

    async def requests():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        found = dict([await request(f"request {i}") for i in range(3)])
        await loop.run_in_executor(None, label, "of nobody")
        return found

    with following() as events:
        numbers = asyncio.run(requests())
    assert events == [*numbers.items(), ("of nobody", 0)]


@pytest.mark.parametrize("key", SUPPRESSION_KEYS, ids=["the API's key", "the plain key"])
def test_suppressed(table, tracer, key):
    """What runs with instrumentation suppressed is not recorded; what comes after it is."""
    with following() as events, tracer.start_as_current_span("span"):
        token = otel_context.attach(otel_context.set_value(key, True))
        label("suppressed")
        otel_context.detach(token)
        label("recorded")
    assert events == [("recorded", 1)]


def test_not_sampled(table):
    """What belongs to a trace that is not sampled is not recorded."""
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")
    with following() as events:
        with unsampled.start_as_current_span("span"):
            label("unsampled")
        label("recorded")
    assert events == [("recorded", 0)]


def test_another_table(table, tracer):
    """A second recording does not change the numbers that the first one knows the spans by, neither by coming nor by going."""
    other = ContextTable()
    with following() as events, tracer.start_as_current_span("first"):
        label("one")
        other.follow()
        label("two")
        with tracer.start_as_current_span("second"):
            label("three")
            other.unfollow()
            label("four")
    assert events == [("one", 1), ("two", 1), ("three", 2), ("four", 2)]


def test_a_busy_interpreter(table, tracer):
    """Threads that all want Python's lock still get each event under its own span."""
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            sum(range(1000))

    spinning = threading.Thread(target=busy)
    spinning.start()
    try:
        with following() as events, ThreadPoolExecutor(4) as pool:
            names = [f"request {i}" for i in range(100)]
            numbers = dict(zip(names, pool.map(lambda name: under(table, tracer, name), names), strict=True))
    finally:
        stop.set()
        spinning.join()
    assert sorted(events) == sorted(numbers.items())
