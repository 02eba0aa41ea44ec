"""The package's only handlers of forks and of process exit; calls registered functions in a fixed order.

Python calls handlers in the order of imports. Here the :class:`Order` decides, and functions of the same order do not depend on one
another, so that a module may be imported at any time. The package's import registers this module with Python: exit functions that a
program registers later run earlier.
"""

from __future__ import annotations

import atexit

# Imported first, so that their fork handlers release locks and renew state in a child before those of this package.
# concurrent.futures.thread holds a lock during a fork: if the SDK's TracerProvider imported it in a child only then, the next
# child would wait forever.
import concurrent.futures.thread  # noqa: F401
import enum
import importlib
import logging  # noqa: F401 - so that it shuts down after this package, which may log
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from . import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Order(enum.IntEnum):
    """Order of calls in a forked child, in the parent after a fork, and at exit; before a fork it is reversed."""

    STATE = 0
    """State of single modules, such as locks that another thread of the parent may have held."""
    SOURCES = 1
    """Sources of events: those of the parent stop, with ``Source.forked`` in the order of the catalog."""
    EXPORT = 2
    """Processors and exporters restart."""
    RECORDINGS = 3
    """Recordings continue in the child; at exit they stop, and send their spans."""
    LAST = 4


class HasForkHandler(Protocol):
    """An object for :func:`watch`."""

    def after_fork_in_child(self) -> None:
        """Resets state in the child; runs before any other Python code, on the only thread."""


LONGEST_WAIT = 1.0
"""Seconds that a fork waits at most for another thread."""
_LOCKS = tuple({type(make()) for make in (threading.Lock, threading.RLock, threads.Lock, threads.RLock)})
_Calls = dict[Order, "list[Callable[[], object]]"]

_before: _Calls = {order: [] for order in Order}
_in_parent: _Calls = {order: [] for order in Order}
_in_child: _Calls = {order: [] for order in Order}
_at_exit: _Calls = {order: [] for order in Order}
_watched: weakref.WeakSet[HasForkHandler] = weakref.WeakSet()
_importing = threads.RLock()
_forking = threads.local()
"""Per forking thread. ``has_lock``: whether it acquired ``_importing``."""


def at_fork(
    order: Order,
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Registers functions to be called at each fork, for the life of the process."""
    for calls, function in ((_before, before), (_in_parent, in_parent), (_in_child, in_child)):
        if function is not None:
            calls[order].append(function)


def at_exit(order: Order, function: Callable[[], object]) -> None:
    """Registers a function to be called at exit, after those that programs registered since the package was imported."""
    _at_exit[order].append(function)


def before_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Registers a function to be called at exit, before the functions registered so far; returns a function that cancels it."""
    atexit.register(function)
    return lambda: atexit.unregister(function)


def watch(handler: HasForkHandler) -> None:
    """Calls ``handler.after_fork_in_child()`` in every child forked while ``handler`` lives, with :attr:`Order.STATE`."""
    _watched.add(handler)


def imported(module: str) -> Any:
    """Imports a module on access to one of its names; a fork waits for it.

    Python does not release the lock of a module that another thread was importing at the fork: a child that imports it
    waits forever.
    """
    with _importing:
        return importlib.import_module(module)


def import_now(*modules: str) -> None:
    """Imports modules that threads of this package would import later, for the same reason."""
    for module in modules:
        importlib.import_module(module)


def release_locks(root: object, package: str) -> None:
    """Releases the locks of ``root`` and of all objects of ``package`` that it refers to. Only for forked children.

    ``threading`` and ``logging`` do the same for their own locks.
    """
    waiting, seen = [root], set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _LOCKS):
            if getattr(thing, "_is_owned", bool)():  # held by the forking thread, which releases it
                continue
            thing._at_fork_reinit()  # type: ignore[union-attr]  # noqa: SLF001 - as threading does
        elif isinstance(thing, dict):
            waiting += [*thing, *thing.values()]
        elif isinstance(thing, list | tuple | set):
            waiting += thing
        elif type(thing).__module__.startswith(package):
            waiting += getattr(thing, "__dict__", {}).values()


def call_each(functions: Iterable[Callable[[], object]]) -> None:
    """Calls all functions even if some raise; then raises the last exception, with the earlier ones as its context."""
    error = None
    for function in functions:
        try:
            function()
        except:  # noqa: E722, PERF203 - names no exception: at exit a program may have cleared the builtins
            error = sys.exc_info()[1]
    if error is not None:
        raise error


def _before_fork() -> None:
    _forking.has_lock = False  # the wait may be interrupted
    _forking.has_lock = _importing.acquire(timeout=LONGEST_WAIT)
    call_each(function for order in reversed(Order) for function in _before[order])


def _after_fork_in_parent() -> None:
    try:
        call_each(function for calls in _in_parent.values() for function in calls)
    finally:
        if _forking.has_lock:
            _importing.release()


def _after_fork_in_child() -> None:
    global _importing  # noqa: PLW0603 - another thread of the parent may have held it
    _importing = threads.RLock()
    threads.after_fork_in_child()
    watched = [handler.after_fork_in_child for handler in list(_watched)]
    call_each([*watched, *(function for calls in _in_child.values() for function in calls)])


def _exit() -> None:
    call_each(function for calls in _at_exit.values() for function in calls)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_exit)
