"""Spans as OpenTelemetry's ReadableSpan objects, for any span processor or exporter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, TraceState, format_span_id

from otel_torchprof import markup
from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._model.limits import limited
from otel_torchprof._model.live_table import live_table
from otel_torchprof._model.span_table import AttributeType, extend_names
from otel_torchprof._model.span_tables import packed, picked
from otel_torchprof._native.encoders import SpanAttribute, SpanColumns
from otel_torchprof._native.loops import positions_of, roots_of
from otel_torchprof.markup import Cell, Heading

from .attributes import add_attributes
from .sampled import with_samples
from .table import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.util.types import AttributeValue

    from otel_torchprof._columns.batch import Names
    from otel_torchprof._model.live_table import Flows
    from otel_torchprof._model.placed import Placed
    from otel_torchprof._model.span_table import Array, AttributeColumn, SpanTable
    from otel_torchprof._model.step_spans import StepSpan

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
    """The first spans as an HTML table, with starts relative to the first; creates no further span objects."""
    first = [spans[index] for index in range(min(len(spans), _DISPLAYED))]
    traces = len({span.context.trace_id for span in first})
    spans_table = markup.table(_HEADINGS, _rows(first), hidden=len(spans) - len(first))
    of_these = "" if len(first) == len(spans) else f" of the first {len(first)}"
    return markup.block(markup.line(f"{len(spans):,} spans; traces{of_these}: {traces}"), spans_table)


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
        # Contiguous, and searched with its own type: else numpy converts all links at every access.
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
        """Copies the spans to a table of their own, see :func:`~otel_torchprof._model.span_tables.packed`."""
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
            part._rows = self._rows[index]  # noqa: SLF001 - same class
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
        attributes = {c.key: self._value(c, at) for c in columns if (at := _index(c, row)) >= 0}
        dropped = _at(self._table.dropped_attributes, row)
        if not dropped:
            return attributes
        bounded = BoundedAttributes(attributes=attributes)
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

    def _value(self, column: AttributeColumn, index: int) -> Any:
        value = column.values[index].item()
        if column.type == AttributeType.NAME:
            return self._table.names[value]
        return bool(value) if column.type == AttributeType.BOOL else value


def _trace_id(raw: npt.NDArray[np.uint8]) -> int:
    return int.from_bytes(raw.tobytes(), "big")


def _index(column: AttributeColumn, row: int) -> int:
    """Index of a row's value in the column; -1 if the row has none."""
    if column.rows is None:
        return row
    at = int(np.searchsorted(column.rows, row))
    return at if at < len(column.rows) and column.rows[at] == row else -1


def _at(column: npt.NDArray[Any] | None, row: int) -> int:
    """Value of an optional column."""
    return 0 if column is None else int(column[row])


# ---- Checked span tables for the native encoders (``otp_spans``) ----

_COLUMNS = ("name", "start", "end", "trace", "span_id", "parent_span_id", "error")
_OPTIONAL_COLUMNS = ("parent_is_remote", "dropped_attributes", "dropped_links")


class CheckedSpans:
    """The columns of a table for C, valid while this object lives.

    ``rows``: the rows that C reads, rising without gaps. Raises ValueError if the table is inconsistent.
    """

    def __init__(self, table: SpanTable, rows: range) -> None:
        self.rows = rows
        self.all_names, self._states = _with_states(table)
        """The names of the table, with its trace states after them."""
        self.spans = self._spans(table)

    def _spans(self, table: SpanTable) -> SpanColumns:
        """Returns the columns of a table; checks that C reads nothing outside its arrays."""
        count, names, states = len(table), self.all_names, self._states
        _check_names(names)
        self._check_index("name", table.name, len(names))
        self._check_index("trace", table.trace, len(table.trace_ids))
        if table.trace_ids.shape[1:] != (16,):
            raise ValueError(f"trace_ids has shape {table.trace_ids.shape}, but must hold 16 bytes per trace")
        if not _rises(table.links["row"]):
            raise ValueError("links must be sorted by row")
        columns = {c: _checked(c, getattr(table, c), count) for c in _COLUMNS}
        columns |= {
            c: _checked(c, values, count) for c in _OPTIONAL_COLUMNS if (values := getattr(table, c)) is not None
        }
        if states is not None:
            columns["trace_state"] = states
        attributes = [self._attribute(column, count, len(names)) for column in table.attributes]
        columns["trace_ids"] = table.trace_ids
        columns["links"] = table.links
        return SpanColumns(count, columns, attributes, len(table.links), names)

    def _check_index(self, column: str, values: Any, size: int) -> None:
        """Checks only the rows that are encoded: a table may be encoded in many pieces."""
        self._check_names_of(column, values[self.rows.start : self.rows.stop], size)

    @staticmethod
    def _check_names_of(column: str, used: Any, size: int) -> None:
        if len(used) and int(used.max()) >= size:
            raise ValueError(f"column {column} points to entry {used.max()}, but the table it points into has {size}")

    def _attribute(self, column: AttributeColumn, count: int, names: int) -> SpanAttribute:
        rows = column.rows
        values = _checked(column.key, column.values, count if rows is None else len(rows))
        begin, end = self.rows.start, self.rows.stop
        if rows is not None:
            # With bounds of another type numpy would convert all rows.
            begin, end = np.searchsorted(rows, np.array((begin, end), dtype=rows.dtype)).tolist()
            if not (rows[begin + 1 : end] > rows[begin : max(end - 1, 0)]).all():
                raise ValueError(f"the rows of column {column.key} must rise")
        if column.type == AttributeType.NAME:
            self._check_names_of(column.key, values[begin:end], names)
        return SpanAttribute(column.key.encode(), int(column.type), values, rows)


