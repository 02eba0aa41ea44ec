"""A log that our own trouble does not fill."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from otel_torchprof.errors import printable_lines

from . import threads

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger("otel_torchprof")

SECONDS_BETWEEN_LIKE_MESSAGES = 60.0


def debug(message: str, *arguments: object) -> None:
    """Logs a message for debugging."""
    _logger.debug(message, *arguments)


class LimitedLog:
    """Warnings of the package's logger, each text at most once a minute.

    Texts are compared without their arguments, since the reason of a failure may differ with each attempt. The next warning
    has the number of omitted ones. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threads.RLock()  # a signal handler may warn in the middle of a warning
        self._logged: dict[str, tuple[float, int]] = {}

    def warning(self, message: str, *arguments: object) -> None:
        """Logs or counts a warning. ``message`` is formatted with ``%``."""
        with self._lock:
            now = self._clock()
            last, hidden = self._logged.get(message, (-SECONDS_BETWEEN_LIKE_MESSAGES + now, 0))
            if now - last < SECONDS_BETWEEN_LIKE_MESSAGES:
                self._logged[message] = (last, hidden + 1)
                return
            self._logged[message] = (now, 0)
        more = f" ({hidden} more like it since the last one)" if hidden else ""
        with contextlib.suppress(Exception):  # raised by a filter or handler of the program
            _logger.warning("%s%s", printable_lines(message % arguments), more)

    def after_fork_in_child(self) -> None:
        """Replaces the lock, which another thread may have held."""
        self._lock = threads.RLock()


class DeferredWarnings:
    """Warnings delayed until no lock is held: the program's handlers may be slow, or call this package. Thread-safe."""

    def __init__(self, log: LimitedLog) -> None:
        self._log = log
        self._waiting: deque[tuple[str, tuple[object, ...]]] = deque()

    def warning(self, message: str, *arguments: object) -> None:
        """Adds a warning."""
        self._waiting.append((message, arguments))

    def say(self) -> None:
        """Logs the waiting warnings."""
        with contextlib.suppress(IndexError):
            while True:
                message, arguments = self._waiting.popleft()
                self._log.warning(message, *arguments)

    def after_fork_in_child(self) -> None:
        """Discards the waiting warnings: the parent logs them."""
        self._waiting.clear()
        self._log.after_fork_in_child()
