"""OpenTelemetry's span limits on a table of spans: how many attributes and links a span has, how long texts are.

What a limit takes away is counted on the span, as OTLP wants it. Of too many, the first are kept, as the specification
says ("if adding an attribute would exceed the limit, it is discarded"); the Python SDK throws out the oldest instead, in
favour of what is set later, which columns have no notion of. The counts are the same either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values

from .span_table import AttributeColumn, AttributeType, SpanTable, extend_names
from .span_tables import narrowed

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Names

Array = npt.NDArray[Any]

# ---- How large a trace may be ----


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
        """The budget minus ``spans`` and ``size`` bytes, but room for at least one span."""
        return self._replace(max_spans=max(self.max_spans - spans, 1), max_bytes=max(self.max_bytes - size, 1))


# ---- How many bytes each span of a table takes as OTLP, without encoding it ----


LINK_SIZE = 35
"""Bytes of a link."""
_ALWAYS = 18 + 10 + 2 + 9 + 9 + 2 + 6
"""Trace id, span id, kind, two times, status, flags."""
_PARENT, _ERROR = 10, 2
_NO_ASCII = 0x80
_WIDEST = 10
"""Bytes of the longest varint."""


def span_sizes(table: SpanTable) -> npt.NDArray[np.int64]:
    """Bytes of each span in an OTLP message: what the encoder writes, or a little more where a name is no valid UTF-8.

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
    """Upper bound of the bytes of ``spans`` spans of the table, with all texts as long as the longest.

    Looks at no span, but counts how many have an attribute: costs some 0.1 µs per name.
    """
    table = narrowed(table)
    text = int(_field(_text_sizes(table.names.flat()).max(initial=0)))
    states = max((len(state.encode("utf-8", "replace")) for state in table.trace_states), default=0)
    span_size = _ALWAYS + _PARENT + _ERROR + text + int(_field(states))
    span_size += sum(6 for counts in (table.dropped_attributes, table.dropped_links) if counts is not None)
    total = spans * int(_field(span_size)) + len(table.links) * LINK_SIZE
    for column in table.attributes:
        value = {AttributeType.NAME: text, AttributeType.BOOL: 2}.get(column.type, 11)
        size = int(_field(_field(len(column.key.encode())) + _field(value)))
        total += min(spans, len(column.values)) * size
    return total + 5 * spans  # the lengths of spans with attributes and links


def _attribute_sizes(column: AttributeColumn, texts: Array) -> Array | int:
    """Bytes of the attribute on each span that has it; ``texts`` are the sizes of the fields of all names.

    Computed for each text and each width of a number that there is, and not for each span.
    """
    key = len(column.key.encode())
    key = _field(key) if key else 0
    if column.type == AttributeType.NAME:
        return _field(key + _field(texts))[column.values]
    if column.type == AttributeType.INT64:
        return _field(key + _field(1 + np.arange(_WIDEST + 1)))[_varint(column.values)]
    return int(_field(key + _field(9 if column.type == AttributeType.DOUBLE else 2)))


def _field(size: Any) -> Any:
    """A field of so many bytes with its tag and length; an empty one is counted though it is left out."""
    return size + 1 + _varint(size)


def _varint(values: Any) -> Any:
    """Bytes of numbers as varints: 7 bits each, ten for a negative one."""
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
    """Bytes of each name once what is no UTF-8 has been replaced, each byte by three."""
    ends = names.ends.astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    foreign = np.flatnonzero(names.data[: ends[-1] if len(ends) else 0] >= _NO_ASCII)
    for index in distinct_values(np.searchsorted(ends, foreign, side="right")).tolist():
        raw = names.raw(index)
        try:
            raw.decode()
        except UnicodeDecodeError:
            sizes[index] += 2 * sum(byte >= _NO_ASCII for byte in raw)
    return sizes


def limited(
    table: SpanTable, *, max_attributes: int | None, max_links: int | None, max_attribute_length: int | None
) -> SpanTable:
    """The same spans within limits, each None or not negative: those of the SDK's SpanLimits for spans.

    A span keeps its first ``max_attributes`` attributes in the order of the table and its first ``max_links`` links; the
    others are counted in ``dropped_attributes`` and ``dropped_links``. Texts of attributes keep their first
    ``max_attribute_length`` characters. Names of spans have no limit.

    Where nothing exceeds a limit the table itself is returned, after a look at its columns and the lengths of its names;
    else only what changes is copied. Thread-safe.
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
    )  # ascending: of more than so many, one has its equal so many places before it
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
