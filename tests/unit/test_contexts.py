"""Numbers of the spans that are current: who gets which, who is muted, when an entry is removed; each event has the number of its begin."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._native.recorder import Session, now_ns
from otel_torchprof._record import contexts
from otel_torchprof._record.contexts import MUTED, NONE, SUPPRESSION_KEYS, ContextTable

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def tracer():
    """A tracer that samples everything."""
    return TracerProvider().get_tracer("test")


@pytest.fixture
def table():
    return ContextTable()


def drain(table, still_open=()):
    table.begin_drain()
    table.end_drain(still_open=still_open)


def remote(traceparent=TRACEPARENT):
    """A context with a parent in another process."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, otel_context.Context())


def resolve_in(table, context):
    token = otel_context.attach(context)
    try:
        return table.resolve()
    finally:
        otel_context.detach(token)


@pytest.mark.parametrize("odd", [object(), Mock(), "span"], ids=["an object", "a mock", "a text"])
def test_an_object_that_is_no_span(odd):
    """Whatever a program has put in the place of the current span, as tests do, nothing is raised on its threads: there is no span."""
    assert ContextTable().resolve(trace.set_span_in_context(odd)) == NONE


def test_no_span(table):
    """Where no span is current there is no number and no entry."""
    assert table.resolve() == NONE
    assert table.get(NONE) is None
    assert table.size == 0


def test_a_span_has_one_number(table, tracer):
    """The same span has the same number whenever it is current, another one the next number."""
    with tracer.start_as_current_span("outer") as outer:
        first = table.resolve()
        with tracer.start_as_current_span("inner") as inner:
            second = table.resolve()
        assert [table.resolve(), first, second] == [1, 1, 2]
    current = table.get(1)
    assert (current.span_context, current.start_ns) == (outer.get_span_context(), outer.start_time)
    assert table.get(2).span_context == inner.get_span_context()


def test_a_remote_parent(table):
    """A parent in another process is one too; it tells no time."""
    context = remote()
    number = resolve_in(table, context)
    assert resolve_in(table, context) == number == 1
    current = table.get(number)
    assert current.span_context.is_remote
    assert f"{current.span_context.span_id:016x}" in TRACEPARENT
    assert current.start_ns is None


@pytest.mark.parametrize("key", contexts.SUPPRESSION_KEYS, ids=["the API's key", "the plain key"])
def test_suppressed_instrumentation_is_muted(table, tracer, key):
    """With instrumentation suppressed, in either way, nothing is recorded, with a span and without."""
    assert resolve_in(table, otel_context.set_value(key, True, otel_context.Context())) == MUTED
    with tracer.start_as_current_span("span"):
        assert resolve_in(table, otel_context.set_value(key, True)) == MUTED
        assert resolve_in(table, otel_context.set_value(key, False)) == 1
    assert table.get(MUTED) is None


def test_what_is_not_sampled_is_muted(table):
    """A span of a trace that is not sampled mutes, whether it is local or remote."""
    with TracerProvider(sampler=ALWAYS_OFF).get_tracer("test").start_as_current_span("span"):
        assert table.resolve() == MUTED
    assert resolve_in(table, remote(TRACEPARENT[:-1] + "0")) == MUTED
    assert table.size == 0


def test_an_invalid_span_is_none(table):
    """A current span whose ids are no ids counts as none."""
    assert resolve_in(table, trace.set_span_in_context(trace.INVALID_SPAN, otel_context.Context())) == NONE


def test_tasks_get_the_numbers_of_their_spans(table, tracer):
    """Tasks that take turns each get the number of their own span at every turn."""

    async def task(name):
        with tracer.start_as_current_span(name) as span:
            numbers = set()
            for _ in range(5):
                numbers.add(table.resolve())
                await asyncio.sleep(0)
            (number,) = numbers
            assert table.get(number).span_context == span.get_span_context()
            return number

    async def all_tasks():
        return await asyncio.gather(*(task(str(i)) for i in range(4)))

    assert sorted(asyncio.run(all_tasks())) == [1, 2, 3, 4]


def test_an_entry_stays_while_its_span_lives(table, tracer):
    """A span that has ended but is still there keeps its entry through any number of drains."""
    with tracer.start_as_current_span("span") as span:
        table.resolve()
    for _ in range(3):
        drain(table)
    assert table.get(1).span_context == span.get_span_context()


def test_an_entry_goes_after_the_next_whole_drain(table, tracer):
    """A span that goes during a drain is still known after it, for what this drain came too early for, and gone after the next."""
    with tracer.start_as_current_span("span") as span:
        table.resolve()
    table.begin_drain()
    del span
    gc.collect()
    table.end_drain()
    assert table.get(1) is not None
    drain(table)
    assert table.get(1) is None
    assert table.size == 0


def test_tables_that_follow_at_once(table, tracer):
    """Whoever is asked, all of them learn of a span and of its end; one that comes later knows what was there before."""
    other = ContextTable()
    table.follow()
    try:
        with tracer.start_as_current_span("first") as first:
            table.resolve()
            other.follow()
            with tracer.start_as_current_span("second") as second:
                assert other.resolve() == 2
            for number, span in ((1, first), (2, second)):
                assert table.get(number).span_context == other.get(number).span_context == span.get_span_context()
        del first, second, span
        gc.collect()
        for each in (table, other):
            drain(each)
            assert each.size == 0
    finally:
        other.unfollow()
        table.unfollow()


def test_an_entry_stays_for_open_events(table, tracer):
    """Events that are open at a drain come with a later one: the numbers that they have stay until then."""
    with tracer.start_as_current_span("span"):
        table.resolve()
    gc.collect()
    drain(table, still_open=[1])
    assert table.get(1) is not None
    drain(table)
    assert table.get(1) is None


