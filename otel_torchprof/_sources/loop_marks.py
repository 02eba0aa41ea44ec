"""What frameworks say of their training loops, passed on to every recording that has steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from otel_torchprof._process import process_changes

from .step_marks import LOOP_END

if TYPE_CHECKING:
    from .step_marks import SegmentChange


class Listener(Protocol):
    """A recording that has steps."""

    def change_segment(self, change: SegmentChange) -> None:
        """Called in the thread of the loop; must not raise."""


class LoopMarks:
    """The recordings that want to know. Any thread, without a lock: each method is one step for Python.

    A change costs what the recordings take, some microseconds each.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, None] = {}
        self._thread: threading.Thread | None = None
        """Whose loop runs; None where none does."""

    @property
    def is_heard(self) -> bool:
        """Whether any recording wants to know."""
        return bool(self._listeners)

    def add(self, listener: Listener) -> None:
        """It gets changes from now on."""
        self._listeners[listener] = None

    def remove(self, listener: Listener) -> None:
        """It gets no more changes; without effect where it got none."""
        self._listeners.pop(listener, None)

    def change(self, change: SegmentChange) -> None:
        """A framework's loop changes to another segment, or begins. Until it has ended, changes of a loop in another thread are ignored."""
        own = threading.current_thread()
        if self._thread not in {None, own} and self._thread.is_alive():
            return
        self._thread = own
        self._tell(change)

    def end(self) -> None:
        """The loop of this thread has ended, with what it was at; without effect where none runs."""
        if self._thread is threading.current_thread():
            self._thread = None
            self._tell(LOOP_END)

    def _tell(self, change: SegmentChange) -> None:
        for listener in tuple(self._listeners):
            listener.change_segment(change)

    def after_fork_in_child(self) -> None:
        """No loop continues in the child."""
        self._thread = None


shared = LoopMarks()
"""Those of the process."""
process_changes.at_fork(process_changes.Order.STATE, in_child=shared.after_fork_in_child)
