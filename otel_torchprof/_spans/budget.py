"""How large a trace may be."""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """The most that a trace may be."""

    max_spans: int = 5_000
    """At least 2: a root and a span."""
    max_bytes: int = 4_000_000
    """Of its spans as OTLP. A span that is larger still goes, in a trace without others."""
    short: float | None = None
    """Seconds; what took longer is neither aggregated nor collapsed. None: the trace group's duration / ``max_spans``, which a picture of
    it cannot show."""

    def allows(self, spans: int, size: int) -> bool:
        """Whether so many spans of so many bytes are within it."""
        return spans <= self.max_spans and size <= self.max_bytes

    def less(self, spans: int, size: int) -> Budget:
        """What is left of it beside so many spans and bytes; room for one span at least."""
        return self._replace(max_spans=max(self.max_spans - spans, 1), max_bytes=max(self.max_bytes - size, 1))