def _with_states(table: SpanTable) -> tuple[Names, npt.NDArray[np.uint32] | None]:
    """The names with the trace states after them, and where each trace's state is; None where there are none."""
    states = table.trace_states
    if states and len(states) != len(table.trace_ids):
        raise ValueError(f"trace_states holds {len(states)} states, but must hold {len(table.trace_ids)} or none")
    distinct = dict.fromkeys(state for state in states if state)
    if not distinct:
        return table.names, None
    first = len(table.names)
    places = {state: first + i for i, state in enumerate(distinct)}
    return (
        extend_names(table.names, list(distinct)),
        np.array([places.get(state, 0) for state in states], dtype=np.uint32),
    )


def _checked(name: str, values: Array, count: int) -> Array:
    """The types are right: the table sees to that."""
    if len(values) != count:
        raise ValueError(f"column {name} holds {len(values)} values, but must hold {count}")
    return values


def _rises(values: Any) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_names(names: Names) -> None:
    if names.added is not None:
        _checked("names.added.ends", names.added.ends, len(names.added))  # added names have no added names themselves
        _check_names(names.added)
    for column, values, dtype in (("data", names.data, np.uint8), ("ends", names.ends, np.uint64)):
        if values.dtype != dtype:
            raise ValueError(f"names.{column} holds {values.dtype}, but must hold {np.dtype(dtype)}")
    if names.is_shared:  # the recorder's names, which may be many, are valid
        return
    if not _rises(names.ends) or (len(names.ends) and int(names.ends[-1]) > len(names.data)):
        raise ValueError(f"names.ends must rise, up to at most the {len(names.data)} bytes of names.data")


# ---- A list of spans split by time, for several files; no tree is split ----

Times = npt.NDArray[np.int64]


class SpanParts:
    """Splits a list of spans by the start of each span's top-level ancestor. Thread-safe."""

    def __init__(self, spans: SpanList) -> None:
        self._spans = spans
        rows = spans.rows
        self._rows = np.arange(rows.start, rows.stop, rows.step)
        table = spans.table
        top = roots_of(_parents(table.span_id[self._rows], table.parent_span_id[self._rows]))
        start = table.start[self._rows]
        self._began = start[top]
        self._top_level = distinct_values(start[top == np.arange(len(top))])

    def cuts(self) -> Times:
        """Returns the times at which the list can be split, rising, Unix ns: ends of steps, else starts of top-level spans."""
        ends = step_ends(self._spans)
        times = ends if len(ends) else self._top_level
        cuts: Times = times[(times > self._began.min()) & (times <= self._began.max())]
        return cuts

    def between(self, begin: float, end: float) -> SpanList:
        """Returns the trees that began from ``begin`` to before ``end``; Unix ns."""
        chosen = self._rows[(self._began >= begin) & (self._began < end)]
        return SpanList(picked(self._spans.table, chosen), resource=self._spans.resource, scope=self._spans.scope)


def step_ends(spans: Sequence[object]) -> Times:
    """Returns the ends of the steps in the list, rising, Unix ns; a step with spans in several contexts counts once."""
    if not isinstance(spans, SpanList):
        return np.empty(0, dtype=np.int64)
    table = spans.table
    rows = np.arange(spans.rows.start, spans.rows.stop, spans.rows.step)
    rows = rows[table.step[rows] >= 0]
    numbers, place = np.unique(table.step[rows], return_inverse=True)
    ends = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(ends, place, table.end[rows])
    return np.sort(ends)


def _parents(ids: npt.NDArray[np.uint64], parent_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Returns the position of each span's parent; -1 if it is not in the list."""
    positions = positions_of(ids, parent_ids)
    return np.where(
        positions == np.arange(len(ids)), -1, positions
    )  # a span that is its own parent counts as top-level


# ---- Spans of one drain ----


def drained_spans(
    placed: Placed,
    ended: Sequence[StepSpan],
    flows: Flows,
    *,
    with_flops: bool = False,
    callers: npt.NDArray[np.uint32] | None = None,
    **options: Any,
) -> SpanTable:
    """The spans of a drain, or of a whole recording, with their attributes; neither reduced nor within any limits.

    Args:
        placed: the events with their places.
        ended: the synthetic spans that have ended.
        flows: which forward operator a backward function links to.
        with_flops: as for :func:`~.attributes.add_attributes`.
        callers: likewise.
        options: of :func:`~otel_torchprof._model.live_table.live_table`.
    """
    table = live_table(placed, ended, flows, **options)
    table = add_attributes(
        table,
        placed.batch,
        dropped_on=_last_root(table) if any(placed.batch.dropped.values()) else None,
        self_time=None if placed.child_time is None else placed.self_times,
        with_flops=with_flops,
        callers=callers,
        device_times=placed.devices,
    )
    # Last, and with them their texts: see ``most_bytes`` of limits.
    return with_samples(table, placed, ended)


def _last_root(table: SpanTable) -> int | None:
    """The last span that is the root of a trace, or of a step."""
    roots = np.flatnonzero((table.parent_span_id == 0) | (table.step >= 0))
    return int(roots[-1]) if len(roots) else None


def within_limits(table: SpanTable, limits: SpanLimits) -> SpanTable:
    """The spans within OpenTelemetry's limits: the last thing that happens to them."""
    return limited(
        table,
        max_attributes=limits.max_span_attributes,
        max_links=limits.max_links,
        max_attribute_length=limits.max_span_attribute_length,
    )
