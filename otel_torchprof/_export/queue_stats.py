"""What became of the spans that were put into a queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

QUEUE_FULL = "queue_full"
OUTAGE = "outage"
SHUTDOWN = "shutdown"
NO_ANSWER = "no_answer"

IN_WORDS = {
    QUEUE_FULL: "it is slower than the spans come",
    OUTAGE: "nothing can be delivered, and no more may wait",
    SHUTDOWN: "it is shut down",
}
"""Why spans were dropped, for the log."""


@dataclass(frozen=True)
class QueueStats:
    """What became of the spans that were put into a queue: each is exported, failed, dropped or waiting, at any moment."""

    exported_spans: int = 0
    """The exporter answered SUCCESS; with our own: the receiver took them."""
    failed_spans: int = 0
    """The exporter answered FAILURE, or raised; with our own: the receiver refused or rejected them for good."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Spans that were given up, by reason: ``queue_full`` (the exporter was slower than they came), ``outage`` (full while the
    receiver took nothing), ``shutdown`` (came after it, or its time was over), and ``no_answer``: those of them that were sent
    before, or were being sent, and had no answer: they may have arrived, and a later answer changes no count."""
    waiting_spans: int = 0
    """Those that the exporter has in its hands are among them."""
    waiting_bytes: int = 0
    """What these hold in memory."""
    outage_seconds: float = 0.0
    """For how long the receiver has taken nothing, and it has been tried again; 0 while it does."""
    last_error: str = ""
    """Why the last attempt failed that was tried again."""

    @property
    def dropped_spans(self) -> int:
        """Spans that were given up, whatever the reason."""
        return sum(self.dropped.values())
