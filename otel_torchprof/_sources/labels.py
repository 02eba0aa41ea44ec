"""Labels: named segments of the program's own, in the same tree as torch's operators."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from otel_torchprof._native.python_sources import Label

from .compiled_code import teach_label
from .label_futures import after

F = TypeVar("F", bound=Callable[..., Any])


class record_function(Label):  # noqa: N801 - torch's name
    """Labels a segment of code: a context manager and a decorator, as torch's ``record_function``.

    Works with and without torch; inside ``torch.compile`` and ``torch.jit.script`` it is torch's own, and what ``torch.jit.trace``
    makes has it as torch's own. Writes straight to the recorder, at a small fraction of what torch's costs, also while no profile runs. Re-entrant, and safe to share between
    threads; one that only one thread at a time is in may also be exited on another thread than it was entered. An exception
    that leaves the block marks the event as an error and names the class of the exception; it is not swallowed. The
    GeneratorExit of a generator that is closed early is none. As a decorator it takes functions, async functions,
    generators and async generators: one event per call. These are off the stack of parents while they are suspended, so that
    two that take turns do not become each other's parents.

    Args:
        name: shown in tables and as the span's name; keep the number of different names small.
        args: what it is called with, as a str; recorded where a profile keeps inputs (``record_shapes``), free otherwise.

    Raises:
        TypeError: the name is not a str.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.name, self.args))

    def _call_end_callbacks_on_future(self, fut: Any) -> Any:
        """Lets the label continue until a future is done, on whatever thread, instead of ending with its block.

        Returns a future of the same kind that is done with the same outcome after the label has ended; a future's
        exception marks the label as an error. To be called once, inside the block; what runs after the block is not inside
        the label. Takes a ``torch.futures.Future``, a ``concurrent.futures.Future`` or an ``asyncio.Future``.

        Raises:
            RuntimeError: called a second time.
            AssertionError: the label was not entered.
            TypeError: it is no future.
        """
        if not self.run_callbacks_on_exit:
            raise RuntimeError("_call_end_callbacks_on_future can only be called once.")
        if not self.is_open():
            raise AssertionError("the label must be entered before a future can end it")
        # Before the future gets the end: it may be done already, and the label then ends here.
        self.run_callbacks_on_exit = False
        try:
            return after(fut, self.finish)
        except TypeError:
            self.run_callbacks_on_exit = True
            raise

    def __call__(self, function: F) -> F:
        """Decorates a function, async function, generator or async generator: one event per call."""
        if inspect.isasyncgenfunction(function):
            wrapped: Any = _async_generator(self, function)
        elif inspect.iscoroutinefunction(function):
            wrapped = _coroutine(self, function)
        elif inspect.isgeneratorfunction(function):
            wrapped = _generator(self, function)
        else:
            wrapped = _plain(self, function)
        return cast("F", wrapped)


def is_labelled(function: Any) -> bool:
    """Whether a function, or what it wraps, has a label of this module as its decorator."""
    while function is not None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and getattr(function, "__globals__", None) is globals():
            return True
        function = wrapped
    return False


def _plain(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    def wrapped(*positional: Any, **keywords: Any) -> Any:
        with record_function(name, args):
            return function(*positional, **keywords)

    return wrapped


@types.coroutine
def _drive(label: record_function, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Runs a coroutine step by step inside a label that leaves the stack of parents whenever the coroutine waits."""
    with label:
        result = yield from _segments(label, coroutine)
    return result


def _segments(label: record_function, inner: Any) -> Generator[Any, Any, Any]:
    """Passes everything through to ``inner``, as ``yield from`` does (PEP 380), with the label suspended at every yield."""
    send, throw = inner.send, inner.throw
    try:
        value = send(None)
        while True:
            label.suspend()
            try:
                received = yield value
            except GeneratorExit:
                label.resume()
                inner.close()
                raise
            except BaseException as error:  # noqa: BLE001 - handed on to the inner one, whatever it is
                label.resume()
                value = throw(error)
            else:
                label.resume()
                value = send(received)
    except StopIteration as stop:
        return stop.value


def _coroutine(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    async def wrapped(*positional: Any, **keywords: Any) -> Any:
        return await cast("Awaitable[Any]", _drive(record_function(name, args), function(*positional, **keywords)))

    return wrapped


def _generator(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    def wrapped(*positional: Any, **keywords: Any) -> Generator[Any, Any, Any]:
        own = record_function(name, args)
        with own:
            return (yield from _segments(own, function(*positional, **keywords)))

    return wrapped


def _async_generator(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    async def wrapped(*positional: Any, **keywords: Any) -> AsyncGenerator[Any, Any]:
        own = record_function(name, args)
        inner = function(*positional, **keywords)
        with own:
            step = inner.asend(None)
            while True:
                try:
                    value = await _async_step(own, step)
                except StopAsyncIteration:
                    return
                own.suspend()
                try:
                    received = yield value
                except GeneratorExit:
                    own.resume()
                    await _async_step(own, inner.aclose())
                    raise
                except BaseException as error:  # noqa: BLE001 - handed on to the inner one, whatever it is
                    own.resume()
                    step = inner.athrow(error)
                else:
                    own.resume()
                    step = inner.asend(received)

    return wrapped


async def _async_step(label: record_function, step: Awaitable[Any]) -> Any:
    return await cast("Awaitable[Any]", _awaiting(label, step))


@types.coroutine
def _awaiting(label: record_function, step: Awaitable[Any]) -> Generator[Any, Any, Any]:
    return (yield from _segments(label, _Steps(step.__await__())))


class _Steps:
    """An awaitable's iterator with the methods of a generator, which asend() objects have and other iterators may not."""

    def __init__(self, iterator: Any) -> None:
        self.send: Callable[[Any], Any] = getattr(iterator, "send", lambda _: next(iterator))
        self.throw = iterator.throw
        self.close: Callable[[], Any] = getattr(iterator, "close", lambda: None)


teach_label(record_function, globals())
