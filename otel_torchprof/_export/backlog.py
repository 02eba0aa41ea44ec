"""What waits for an exporter, and how much of it."""

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
    """Spans that wait."""

    spans: Sequence[ReadableSpan]
    size_bytes: int
    """What they hold: of a SpanList all of its table, for as long as a single span of it is left."""
    tried: bool = False
    """Whether the first of them were sent, and not taken."""
    sending: int = 0
    """So many of the first are being sent."""
    unanswered: int = 0
    """So many of the first were sent, and no response came."""
    passed: int = 0
    """So many of the first were passed to the exporter, at least once."""
    number: int = 0
    """Of those that came before it."""
    attempts: int = 0
    """In a row that failed, of its first message; this and what follows is for :class:`~otel_torchprof._export.queue.RejectedMessages`."""
    since: float = 0.0
    """When the first of them began."""
    alone: int = 0
    """Those of them before which others were accepted."""
    others_accepted: int = 0


@dataclass(eq=False)
class Flush:
    """A request that waits like spans, so that everything put before it is done before it is."""

    deadline: Deadline
    done: bool = False
    result: bool = False


@dataclass(frozen=True)
class Undelivered:
    """Spans that wait no more without having been delivered."""

    dropped: int = 0
    """They never arrived."""
    unanswered: int = 0
    """They were sent, and may have arrived."""
    passed: int = 0
    """Those of ``dropped`` that were passed to the exporter."""

    def __add__(self, other: Undelivered) -> Undelivered:
        return Undelivered(self.dropped + other.dropped, self.unanswered + other.unanswered, self.passed + other.passed)

    @property
    def spans(self) -> int:
        """All of them."""
        return self.dropped + self.unanswered


class Backlog:
    """Batches and requests to flush, in the order in which they came. Not thread-safe: its queue locks.

    A batch that is in somebody's hands, from :meth:`take` on, counts like those that wait until it is settled, put back or
    cleared: it is held in memory all the same.
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
        """Batches and requests that wait, without the one in hand."""
        return len(self._items)

    @property
    def has_urgent(self) -> bool:
        """Whether somebody waits for a flush."""
        self._flushes = [flush for flush in self._flushes if not flush.deadline.passed]
        return bool(self._flushes)

    def append(self, item: QueuedBatch | Flush) -> None:
        """Lets it wait behind all others."""
        self._items.append(item)
        if isinstance(item, Flush):
            self._flushes.append(item)
        else:
            item.number = self._appended
            self._appended += 1
            self.spans += len(item.spans)
            self.size_bytes += item.size_bytes

    def take(self) -> QueuedBatch | Flush | None:
        """What waits longest, if anything does."""
        item = self._items.popleft() if self._items else None
        self._in_hand = item if isinstance(item, QueuedBatch) else None
        return item

    def hand_on(self, batch: QueuedBatch, spans: int) -> None:
        """Counts the first spans of the batch in hand, which are passed to the exporter now, unless they were before."""
        first = max(spans - batch.passed, 0)
        batch.passed += first
        self.passed += first

    def settle(self, batch: QueuedBatch, spans: int) -> None:
        """So many of the first spans of the batch in hand are done; with its last one it is out of hand."""
        self.spans -= spans
        if spans:
            batch.spans = batch.spans[spans:]
            batch.sending, batch.unanswered = 0, max(batch.unanswered - spans, 0)
            batch.passed = max(batch.passed - spans, 0)
        if not batch.spans:
            self.size_bytes -= batch.size_bytes
            self._in_hand = None

    def put_back(self, batch: QueuedBatch, behind: float = 0) -> Undelivered:
        """Lets the rest of the batch in hand wait again; what was dropped since it does not fit.

        It waits before all that came later; with ``behind`` so many batches go first, but no flush that somebody waits for.
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
        """Drops the oldest until so much fits or nothing waits. Requests to flush stay."""
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
        """Drops everything, also what is in somebody's hands; and the requests that wait."""
        in_hand = [] if self._in_hand is None else [self._in_hand]
        undelivered = sum(
            (self._dropped(item) for item in (*in_hand, *self._items) if isinstance(item, QueuedBatch)), Undelivered()
        )
        flushes, self._flushes, self._in_hand = self._flushes, [], None
        self._items.clear()
        return undelivered, flushes

    def answered(self, flush: Flush) -> None:
        """Nobody waits for this one any more."""
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
