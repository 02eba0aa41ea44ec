"""A queue in front of an exporter, and the thread that exports from it."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExportResult

from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.quiet import DeferredWarnings, LimitedLog
from otel_torchprof.health import QueueStats

from .backlog import Backlog, Flush, QueuedBatch, Undelivered
from .ledger import (
    ALREADY_SHUTDOWN,
    IN_WORDS,
    NO_RESPONSE,
    OUTAGE,
    QUEUE_FULL,
    SHUTDOWN,
    Delivery,
    Ledger,
    can_stop_midway,
    takes_timeout,
)
from .response import Backoff, Outcome, Response
from .sdk import suppressed
from .settings import QueueSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter


__all__ = ["Deadline", "ExportQueue", "QueueSettings", "QueueStats"]

# ---- Outages of a receiver, and the backoff between retries ----

_NORMAL_BACKOFF = Backoff(longest=30.0)
"""Backoff while no flush or shutdown waits. A recovered receiver is noticed after the longest pause at the latest."""
_URGENT_BACKOFF = Backoff(longest=2.0)
"""Backoff while a flush or the shutdown waits."""
_REPORTED_AFTER = 5.0
"""Seconds of an outage after which it is logged."""


class Outage:
    """An outage: the time from the first failed attempt to the next successful one. Not thread-safe: its queue locks."""

    def __init__(self, name: str, log: DeferredWarnings, clock: Callable[[], float]) -> None:
        self.reason = ""
        """Why the last attempt that failed did."""
        self._name = name
        self._log = log
        self._clock = clock
        self._since: float | None = None
        self._failures = 0
        self._dropped = 0
        self._reported = False

    @property
    def seconds(self) -> float:
        """Seconds since its begin; 0 without an outage."""
        return 0.0 if self._since is None else max(self._clock() - self._since, 1e-9)

    def failed(self, began: float, reason: str, waiting: int) -> None:
        """Notes a failed attempt that began at ``began``, with ``waiting`` queued spans."""
        self._since = began if self._since is None else self._since
        self._failures += 1
        self.reason = reason
        if not self._reported and self.seconds >= _REPORTED_AFTER:
            self._reported = True
            text = "%s: nothing was delivered for %.0f s, %d spans wait and it is tried again: %s"
            self._log.warning(text, self._name, self.seconds, waiting, reason)

    def dropped(self, spans: int) -> None:
        """Counts spans that were dropped during the outage."""
        self._dropped += spans

    def over(self) -> None:
        """Ends the outage after a response; no effect without one."""
        if self._reported:
            text = "%s: delivers again after %.0f s; %d spans were dropped meanwhile"
            self._log.warning(text, self._name, self.seconds, self._dropped)
        self._since = None
        self._failures = self._dropped = 0
        self._reported = False

    def pause(self, asked: float | None, *, hurried: bool) -> float:
        """Returns the seconds until the next attempt: as the receiver ``asked``, else from the backoff."""
        return (_URGENT_BACKOFF if hurried else _NORMAL_BACKOFF).wait(max(self._failures - 1, 0), asked)


# ---- Detection of messages that the receiver will never accept ----

_ATTEMPTS = 4
"""Failed attempts in a row after which one other message is sent first, to find out whether the receiver accepts any."""
_ALONE = 5
"""Failed attempts, each after other messages were accepted, before a message is given up: random failures rarely repeat so often."""
_SECONDS = 300.0
"""Seconds from the first failed attempt before a message is given up. Meanwhile all other messages are sent before it."""


class RejectedMessages:
    """The poison message policy: a message that crashes its receiver, or exceeds the timeout, must not block all later messages.

    In an outage no other message is accepted either; then the order stays, and no message is dropped. Not thread-safe: its queue locks.
    """

    def __init__(self) -> None:
        self._accepted = 0

    def accepted(self, batch: QueuedBatch) -> None:
        """Notes that the receiver has accepted or refused the first message of a batch."""
        self._accepted += 1
        batch.attempts = batch.alone = 0

    def failed(self, batch: QueuedBatch, began: float) -> float:
        """Notes a failed attempt, begun at ``began``, of the first message; returns behind how many batches to queue it."""
        if not batch.attempts:
            batch.since = began
        elif self._accepted > batch.others_accepted:
            batch.alone += 1
        batch.attempts += 1
        batch.others_accepted = self._accepted
        if batch.alone:
            return math.inf
        return 1 if batch.attempts % _ATTEMPTS == 0 else 0

    def is_over(self, batch: QueuedBatch, now: float) -> bool:
        """Whether to drop its first message."""
        return batch.alone >= _ALONE and now - batch.since >= _SECONDS


THREAD_NAME = "otel-torchprof-export"
_LAST_TRY_SECONDS = 1.0
"""Time for one last attempt at the shutdown, if the receiver has not responded during the time that a shutdown waits."""


_instances: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
"""Counters of exporters by class, for their names."""


class ExportQueue:
    """Queues spans for an exporter, and exports them in order on its own thread.

    ``put`` never waits for the exporter. If the queue is full, the oldest spans are dropped, and counted. Exceptions of the exporter
    are counted and logged, at most once a minute. The daemon thread starts with the first ``put``, and has instrumentation
    suppressed. Thread-safe; in a forked child the queue is empty and restarts.

    Spans that an exporter with ``export_some`` did not deliver stay at the front, and are retried with growing pauses, or when the receiver
    asks, for as long as they fit. A waiting flush or shutdown shortens the pauses. A message that is never accepted while others are
    moves behind these, and is dropped after five minutes.

    Args:
        exporter: any SpanExporter. One with a true attribute ``takes_span_lists`` gets each batch whole, any other at most
            ``max_export_batch_size`` spans at a time. If its ``export`` has a parameter ``timeout_millis``, it gets that too.
        settings: limits; by default those of the environment.
        ledger: ledger with the lock for counts; by default a new one.
        clock: a monotonic clock, in seconds.
        wait: waits for a change, with a timeout by that clock.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        settings: QueueSettings | None = None,
        *,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threads.Condition, float], object] = threads.Condition.wait,
    ) -> None:
        self.exporter = exporter
        self.component_type = f"{type(exporter).__module__}.{type(exporter).__qualname__}"
        self.component_name = f"{self.component_type}/{next(_instances[self.component_type])}"
        """Unique name of the exporter in this process, for metrics: counters with a shared name would seem to decrease."""
        self._settings = settings or QueueSettings.from_environment()
        self._ledger = ledger or Ledger()
        self._clock = clock
        self._pause_for = wait
        self._log = DeferredWarnings(LimitedLog(clock))
        self._stops_midway = can_stop_midway(exporter)
        timeout = {"timeout_millis": self._settings.export_timeout_millis}
        self._export_keywords = timeout if takes_timeout(exporter) else {}
        self._closing = False
        self._reset()
        process_changes.watch(self)

    def _reset(self) -> None:
        """Creates the state of one process."""
        self._changed = threads.Condition(self._ledger.lock)
        self._backlog = Backlog(self._settings)
        self._outage = Outage(self._name, self._log, self._clock)
        self._rejected_messages = RejectedMessages()
        self._end: Deadline | None = None
        self._end_unanswered: Deadline | None = None
        self._has_answered = False
        self._exported = self._failed = self._rejected = 0
        self._dropped: Counter[str] = Counter()
        self._dropped_passed: Counter[str] = Counter()
        self._undelivered_at_flush = 0
        self._stopped_by: Response | None = None
        self._abandoned = self._shutdown_begun = self._exporter_is_down = False
        self._thread: threads.Thread | None = None

    # ---- For producers ----

    def put(self, spans: Sequence[ReadableSpan], size_bytes: int) -> None:
        """Queues spans for export; returns at once. ``size_bytes``: their memory.

        Where they do not fit, the oldest that wait are dropped. A batch that is too large for the queue all alone is taken
        nevertheless, when nothing else waits: it would never be exported otherwise. After the shutdown they are dropped.
        """
        self.add(spans, size_bytes)
        self.say()

    def add(self, spans: Sequence[ReadableSpan], size_bytes: int) -> None:
        """As :meth:`put`, for callers that hold the ledger's lock; warnings are deferred until :meth:`say`."""
        count = len(spans)
        if not count:
            return
        with self._changed:
            why = ALREADY_SHUTDOWN if self._closing else OUTAGE if self._outage.seconds else QUEUE_FULL
            undelivered = Undelivered(count) if self._closing else self._backlog.make_room(count, size_bytes)
            self._drop(undelivered, why)
            if not self._closing:
                self._backlog.append(QueuedBatch(spans, size_bytes))
                self._start_thread()
                self._changed.notify_all()
            if undelivered.spans:
                self._log.warning("%s: %d spans were dropped: %s", self._name, undelivered.spans, IN_WORDS[why])

    def say(self) -> None:
        """Logs the deferred warnings. Must be called without the lock, since a logging handler of the program may read the health."""
        self._log.say()

    def force_flush(self, deadline: Deadline) -> bool:
        """Waits until everything put so far has been exported, and has the exporter flush too.

        False where the deadline came first, the exporter's own flush said so, or spans were lost since the flush before this one.
        Keeps the deadline even when the exporter hangs.
        """
        with self._changed:
            if self._closing:
                return not self._backlog.spans
            flush = Flush(deadline)
            self._backlog.append(flush)
            self._start_thread()
            self._changed.notify_all()
        if self._has_thread:
            self._wait(lambda: flush.done, deadline)
        else:
            self._empty(deadline)
        return flush.result

    def shutdown(self, deadline: Deadline, unanswered: float = math.inf) -> bool:
        """Exports what waits and shuts the exporter down; True when both were done before the deadline.

        Gives up earlier if the next attempt would be after the deadline, or if the receiver has not responded at all for ``unanswered``
        seconds, including an outage that began before: it is probably down. Spans that are still queued are then dropped and counted,
        and an exporter that hangs is left on its daemon thread. A second call waits for the first.
        """
        with self._changed:
            first, self._closing = not self._closing, True
            if first:
                left = max(unanswered - self._outage.seconds, _LAST_TRY_SECONDS)
                at = min(deadline.at, deadline.clock() + left)
                self._end, self._end_unanswered = deadline, Deadline(at, deadline.clock)
                self._start_thread()
                self._changed.notify_all()
        if not first:  # another thread starts it, or has
            return self._wait(lambda: self._exporter_is_down or self._abandoned, deadline) and not self._abandoned
        if self._has_thread:
            finished = self._wait(lambda: self._exporter_is_down, self._time_over or deadline)
            if not finished and self._has_answered:
                finished = self._wait(lambda: self._exporter_is_down, deadline)
        else:
            finished = self._empty(deadline)
            self._shut_exporter_down()
        if not finished:
            self._abandon()
        return finished and not self._abandoned

    @property
    def is_behind(self) -> bool:
        """Whether spans are queued, so that new ones must wait. Without the lock, so it may be outdated."""
        return self._backlog.spans > 0

    @property
    def stats(self) -> QueueStats:
        """Outcomes of the spans so far, as one consistent object."""
        with self._changed:
            return QueueStats(
                self._exported,
                self._failed,
                dict(self._dropped),
                self._backlog.spans,
                self._backlog.size_bytes,
                self._outage.seconds,
                self._outage.reason,
                self._backlog.passed,
                dict(self._dropped_passed),
                self._rejected,
            )

    def after_fork_in_child(self) -> None:
        """Empties the queue in a forked child and renews its locks; the next put starts a thread. Called automatically."""
        self._log.after_fork_in_child()
        self._reset()

    # ---- The thread ----

    @property
    def _name(self) -> str:
        return type(self.exporter).__name__

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None

    def _start_thread(self) -> None:
        """Starts the thread. If that is impossible (at the interpreter's exit), flush and shutdown export on the caller's thread."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threads.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def _wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        try:
            with self._changed:
                while not condition() and not deadline.passed:
                    self._changed.wait(deadline.remaining())
                return condition()
        except RuntimeError as error:
            # If a signal handler raises while wait() has released the lock, `with` has nothing to release.
            raise error.__context__ or error from None

    def _run(self) -> None:
        with suppressed():
            while self._work():
                pass
            self._shut_exporter_down()

    def _work(self) -> bool:
        """Waits for the oldest item and handles it; returns False when there will be no more.

        Not a loop, whose variable would keep the last batch, which may be large, alive during the wait.
        """
        self._pause(None)
        item = self._next()
        if item is None:
            return False
        try:
            self._handle(item)
        except BaseException as error:  # noqa: BLE001 - an interrupt that was meant for the program: a flush may be waiting
            self._log.warning("%s: its thread continues after %s: %s", self._name, type(error).__name__, error)
        self.say()
        return True

    def _next(self) -> QueuedBatch | Flush | None:
        """Waits for an item and takes the oldest; None when no more will come."""
        with self._changed:
            while not self._backlog and not self._closing:
                self._changed.wait()
            return self._backlog.take()

    def _empty(self, deadline: Deadline) -> bool:
        """Exports on the calling thread; returns whether everything was exported before the deadline."""
        with suppressed():
            while not deadline.passed:
                with self._changed:
                    item = self._backlog.take()
                if item is None:
                    return True
                self._handle(item)
                del item
                self.say()
                self._pause(deadline)
        return False

    def _handle(self, item: QueuedBatch | Flush) -> None:
        if isinstance(item, Flush):
            self._flush(item)
            return
        try:
            if self._stops_midway:
                self._export_some(item)
            else:
                self._export(item)
        except BaseException:  # an interrupt
            with self._changed:
                if not self._abandoned:
                    self._backlog.hand_on(item, len(item.spans))
                self._settle(item, Delivery(failed=len(item.spans)))
            raise

    def _flush(self, flush: Flush) -> None:
        flushed = not flush.deadline.passed and self._flush_exporter(flush.deadline)
        self.say()
        with self._changed:
            self._backlog.answered(flush)
            undelivered = self._failed + self._dropped.total()
            flush.result = flushed and undelivered == self._undelivered_at_flush
            flush.done = True
            self._undelivered_at_flush = undelivered
            self._changed.notify_all()

    # ---- The exporter ----

    def _export(self, batch: QueuedBatch) -> None:
        """Exports to an exporter that accepts all spans or none; those that it does not accept are dropped."""
        whole = getattr(self.exporter, "takes_span_lists", False)
        while batch.spans and not self._abandoned:
            part = batch.spans if whole else batch.spans[: self._settings.max_export_batch_size]
            with self._changed:
                if self._abandoned:  # meanwhile: counted as dropped, so it must not be sent
                    return
                batch.sending = len(part)
                self._backlog.hand_on(batch, len(part))
            succeeded = self._exported_part(part)
            with self._changed:
                self._settle(batch, Delivery(len(part)) if succeeded else Delivery(failed=len(part)))

    def _exported_part(self, spans: Sequence[ReadableSpan]) -> bool:
        try:
            return self.exporter.export(spans, **self._export_keywords) is SpanExportResult.SUCCESS
        except (Exception, SystemExit) as error:  # noqa: BLE001 (an exporter's exceptions must not end the thread)
            self._log.warning(
                "%s: %d spans were lost: it raised %s: %s", self._name, len(spans), type(error).__name__, error
            )
            return False

    def _export_some(self, batch: QueuedBatch) -> None:
        """Exports to an exporter that reports how many spans it has sent; the rest is queued again before all later ones."""
        began, before = self._clock(), len(batch.spans)
        with self._changed:
            if self._abandoned:
                return
            self._backlog.hand_on(batch, before)
        last = Delivery()
        for last in self._some_exported(batch):
            with self._changed:
                if self._abandoned:
                    return
                self._settle(batch, last)
                if last.settled:
                    self._outage.over()
                    self._rejected_messages.accepted(batch)
        with self._changed:
            if self._abandoned:
                return
            nothing = len(batch.spans) == before
            behind = self._failed_again(batch, last, began) if nothing else 0
            if not batch.spans:
                return
            stopped = last.stopped_by
            batch.tried = stopped is not None
            self._drop(self._backlog.put_back(batch, behind), OUTAGE)
            if stopped is not None or nothing:
                self._stopped_by = stopped or Response(Outcome.RETRY, "there was no time")
                self._outage.failed(began, self._stopped_by.text, self._backlog.spans)

    def _failed_again(self, batch: QueuedBatch, last: Delivery, began: float) -> float:
        """Drops the first message if that is due; returns behind how many batches to queue the rest."""
        response = last.stopped_by
        if response is None or response.wait is not None:  # a receiver that asks for time gets it
            return 0
        behind = self._rejected_messages.failed(batch, began)
        if not self._rejected_messages.is_over(batch, self._clock()):
            return behind
        count = last.stopped_at or len(batch.spans)
        self._rejected_messages.accepted(batch)
        self._settle(batch, Delivery(failed=count))
        text = "%s: %d spans were lost: they were not taken in any attempt, and others were meanwhile: %s"
        self._log.warning(text, self._name, count, response.text)
        return 0

    def _some_exported(self, batch: QueuedBatch) -> Iterator[Delivery]:
        seconds = self._settings.export_timeout_millis / 1000
        if (end := self._time_over) is not None:
            seconds = min(seconds, end.remaining())
        try:
            yield from self.exporter.export_some(batch.spans, seconds * 1000, again=batch.tried)  # type: ignore[attr-defined]
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as above)
            count = len(batch.spans)
            self._log.warning(
                "%s: %d spans were lost: it raised %s: %s", self._name, count, type(error).__name__, error
            )
            yield Delivery(failed=count)

    def _pause(self, limit: Deadline | None) -> None:
        """After a RETRY, waits for the next attempt; returns early when a flush or the shutdown begins, or the queue was given up.

        No reference to a batch is held meanwhile, so that a dropped one is freed. ``limit``: deadline of the caller whose thread this is.
        """
        with self._changed:
            stopped, self._stopped_by = self._stopped_by, None
            if stopped is not None:
                self._pause_after(stopped.wait, limit)

    def _pause_after(self, asked: float | None, limit: Deadline | None) -> None:
        hurried = self._is_hurried
        due = self._clock() + self._outage.pause(asked, hurried=hurried)
        while not self._abandoned and (left := due - self._clock()) > 0:
            if self._is_hurried and not hurried and asked is None:
                return
            if (end := self._time_over) is not None and left >= end.remaining():
                self._give_up()
                return
            if limit is not None and limit.passed:
                return
            self._pause_for(self._changed, left if limit is None else min(left, limit.remaining()))

    @property
    def _time_over(self) -> Deadline | None:
        """Deadline of the shutdown; None before it."""
        return self._end if self._has_answered else self._end_unanswered

    @property
    def _is_hurried(self) -> bool:
        return self._closing or self._backlog.has_urgent

    def _settle(self, batch: QueuedBatch, delivery: Delivery) -> None:
        if self._abandoned:  # already dropped with the queue; each span counts once
            return
        if delivery.settled > len(batch.spans):  # a foreign exporter miscounts
            delivery = Delivery(exported=len(batch.spans))
        unanswered = min(delivery.failed, batch.unanswered)  # sent before without a response
        stopped = delivery.stopped_by
        if delivery.exported or delivery.rejected or (stopped is not None and stopped.wait is not None):
            self._has_answered = True
        self._exported += delivery.exported
        self._failed += delivery.failed - unanswered + delivery.rejected
        self._rejected += delivery.rejected
        self._drop(Undelivered(0, unanswered), SHUTDOWN)
        self._backlog.settle(batch, delivery.settled)
        batch.sending = delivery.sending
        if stopped is not None and stopped.may_have_arrived:
            batch.unanswered = max(batch.unanswered, delivery.stopped_at)

    def _drop(self, undelivered: Undelivered, why: str) -> None:
        self._dropped += Counter({why: undelivered.dropped, NO_RESPONSE: undelivered.unanswered})
        self._dropped_passed += Counter({why: undelivered.passed, NO_RESPONSE: undelivered.unanswered})
        if why == OUTAGE:
            self._outage.dropped(undelivered.spans)

    def _flush_exporter(self, deadline: Deadline) -> bool:
        try:
            # Some exporters return None, as the SDK's own base class once did.
            return self.exporter.force_flush(int(deadline.remaining() * 1000)) is not False
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as above)
            self._log.warning("%s: its force_flush raised %s: %s", self._name, type(error).__name__, error)
            return False

    def _shut_exporter_down(self) -> None:
        with self._changed:
            if self._shutdown_begun:
                return
            self._shutdown_begun = True
        try:
            self.exporter.shutdown()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as above)
            self._log.warning("%s: its shutdown raised %s: %s", self._name, type(error).__name__, error)
        self.say()
        with self._changed:
            self._exporter_is_down = True
            self._changed.notify_all()

    def _give_up(self) -> None:
        """Drops all queued spans, and those that the exporter is sending, whatever its result. Repeated calls have no effect."""
        if self._abandoned:
            return
        self._abandoned = True
        undelivered, flushes = self._backlog.clear()
        self._drop(undelivered, SHUTDOWN)
        for flush in flushes:
            flush.done = True
        self._changed.notify_all()
        if undelivered.spans:
            sent = undelivered.unanswered
            unanswered = f" ({sent} of them were sent and had no response: they may have arrived)" if sent else ""
            why = f": {self._outage.reason}" if self._outage.seconds else ""
            text = "%s: %d waiting spans were dropped: the shutdown's time was over%s%s"
            self._log.warning(text, self._name, undelivered.spans, why, unanswered)

    def _abandon(self) -> None:
        """Gives up the queued spans, and wakes the exporter, so that one of this package stops waiting for a retry."""
        with self._changed:
            self._give_up()
        self.say()
        # On a thread of its own, since it may hang as well.
        try:
            threads.Thread(target=self._shut_exporter_down, name=THREAD_NAME, daemon=True).start()
        except RuntimeError:
            self._log.warning("%s: it was not shut down: it hangs, and the interpreter goes down", self._name)
            self.say()
