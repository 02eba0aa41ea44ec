"""OpenTelemetry's span limits on a table of spans: how many attributes and links a span has, how long texts are.

What a limit takes away is counted on the span, as OTLP wants it. Of too many, the first are kept, as the specification
says ("if adding an attribute would exceed the limit, it is discarded"); the Python SDK throws out the oldest instead, in
favour of what is set later, which columns have no notion of. The counts are the same either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._tree.span_table import AttributeColumn, AttributeType, SpanTable, extend_names

from .span_tables import narrowed

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Names

Array = npt.NDArray[Any]


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
    kept = []
    for column in table.attributes:
        present = np.ones(len(table), dtype=bool) if column.present is None else column.present != 0
        fits = present & (count < most)
        count += present
        if np.array_equal(fits, present):
            kept.append(column)
        elif fits.any():
            kept.append(replace(column, present=fits.view(np.uint8)))
    dropped = np.maximum(count, most) - np.uint32(most)
    if not dropped.any():
        return table
    return replace(table, attributes=tuple(kept), dropped_attributes=_sum(table.dropped_attributes, dropped))


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
            used = column.values if column.present is None else column.values[column.present != 0]
            for index in distinct_values(used[suspect[used]]).tolist():
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
