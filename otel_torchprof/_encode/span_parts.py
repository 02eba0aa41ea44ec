"""A list of spans in parts, by time, with no tree in two of them: what goes into one file and what into the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._tree.forest import top_level

from .spans import SpanList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._tree.span_table import SpanTable

Times = npt.NDArray[np.int64]


class SpanParts:
    """The spans of a list, to be taken out by when the top-level span above each began. Thread-safe."""

    def __init__(self, spans: SpanList) -> None:
        self._spans = spans
        rows = spans.rows
        self._rows = np.arange(rows.start, rows.stop, rows.step)
        table = spans.table
        top = top_level(_parents(table.span_id[self._rows], table.parent_span_id[self._rows]))
        start = table.start[self._rows]
        self._began = start[top]
        self._top_level = distinct_values(start[top == np.arange(len(top))])

    def cuts(self) -> Times:
        """Where the list can be cut, Unix ns, rising: where steps ended; where none did, wherever a top-level span begins."""
        ends = step_ends(self._spans)
        found = ends if len(ends) else self._top_level
        child_time: Times = found[(found > self._began.min()) & (found <= self._began.max())]
        return child_time

    def between(self, begin: float, end: float) -> SpanList:
        """The spans of the trees that began in that time, ``end`` not in it; Unix ns."""
        chosen = self._rows[(self._began >= begin) & (self._began < end)]
        return SpanList(picked(self._spans.table, chosen), resource=self._spans.resource, scope=self._spans.scope)


def step_ends(spans: Sequence[object]) -> Times:
    """When the steps whose spans are in the list ended, Unix ns, rising; a step once, in however many contexts it is."""
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
    """The position of each span's parent, -1 where it is not in the list."""
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, parent_ids, sorter=order), len(ids) - 1)
    found = order[place]
    # What is its own parent would be nobody's child.
    there = (ids[found] == parent_ids) & (found != np.arange(len(ids)))
    return np.where(there, found, -1)


def picked(table: SpanTable, rows: npt.NDArray[np.int64]) -> SpanTable:
    """Only these rows, in this order, which must rise; traces and names stay as they are."""
    place = np.full(len(table), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    links = table.links[place[table.links["row"].astype(np.int64)] >= 0]
    links["row"] = place[links["row"].astype(np.int64)]
    columns = ("name", "start", "end", "trace", "span_id", "parent_span_id", "error", "row", "step")
    optional = ("parent_is_remote", "dropped_attributes", "dropped_links")
    return replace(
        table,
        **{name: getattr(table, name)[rows] for name in columns},
        **{name: values[rows] for name in optional if (values := getattr(table, name)) is not None},
        links=links,
        attributes=tuple(
            replace(c, values=c.values[rows], present=None if c.present is None else c.present[rows])
            for c in table.attributes
        ),
    )
