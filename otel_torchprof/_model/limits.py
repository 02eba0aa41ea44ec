"""Applies OpenTelemetry's span limits to a table of spans: number of attributes and links, length of texts.

Dropped attributes and links are counted on the span, as OTLP requires. The first ones are kept, as the specification says ("if adding an
attribute would exceed the limit, it is discarded"). The Python SDK drops the oldest instead; columns do not know which were set later.
The counts are the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values

from .span_table import AttributeColumn, AttributeType, SpanTable, extend_names
from .span_tables import narrowed

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Names

Array = npt.NDArray[Any]

# ---- The size limit of a trace ----


class Budget(NamedTuple):
    """Size limit of a trace."""

    max_spans: int = 5_000
    """At least 2: a root and one span."""
    max_bytes: int = 4_000_000
    """Bytes of the spans as OTLP. A single larger span is sent too, alone in a trace."""
    short: float | None = None
    """Seconds; longer spans are neither aggregated nor collapsed. None: the trace group's duration / ``max_spans``, too short to be visible
    in a display of the trace."""

    def allows(self, spans: int, size: int) -> bool:
        """Whether ``spans`` spans of ``size`` bytes are within the limit."""
        return spans <= self.max_spans and size <= self.max_bytes

    def less(self, spans: int, size: int) -> Budget:
        """Returns the limit minus ``spans`` and ``size`` bytes, but at least one of each."""
        return self._replace(max_spans=max(self.max_spans - spans, 1), max_bytes=max(self.max_bytes - size, 1))


# ---- Size of spans as OTLP, without encoding them ----


LINK_SIZE = 35
"""Bytes of a link."""
_ALWAYS = 18 + 10 + 2 + 9 + 9 + 2 + 6
"""Trace id, span id, kind, two times, status, flags."""
_PARENT, _ERROR = 10, 2
_NO_ASCII = 0x80
_WIDEST = 10
"""Bytes of the longest varint."""


def span_sizes(table: SpanTable) -> npt.NDArray[np.int64]:
    """Returns the bytes of each span in an OTLP message: those that the encoder writes, or a little more if a name is not valid UTF-8.

    Costs a numpy pass or two per attribute, and some 0.1 µs per name that is not ASCII.
    """
    table = narrowed(table)
    texts = _field(_text_sizes(table.names.flat()))
    size = np.full(len(table), _ALWAYS, dtype=np.int64)
    size += texts[table.name]
    size += (table.parent_span_id != 0) * _PARENT
    size += (table.error != 0) * _ERROR
    if table.trace_states:
        states = np.array([len(state.encode("utf-8", "replace")) for state in table.trace_states], dtype=np.int64)
        size += _field(states)[table.trace]
    for column in table.attributes:
        size[slice(None) if column.rows is None else column.rows] += _attribute_sizes(column, texts)
    for counts in (table.dropped_attributes, table.dropped_links):
        if counts is not None:
            size += np.where(counts != 0, 1 + _varint(counts), 0)
    if len(table.links):
        size += LINK_SIZE * np.bincount(table.links["row"].astype(np.int64), minlength=len(table))
    whole: npt.NDArray[np.int64] = _field(size)
    return whole


def most_bytes(table: SpanTable, spans: int) -> int:
    """Returns an upper bound of the bytes of ``spans`` spans of the table.

    As if all texts of an attribute were as long as the longest name up to the last that it has: averages of steps, which are far longer
    than all others, have the last names. Costs some 0.1 µs per name, and 0.1 ns per text.
    """
    table = narrowed(table)
    longest = np.maximum.accumulate(np.append(_text_sizes(table.names.flat()), 0))
    text = _field(longest.item(table.name.max(initial=0)))
    states = max((len(state.encode("utf-8", "replace")) for state in table.trace_states), default=0)
    span_size = _ALWAYS + _PARENT + _ERROR + text + int(_field(states))
    span_size += sum(6 for counts in (table.dropped_attributes, table.dropped_links) if counts is not None)
    total = spans * int(_field(span_size)) + len(table.links) * LINK_SIZE
    for column in table.attributes:
        value = 2 if column.type == AttributeType.BOOL else 11
        if column.type == AttributeType.NAME:
            value = _field(longest.item(column.values.max(initial=0)))
        total += min(spans, len(column.values)) * _attribute_size(column.key, value)
    return total + 5 * spans  # the lengths of spans with attributes and links


@lru_cache(maxsize=1024)
def _attribute_size(key: str, value: int) -> int:
    """Returns the bytes of an attribute whose value, as a field, has ``value`` bytes."""
    return int(_field(_field(len(key.encode())) + _field(value)))


def _attribute_sizes(column: AttributeColumn, texts: Array) -> Any:
    """Returns the bytes of the attribute on each span that has it; ``texts``: sizes of all names as fields.

    Computed once per text and per width of a number, not per span.
    """
    key_size = len(column.key.encode())
    key = _field(key_size) if key_size else 0
    if column.type == AttributeType.NAME:
        return _field(key + _field(texts))[column.values]
    if column.type == AttributeType.INT64:
        return _field(key + _field(1 + np.arange(_WIDEST + 1)))[_varint(column.values)]
    return _field(key + _field(9 if column.type == AttributeType.DOUBLE else 2))


def _field(size: Any) -> Any:
    """Returns the size of a field with its tag and length. Counts empty fields too, which are not written."""
    return size + 1 + _varint(size)


def _varint(values: Any) -> Any:
    """Returns the bytes of numbers as varints: 7 bits per byte, ten bytes for a negative number."""
    if not isinstance(values, np.ndarray):
        return _WIDEST if values < 0 else max((int(values).bit_length() + 6) // 7, 1)
    size = np.ones(len(values), dtype=np.int64)
    # Most numbers are small: comparing with the few limits up to the largest takes a fifth of a binary search for each.
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    for bits in range(7, most.bit_length(), 7):
        size += values >= values.dtype.type(1 << bits)
    if least < 0:
        size[values < 0] = _WIDEST
    return size


def _text_sizes(names: Names) -> npt.NDArray[np.int64]:
    """Returns the bytes of each name after each byte that is not UTF-8 is replaced by three."""
    ends = names.ends.astype(np.int64)
    sizes = ends.copy()
    sizes[1:] -= ends[:-1]
    foreign = np.flatnonzero(names.data[: ends[-1] if len(ends) else 0] >= _NO_ASCII)
    for index in distinct_values(np.searchsorted(ends, foreign, side="right")).tolist() if foreign.size else ():
        raw = names.raw(index)
        try:
            raw.decode()
        except UnicodeDecodeError:
            sizes[index] += 2 * sum(byte >= _NO_ASCII for byte in raw)
    return sizes


def limited(
    table: SpanTable, *, max_attributes: int | None, max_links: int | None, max_attribute_length: int | None
) -> SpanTable:
    """Returns the spans within the limits of the SDK's SpanLimits, each None or not negative.

    A span keeps its first ``max_attributes`` attributes in the order of the table and its first ``max_links`` links; the
    others are counted in ``dropped_attributes`` and ``dropped_links``. Texts of attributes keep their first
    ``max_attribute_length`` characters. Names of spans have no limit.

    If nothing exceeds a limit, returns the table itself after a check of its columns and the lengths of its names;
    else copies only the columns that change. Thread-safe.
    """
    if max_attributes is not None and len(table.attributes) > max_attributes:
        table = _fewer_attributes(table, max_attributes)
    if max_links is not None and len(table.links) > max_links:
        table = _fewer_links(table, max_links)
    if max_attribute_length is not None:
        table = _shorter_texts(table, max_attribute_length)
    return table


def _fewer_attributes(table: SpanTable, most: int) -> SpanTable:
    count = np.zeros(len(table), dtype=np.uint32)
    attributes = []
    for column in table.attributes:
        rows = np.arange(len(table), dtype=np.uint32) if column.rows is None else column.rows
        fits = count[rows] < most
        count[rows] += 1
        if fits.all():
            attributes.append(column)
        elif fits.any():
            attributes.append(replace(column, values=column.values[fits], rows=rows[fits]))
    dropped = np.maximum(count, most) - np.uint32(most)
    if not dropped.any():
        return table
    return replace(table, attributes=tuple(attributes), dropped_attributes=_sum(table.dropped_attributes, dropped))


def _fewer_links(table: SpanTable, most: int) -> SpanTable:
    rows = np.ascontiguousarray(
        table.links["row"]
    )  # ascending: a span with more than ``most`` links has the same row ``most`` places apart
    if (rows[most:] != rows[: len(rows) - most]).all():
        return table
    before_it = np.arange(len(rows)) - np.searchsorted(rows, rows)
    fits = before_it < most
    dropped = np.bincount(rows[~fits].astype(np.int64), minlength=len(table))
    return replace(table, links=table.links[fits], dropped_links=_sum(table.dropped_links, dropped))


def _sum(before: npt.NDArray[np.uint32] | None, now: Array) -> npt.NDArray[np.uint32]:
    total = now if before is None else before + now
    return total.astype(np.uint32, copy=False)


def _shorter_texts(table: SpanTable, longest: int) -> SpanTable:
    whole, table = table, narrowed(table)
    suspect = _bytes_of(table.names) > longest  # no text has more characters than bytes
    if not suspect.any():
        return whole
    replaced: dict[int, int] = {}
    texts: list[str] = []
    for column in table.attributes:
        if column.type == AttributeType.NAME:
            for index in distinct_values(column.values[suspect[column.values]]).tolist():
                text = table.names.raw(index).decode("utf-8", "replace")
                if len(text) > longest and index not in replaced:
                    replaced[index] = len(table.names) + len(texts)
                    texts.append(text[:longest])
    if not texts:
        return whole
    places = np.arange(len(table.names), dtype=np.uint32)
    places[list(replaced)] = list(replaced.values())
    columns = tuple(_moved(column, places) for column in table.attributes)
    return replace(table, attributes=columns, names=extend_names(table.names, texts))


def _bytes_of(names: Names) -> npt.NDArray[np.uint64]:
    return np.diff(names.flat().ends, prepend=np.uint64(0))


def _moved(column: AttributeColumn, places: npt.NDArray[np.uint32]) -> AttributeColumn:
    return replace(column, values=places[column.values]) if column.type == AttributeType.NAME else column
