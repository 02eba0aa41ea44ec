"""What an exporter answers that can say how far it came."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .response import Response


class Delivery(NamedTuple):
    """What became of the first spans of a batch, after those of the deliveries before."""

    exported: int = 0
    """The receiver took them."""
    failed: int = 0
    """They will never arrive."""
    rejected: int = 0
    """The receiver took their message, and said that it dropped them."""
    sending: int = 0
    """These are being sent: what becomes of them comes next."""
    stopped_by: Response | None = None
    """Why these, and with them the rest, were not taken: a RETRY."""
    stopped_at: int = 0
    """Spans of the message that was not taken."""

    @property
    def settled(self) -> int:
        """Spans that need not be sent again."""
        return self.exported + self.failed + self.rejected


class ExportsSome(Protocol):
    """An exporter that can stop in the middle of a batch."""

    def export_some(self, spans: Sequence[ReadableSpan], timeout_millis: float, *, again: bool) -> Iterator[Delivery]:
        """Sends each message once, in order, until one may be taken at another time; reports each before and after.

        ``again``: the first message was sent before, and was not taken. What it tells nothing of is as it was.
        """


def takes_timeout(exporter: Any) -> bool:
    """Whether its ``export`` wants to be told for how long it may last."""
    try:
        return "timeout_millis" in inspect.signature(exporter.export).parameters
    except (TypeError, ValueError):  # a function in C that does not tell
        return False


def can_stop_midway(exporter: Any) -> bool:
    """Whether the exporter is an ``ExportsSome``, and nobody's own ``export`` would be passed by if that were used."""
    if "export" in getattr(exporter, "__dict__", ()) or not getattr(exporter, "takes_span_lists", False):
        return False
    makers = [vars(kind) for kind in type(exporter).__mro__ if "export" in vars(kind)]
    return bool(makers) and "export_some" in makers[0]
