"""Stores which spans replaced spans that were removed or moved to another trace, for links of later drains."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._model.live_table import REMEMBERED
from otel_torchprof._model.span_table import LINK
from otel_torchprof._model.span_tree import column_of, rows_of_spans
from otel_torchprof._native.loops import positions_of

from .aggregating import AGGREGATED_COUNT, COLLAPSED_COUNT, links_once
from .policy import RECORDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._model.span_table import SpanTable

Array = npt.NDArray[Any]

_LINKED = ("torch.op.sequence_nr", COLLAPSED_COUNT, AGGREGATED_COUNT, RECORDED)
"""Links of later drains point only to roots and to spans with the first attribute. The others mark spans that replace such spans."""
_MOST_MOVES = 3
"""Moves of one span: into another span of its trace group, with that one into the trace of a request, with its root into another trace."""


class MovedSpans:
    """The latest :data:`REMEMBERED` moved spans, or up to twice as many, 56 bytes each. Not thread-safe."""

    def __init__(self) -> None:
        # From `_begin` on, the latest first; until they are full, memory before that is not touched.
        self._begin = 2 * REMEMBERED
        self._span_ids = np.empty(self._begin, dtype=np.uint64)
        self._ends = np.empty(self._begin, dtype=LINK)

    def note(self, before: SpanTable, after: SpanTable, root: int | Array, *, became: Array | None = None) -> None:
        """Stores where the spans of trace groups, ``before``, are in ``after``; links to missing ones move to their root.

        ``root``: id of the root, one for all spans or one for each. ``became``: for each span of ``before``, the id of the span that
        replaces it; by default its own id.
        """
        roots = np.broadcast_to(np.asarray(root, dtype=np.uint64), len(before))
        rows = _linked_rows(before, roots)
        ends = np.zeros(len(rows), dtype=LINK)
        ends["span_id"] = before.span_id[rows] if became is None else became[rows]
        ends["trace_id"] = before.trace_ids[before.trace[rows]]
        at = rows_of_spans(after, ends["span_id"])
        lost = np.flatnonzero(at < 0)
        if lost.size:
            ends["span_id"][lost] = roots[rows[lost]]
            at[lost] = rows_of_spans(after, roots[rows[lost]])
        here = at >= 0
        ends["trace_id"][here] = after.trace_ids[after.trace[at[here]]]
        elsewhere = ends["span_id"] != before.span_id[rows]
        elsewhere |= (ends["trace_id"] != before.trace_ids[before.trace[rows]]).any(axis=1)
        self._add(before.span_id[rows[elsewhere]], ends[elsewhere])

    def note_left(self, span_ids: Array, roots: Array, trace_ids: Array) -> None:
        """Stores that spans are not sent: links to them move to their ``roots``, in the same trace."""
        ends = np.zeros(len(span_ids), dtype=LINK)
        ends["span_id"], ends["trace_id"] = roots, trace_ids
        self._add(span_ids, ends)

    def followed(self, table: SpanTable) -> SpanTable:
        """Returns the table with links to moved spans replaced; the table itself if it has none."""
        if self._begin == len(self._span_ids) or not len(table.links):
            return table
        links = table.links
        for _ in range(_MOST_MOVES):
            before, links = links, self._at_their_ends(links)
            if links is before:
                break
        if links is table.links:
            return table
        return replace(table, links=links_once(links[links["span_id"] != table.span_id[links["row"]]]))

    def _at_their_ends(self, links: Array) -> Array:
        place = positions_of(self._span_ids[self._begin :], links["span_id"])
        moved = np.flatnonzero(place >= 0)
        if not moved.size:
            return links
        links, ends = links.copy(), self._ends[self._begin + place[moved]]
        links["span_id"][moved], links["trace_id"][moved] = ends["span_id"], ends["trace_id"]
        return links

    def _add(self, span_ids: Array, ends: Array) -> None:
        span_ids, ends = span_ids[::-1], ends[::-1]
        begin = self._begin - len(span_ids)
        if begin < 0:  # rarely: each cut copies
            span_ids = np.concatenate((span_ids, self._span_ids[self._begin :]))[:REMEMBERED]
            ends = np.concatenate((ends, self._ends[self._begin :]))[:REMEMBERED]
            begin = len(self._span_ids) - REMEMBERED
        self._span_ids[begin : begin + len(span_ids)], self._ends[begin : begin + len(ends)] = span_ids, ends
        self._begin = begin


def without_links_to(table: SpanTable, waiting: Mapping[int, Sequence[SpanTable]]) -> SpanTable:
    """Removes links to spans in the span buffer, as they may yet be dropped; counts the links as dropped.

    ``waiting``: buffered spans of trace groups by the id of their root. Links to roots stay.
    """
    if not waiting or not len(table.links):
        return table
    targets, roots = np.ascontiguousarray(table.links["span_id"]), np.fromiter(waiting, np.uint64, len(waiting))
    stays = np.ones(len(targets), dtype=np.bool_)
    for other in chain.from_iterable(waiting.values()):
        stays &= rows_of_spans(other, targets) < 0
    if stays.all():
        return table
    away = np.flatnonzero(~stays)
    stays[away] = (rows_of_spans(table, targets[away]) >= 0) | np.isin(targets[away], roots)
    if stays.all():
        return table
    dropped = np.bincount(table.links["row"][~stays].astype(np.int64), minlength=len(table)).astype(np.uint32)
    before = table.dropped_links
    return replace(table, links=table.links[stays], dropped_links=dropped if before is None else before + dropped)


def _linked_rows(table: SpanTable, roots: Array) -> npt.NDArray[np.int64]:
    is_linked = table.span_id == roots
    if column_of(table, _LINKED[0]) is None:  # hidden
        is_linked[:] = True
    for column in filter(None, (column_of(table, key) for key in _LINKED)):
        is_linked |= column[1]
    return np.flatnonzero(is_linked)
