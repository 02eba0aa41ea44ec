"""The current span, carried into other threads: by hand, and for threads that are started with a method of a model."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_torchprof._process.wrapped_calls import WrappedCalls

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper

_T = TypeVar("_T")
_logger = logging.getLogger("otel_torchprof")

_MOST_WRAPPERS = 8
"""Partials and decorators around a method that are looked into."""


def carry(function: Callable[..., _T]) -> Callable[..., _T]:
    """``function``, which runs in the OpenTelemetry context of the caller of this, whatever thread it is called in.

    ``executor.submit(otp.carry(model.generate), ids)``: what runs in it belongs to the span that is current now, while that is
    open; what begins after its end is in traces of its own that link to it. A coroutine that it returns is awaited in the context too; a
    generator is not iterated in it. ``Thread(target=model.generate)`` needs none, while torch is instrumented.

    May be called any number of times, also at the same time in several threads, each of which has its own context back
    afterwards. Costs 1 us here, and 1 us a call.

    Raises:
        TypeError: ``function`` cannot be called, or is a generator function, whose body runs in its consumer.
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

    return functools.update_wrapper(called, function, updated=())  # the dictionary of a module is none for a function


async def _awaiting(coroutine: Any) -> Any:
    return await coroutine


class _Method(NamedTuple):
    """A method of Python's that is wrapped."""

    module: str
    path: str


def _start(_method: _Method, before: Callable[[threading.Thread], None]) -> Wrapper:
    """``Thread.start``, which has a thread that is to run a model in the span of whoever starts it; and what ends that."""
    carries = True

    @functools.wraps(before)
    def start(thread: threading.Thread) -> None:
        try:
            target: Any = getattr(thread, "_target", None)
            if carries and trace.get_current_span() is not trace.INVALID_SPAN and _is_of_module(target):
                thread._target = _unless_current(target, otel_context.get_current())  # type: ignore[attr-defined]  # noqa: SLF001
        except Exception:  # an object of the program's may raise whatever it is asked; its thread starts
            _logger.debug("the target of a thread was not looked at", exc_info=True)
        before(thread)

    def retire() -> None:
        nonlocal carries
        carries = False

    return start, retire


def _unless_current(target: Callable[..., Any], context: otel_context.Context) -> Callable[..., Any]:
    """``target`` in a context, where its thread has no span of its own."""
    carried = _carried(target, context)

    @functools.wraps(target, updated=())
    def run(*arguments: Any, **keywords: Any) -> Any:
        own = trace.get_current_span()
        return (carried if own is trace.INVALID_SPAN else target)(*arguments, **keywords)

    return run


def _is_of_module(target: Any) -> bool:
    """Whether it is a module, or a method of one: also in a partial, and decorated."""
    module: Any = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    for _ in range(_MOST_WRAPPERS if module is not None else 0):
        if isinstance(target, module) or isinstance(getattr(target, "__self__", None), module):
            return True
        inner = target.func if isinstance(target, functools.partial) else getattr(target, "__wrapped__", None)
        if inner is None:
            return False
        target = inner
    return False


started_threads = WrappedCalls((_Method("threading", "Thread.start"),), _start)
"""Threads of the process that are started with a method of a module as their target have the span of whoever starts them.

Transformers' own recipe for streaming is ``Thread(target=model.generate)``. A thread that has a current span by itself, as
``opentelemetry-instrumentation-threading`` and later Pythons give it, keeps that. Other threads are left alone: what a
program starts inside its first request, such as a batcher, may work for all later ones.
"""
os.register_at_fork(after_in_child=started_threads.renew_lock)  # those who record continue in the child
