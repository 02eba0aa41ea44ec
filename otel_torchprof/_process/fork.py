"""What forks need: objects that begin anew in the child, and nothing that waits there for a thread of the parent."""

from __future__ import annotations

# Holds a lock of its own over a fork, and releases it in the order of imports: a TracerProvider of the SDK uses it at a fork too, and
# where it is what imports it, in a child, the next child waits for ever.
import concurrent.futures.thread  # noqa: F401
import importlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from . import threads

if TYPE_CHECKING:
    from collections.abc import Callable


class BegunAnew(Protocol):
    """What :func:`watch` takes."""

    def after_fork_in_child(self) -> None:
        """Called in the child, before any other Python code of it, on its only thread."""


LONGEST_WAIT = 1.0
"""Seconds that a fork may wait for what another thread is doing."""
_LOCKS = tuple({type(make()) for make in (threading.Lock, threading.RLock, threads.Lock, threads.RLock)})

_watched: weakref.WeakSet[BegunAnew] = weakref.WeakSet()


def watch(thing: BegunAnew) -> None:
    """Calls ``thing.after_fork_in_child()`` in every child that is forked while ``thing`` lives.

    A handler of ``os.register_at_fork`` can never be removed, so there is one for all.
    """
    _watched.add(thing)


_late: dict[str, list[Callable[[], None]]] = {"before": [], "after_in_parent": [], "after_in_child": []}


def call_late(**functions: Callable[[], None]) -> None:
    """As ``os.register_at_fork``, for modules that are imported when they are asked for: in the place that is kept for them.

    That is where the package's import calls :func:`call`, among what it registers itself.
    """
    for when, function in functions.items():
        _late[when].append(function)


def call(when: str) -> None:
    """Calls what :func:`call_late` was given so far, ``before`` a fork in reverse order as Python does."""
    for function in _late[when][:: -1 if when == "before" else 1]:
        function()


def import_now(*modules: str) -> None:
    """Imports what threads of this package would import later.

    Python does not release the lock of a module that another thread was importing at the fork: a child that imports it too
    waits for ever.
    """
    for module in modules:
        importlib.import_module(module)


def release_locks(root: object, package: str) -> None:
    """Releases the locks of ``root`` and of all that it refers to, as far as that is of ``package``: only in a forked child.

    As ``threading`` and ``logging`` do it for their own.
    """
    waiting, seen = [root], set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _LOCKS):
            if getattr(thing, "_is_owned", bool)():  # by the thread that forked, which is to release it
                continue
            thing._at_fork_reinit()  # type: ignore[union-attr]  # noqa: SLF001 - what threading itself calls
        elif isinstance(thing, dict):
            waiting += [*thing, *thing.values()]
        elif isinstance(thing, list | tuple | set):
            waiting += thing
        elif type(thing).__module__.startswith(package):
            waiting += getattr(thing, "__dict__", {}).values()


def _in_child() -> None:
    for thing in list(_watched):
        thing.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
