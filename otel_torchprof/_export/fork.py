"""Who has to begin anew in a forked child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class BegunAnew(Protocol):
    """What :func:`watch` takes."""

    def after_fork_in_child(self) -> None:
        """Called in the child, before any other Python code of it, on its only thread."""


_watched: weakref.WeakSet[BegunAnew] = weakref.WeakSet()


def watch(thing: BegunAnew) -> None:
    """Calls ``thing.after_fork_in_child()`` in every child that is forked while ``thing`` lives.

    A handler of ``os.register_at_fork`` can never be removed, so there is one for all.
    """
    _watched.add(thing)


def _in_child() -> None:
    for thing in list(_watched):
        thing.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
