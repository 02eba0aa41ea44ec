"""Drains a running recording slice by slice on a thread: on schedule, when much is buffered, and on request."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._native.recorder import SLICE_BYTES, now_ns
from otel_torchprof._process import threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.give_way import giving_way
from otel_torchprof._process.quiet import LimitedLog

from .sdk import suppressed

if TYPE_CHECKING:
    from collections.abc import Callable

THREAD_NAME = "otel-torchprof-drain"
_LOOK_SECONDS = 0.25
"""Seconds between two checks of the buffer, between scheduled drains."""
_FIRST_SHARE = 1 / 16
"""The first pause as a share of that, after the start and after a drain before its schedule; each later one is twice as long. What a loop
does is learned from the first drains, and where much is recorded the next drain is due soon."""
_DRAIN_SHARE = 0.5
"""Largest share of a core that the thread takes; if that is not enough, the recorder drops the oldest events."""


_MOST_WAITING_BYTES = 4 * SLICE_BYTES
"""Bytes of events that may wait for drains that give way to the program; the more do, the less these give way. So a step is slowed by a
part of a drain, and seldom by a whole one."""


def most_bytes(limit: int) -> int:
    """Returns the bytes of a large slice: a quarter of a small memory limit, which else was full again before the drain ends. 0: no limit."""
    return min(SLICE_BYTES, limit // 4 or SLICE_BYTES)


def waiting_share(buffered: int, limit: int) -> float:
    """Returns ``buffered`` bytes as a share of those that may wait for drains: half of a small memory limit."""
    return buffered / max(min(_MOST_WAITING_BYTES, limit // 2), 1)


_PAUSES = 8
"""Pauses of a drain between two looks at what waits: each calls the recorder, and takes the GIL twice."""
_GIVE_UP_SECONDS = 1.0
"""Seconds to wait for a running slice after the deadline."""


class _DrainRequest:
    """A request to drain all events so far, or all that ``take`` returns. Any number of threads may wait for it.

    A waiting thread holds no lock, so a signal handler may request a drain and wait too.
    """

    def __init__(self, deadline: Deadline, take: Callable[[], int] | None = None) -> None:
        self.deadline = deadline
        self.take = take
        self.result: bool | None = None
        """Whether all was handed on; None as long as that is not known."""
        self._waiting: list[threads.SimpleQueue[None]] = []

    def settle(self, result: bool) -> None:
        """Sets the result, and releases the reference to the recording."""
        self.result, self.take = result, None
        for waiter in self._waiting.copy():
            waiter.put(None)

    def wait(self, deadline: Deadline) -> bool:
        """Waits for the result; False after the deadline."""
        mine: threads.SimpleQueue[None] = threads.SimpleQueue()
        self._waiting.append(mine)
        if self.result is None:
            with contextlib.suppress(threads.Empty):
                mine.get(timeout=deadline.remaining())
        return bool(self.result)


class Ending(NamedTuple):
    """Functions that end a recording."""

    stop: Callable[[], object]
    """Stops recording."""
    take: Callable[[], int]
    """Drains a slice of the rest; returns the watermark, Unix ns."""
    give_up: Callable[[], int]
    """Drops the remaining events, if there is no time for them, and passes on the drained ones; returns the watermark."""
    abandon: Callable[[], object]
    """Counts the rest as dropped if a drain hangs or fails."""


class Drainer:
    """Drains a recording in slices, on one thread at a time: its own, if it has one, else the caller's.

    While its thread runs, no other thread drains. Interrupts and signal handlers run on the main thread, and so never in the middle of
    a drain, which takes events from the recorder, counts them and queues them. Thread-safe.

    Args:
        delay: seconds between two scheduled drains.
        take_slice: drains the next slice; returns the watermark, Unix ns.
        is_due: returns whether a drain is due before its schedule; called on the thread every quarter second, at first more often.
        backlog: returns what is buffered as a share of what may wait: the drain yields the less to other threads the more that is, and
            not at all from 1 on. Called every few milliseconds of a drain.
    """

    def __init__(
        self, delay: float, take_slice: Callable[[], int], is_due: Callable[[], bool], backlog: Callable[[], float]
    ) -> None:
        self.delay = delay
        self._take = take_slice
        self.is_due = is_due
        self.backlog = backlog
        self.lock = threads.RLock()
        """Held during start and end; others hold it for related changes."""
        self.draining = threads.RLock()
        """Held during a slice. Reentrant: a signal handler may ask for a drain in the middle of one."""
        self._in_slice = False
        self._thread: _DrainThread | None = None
        self._final: _DrainRequest | None = None
        self._log = LimitedLog()

    def start(self) -> None:
        """Begins the thread, unless there is one."""
        with self.lock:
            if self._thread is not None:
                return
            try:
                self._thread = _DrainThread(self)
            except RuntimeError as error:  # interpreter shutdown: a flush or the shutdown drains the events
                self._log.warning("there is no thread to take events from the recorder: %s", error)

    @property
    def has_thread(self) -> bool:
        """Whether it was started and not ended."""
        return self._thread is not None

    def drain(self, deadline: Deadline) -> bool:
        """Drains all events so far; returns False after the deadline, or if a drain failed."""
        thread = self._thread
        if thread is None:
            return self.drain_here(deadline)
        if thread.is_current:  # called from inside a drain
            return False
        request = _DrainRequest(deadline)
        return request.wait(deadline) if thread.ask(request) else self.drain_here(deadline)

    def end(self, deadline: Deadline, claim: Callable[[], Ending | None] | None = None) -> None:
        """Drains the rest of a recording and ends the thread. A second call waits for the first.

        Args:
            deadline: of all of it; a slice that has begun then has a second more.
            claim: gives the recording to one caller only; called with the lock.

        Raises:
            KeyboardInterrupt, SystemExit: to be called again then.
        """
        thread = self._thread
        try:
            with self.lock:
                ending, thread = None if claim is None else claim(), self._thread
                self._thread = None
                if ending is not None:
                    self._final = _DrainRequest(deadline, ending.take)
                final = self._final
            if ending is not None and final is not None:
                self._finish(ending, final, thread)
            elif final is not None:
                final.wait(deadline)  # another thread is ending it, or this one, interrupted by a signal
            if thread is not None:
                thread.end(deadline)
            if ending is None:
                self.drain_here(deadline)
        except (KeyboardInterrupt, SystemExit):
            self._thread = self._thread or thread  # for the next call
            raise
        except Exception:  # raised by the stop of the recording
            if thread is not None:
                thread.end(deadline)
            raise

    def _finish(self, ending: Ending, final: _DrainRequest, thread: _DrainThread | None) -> None:
        try:
            ending.stop()
        except BaseException:
            final.settle(False)  # the remaining events stay; a repeated call must not wait for them
            raise
        if self._is_handled(final, thread, final.deadline):
            return
        self._log.warning("not all events were taken from the recorder: there was no time, or it failed")
        grace = Deadline.after(_GIVE_UP_SECONDS)
        if not self._is_handled(_DrainRequest(grace, ending.give_up), thread, grace):
            ending.abandon()

    def _is_handled(self, request: _DrainRequest, thread: _DrainThread | None, deadline: Deadline) -> bool:
        if thread is None or thread.is_current or not thread.ask(request):
            request.settle(self.drain_here(request.deadline, request.take))
        return request.wait(deadline)

    def drain_here(self, deadline: Deadline, take: Callable[[], int] | None = None) -> bool:
        """Drains on the caller's thread all events so far, or all that ``take`` returns, in slices.

        Drains at least one slice, unless another thread drains until the deadline.
        """
        until = now_ns() if take is None else NEVER
        while True:
            watermark = self.take_slice(deadline, take)
            if watermark is None or watermark >= until:
                return watermark is not None
            if deadline.passed:
                return False

    def take_slice(self, deadline: Deadline, take: Callable[[], int] | None = None) -> int | None:
        """Drains a slice; returns the watermark, Unix ns, or None if that failed or another drain ran until the deadline."""
        if not self.draining.acquire(timeout=deadline.remaining()):
            return None
        try:
            if self._in_slice:  # called from inside a drain, by a signal handler or a sampler
                return None
            self._in_slice = True
            try:
                return (take or self._take)()
            finally:
                self._in_slice = False
        except Exception:  # noqa: BLE001 - the application continues, whatever this is
            self._log.warning("taking events from the recorder failed, these are lost: %s", traceback.format_exc())
            return None
        finally:
            self.draining.release()


class _DrainThread:
    """The thread of a drainer, until it is ended."""

    def __init__(self, drainer: Drainer) -> None:
        self._drainer = drainer
        self._longest_pause = min(_LOOK_SECONDS, drainer.delay)
        self._pause = self._longest_pause * _FIRST_SHARE
        self._asked: threads.SimpleQueue[_DrainRequest | None] = threads.SimpleQueue()
        self._ends = self._gone = False
        self._backlog, self._pauses = 0.0, 0
        self._log = LimitedLog()
        self._thread = threads.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether it is the calling thread: code that a drain calls may request another drain."""
        return self._thread.ident == threads.get_ident()

    def ask(self, request: _DrainRequest) -> bool:
        """Queues a request; returns False if the thread has ended, for example at the exit of the interpreter."""
        self._asked.put(request)
        return not self._gone and not sys.is_finalizing()

    def end(self, deadline: Deadline) -> None:
        """Ends the thread after earlier requests, and waits for it, unless it is the calling thread."""
        self._ends = True
        self._asked.put(None)
        if not self.is_current:
            self._thread.join(deadline.remaining())

    def _run(self) -> None:
        with suppressed():
            due, wait = time.monotonic() + self._drainer.delay, self._next_pause()
            while not self._ends or not self._asked.empty():
                due, wait = self._work(due, wait)
        self._gone = True

    def _work(self, due: float, wait: float) -> tuple[float, float]:
        """Handles one request or checks the buffer once; returns when the next scheduled drain is due, and how long to wait."""
        request, is_asked = None, True
        try:
            request = self._asked.get(timeout=wait)
        except threads.Empty:
            is_asked = False
        try:
            if request is not None:
                request.settle(self._drainer.drain_here(request.deadline, request.take))
            return (due, self._next_pause()) if is_asked else self._look(due)
        except BaseException as error:  # noqa: BLE001 - whatever a sampler raises, SystemExit too: the others are drained
            with contextlib.suppress(Exception):
                self._log.warning(
                    "the thread that drains the recorder continues after %s: %s", type(error).__name__, error
                )
            return due, self._next_pause()
        finally:
            if request is not None and request.result is None:
                request.settle(False)

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, self._longest_pause)
        return pause

    def _urgency(self) -> float:
        """Returns 1 if a thread waits for the slice, else the drain's backlog, which is at most :data:`_PAUSES` pauses old."""
        if not self._asked.empty():
            return 1
        if self._pauses % _PAUSES == 0:
            self._backlog = self._drainer.backlog()
        self._pauses += 1
        return self._backlog

    def _look(self, due: float) -> tuple[float, float]:
        begin, worked = time.monotonic(), time.thread_time()
        is_due = self._drainer.is_due()
        if begin < due and not is_due:
            return due, self._next_pause()
        if is_due:
            self._pause = self._longest_pause * _FIRST_SHARE
        self._pauses = 0
        with giving_way(self._urgency):
            watermark = self._drainer.take_slice(Deadline.after(math.inf))
        now = time.monotonic()
        if watermark in {None, NEVER}:
            return now + self._drainer.delay, self._next_pause()
        worked = time.thread_time() - worked
        return due, max(worked / _DRAIN_SHARE - (now - begin), 0)
