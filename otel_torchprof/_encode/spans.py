"""Spans as OpenTelemetry's ReadableSpan objects, for any span processor or exporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from otel_torchprof._model.units import AttributeType

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._model.units import AttributeColumn, SpanTable

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SpanList(Sequence[ReadableSpan]):
    """The spans of a table as a sequence of ReadableSpan, each made when it is asked for (about 20 µs) and not kept.

    They are what the OTLP encoder encodes: same ids, times, parents, links, attributes and status. A slice is a SpanList
    over the same table. Immutable and thread-safe.
    """

    __slots__ = ("_link_rows", "_resource", "_rows", "_scope", "_table")

    def __init__(
        self, table: SpanTable, *, resource: Resource, scope: InstrumentationScope, rows: range | None = None
    ) -> None:
        self._table = table
        self._resource = resource
        self._scope = scope
        self._rows = range(len(table)) if rows is None else rows
        # Contiguous and searched for its own type: else numpy would convert all links at every access.
        self._link_rows = np.ascontiguousarray(table.links["row"])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> SpanList: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | SpanList:
        if isinstance(index, slice):
            return SpanList(self._table, resource=self._resource, scope=self._scope, rows=self._rows[index])
        try:
            row = self._rows[index]
        except IndexError:
            raise IndexError(f"span index {index} out of range: there are {len(self)} spans") from None
        return self._span(row)

    def _span(self, row: int) -> ReadableSpan:
        table = self._table
        trace_id = int.from_bytes(table.trace_ids[table.trace[row]].tobytes(), "big")
        parent_id = int(table.parent_span_id[row])
        first, last = np.searchsorted(self._link_rows, np.array((row, row + 1), dtype=np.uint64)).tolist()
        return ReadableSpan(
            table.names[table.name[row]],
            self._context(trace_id, int(table.span_id[row])),
            parent=self._parent(trace_id, parent_id) if parent_id else None,
            resource=self._resource,
            attributes={c.key: self._value(c, row) for c in table.attributes if c.present is None or c.present[row]},
            links=[
                Link(self._context(int.from_bytes(link["trace_id"].tobytes(), "big"), int(link["span_id"])))
                for link in table.links[first:last]
            ],
            status=Status(StatusCode.ERROR if table.error[row] else StatusCode.UNSET),
            start_time=int(table.start[row]),
            end_time=int(table.end[row]),
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: int, span_id: int) -> SpanContext:
        ambient = self._table.parent
        return SpanContext(
            trace_id,
            span_id,
            is_remote=False,
            trace_flags=_SAMPLED,
            trace_state=ambient.trace_state if ambient else None,
        )

    def _parent(self, trace_id: int, span_id: int) -> SpanContext:
        ambient = self._table.parent
        return ambient if ambient and ambient.span_id == span_id else self._context(trace_id, span_id)

    def _value(self, column: AttributeColumn, row: int) -> Any:
        value = column.values[row].item()
        if column.type == AttributeType.NAME:
            return self._table.names[value]
        return bool(value) if column.type == AttributeType.BOOL else value
