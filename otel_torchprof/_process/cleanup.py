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
"""Every stack that has functions."""


class _CleanupThread(threads.local):
    depth = 0
    """Number of nested closes and starts on this thread."""


_thread = _CleanupThread()


def without_waiting(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates what closes or starts something: inside, a stack that another thread closes is left to it (:class:`CleanupStack`)."""

    # Not a context manager of contextlib's: the recording that such a start has begun would have its frames.
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
        pass  # cut off, and so called again
    except Exception:
        _logger.warning("a recording was not stopped whole", exc_info=True)


def _was_cut_off(error: RecursionError) -> bool:
    """Whether the stack was nearly full before, and it is not the function that has filled it."""
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
    """Called at exit before the stack is closed, unless a close has begun."""

    def __init__(self, owner: object, dropped: Callable[[], object] | None = None) -> None:
        self._dropped = dropped
        self._reset()
        self._owner = weakref.ref(owner, self._owner_died)

    def _reset(self) -> None:
        self._functions: list[Callable[[], object]] = []
        self._lock: Any = threads.RLock()
        self._closing = False
        self._pid = os.getpid()  # last: until then it is the parent's

    def _check_process(self) -> None:
        # Not by a handler of forks: those of the owners, which use this, may come before and after it.
        if self._pid != os.getpid():
            self._reset()

    def push(self, function: Callable[[], object]) -> None:
        """Adds a function, before what it undoes is begun: that may be interrupted too."""
        self._check_process()
        if not self._functions:
            self._closing = False  # a close that left the rest to another thread may have said so after that one's end
        _stacks.add(self)
        self._functions.append(function)

    def close(self) -> None:
        """Calls what is left; does nothing where nothing is.

        Raises:
            Exception: the first that a function raised, after all others were called.
        """
        self._check_process()
        self._closing = True
        if self._lock._is_owned():  # noqa: SLF001 - a function, or a finalizer, closes it again
            self._call_all()
        else:
            self._close(wait=not _thread.depth)

    def _close(self, *, wait: bool) -> None:
        lock = self._lock
        try:
            if lock.acquire(blocking=wait):
                self._call_all()
        finally:
            if lock._is_owned():  # noqa: SLF001 - an interrupt may come right after it was taken, or before
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
            with suppress(ValueError):  # it may be closed by now, or another thread may have added to it
                self._functions.remove(function)
        self._closing = False
        _stacks.discard(self)
        if errors:
            raise errors[0]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to call."""
        return not self._functions or self._pid != os.getpid()

    def close_if_due(self) -> None:
        """Closes where a close was cut off or the owner is freed, unless it is being closed; logs what a function raises."""
        self._check_process()
        if (self._closing or self._owner() is None) and not self._lock._is_owned():  # noqa: SLF001 - it is being closed, here
            with _logged():
                self._close(wait=False)

    def close_and_log(self) -> None:
        """As :meth:`close`, but logs what a function raises, calls the other functions, and returns."""
        with _logged():
            self.close()

    def close_at_exit(self) -> None:
        """As :meth:`close_and_log`, for a stack that is still open when the interpreter exits."""
        if self.at_exit is not None and not (self.is_empty or self._closing):
            self.at_exit()
        self.close_and_log()

    def _owner_died(self, _reference: object) -> None:
        if not self._functions:  # also where it dies with the interpreter, and modules have lost their globals
            return
        try:
            if not self.is_empty and self._dropped is not None and not sys.is_finalizing():
                self._dropped()
            self.close_if_due()
        except RecursionError:
            return  # it is due still


def close_due() -> None:
    """Closes the stacks whose close was cut off. Whoever starts or stops a recording calls it first. Costs under a microsecond."""
    for stack in _stacks.copy():
        stack.close_if_due()


def _close_all() -> None:
    for stack in _stacks.copy():
        stack.close_at_exit()


process_changes.at_exit(process_changes.Order.RECORDINGS, _close_all)
