"""A moment until which several waits together may last."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Deadline:
    """A moment on a monotonic clock. Immutable, hence thread-safe."""

    at: float
    """In seconds of ``clock``; ``math.inf`` for no deadline."""
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """The moment that is ``seconds`` away (``math.inf`` for no deadline)."""
        return cls(clock() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left, never below 0 and never more than ``wait`` of the threading module takes."""
        return min(max(0.0, self.at - self.clock()), threading.TIMEOUT_MAX)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0
