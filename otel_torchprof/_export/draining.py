"""How a recording is drained while it runs: by a thread, on schedule, when much waits, and on request; slice by slice."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.give_way import giving_way
from otel_torchprof._process.quiet import LimitedLog

from .sdk import suppressed

if TYPE_CHECKING:
    from collections.abc import Callable

THREAD_NAME = "otel-torchprof-drain"
_LOOK_SECONDS = 0.25
"""How often the buffer is looked at between two scheduled drains."""
_DRAIN_SHARE = 0.5
"""Of one core, that the thread takes at most: when it does not keep up, the recorder throws away the oldest events."""


_GIVE_UP_SECONDS = 1.0
"""How long a drain that is in the middle of a slice is waited for, once there is no time left."""


class _DrainRequest:
    """To hand on what was recorded until now, or all that ``take`` brings. Any number of threads may wait for it.

    No lock of Python's own is held by who waits: a signal's handler may come, and ask or wait as well.
    """

    def __init__(self, deadline: Deadline, take: Callable[[], int] | None = None) -> None:
        self.deadline = deadline
        self.take = take
        self.result: bool | None = None
        """Whether all was handed on; None as long as that is not known."""
        self._waiting: list[threads.SimpleQueue[None]] = []

    def settle(self, result: bool) -> None:
        """Says what became of it, and lets go of the recording."""
        self.result, self.take = result, None
        for waiter in self._waiting.copy():
            waiter.put(None)

    def wait(self, deadline: Deadline) -> bool:
        """Whether all was handed on before the deadline."""
        mine: threads.SimpleQueue[None] = threads.SimpleQueue()
        self._waiting.append(mine)
        if self.result is None:
            with contextlib.suppress(threads.Empty):
                mine.get(timeout=deadline.remaining())
        return bool(self.result)


class Ending(NamedTuple):
    """How a recording ends."""

    stop: Callable[[], object]
    """Records nothing more."""
    take: Callable[[], int]
    """Takes a slice of the rest and hands it on; up to when all has been handed on, Unix ns."""
    give_up: Callable[[], int]
    """Throws the rest away, where there is no time for it, and hands on what is known of it."""
    abandon: Callable[[], object]
    """Counts it where not even that is possible: a drain hangs or fails."""


class Drainer:
    """Has a recording drained in slices, by one thread at a time: its own, where there is one, else the caller's.

    While there is the thread nobody else drains: interrupts and handlers of signals come on the main thread, and so never between
    two steps of a drain, which takes events from the recorder, counts them and lets them wait for the exporters. Any thread may call
    any method, at any time.

    Args:
        delay: seconds between two scheduled drains.
        take_slice: takes the next slice and hands it on; up to when all has been handed on, Unix ns.
        is_due: whether so much waits that it is to be taken at once; asked on the thread, every quarter second.
        is_behind: whether there is no time to give way to other threads: at least a slice waits beside the one at work. Asked every
            millisecond of that.
    """

    def __init__(
        self, delay: float, take_slice: Callable[[], int], is_due: Callable[[], bool], is_behind: Callable[[], bool]
    ) -> None:
        self.delay = delay
        self._take = take_slice
        self.is_due = is_due
        self.is_behind = is_behind
        self.lock = threads.RLock()
        """Held while it begins or ends, for who has something to change with that."""
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
            except RuntimeError as error:  # the interpreter is going down: a flush or the shutdown takes what there is
                self._log.warning("there is no thread to take events from the recorder: %s", error)

    @property
    def has_thread(self) -> bool:
        """Whether it was started and not ended."""
        return self._thread is not None

    def drain(self, deadline: Deadline) -> bool:
        """Hands on what was recorded until now; False where there was no time or it failed."""
        thread = self._thread
        if thread is None:
            return self.drain_here(deadline)
        if thread.is_current:  # what a drain calls asks for another
            return False
        request = _DrainRequest(deadline)
        return request.wait(deadline) if thread.ask(request) else self.drain_here(deadline)

    def end(self, deadline: Deadline, claim: Callable[[], Ending | None] | None = None) -> None:
        """Takes the rest of a recording and ends the thread; without one what was recorded until now. A second call waits for the first.

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
                final.wait(deadline)  # another thread is at it, or this one, which a signal has interrupted
            if thread is not None:
                thread.end(deadline)
            if ending is None:
                self.drain_here(deadline)
        except (KeyboardInterrupt, SystemExit):
            self._thread = self._thread or thread  # for the next call
            raise
        except Exception:  # of who stops the recording
            if thread is not None:
                thread.end(deadline)
            raise

    def _finish(self, ending: Ending, final: _DrainRequest, thread: _DrainThread | None) -> None:
        try:
            ending.stop()
        except BaseException:
            final.settle(False)  # nobody takes the rest: who calls again doesn't wait for it
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
        """On the caller's thread: hands on what was recorded until now, or all that ``take`` brings, in slices.

        There is time for one slice at least, unless another thread is at it until the deadline.
        """
        until = now_ns() if take is None else NEVER
        while True:
            watermark = self.take_slice(deadline, take)
            if watermark is None or watermark >= until:
                return watermark is not None
            if deadline.passed:
                return False

    def take_slice(self, deadline: Deadline, take: Callable[[], int] | None = None) -> int | None:
        """Up to when everything has been handed on, Unix ns; None where that failed, or another drain took until the deadline."""
        if not self.draining.acquire(timeout=deadline.remaining()):
            return None
        try:
            if self._in_slice:  # it is what a drain calls on its thread that asks: a signal handler, somebody's sampler
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
        self._pause = min(_LOOK_SECONDS, drainer.delay)
        self._asked: threads.SimpleQueue[_DrainRequest | None] = threads.SimpleQueue()
        self._ends = self._gone = False
        self._log = LimitedLog()
        self._thread = threads.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether it is the caller: what a drain calls asks for another."""
        return self._thread.ident == threads.get_ident()

    def ask(self, request: _DrainRequest) -> bool:
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
            due, wait = time.monotonic() + self._drainer.delay, self._pause
            while not self._ends or not self._asked.empty():
                due, wait = self._work(due, wait)
        self._gone = True

    def _work(self, due: float, wait: float) -> tuple[float, float]:
        """One request, or one look at the recorder; when the next scheduled drain is due, and how long to wait."""
        request, is_asked = None, True
        try:
            request = self._asked.get(timeout=wait)
        except threads.Empty:
            is_asked = False
        try:
            if request is not None:
                request.settle(self._drainer.drain_here(request.deadline, request.take))
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

    def _is_hurried(self) -> bool:
        """Whether somebody waits for the slice, or so much is waiting that it must not take longer than it has to."""
        return not self._asked.empty() or self._drainer.is_behind()

    def _look(self, due: float) -> tuple[float, float]:
        begin, worked = time.monotonic(), time.thread_time()
        is_due = self._drainer.is_due()
        if begin < due and not is_due:
            return due, self._pause
        with giving_way(self._is_hurried):
            watermark = self._drainer.take_slice(Deadline.after(math.inf))
        now = time.monotonic()
        if watermark in {None, NEVER}:
            return now + self._drainer.delay, self._pause
        worked = time.thread_time() - worked
        return due, max(worked / _DRAIN_SHARE - (now - begin), 0)
