"""Cleanup that survives interrupts: everything that a recording has started is stopped, even if an exception ends a stop halfway."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import process_changes, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_P = ParamSpec("_P")
_R = TypeVar("_R")

_logger = logging.getLogger("otel_torchprof")

_stacks: set[CleanupStack] = set()
"""All stacks with functions."""


class _CleanupThread(threads.local):
    depth = 0
    """Number of nested closes and starts on this thread."""


_thread = _CleanupThread()


def without_waiting(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that closes or starts something: in it, a close does not wait for another thread's (:class:`CleanupStack`)."""

    # Not a contextlib context manager: the started recording would contain its calls.
    @functools.wraps(function)
    def inside(*arguments: _P.args, **named: _P.kwargs) -> _R:
        depth = _thread.depth
        try:
            _thread.depth = depth + 1
            return function(*arguments, **named)
        finally:
            _thread.depth = depth

    return inside


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        pass  # cut off: it is called again later
    except Exception:
        _logger.warning("a recording was not stopped whole", exc_info=True)


def _was_cut_off(error: RecursionError) -> bool:
    """Whether the stack was nearly full before the function, which did not fill it itself."""
    depth, at = 0, error.__traceback__
    while at is not None:
        depth, at = depth + 1, at.tb_next
    return depth < sys.getrecursionlimit() // 2


class CleanupStack:
    """Functions that undo what an owner has started, called in reverse order by :meth:`close`.

    A ``KeyboardInterrupt`` can end a stop between any two instructions, a ``RecursionError`` at any call on a nearly full
    stack; in finalizers Python swallows both. So a function stays on its stack until it has returned or raised another
    ``Exception``. A function that was interrupted is called again by the next :meth:`close`, by :func:`close_due` and at
    exit: functions must be idempotent. The stack closes itself when its owner is garbage collected, provided that no
    function refers to the owner. In a forked child all stacks are empty.

    Thread-safe. A second thread that closes waits for the first, unless it is inside another close or a start
    (:func:`without_waiting`): a finalizer may run while its thread holds a lock that the first thread waits for.

    Args:
        owner: only a weak reference to it is held.
        dropped: called first if the owner is garbage collected with functions left.
    """

    at_exit: Callable[[], object] | None = None
    """Function to call at exit before the stack is closed, unless a close has begun."""

    def __init__(self, owner: object, dropped: Callable[[], object] | None = None) -> None:
        self._dropped = dropped
        self._reset()
        self._owner = weakref.ref(owner, self._owner_died)

    def _reset(self) -> None:
        self._functions: list[Callable[[], object]] = []
        self._lock: Any = threads.RLock()
        self._closing = False
        self._pid = os.getpid()  # last: until then the stack counts as the parent's

    def _check_process(self) -> None:
        # Not in a fork handler: handlers of the owners use the stack, and may run before or after it.
        if self._pid != os.getpid():
            self._reset()

    def push(self, function: Callable[[], object]) -> None:
        """Adds a function. Call it before starting what the function undoes, as the start may be interrupted."""
        self._check_process()
        if not self._functions:
            self._closing = False  # a close that left the rest to another thread may have set it after that one ended
        _stacks.add(self)
        self._functions.append(function)

    def close(self) -> None:
        """Calls the remaining functions, if any.

        Raises:
            Exception: the first that a function raised, after all others were called.
        """
        self._check_process()
        self._closing = True
        if self._lock._is_owned():  # noqa: SLF001 - nested: called by a function of the stack or a finalizer
            self._call_all()
        else:
            self._close(wait=not _thread.depth)

    def _close(self, *, wait: bool) -> None:
        lock = self._lock
        try:
            if lock.acquire(blocking=wait):
                self._call_all()
        finally:
            if lock._is_owned():  # noqa: SLF001 - an interrupt may come right before or after it is acquired
                lock.release()

    @without_waiting
    def _call_all(self) -> None:
        errors = []
        while self._functions:
            function = self._functions[-1]
            try:
                function()
            except Exception as error:
                if isinstance(error, RecursionError) and _was_cut_off(error):
                    raise
                errors.append(error)
            with suppress(ValueError):  # the function may have closed the stack itself
                self._functions.remove(function)
        self._closing = False
        _stacks.discard(self)
        if errors:
            raise errors[0]

    @property
    def is_empty(self) -> bool:
        """Whether no functions remain."""
        return not self._functions or self._pid != os.getpid()

    def close_if_due(self) -> None:
        """Closes the stack if a close was cut off or its owner was freed, unless it is being closed; logs exceptions of functions."""
        self._check_process()
        if (self._closing or self._owner() is None) and not self._lock._is_owned():  # noqa: SLF001 - this thread is closing it
            with _logged():
                self._close(wait=False)

    def close_and_log(self) -> None:
        """Calls the remaining functions, and logs their exceptions."""
        with _logged():
            self.close()

    def close_at_exit(self) -> None:
        """Closes a stack that is open when the interpreter exits."""
        if self.at_exit is not None and not (self.is_empty or self._closing):
            self.at_exit()
        self.close_and_log()

    def _owner_died(self, _reference: object) -> None:
        if not self._functions:  # first: at interpreter exit modules have lost their globals
            return
        try:
            if not self.is_empty and self._dropped is not None and not sys.is_finalizing():
                self._dropped()
            self.close_if_due()
        except RecursionError:
            return  # it remains due
        except BaseException:  # an interrupt, of which Python only tells: nothing may start or stop after it
            self.close_if_due()
            raise


def close_due() -> None:
    """Closes the stacks whose close was cut off. Every start and stop of a recording calls it first. Costs under a microsecond."""
    for stack in _stacks.copy():
        stack.close_if_due()


def _close_all() -> None:
    for stack in _stacks.copy():
        stack.close_at_exit()


process_changes.at_exit(process_changes.Order.RECORDINGS, _close_all)
