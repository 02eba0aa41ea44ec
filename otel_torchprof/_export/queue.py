"""A queue in front of an exporter, with one thread that empties it."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import fork
from .deadline import Deadline
from .quiet import LimitedLog
from .sdk import suppressed
from .settings import QueueSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Deadline", "ExportQueue", "QueueSettings", "QueueStats"]

THREAD_NAME = "otel-torchprof-export"


@dataclass(frozen=True)
class QueueStats:
    """What became of the spans that were put into a queue. Those that are with the exporter right now are in none of the numbers."""

    exported_spans: int = 0
    """The exporter answered SUCCESS."""
    failed_spans: int = 0
    """The exporter answered FAILURE, or raised."""
    dropped_spans: int = 0
    """Never given to the exporter: the queue was full, or shut down."""
    waiting_spans: int = 0
    waiting_bytes: int = 0


@dataclass(eq=False)
class _Batch:
    """Spans that wait."""

    spans: Sequence[ReadableSpan]
    size_bytes: int


@dataclass(eq=False)
class _Flush:
    """A request that waits in the queue like spans, so that everything put before it is done before it is."""

    deadline: Deadline
    done: bool = False
    result: bool = False


class ExportQueue:
    """Spans that wait for an exporter, in the order in which they came; a thread of its own hands them on.

    ``put`` never waits for the exporter. What does not fit pushes out the oldest, and is counted. Whatever the exporter raises
    is counted and logged, at most once a minute. The thread begins with the first ``put``, is a daemon, and has instrumentation
    suppressed. Thread-safe; in a forked child it is empty and begins anew.

    Args:
        exporter: any SpanExporter. One with a true attribute ``takes_span_lists`` is given each batch whole, any other at most
            ``max_export_batch_size`` spans at a time. One whose ``export`` takes a ``timeout_millis`` is given that too.
        settings: bounds; by default those of the environment.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        settings: QueueSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.exporter = exporter
        self._settings = settings or QueueSettings.from_environment()
        self._clock = clock
        self._log = LimitedLog(clock)
        timeout = {"timeout_millis": self._settings.export_timeout_millis}
        self._export_keywords = timeout if _takes_timeout(exporter) else {}
        self._closing = False
        self._reset()
        fork.watch(self)

    def _reset(self) -> None:
        """What belongs to one process."""
        self._changed = threading.Condition()
        self._waiting: deque[_Batch | _Flush] = deque()
        self._waiting_spans = 0
        self._waiting_bytes = 0
        self._exported = self._failed = self._dropped = 0
        self._lost_at_flush = 0
        self._abandoned = self._shutdown_begun = self._exporter_is_down = False
        self._thread: threading.Thread | None = None

    # ---- for those who put ----

    def put(self, spans: Sequence[ReadableSpan], size_bytes: int) -> None:
        """Lets spans wait for their export; returns at once. ``size_bytes`` is what they hold in memory.

        Where they do not fit, the oldest that wait are dropped. A batch that is too large for the queue all alone is taken
        nevertheless, when nothing else waits: it would never be exported otherwise. After the shutdown they are dropped.
        """
        count = len(spans)
        if not count:
            return
        with self._changed:
            dropped = count if self._closing else self._make_room(count, size_bytes)
            self._dropped += dropped
            if not self._closing:
                self._waiting.append(_Batch(spans, size_bytes))
                self._waiting_spans += count
                self._waiting_bytes += size_bytes
                self._start_thread()
                self._changed.notify_all()
        if dropped:
            reason = "it is shut down" if self._closing else "it is slower than the spans come"
            self._log.warning("%s: %d spans were dropped: %s", self._name, dropped, reason)

    def force_flush(self, deadline: Deadline) -> bool:
        """Waits until everything put so far has been exported, and has the exporter flush too.

        False where the deadline came first, the exporter's own flush said so, or spans were lost since the flush before this one.
        Keeps the deadline even when the exporter hangs.
        """
        with self._changed:
            if self._closing:
                return not self._waiting
            flush = _Flush(deadline)
            self._waiting.append(flush)
            self._start_thread()
            self._changed.notify_all()
        if self._has_thread:
            self._wait(lambda: flush.done, deadline)
        else:
            self._empty(deadline)
        return flush.result

    def shutdown(self, deadline: Deadline) -> bool:
        """Exports what waits and shuts the exporter down; True when both were done before the deadline.

        What still waits then is dropped and counted, and an exporter that hangs is left behind on its daemon thread. A second
        call does nothing.
        """
        with self._changed:
            if self._closing:
                return self._exporter_is_down
            self._closing = True
            self._start_thread()
            self._changed.notify_all()
        if self._has_thread:
            finished = self._wait(lambda: self._exporter_is_down, deadline)
        else:
            finished = self._empty(deadline)
            self._shut_exporter_down()
        if not finished:
            self._abandon()
        return finished

    @property
    def stats(self) -> QueueStats:
        """What became of the spans so far, at one moment."""
        with self._changed:
            return QueueStats(self._exported, self._failed, self._dropped, self._waiting_spans, self._waiting_bytes)

    def after_fork_in_child(self) -> None:
        """In a forked child: empty, with new locks, and without a thread until the next put. Called by itself."""
        self._log.after_fork_in_child()
        self._reset()

    # ---- room ----

    def _make_room(self, count: int, size_bytes: int) -> int:
        """Drops the oldest until so much fits or nothing waits; how many spans were dropped. Requests to flush stay."""
        dropped, flushes = 0, []
        while self._waiting and not self._fits(count, size_bytes):
            oldest = self._waiting.popleft()
            if isinstance(oldest, _Flush):
                flushes.append(oldest)
            else:
                dropped += self._taken_out(oldest)
        self._waiting.extendleft(reversed(flushes))
        return dropped

    def _fits(self, count: int, size_bytes: int) -> bool:
        return (
            self._waiting_spans + count <= self._settings.max_queue_size
            and self._waiting_bytes + size_bytes <= self._settings.max_queue_bytes
        )

    def _taken_out(self, batch: _Batch) -> int:
        self._waiting_spans -= len(batch.spans)
        self._waiting_bytes -= batch.size_bytes
        return len(batch.spans)

    # ---- the thread ----

    @property
    def _name(self) -> str:
        return type(self.exporter).__name__

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None

    def _start_thread(self) -> None:
        """Where there can be none (an interpreter that is going down), flush and shutdown export on the caller's thread."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def _wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        with self._changed:
            while not condition() and not deadline.passed:
                self._changed.wait(deadline.remaining())
            return condition()

    def _run(self) -> None:
        with suppressed():
            while self._work():
                pass
            self._shut_exporter_down()

    def _work(self) -> bool:
        """Handles what waits longest, once there is something; False when no more will come.

        Not a loop: its variable would hold the last batch, which may be large, for as long as nothing comes.
        """
        item = self._next()
        if item is None:
            return False
        self._handle(item)
        return True

    def _next(self) -> _Batch | _Flush | None:
        """What waits longest, when there is something; None when no more will come."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            return self._pop()

    def _pop(self) -> _Batch | _Flush | None:
        if not self._waiting:
            return None
        item = self._waiting.popleft()
        if isinstance(item, _Batch):
            self._taken_out(item)
        return item

    def _empty(self, deadline: Deadline) -> bool:
        """Does the thread's work on the calling thread; whether the deadline left time for all of it."""
        with suppressed():
            while not deadline.passed:
                with self._changed:
                    item = self._pop()
                if item is None:
                    return True
                self._handle(item)
        return False

    def _handle(self, item: _Batch | _Flush) -> None:
        if isinstance(item, _Batch):
            self._export(item.spans)
            return
        flushed = not item.deadline.passed and self._flush_exporter(item.deadline)
        with self._changed:
            lost = self._failed + self._dropped
            item.result = flushed and lost == self._lost_at_flush
            item.done = True
            self._lost_at_flush = lost
            self._changed.notify_all()

    # ---- the exporter ----

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        if getattr(self.exporter, "takes_span_lists", False):
            self._export_part(spans)
            return
        size = self._settings.max_export_batch_size
        for first in range(0, len(spans), size):
            if self._abandoned:
                with self._changed:
                    self._dropped += len(spans) - first
                return
            self._export_part(spans[first : first + size])

    def _export_part(self, spans: Sequence[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        succeeded = False
        try:
            succeeded = self.exporter.export(spans, **self._export_keywords) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 (whatever somebody's exporter raises must not end the thread)
            self._log.warning(
                "%s: %d spans were lost: it raised %s: %s", self._name, len(spans), type(error).__name__, error
            )
        with self._changed:
            if succeeded:
                self._exported += len(spans)
            else:
                self._failed += len(spans)

    def _flush_exporter(self, deadline: Deadline) -> bool:
        try:
            # Some exporters return None, as the SDK's own base class once did.
            return self.exporter.force_flush(int(deadline.remaining() * 1000)) is not False
        except Exception as error:  # noqa: BLE001 (as above)
            self._log.warning("%s: its force_flush raised %s: %s", self._name, type(error).__name__, error)
            return False

    def _shut_exporter_down(self) -> None:
        with self._changed:
            if self._shutdown_begun:
                return
            self._shutdown_begun = True
        try:
            self.exporter.shutdown()
        except Exception as error:  # noqa: BLE001 (as above)
            self._log.warning("%s: its shutdown raised %s: %s", self._name, type(error).__name__, error)
        with self._changed:
            self._exporter_is_down = True
            self._changed.notify_all()

    def _abandon(self) -> None:
        """Gives up what still waits, and wakes the exporter: one of ours that waits to try again then stops."""
        with self._changed:
            self._abandoned = True
            items = list(self._waiting)
            self._waiting.clear()
            dropped = sum(self._taken_out(item) for item in items if isinstance(item, _Batch))
            self._dropped += dropped
            for item in items:
                if isinstance(item, _Flush):
                    item.done = True
            self._changed.notify_all()
        self._log.warning("%s: %d waiting spans were dropped: the shutdown's time was over", self._name, dropped)
        # On a thread of its own, since it may hang as well.
        try:
            threading.Thread(target=self._shut_exporter_down, name=THREAD_NAME, daemon=True).start()
        except RuntimeError:
            self._log.warning("%s: it was not shut down: it hangs, and the interpreter goes down", self._name)


def _takes_timeout(exporter: SpanExporter) -> bool:
    try:
        return "timeout_millis" in inspect.signature(exporter.export).parameters
    except (TypeError, ValueError):  # a function in C that does not tell
        return False
