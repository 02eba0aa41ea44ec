"""Spans as HTML, for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import format_span_id

from otel_torchprof import markup
from otel_torchprof.markup import Cell, Heading

from .table import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

_DISPLAYED = 50
_TRACE_DIGITS = 8
_NS_PER_US = 1000
_HEADINGS = (
    Heading("Name", is_text=True),
    Heading("Start"),
    Heading("Duration"),
    Heading("Trace", is_text=True),
    Heading("Span", is_text=True),
    Heading("Parent", is_text=True),
    Heading("Attributes", is_text=True),
)


def html_of(spans: Sequence[ReadableSpan]) -> str:
    """The first spans as a table: start since the first of them, the first digits of the trace id; makes no more of them."""
    first = [spans[index] for index in range(min(len(spans), _DISPLAYED))]
    traces = len({span.context.trace_id for span in first})
    found = markup.table(_HEADINGS, _rows(first), hidden=len(spans) - len(first))
    of_these = "" if len(first) == len(spans) else f" of the first {len(first)}"
    return markup.block(markup.line(f"{len(spans):,} spans; traces{of_these}: {traces}"), found)


def _rows(spans: Sequence[ReadableSpan]) -> Iterator[list[Cell]]:
    begin = min((span.start_time or 0 for span in spans), default=0)
    for span in spans:
        start = ((span.start_time or 0) - begin) / _NS_PER_US
        duration = ((span.end_time or 0) - (span.start_time or 0)) / _NS_PER_US
        yield [
            Cell(span.name),
            Cell(format_time(start), start),
            Cell(format_time(duration), duration),
            Cell(f"{span.context.trace_id:032x}"[:_TRACE_DIGITS]),
            Cell(format_span_id(span.context.span_id)),
            Cell("" if span.parent is None else format_span_id(span.parent.span_id)),
            Cell(", ".join(f"{key}={value!r}" for key, value in (span.attributes or {}).items())),
        ]
