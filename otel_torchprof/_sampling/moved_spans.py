"""Where spans are that were sent elsewhere, or left in a reduction, for links of later drains."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._spans.live_table import REMEMBERED
from otel_torchprof._spans.span_tree import column_of, rows_of_spans
from otel_torchprof._tree.span_table import LINK

from .absorbing import links_once

if TYPE_CHECKING:
    from otel_torchprof._tree.span_table import SpanTable

Array = npt.NDArray[Any]

_LINKED = "torch.op.sequence_nr"
"""What links of later drains lead to has this attribute, or is a root."""


class MovedSpans:
    """The latest :data:`REMEMBERED` of them, or up to twice as many: 56 bytes each. For one thread at a time."""

    def __init__(self) -> None:
        self._span_ids = self._sorted = np.empty(0, dtype=np.uint64)
        self._order: npt.NDArray[np.int64] | None = None
        self._ends = np.empty(0, dtype=LINK)

    def note(self, before: SpanTable, after: SpanTable, root: int, *, became: Array | None = None) -> None:
        """The spans of a trace group are in ``after`` now; those that are not there are their ``root``, wherever that is.

        ``became``: of each span of ``before`` the id of the one that it is part of; by default its own.
        """
        rows = _linked_rows(before, root)
        ends = np.zeros(len(rows), dtype=LINK)
        ends["span_id"] = before.span_id[rows] if became is None else became[rows]
        ends["trace_id"] = before.trace_ids[before.trace[rows]]
        at = rows_of_spans(after, ends["span_id"])
        above = rows_of_spans(after, np.array([root], dtype=np.uint64))
        ends["span_id"][at < 0] = root
        at[at < 0] = above
        here = at >= 0
        ends["trace_id"][here] = after.trace_ids[after.trace[at[here]]]
        elsewhere = ends["span_id"] != before.span_id[rows]
        elsewhere |= (ends["trace_id"] != before.trace_ids[before.trace[rows]]).any(axis=1)
        self._add(before.span_id[rows[elsewhere]], ends[elsewhere])

    def note_left(self, table: SpanTable, rows: Array, roots: npt.NDArray[np.uint64]) -> None:
        """The spans at ``rows`` are not sent; each one's root is, in the same trace."""
        chosen = np.isin(rows, _linked_rows(table))
        ends = np.zeros(int(chosen.sum()), dtype=LINK)
        ends["span_id"], ends["trace_id"] = roots[chosen], table.trace_ids[table.trace[rows[chosen]]]
        self._add(table.span_id[rows[chosen]], ends)

    def followed(self, table: SpanTable) -> SpanTable:
        """The table, whose links lead to where spans are now; the table itself where none leads to one that moved."""
        if not len(self._span_ids) or not len(table.links):
            return table
        links = self._at_their_ends(table.links)
        if links is table.links:
            return table
        links = self._at_their_ends(links)  # what became its root is where that went
        return replace(table, links=links_once(links[links["span_id"] != table.span_id[links["row"]]]))

    def _at_their_ends(self, links: Array) -> Array:
        if self._order is None:
            self._order = np.argsort(self._span_ids, kind="stable")
            self._sorted = self._span_ids[self._order]
        place = np.searchsorted(self._sorted, links["span_id"], side="right") - 1  # the latest
        moved = np.flatnonzero((place >= 0) & (self._sorted[place] == links["span_id"]))
        if not moved.size:
            return links
        links, ends = links.copy(), self._ends[self._order[place[moved]]]
        links["span_id"][moved], links["trace_id"][moved] = ends["span_id"], ends["trace_id"]
        return links

    def _add(self, span_ids: Array, ends: Array) -> None:
        if not len(span_ids):
            return
        self._order = None
        self._span_ids = np.concatenate((self._span_ids, span_ids))
        self._ends = np.concatenate((self._ends, ends))
        if len(self._span_ids) > 2 * REMEMBERED:  # not at every drain
            self._span_ids, self._ends = self._span_ids[-REMEMBERED:].copy(), self._ends[-REMEMBERED:].copy()


def _linked_rows(table: SpanTable, root: int = 0) -> npt.NDArray[np.int64]:
    numbered = column_of(table, _LINKED)
    found = np.ones(len(table), np.bool_) if numbered is None else numbered[1] | (table.span_id == np.uint64(root))
    return np.flatnonzero(found)
