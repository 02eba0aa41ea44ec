"""The thread that drains a recording: on schedule, when much waits, and on request."""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._export.sdk import suppressed
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.quiet import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from .live_recording import Drained

THREAD_NAME = "otel-torchprof-drain"
_LOOK_SECONDS = 0.25
"""How often the buffer is looked at between two scheduled drains."""
_DRAIN_SHARE = 0.5
"""Of one core, that the thread takes at most: when it does not keep up, the recorder throws away the oldest events."""


class Request:
    """To hand on what was recorded until now, or all that ``take`` brings. Any number of threads may wait for it.

    No lock of Python's own is held by who waits: a signal's handler may come, and ask or wait as well.
    """

    def __init__(self, deadline: Deadline, take: Callable[[], Drained] | None = None) -> None:
        self.deadline = deadline
        self.take = take
        self.result: bool | None = None
        """Whether all was handed on; None as long as that is not known."""
        self._waiting: list[queue.SimpleQueue[None]] = []

    def settle(self, result: bool) -> None:
        """Says what became of it, and lets go of the recording."""
        self.result, self.take = result, None
        for waiter in self._waiting.copy():
            waiter.put(None)

    def wait(self, deadline: Deadline) -> bool:
        """Whether all was handed on before the deadline."""
        mine: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting.append(mine)
        if self.result is None:
            with contextlib.suppress(queue.Empty):
                mine.get(timeout=deadline.remaining())
        return bool(self.result)


class DrainThread:
    """Drains until it is ended.

    While there is one nobody else does: interrupts and handlers of signals come on the main thread, and so never between two steps
    of a drain, which takes events from the recorder, counts them and lets them wait for the exporters.

    Args:
        delay: seconds between two scheduled drains.
        drain: handles a request, with its deadline and its ``take``.
        drain_slice: takes a slice within a deadline; up to when all has been handed on, None where that failed.
        is_due: whether so much waits that it is to be taken at once.
    """

    def __init__(
        self,
        delay: float,
        drain: Callable[[Deadline, Callable[[], Drained] | None], bool],
        drain_slice: Callable[[Deadline], int | None],
        is_due: Callable[[], bool],
    ) -> None:
        self._delay = delay
        self._pause = min(_LOOK_SECONDS, delay)
        self._drain = drain
        self._drain_slice = drain_slice
        self._is_due = is_due
        self._asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._ends = self._gone = False
        self._log = LimitedLog()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether it is the caller: what a drain calls asks for another."""
        return self._thread is threading.current_thread()

    def ask(self, request: Request) -> bool:
        """Has it handled, after what was asked before; False where the thread has ended, if only since the interpreter does."""
        self._asked.put(request)
        return not self._gone and not sys.is_finalizing()

    def end(self, deadline: Deadline) -> None:
        """Ends it after what was asked before, and waits for that, unless it is the caller."""
        self._ends = True
        self._asked.put(None)
        if not self.is_current:
            self._thread.join(deadline.remaining())

    def _run(self) -> None:
        with suppressed():
            due, wait = time.monotonic() + self._delay, self._pause
            while not self._ends or not self._asked.empty():
                due, wait = self._work(due, wait)
        self._gone = True

    def _work(self, due: float, wait: float) -> tuple[float, float]:
        """One request, or one look at the recorder; when the next scheduled drain is due, and how long to wait."""
        request, is_asked = None, True
        try:
            request = self._asked.get(timeout=wait)
        except queue.Empty:
            is_asked = False
        try:
            if request is not None:
                request.settle(self._drain(request.deadline, request.take))
            return (due, self._pause) if is_asked else self._look(due)
        except BaseException as error:  # noqa: BLE001 - whatever a sampler raises, SystemExit too: the others are drained
            with contextlib.suppress(Exception):
                self._log.warning(
                    "the thread that drains the recorder continues after %s: %s", type(error).__name__, error
                )
            return due, self._pause
        finally:
            if request is not None and request.result is None:
                request.settle(False)

    def _look(self, due: float) -> tuple[float, float]:
        begin = time.monotonic()
        is_due = self._is_due()
        if begin < due and not is_due:
            return due, self._pause
        watermark = self._drain_slice(Deadline.after(math.inf))
        took = time.monotonic() - begin
        if watermark in {None, NEVER}:
            return begin + took + self._delay, self._pause
        return due, took / _DRAIN_SHARE - took
