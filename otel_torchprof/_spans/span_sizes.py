"""How many bytes each span of a table takes as OTLP, without encoding it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._tree.span_table import AttributeType

from .span_tables import narrowed

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Names
    from otel_torchprof._tree.span_table import AttributeColumn, SpanTable

Array = npt.NDArray[Any]

LINK_SIZE = 35
"""Bytes of a link."""
_ALWAYS = 18 + 10 + 2 + 9 + 9 + 2 + 6
"""Trace id, span id, kind, two times, status, flags."""
_PARENT, _ERROR = 10, 2
_NO_ASCII = 0x80
_VARINTS = np.array([1 << 7 * i for i in range(1, 10)], dtype=np.uint64)


def span_sizes(table: SpanTable) -> npt.NDArray[np.int64]:
    """Bytes of each span in an OTLP message: what the encoder writes, or a little more where a name is no valid UTF-8.

    Costs a numpy pass or two per attribute, and some 0.1 µs per name that is not ASCII.
    """
    table = narrowed(table)
    texts = _field(_text_sizes(table.names.flat()))
    size = np.full(len(table), _ALWAYS, dtype=np.int64)
    size += texts[table.name]
    size += np.where(table.parent_span_id != 0, _PARENT, 0)
    size += np.where(table.error != 0, _ERROR, 0)
    if table.trace_states:
        states = np.array([len(state.encode("utf-8", "replace")) for state in table.trace_states], dtype=np.int64)
        size += _field(states)[table.trace]
    for column in table.attributes:
        size += _attribute_sizes(column, texts)
    for counts in (table.dropped_attributes, table.dropped_links):
        if counts is not None:
            size += np.where(counts != 0, 1 + _varint(counts), 0)
    if len(table.links):
        size += LINK_SIZE * np.bincount(table.links["row"].astype(np.int64), minlength=len(table))
    whole: npt.NDArray[np.int64] = _field(size)
    return whole


def largest_size(table: SpanTable) -> int:
    """Bytes that no span of the table exceeds: its longest name, its largest attributes and its most links in one.

    Costs a quarter of :func:`span_sizes`, and is close to the largest of these where spans are alike.
    """
    if not len(table):
        return 0
    table = narrowed(table)
    texts = _field(_text_sizes(table.names.flat()))
    states = [len(state.encode("utf-8", "replace")) for state in table.trace_states]
    size = _ALWAYS + _PARENT + _ERROR + int(texts[table.name].max()) + int(_field(max(states, default=0)))
    for column in table.attributes:
        values = column.values
        if column.type == AttributeType.NAME:
            values = values[[texts[values].argmax()]]
        elif column.type == AttributeType.INT64:
            values = values.astype(np.uint64).max(keepdims=True)
        else:
            values = values[:1]
        size += int(_attribute_sizes(replace(column, values=values, present=None), texts)[0])
    for counts in (table.dropped_attributes, table.dropped_links):
        if counts is not None:
            size += 1 + int(_varint(counts.max()))
    if len(table.links):
        size += LINK_SIZE * int(np.bincount(table.links["row"].astype(np.int64)).max())
    return int(_field(size))


def _attribute_sizes(column: AttributeColumn, texts: Array) -> Array:
    """Bytes of the attribute on each span, 0 where it is not; ``texts`` are the sizes of the fields of all names."""
    value: Any
    if column.type == AttributeType.NAME:
        value = texts[column.values]
    elif column.type == AttributeType.INT64:
        value = 1 + _varint(column.values)
    else:
        value = 9 if column.type == AttributeType.DOUBLE else 2
    key = len(column.key.encode())
    size = _field((_field(key) if key else 0) + _field(value))
    return np.broadcast_to(size, len(column.values)) if column.present is None else np.where(column.present, size, 0)


def _field(size: Any) -> Any:
    """A field of so many bytes with its tag and length; an empty one is counted though it is left out."""
    return size + 1 + _varint(size)


def _varint(values: Any) -> Any:
    return 1 + np.searchsorted(_VARINTS, np.asarray(values).astype(np.uint64), side="right")


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
