"""Spans as OpenTelemetry's ReadableSpan objects, for any span processor or exporter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, TraceState, format_span_id

from otel_torchprof import markup
from otel_torchprof._spans.span_tables import packed
from otel_torchprof._tree.span_table import AttributeType
from otel_torchprof.markup import Cell, Heading

from .table import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.util.types import AttributeValue

    from otel_torchprof._tree.span_table import AttributeColumn, SpanTable


# ---- Spans as HTML, for notebooks ----

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


_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OBJECT_BYTES = 5_000
"""Memory of a table's arrays and columns as objects, whatever their content (measured: 4.2 to 4.7 KB)."""


class SpanList(Sequence[ReadableSpan]):
    """The spans of a table as a sequence of ReadableSpan objects, each created on access (about 20 µs) and not kept.

    They equal the spans of the OTLP encoder: ids, times, parents, links, attributes, status, trace states and dropped
    counts. Contexts are marked as sampled; those of links have no trace state, which OpenTelemetry's encoder does not
    send. A slice is a SpanList over the same table. Immutable and thread-safe.
    """

    __slots__ = ("_link_rows", "_resource", "_rows", "_scope", "_states", "_table")

    def __init__(
        self, table: SpanTable, *, resource: Resource, scope: InstrumentationScope, rows: range | None = None
    ) -> None:
        self._table = table
        self._resource = resource
        self._scope = scope
        self._rows = range(len(table)) if rows is None else rows
        # Contiguous and searched for its own type: else numpy would convert all links at every access.
        self._link_rows = np.ascontiguousarray(table.links["row"])
        self._states: dict[int, TraceState] = {}

    @property
    def table(self) -> SpanTable:
        """The table behind the spans."""
        return self._table

    @property
    def rows(self) -> range:
        """Rows of the table, in the order of the spans."""
        return self._rows

    @property
    def resource(self) -> Resource:
        """Resource of all spans."""
        return self._resource

    @property
    def scope(self) -> InstrumentationScope:
        """Instrumentation scope of all spans."""
        return self._scope

    @property
    def nbytes(self) -> int:
        """Memory of the whole table, whichever rows these are, and of some objects, in bytes."""
        return self._table.nbytes + self._link_rows.nbytes + _OBJECT_BYTES

    def packed(self) -> SpanList:
        """Copies the spans to a table of their own, see :func:`~otel_torchprof._spans.span_tables.packed`."""
        return SpanList(packed(self._table), resource=self._resource, scope=self._scope, rows=self._rows)

    def _repr_html_(self) -> str | None:
        """HTML of the first spans for a notebook; None if that fails, so that the notebook displays the text."""
        return markup.attempt(lambda: html_of(self))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> SpanList: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | SpanList:
        if isinstance(index, slice):
            part = copy.copy(self)
            part._rows = self._rows[index]  # noqa: SLF001 - one of its own kind
            return part
        try:
            row = self._rows[index]
        except IndexError:
            raise IndexError(f"span index {index} out of range: there are {len(self)} spans") from None
        return self._span(row)

    def _span(self, row: int) -> ReadableSpan:
        table = self._table
        parent_id = int(table.parent_span_id[row])
        return ReadableSpan(
            table.names[table.name[row]],
            self._context(row, int(table.span_id[row])),
            parent=self._context(row, parent_id, is_remote=_at(table.parent_is_remote, row) != 0)
            if parent_id
            else None,
            resource=self._resource,
            attributes=self._attributes(row),
            links=self._links(row),
            status=Status(StatusCode.ERROR if table.error[row] else StatusCode.UNSET),
            start_time=int(table.start[row]),
            end_time=int(table.end[row]),
            instrumentation_scope=self._scope,
        )

    def _context(self, row: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
        """Context of a span in the trace of this row."""
        entry = int(self._table.trace[row])
        return SpanContext(
            _trace_id(self._table.trace_ids[entry]),
            span_id,
            is_remote=is_remote,
            trace_flags=_SAMPLED,
            trace_state=self._state(entry) if self._table.trace_states else None,
        )

    def _state(self, entry: int) -> TraceState:
        state = self._states.get(entry)
        if state is None:
            state = self._states[entry] = TraceState.from_header([self._table.trace_states[entry]])
        return state

    def _attributes(self, row: int) -> Mapping[str, AttributeValue]:
        columns = self._table.attributes
        found = {c.key: self._value(c, row) for c in columns if c.present is None or c.present[row]}
        dropped = _at(self._table.dropped_attributes, row)
        if not dropped:
            return found
        bounded = BoundedAttributes(attributes=found)
        bounded.dropped = dropped
        return bounded

    def _links(self, row: int) -> Sequence[Link]:
        first, last = np.searchsorted(self._link_rows, np.array((row, row + 1), dtype=np.uint64)).tolist()
        links = [
            Link(SpanContext(_trace_id(link["trace_id"]), int(link["span_id"]), is_remote=False, trace_flags=_SAMPLED))
            for link in self._table.links[first:last]
        ]
        dropped = _at(self._table.dropped_links, row)
        if not dropped:
            return links
        bounded = BoundedList.from_seq(len(links), links)
        bounded.dropped = dropped
        return bounded

    def _value(self, column: AttributeColumn, row: int) -> Any:
        value = column.values[row].item()
        if column.type == AttributeType.NAME:
            return self._table.names[value]
        return bool(value) if column.type == AttributeType.BOOL else value


def _trace_id(raw: npt.NDArray[np.uint8]) -> int:
    return int.from_bytes(raw.tobytes(), "big")


def _at(column: npt.NDArray[Any] | None, row: int) -> int:
    """Value of an optional column."""
    return 0 if column is None else int(column[row])
