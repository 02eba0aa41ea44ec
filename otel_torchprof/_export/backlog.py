"""The spans that are queued for an exporter."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from otel_torchprof._process.deadline import Deadline

    from .settings import QueueSettings


@dataclass(eq=False)
class QueuedBatch:
    """Queued spans."""

    spans: Sequence[ReadableSpan]
    size_bytes: int
    """Memory; that of a SpanList is its whole table, as long as one of its spans is queued."""
    tried: bool = False
    """Whether the first spans were sent and not accepted."""
    sending: int = 0
    """Number of the first spans that are being sent."""
    unanswered: int = 0
    """Number of the first spans that were sent without a response."""
    passed: int = 0
    """Number of the first spans that were passed to the exporter at least once."""
    number: int = 0
    """Number of batches before this one."""
    attempts: int = 0
    """Consecutive failed attempts of its first message; for :class:`~otel_torchprof._export.queue.RejectedMessages`, as the next."""
    since: float = 0.0
    """Time of the first of these attempts."""
    alone: int = 0
    """Number of these attempts before which other messages were accepted."""
    others_accepted: int = 0


@dataclass(eq=False)
class Flush:
    """A request to flush, queued like spans: everything that was put before it is exported before it is done."""

    deadline: Deadline
    done: bool = False
    result: bool = False


@dataclass(frozen=True)
class Undelivered:
    """Spans that were removed from the queue without being delivered."""

    dropped: int = 0
    """Spans that never arrived."""
    unanswered: int = 0
    """Spans that were sent, and may have arrived."""
    passed: int = 0
    """Spans of ``dropped`` that were passed to the exporter."""

    def __add__(self, other: Undelivered) -> Undelivered:
        return Undelivered(self.dropped + other.dropped, self.unanswered + other.unanswered, self.passed + other.passed)

    @property
    def spans(self) -> int:
        """Number of all undelivered spans."""
        return self.dropped + self.unanswered


class Backlog:
    """Batches and requests to flush, in the order in which they came. Not thread-safe: its queue locks.

    A batch that was taken still counts as queued until it is settled, put back or cleared, since it is still in memory.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.spans = 0
        self.size_bytes = 0
        self.passed = 0
        """Spans that were passed to the exporter so far, each once."""
        self._settings = settings
        self._items: deque[QueuedBatch | Flush] = deque()
        self._flushes: list[Flush] = []
        self._in_hand: QueuedBatch | None = None
        self._appended = 0

    def __len__(self) -> int:
        """Number of queued batches and requests, without the one that was taken."""
        return len(self._items)

    @property
    def has_urgent(self) -> bool:
        """Whether a flush is requested."""
        self._flushes = [flush for flush in self._flushes if not flush.deadline.passed]
        return bool(self._flushes)

    def append(self, item: QueuedBatch | Flush) -> None:
        """Queues an item behind all others."""
        self._items.append(item)
        if isinstance(item, Flush):
            self._flushes.append(item)
        else:
            item.number = self._appended
            self._appended += 1
            self.spans += len(item.spans)
            self.size_bytes += item.size_bytes

    def take(self) -> QueuedBatch | Flush | None:
        """Takes the oldest item; None if there is none."""
        item = self._items.popleft() if self._items else None
        self._in_hand = item if isinstance(item, QueuedBatch) else None
        return item

    def hand_on(self, batch: QueuedBatch, spans: int) -> None:
        """Counts the first spans of the taken batch as passed to the exporter, unless they were before."""
        first = max(spans - batch.passed, 0)
        batch.passed += first
        self.passed += first

    def settle(self, batch: QueuedBatch, spans: int) -> None:
        """Removes the first spans of the taken batch, and the batch itself with its last span."""
        self.spans -= spans
        if spans:
            batch.spans = batch.spans[spans:]
            batch.sending, batch.unanswered = 0, max(batch.unanswered - spans, 0)
            batch.passed = max(batch.passed - spans, 0)
        if not batch.spans:
            self.size_bytes -= batch.size_bytes
            self._in_hand = None

    def put_back(self, batch: QueuedBatch, behind: float = 0) -> Undelivered:
        """Queues the rest of the taken batch again; returns the spans dropped to make room for it.

        It precedes all later items, except the next ``behind`` batches; it never moves behind a requested flush.
        """
        self._in_hand = None
        if self._items and not self._fits(0, 0):
            return self._dropped(batch)
        self._items.insert(self._place(batch, behind), batch)
        return Undelivered()

    def _place(self, batch: QueuedBatch, behind: float) -> int:
        for place, item in enumerate(self._items):
            if isinstance(item, Flush):
                if not item.deadline.passed:
                    return place
            elif behind > 0:
                behind -= 1
            elif item.alone or item.number > batch.number:
                return place
        return len(self._items)

    def make_room(self, spans: int, size_bytes: int) -> Undelivered:
        """Drops the oldest spans until the given size fits or nothing is queued. Requests to flush stay."""
        undelivered, flushes = Undelivered(), []
        while self._items and not self._fits(spans, size_bytes):
            oldest = self._items.popleft()
            if isinstance(oldest, Flush):
                flushes.append(oldest)
            else:
                undelivered += self._dropped(oldest)
        self._items.extendleft(reversed(flushes))
        return undelivered

    def clear(self) -> tuple[Undelivered, list[Flush]]:
        """Drops everything, including the taken batch; returns the dropped spans, and the requests to flush."""
        in_hand = [] if self._in_hand is None else [self._in_hand]
        undelivered = sum(
            (self._dropped(item) for item in (*in_hand, *self._items) if isinstance(item, QueuedBatch)), Undelivered()
        )
        flushes, self._flushes, self._in_hand = self._flushes, [], None
        self._items.clear()
        return undelivered, flushes

    def answered(self, flush: Flush) -> None:
        """Removes a request to flush that is done."""
        self._flushes = [other for other in self._flushes if other is not flush]

    def _fits(self, spans: int, size_bytes: int) -> bool:
        return (
            self.size_bytes + size_bytes <= self._settings.max_queue_bytes
            and self.spans + spans <= self._settings.max_queue_size
        )

    def _dropped(self, batch: QueuedBatch) -> Undelivered:
        count = len(batch.spans)
        self.spans -= count
        self.size_bytes -= batch.size_bytes
        unanswered = min(max(batch.sending, batch.unanswered), count)
        return Undelivered(count - unanswered, unanswered, min(max(batch.passed - unanswered, 0), count - unanswered))