def test_a_new_span_at_an_old_address(table, tracer):
    """However often a span comes to stand where another one was, it gets a number of its own."""
    numbers = set()
    for count in range(1, 500):
        with tracer.start_as_current_span("span") as span:
            number = table.resolve()
            assert table.get(number).span_context == span.get_span_context()
        numbers.add(number)
        del span
        assert len(numbers) == count
        drain(table)
    drain(table)
    assert table.size == 0


def test_threads_that_ask_at_once_get_one_number(table, tracer):
    """Threads that come upon a new span at the same time all get its one number."""
    barrier = threading.Barrier(8)
    for _ in range(20):
        span = tracer.start_span("span")
        context = trace.set_span_in_context(span)
        numbers = []

        def ask(context=context, numbers=numbers):
            barrier.wait()
            numbers.append(resolve_in(table, context))

        in_threads(*[ask] * 8)
        assert len(set(numbers)) == 1
        assert table.get(numbers[0]).span_context == span.get_span_context()
    assert table.size == 20


def test_numbers_start_again(table, tracer):
    """When the numbers are used up they start again, without those that are still there, and never with a reserved one."""
    with tracer.start_as_current_span("first"):
        assert table.resolve() == 1
        table._last = MUTED - 2
        with tracer.start_as_current_span("last"):
            assert table.resolve() == MUTED - 1
            with tracer.start_as_current_span("again"):
                assert table.resolve() == 2


def test_other_kinds_of_context_are_asked_every_time(table, monkeypatch):
    """Where OpenTelemetry keeps its context elsewhere than in context variables, their identity tells nothing."""
    assert table.follow() is True
    monkeypatch.setattr(contexts, "_runtime_context", object)
    assert table.follow() is False
    table.unfollow()


def test_the_end_of_a_span_is_known_while_it_lives(table, tracer):
    """A context whose span has ended says so from the next drain on, whoever made the span; an open one does not."""
    ended, running = tracer.start_span("ended"), tracer.start_span("open")
    numbers = [resolve_in(table, trace.set_span_in_context(span)) for span in (ended, running)]
    ended.end()
    before = now_ns()
    drain(table)
    end, of_running = (table.ended(number) for number in numbers)
    assert before <= end <= now_ns()
    assert of_running is None


def test_the_end_of_a_span_is_known_after_it_has_gone(table, tracer):
    """A thread may end with its context, and the span with that, before the drain: the processor has noted when it ended."""
    span = tracer.start_span("request")
    number = resolve_in(table, trace.set_span_in_context(span))
    before = now_ns()
    table.note_end(span.get_span_context().span_id)
    after = now_ns()
    del span
    gc.collect()
    table.begin_drain()
    assert before - 100_000 <= table.ended(number) <= after + 100_000  # the clocks are read one after another
    table.end_drain()
    assert table.ended(number) is None


def test_a_span_that_had_ended_when_it_was_first_seen(table, tracer):
    """Whatever a thread does that begins its work after the request has ended comes after the end."""
    span = tracer.start_span("request")
    span.end()
    number = resolve_in(table, trace.set_span_in_context(span))
    assert table.ended(number) == 0


def test_ends_of_other_spans_are_not_kept(table):
    """A service that ends spans in which no model ran costs no memory."""
    for span_id in range(1, 1000):
        table.note_end(span_id)
    drain(table)
    assert table.size == 0
    assert table.ended(1) is None


# ---- recorded: each event under the span that was current when it began ----


@pytest.fixture
def asked(table):
    """A table that the recorder asks."""
    table.follow()
    yield table
    table.unfollow()


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


def under(asked, tracer, name):
    """A label inside a span of the same name; the number that its event should have."""
    with tracer.start_as_current_span(name):
        label(name)
        return asked.resolve()


def test_spans_of_one_thread(asked, tracer):
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


def test_tasks_that_take_turns(asked, tracer):
    """Tasks of one thread that take turns within their spans each get their own events."""

    async def task(name):
        with tracer.start_as_current_span(name):
            number = asked.resolve()
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


def test_a_thread_pool(asked, tracer):
    """Threads that serve one span after the other have each event under the right one."""
    with following() as events, ThreadPoolExecutor(4) as pool:
        names = [f"request {i}" for i in range(50)]
        numbers = dict(zip(names, pool.map(lambda name: under(asked, tracer, name), names), strict=True))
    assert sorted(events) == sorted(numbers.items())


def test_to_thread_and_back(asked, tracer):
    """A thread that is lent to a task is in the task's span for that time only."""

    async def request(name):
        with tracer.start_as_current_span(name):
            await asyncio.to_thread(label, name)
            return name, asked.resolve()

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
def test_suppressed(asked, tracer, key):
    """What runs with instrumentation suppressed is not recorded; what comes after it is."""
    with following() as events, tracer.start_as_current_span("span"):
        token = otel_context.attach(otel_context.set_value(key, True))
        label("suppressed")
        otel_context.detach(token)
        label("recorded")
    assert events == [("recorded", 1)]


def test_not_sampled(asked):
    """What belongs to a trace that is not sampled is not recorded."""
    unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")
    with following() as events:
        with unsampled.start_as_current_span("span"):
            label("unsampled")
        label("recorded")
    assert events == [("recorded", 0)]


def test_another_table(asked, tracer):
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


def test_a_busy_interpreter(asked, tracer):
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
            numbers = dict(zip(names, pool.map(lambda name: under(asked, tracer, name), names), strict=True))
    finally:
        stop.set()
        spinning.join()
    assert sorted(events) == sorted(numbers.items())
