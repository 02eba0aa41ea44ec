"""``carry``: the current span in other threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("test")


def current(*arguments, **keywords):
    """Span id of the current span, and what it was called with."""
    return trace.get_current_span().get_span_context().span_id, arguments, keywords


def test_a_function_is_carried_into_an_executor():
    """It runs in the span of whoever carried it, with its arguments and result; the thread has its own context back after it."""
    with ThreadPoolExecutor(1) as pool:
        with TRACER.start_as_current_span("request") as span:
            carried = pool.submit(otp.carry(current), 1, a=2)
        assert carried.result() == (span.get_span_context().span_id, (1,), {"a": 2})
        assert pool.submit(current).result() == (0, (), {})


def test_an_exception_leaves_the_context_as_it_was():
    """What the function raises comes out, and the thread is in its own context again."""

    def fail():
        raise ValueError("no")

    with TRACER.start_as_current_span("request"):
        carried = otp.carry(fail)
    with pytest.raises(ValueError, match="no"):
        carried()
    assert current()[0] == 0


def test_a_coroutine_function_is_carried_until_it_is_done():
    """Its body runs in the span after every await, in a task that was made elsewhere."""

    async def body():
        first = current()[0]
        await asyncio.sleep(0)
        return first, current()[0]

    with TRACER.start_as_current_span("request") as span:
        carried = otp.carry(body)
    assert asyncio.run(carried()) == (span.get_span_context().span_id,) * 2


def test_a_coroutine_that_a_function_returns_is_carried():
    """A decorator or a lambda around an async function hides it; what comes back is awaited in the span."""

    async def body():
        await asyncio.sleep(0)
        return current()[0]

    def hidden():
        return body()

    with TRACER.start_as_current_span("request") as span:
        carried = otp.carry(hidden)
    assert asyncio.run(carried()) == span.get_span_context().span_id


@pytest.mark.parametrize("generator", [lambda: (yield), 3], ids=["generator", "number"])
def test_what_cannot_be_carried_is_refused(generator):
    """A generator runs in whoever iterates it, and a number not at all: both are named, with the way out."""
    with pytest.raises(TypeError, match="carry"):
        otp.carry(generator)


def test_a_carried_function_is_called_as_it_was():
    """It has the name and the signature of the function."""
    assert otp.carry(current).__name__ == "current"
    assert otp.carry(current).__wrapped__ is current
