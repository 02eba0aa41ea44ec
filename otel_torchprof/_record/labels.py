"""Labels: named segments of the program, in the same tree as torch's operators."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, TypeVar, cast

from otel_torchprof._native.python_sources import Label

from .compiled_code import teach_label

# ---- Labels that end with a future of torch, ``concurrent.futures`` or asyncio ----


def after(future: Any, end: Callable[[type[BaseException] | None], object]) -> Any:
    """Returns a future of the same kind and outcome that is done once ``future`` is done and ``end`` has run.

    ``end`` is called with the class of the future's exception, or None, on whatever thread the future is done.

    Raises:
        TypeError: it is no future.
    """
    # Not imported here: a program with asyncio futures has imported it, and for others it would be a tenth of our import time.
    asyncio: Any = sys.modules.get("asyncio")
    if hasattr(asyncio, "Future") and isinstance(future, asyncio.Future):
        return _chained(future, future.get_loop().create_future(), asyncio.CancelledError, end)
    if isinstance(future, concurrent.futures.Future):
        return _chained(future, concurrent.futures.Future(), concurrent.futures.CancelledError, end)
    if not hasattr(future, "then"):
        raise TypeError(
            f"{future!r} is no future: a torch.futures.Future, a concurrent.futures.Future or an asyncio.Future is needed"
        )
    return future.then(lambda done: _value(done, end))


def _value(done: Any, end: Callable[[type[BaseException] | None], object]) -> Any:
    try:
        value = done.value()
    except BaseException as error:
        end(type(error))
        raise
    end(None)
    return value


def _chained(
    future: Any, result: Any, cancelled: type[BaseException], end: Callable[[type[BaseException] | None], object]
) -> Any:
    def done(source: Any) -> None:
        if source.cancelled():
            end(cancelled)
            result.cancel()
            return
        error = source.exception()
        end(None if error is None else type(error))
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(source.result())

    future.add_done_callback(done)
    return result


F = TypeVar("F", bound=Callable[..., Any])


class record_function(Label):  # noqa: N801 - torch's name
    """Labels a segment of code: a context manager and a decorator, as torch's ``record_function``.

    Works with and without torch. Inside ``torch.compile`` and ``torch.jit.script``, and in the results of
    ``torch.jit.trace``, it is torch's own. Writes directly to the recorder, at a small fraction of the cost of torch's,
    even while no profile runs. An exception that leaves the block marks the event as an error with the name of its
    class, and propagates; the GeneratorExit of a generator that is closed early is not an error.

    As a decorator it accepts functions, async functions, generators and async generators, and records one event per
    call. Suspended ones are not on the stack of parents, so that two that alternate do not become each other's parents.

    Reentrant and thread-safe. A label that one thread uses at a time may be exited on another thread than it was
    entered.

    Args:
        name: name in tables and of the span; the number of different names should be small.
        args: description of the arguments, a str; recorded by profiles with ``record_shapes``, free otherwise. Default:
            None.

    Raises:
        TypeError: ``name`` is not a str.

    Examples:
        >>> with otp.profile() as prof:
        ...     with otp.record_function("preprocess"):
        ...         y = torch.ones(3) + 1
        >>> prof.events()[0].name
        'preprocess'
        >>> @otp.record_function("double")
        ... def double(x):
        ...     return 2 * x
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.name, self.args))

    def _call_end_callbacks_on_future(self, fut: Any) -> Any:
        """Extends the label until a future is done, on any thread, instead of the end of its block.

        Returns a future of the same kind, which is done with the same outcome after the label has ended; an exception
        of the future marks the label as an error. Call it once, inside the block; work after the block is not inside
        the label. Accepts a ``torch.futures.Future``, a ``concurrent.futures.Future`` or an ``asyncio.Future``.

        Raises:
            RuntimeError: a second call.
            AssertionError: the label was not entered.
            TypeError: ``fut`` is not a future.
        """
        if not self.run_callbacks_on_exit:
            raise RuntimeError("_call_end_callbacks_on_future can only be called once.")
        if not self.is_open():
            raise AssertionError("the label must be entered before a future can end it")
        # First: if the future is done already, the label ends in the next call.
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
    """Whether a function, or a function that it wraps, is decorated with a label of this module."""
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


# What is thrown into a wrapper is handed on after its ``except`` block, where it would be the context of all that the inner one
# raises later; and no frame keeps it, which its traceback would make a cycle.


def _generator(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    def wrapped(*positional: Any, **keywords: Any) -> Generator[Any, Any, Any]:
        own = record_function(name, args)
        received = None
        thrown: list[BaseException] = []
        with own:
            inner = function(*positional, **keywords)
            send, throw = inner.send, inner.throw
            try:
                # Not ``yield from``, which ends at a close() that the inner generator ignores, and loses what it returns then.
                while True:
                    value = throw(thrown.pop()) if thrown else send(received)
                    own.suspend()
                    try:
                        received = yield value
                    except BaseException as error:  # noqa: BLE001 - handed on to the inner one, whatever it is
                        thrown.append(error)
                    own.resume()
            except StopIteration as stop:
                return stop.value

    return wrapped


def _coroutine(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    async def wrapped(*positional: Any, **keywords: Any) -> Any:
        own = record_function(name, args)
        inner = function(*positional, **keywords)
        with own:
            return await _segments(own, inner)

    return wrapped


def _async_generator(label: record_function, function: Callable[..., Any]) -> Callable[..., Any]:
    name, args = label.name, label.args

    @functools.wraps(function)
    async def wrapped(*positional: Any, **keywords: Any) -> AsyncGenerator[Any, Any]:
        own = record_function(name, args)
        inner = function(*positional, **keywords)
        received = None
        thrown: list[BaseException] = []
        with own:
            while True:
                try:
                    value = await _segments(
                        own, _Steps(inner.athrow(thrown.pop()) if thrown else inner.asend(received))
                    )
                except StopAsyncIteration:
                    return
                own.suspend()
                try:
                    received = yield value
                except BaseException as error:  # noqa: BLE001 - as above
                    thrown.append(error)
                own.resume()

    return wrapped


@types.coroutine
def _segments(label: record_function, inner: Any) -> Generator[Any, Any, Any]:
    """Passes everything through to ``inner``, as ``await`` does (PEP 380), with the label suspended at every yield."""
    received = None
    thrown: list[BaseException] = []
    try:
        while True:
            value = inner.throw(thrown.pop()) if thrown else inner.send(received)
            label.suspend()
            try:
                received = yield value
            except BaseException as error:  # noqa: BLE001 - as above
                thrown.append(error)
            label.resume()
            if thrown and isinstance(thrown[0], GeneratorExit):
                inner.close()
                raise thrown.pop()
    except StopIteration as stop:
        return stop.value
    finally:
        del inner  # the object of athrow() has what is thrown


class _Steps:
    """The iterator of any awaitable with the methods of a generator; only asend() objects always have them."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        iterator: Any = awaitable.__await__()
        self.send: Callable[[Any], Any] = getattr(iterator, "send", lambda _: next(iterator))
        self.throw = iterator.throw
        self.close: Callable[[], Any] = getattr(iterator, "close", lambda: None)


teach_label(record_function, globals())
