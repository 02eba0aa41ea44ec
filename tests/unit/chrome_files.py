"""What the tests of trace files have in common: spans made by hand, and what a file says."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from trace_validator import slices_by_track, validate

from otel_torchprof._encode.chrome_spans import CLOSING, ChromeSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE_ID = 0xA5A5A5A5_A5A5A5A5_A5A5A5A5_A5A5A5A5
RESOURCE = Resource({"service.name": "shop"})
SCOPE = InstrumentationScope("app", "1.0")
PID = 42
UNIX_NS = 1_790_857_026_123_456_789


def context(span_id: int, trace_id: int = TRACE_ID, *, is_remote: bool = False, **more: Any) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=TraceFlags(1), **more)


def span(
    name: str, start: int, end: int, *, number: int = 1, parent: int | SpanContext = 0, **more: Any
) -> ReadableSpan:
    """A span with these times; ``number`` and ``parent`` are span ids."""
    neutral = {
        "context": context(number),
        "parent": (context(parent) if parent else None) if isinstance(parent, int) else parent,
        "resource": RESOURCE,
        "instrumentation_scope": SCOPE,
    }
    return ReadableSpan(name, start_time=start, end_time=end, **(neutral | more))


def trace_of(*exports: Sequence[ReadableSpan], encoder: ChromeSpans | None = None) -> dict[str, Any]:
    """A document with these exports, checked against what must hold for every trace."""
    encoder = encoder or ChromeSpans(PID)
    pieces = [piece for i, spans in enumerate(exports) for piece in encoder.encode(spans, begin=i == 0)]
    return validate(b"".join(pieces) + CLOSING)


def events_of(*exports: Sequence[ReadableSpan], encoder: ChromeSpans | None = None) -> list[dict[str, Any]]:
    """The events of such a document."""
    return trace_of(*exports, encoder=encoder)["traceEvents"]


def events_in(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file that is complete, checked likewise."""
    data = Path(path).read_bytes()
    return validate(gzip.decompress(data) if str(path).endswith(".gz") else data)["traceEvents"]


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def names_by_track(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the slices of each track, as they begin, by the name of the track."""
    reported = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return {reported[tid]: [e["name"] for e in track] for (_, tid), track in slices_by_track(events).items()}


def metadata(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["args"] for event in events if event["ph"] == "M" and event["name"] == kind]
