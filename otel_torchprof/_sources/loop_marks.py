"""What frameworks say of their training loops, passed on to every recording that has steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from otel_torchprof._process import fork

if TYPE_CHECKING:
    from otel_torchprof._columns.phases import Segment

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
        self.current: Segment | None = None
        """What the loop was at last; None outside of one."""
        self._thread: threading.Thread | None = None
        """Whose loop that is."""

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
        """A framework's loop changes to another segment. Until it has ended, changes of a loop in another thread are ignored."""
        own = threading.current_thread()
        if (
            self.current is not None
            and self._thread is not own
            and self._thread is not None
            and self._thread.is_alive()
        ):
            return
        self._thread, self.current = own, change.begins
        for listener in tuple(self._listeners):
            listener.change_segment(change)

    def after_fork_in_child(self) -> None:
        """No loop continues in the child."""
        self.current = self._thread = None


shared = LoopMarks()
"""Those of the process."""
fork.call_late(after_in_child=shared.after_fork_in_child)
