"""Counts of the outcomes of events and spans of one recording, under one lock."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from otel_torchprof._process import threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .response import Response

QUEUE_FULL = "queue_full"
OUTAGE = "outage"
ALREADY_SHUTDOWN = "already_shutdown"
SHUTDOWN = "shutdown"
NO_RESPONSE = "no_response"

IN_WORDS = {
    QUEUE_FULL: "it is slower than the spans come",
    OUTAGE: "nothing can be delivered, and no more may wait",
    ALREADY_SHUTDOWN: "it is shut down",
}
"""Why spans were dropped, for the log."""


class Entries(NamedTuple):
    """All counts of a ledger at one moment."""

    recorded: int
    """Events taken from the recorder."""
    dropped: dict[str, int]
    """Dropped events by reason."""
    spans: dict[str, int]
    """Outcomes of all other events, and added spans; see ``ProcessorHealth.spans``."""


class Ledger:
    """Counts that are read together. Thread-safe; in a forked child they begin at 0.

    The export queues count under :attr:`lock` too: while it is held, each event is counted in exactly one place.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threads.RLock()  # reentrant: a signal handler may read in the middle
        self._recorded = 0
        self._dropped: Counter[str] = Counter()
        self._spans: Counter[str] = Counter()
        self._pid = os.getpid()  # last: until then the ledger counts as the parent's

    @property
    def lock(self) -> threads.RLock:
        """Lock that is only held briefly; a new one in a forked child."""
        # Not in a fork handler: handlers of the queues use the lock, and may run before or after it.
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    @contextlib.contextmanager
    def let_go(self) -> Iterator[None]:
        """Releases the lock inside the context, if the calling thread holds it, as a signal handler that waits may.

        As ``Condition.wait`` does, since the thread that it waits for needs the lock to count.
        """
        lock: Any = self.lock
        held = lock._release_save() if lock._is_owned() else None  # noqa: SLF001 - as threading.Condition does
        try:
            yield
        finally:
            if held is not None:
                lock._acquire_restore(held)  # noqa: SLF001 - likewise

    def add(self, recorded: int, dropped: Mapping[str, int], spans: Mapping[str, int] | None = None) -> None:
        """Adds the counts of a drain; counts in ``spans`` may be negative, for spans that are no longer buffered."""
        with self.lock:
            self._recorded += recorded
            self._dropped.update(dropped)
            self._spans.update(spans or {})

    def read(self) -> Entries:
        """Returns all counts that are not 0."""
        with self.lock:
            return Entries(self._recorded, dict(+self._dropped), dict(+self._spans))


# ---- Results of exporters that report partial delivery ----


class Delivery(NamedTuple):
    """Outcome of the next spans of a batch, after those of earlier deliveries."""

    exported: int = 0
    """Spans that the receiver accepted."""
    failed: int = 0
    """Spans that will never arrive."""
    rejected: int = 0
    """Spans that the receiver rejected from an accepted message."""
    sending: int = 0
    """Spans that are being sent; the next delivery has their outcome."""
    stopped_by: Response | None = None
    """The response, a RETRY, after which the rest of the batch was not sent."""
    stopped_at: int = 0
    """Spans of the message that was not accepted."""

    @property
    def settled(self) -> int:
        """Spans that need not be sent again."""
        return self.exported + self.failed + self.rejected


class ExportsSome(Protocol):
    """An exporter that can stop in the middle of a batch."""

    def export_some(self, spans: Sequence[ReadableSpan], timeout_millis: float, *, again: bool) -> Iterator[Delivery]:
        """Sends the messages in order until one has to be retried later; yields a delivery before and after each.

        ``again``: whether the first message was sent before and has to be retried. Spans without a delivery were not sent.
        """


def takes_timeout(exporter: Any) -> bool:
    """Whether its ``export`` has a parameter ``timeout_millis``."""
    try:
        return "timeout_millis" in inspect.signature(exporter.export).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return False


def can_stop_midway(exporter: Any) -> bool:
    """Whether the exporter is an ``ExportsSome`` whose ``export`` is not overridden, as calling ``export_some`` would bypass that."""
    if "export" in getattr(exporter, "__dict__", ()) or not getattr(exporter, "takes_span_lists", False):
        return False
    makers = [vars(kind) for kind in type(exporter).__mro__ if "export" in vars(kind)]
    return bool(makers) and "export_some" in makers[0]
