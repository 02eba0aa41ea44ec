"""Propagates the current span to other threads: explicitly, and for threads that run a method of a model."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_torchprof._process import process_changes
from otel_torchprof._process.wrapped_calls import WrappedCalls, WrappedFunction

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper

_T = TypeVar("_T")
_logger = logging.getLogger("otel_torchprof")

_MOST_WRAPPERS = 8
"""Most partials and decorators around a method that are unwrapped."""


def carry(function: Callable[..., _T]) -> Callable[..., _T]:
    """Wraps ``function`` so that it runs in the caller's current OpenTelemetry context, on any thread.

    ``executor.submit(otp.carry(model.generate), ids)``: work inside it belongs to the span that is current now, while
    that is open; work that begins after its end is in traces of its own, linked to it. A returned coroutine is awaited
    in the context too; a generator is not iterated in it. ``Thread(target=model.generate)`` needs no ``carry`` while
    torch is instrumented.

    The result may be called any number of times, also concurrently; each thread gets its own context back afterwards.
    Costs 1 us here and 1 us per call.

    Args:
        function: a function, method, module or other callable.

    Returns:
        A function with the same arguments and result.

    Raises:
        TypeError: ``function`` is not callable, or is a generator function, whose body runs in its consumer.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from opentelemetry import trace
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> tracer = TracerProvider().get_tracer("app")
        >>> with tracer.start_as_current_span("request") as span, ThreadPoolExecutor() as pool:
        ...     seen = pool.submit(otp.carry(trace.get_current_span)).result()
        >>> seen is span
        True
    """
    if not callable(function):
        raise TypeError(f"carry() takes a function, not {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"carry() cannot carry the generator {function!r}: carry the function that iterates it")
    return _carried(function, otel_context.get_current())


def _carried(function: Callable[..., Any], context: otel_context.Context) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: Any, **keywords: Any) -> Any:
            token = otel_context.attach(context)
            try:
                return await function(*arguments, **keywords)
            finally:
                otel_context.detach(token)

        return awaited

    def called(*arguments: Any, **keywords: Any) -> Any:
        token = otel_context.attach(context)
        try:
            result = function(*arguments, **keywords)
        finally:
            otel_context.detach(token)
        return _carried(_awaiting, context)(result) if inspect.iscoroutine(result) else result

    return functools.update_wrapper(
        called, function, updated=()
    )  # not __dict__: that of a module does not fit a function


async def _awaiting(coroutine: Any) -> Any:
    return await coroutine


def _start(_method: WrappedFunction, before: Callable[[threading.Thread], None]) -> Wrapper:
    """Returns a ``Thread.start`` that runs a model in the span of the starter, and a function that turns this off."""
    carries = True

    @functools.wraps(before)
    def start(thread: threading.Thread) -> None:
        try:
            target: Any = getattr(thread, "_target", None)
            if carries and trace.get_current_span() is not trace.INVALID_SPAN and _is_of_module(target):
                thread._target = _unless_current(target, otel_context.get_current())  # type: ignore[attr-defined]  # noqa: SLF001
        except Exception:  # attributes of the program's objects may raise; the thread starts anyway
            _logger.debug("the target of a thread was not looked at", exc_info=True)
        before(thread)

    def retire() -> None:
        nonlocal carries
        carries = False

    return start, retire


def _unless_current(target: Callable[..., Any], context: otel_context.Context) -> Callable[..., Any]:
    """Runs ``target`` in a context, unless its thread has a span of its own."""
    carried = _carried(target, context)

    @functools.wraps(target, updated=())
    def run(*arguments: Any, **keywords: Any) -> Any:
        own = trace.get_current_span()
        return (carried if own is trace.INVALID_SPAN else target)(*arguments, **keywords)

    return run


def _is_of_module(target: Any) -> bool:
    """Whether the target is a module or a method of one, also in a partial or decorated."""
    module: Any = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    for _ in range(_MOST_WRAPPERS if module is not None else 0):
        if isinstance(target, module) or isinstance(getattr(target, "__self__", None), module):
            return True
        inner = target.func if isinstance(target, functools.partial) else getattr(target, "__wrapped__", None)
        if inner is None:
            return False
        target = inner
    return False


started_threads = WrappedCalls((WrappedFunction("threading", "Thread.start"),), _start)
"""Threads that are started with a method of a module as their target get the span of their starter.  Transformers'
own recipe for streaming is ``Thread(target=model.generate)``. A thread that has a current span already, from
``opentelemetry-instrumentation-threading`` or later Pythons, keeps it. Other threads are left alone: a thread
that a program starts inside its first request, such as a batcher, may work for all later ones."""
process_changes.at_fork(
    process_changes.Order.STATE, in_child=started_threads.renew_lock
)  # recordings may continue in the child
