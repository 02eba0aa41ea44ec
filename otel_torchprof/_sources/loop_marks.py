"""What frameworks say of their training loops, passed on to every recording that has steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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

    def add(self, listener: Listener) -> None:
        """It is told from now on."""
        self._listeners[listener] = None

    def remove(self, listener: Listener) -> None:
        """It is told no more; without effect where it was not."""
        self._listeners.pop(listener, None)

    def change(self, change: SegmentChange) -> None:
        """A framework's loop continues with something else."""
        for listener in tuple(self._listeners):
            listener.change_segment(change)


shared = LoopMarks()
"""Those of the process."""
