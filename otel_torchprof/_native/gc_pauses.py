"""Pauses of Python's garbage collector as events among the calls, on and off."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

from otel_torchprof._process import process_changes, threads

from .ffi import python_sources

if TYPE_CHECKING:
    from .recorder import Session

_EVERY_SESSION = (1 << 32) - 1
_lock = threads.RLock()  # a collection, hence any finalizer, may begin wherever it is held


class GcPauses:
    """Collections as events of a session, on whatever thread they happen, from :meth:`start` to :meth:`stop`.

    Each is an event where it happens, in which the finalizers are that it runs. One that runs already is left out; one that
    still runs at the stop ends there. Costs a microsecond per collection. A function that waits for the end of such a one
    stays among ``gc.callbacks`` until the next recording has stopped.
    """

    def __init__(self, session: Session) -> None:
        self._consumer = session.consumer

    def start(self) -> None:
        """Begins it, once the session runs. To be stopped also where this is interrupted."""
        with _lock:
            python_sources.follow_collections(self._consumer)
            if python_sources.on_collection not in gc.callbacks:
                gc.callbacks.append(python_sources.on_collection)

    def stop(self) -> None:
        """Ends it, from any thread."""
        _leave(self._consumer)


def _leave(consumers: int) -> None:
    with _lock:
        if not python_sources.leave_collections(consumers):
            with contextlib.suppress(ValueError):  # somebody has emptied the list
                gc.callbacks.remove(python_sources.on_collection)


def off() -> None:
    """Off, whoever began it: in forked children, and before the interpreter is taken down."""
    _leave(_EVERY_SESSION)


def off_in_child() -> None:
    """In a forked child: off, as it is in a process that has not begun it."""
    global _lock  # noqa: PLW0603 - whoever held it is not in this process
    _lock = threads.RLock()
    off()


process_changes.at_exit(process_changes.Order.SOURCES, off)
