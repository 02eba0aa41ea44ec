"""The spans of one trace as a tree on columns: parents, order, and sums over descendants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._native import loops

if TYPE_CHECKING:
    from .span_table import SpanTable

Array = npt.NDArray[Any]

DEEPEST = 1000
"""Maximum depth; deeper spans count as children of an ancestor at this depth."""


def rows_of_spans(table: SpanTable, span_ids: Array) -> npt.NDArray[np.int64]:
    """Indices in the table of the spans with these ids; -1 if missing, and for 0."""
    return loops.positions_of(table.span_id, span_ids)


def column_of(table: SpanTable, key: str) -> tuple[Array, npt.NDArray[np.bool_]] | None:
    """The values of an attribute by span, and a mask of the spans that have it; None if no span has it."""
    column = next((column for column in table.attributes if column.key == key), None)
    return None if column is None else column.spread(len(table))


class SpanTree:
    """Parents and children among the spans of a table. Costs some 30 ns per span."""

    def __init__(self, table: SpanTable, root: int = -1, *, parent: Array | None = None) -> None:
        self.parent = rows_of_spans(table, table.parent_span_id) if parent is None else parent
        """Row of each span's parent; -1 if it is not in the table."""
        self.root = root
        """Row of the common root, which is ordered first; -1 if it is not in the table."""
        self.thread = _threads(table)
        """Index of the span's thread, from 0."""
        self.by_start = np.argsort(table.start, kind="stable")
        """The rows by start."""
        # Groups children by parent and thread; spans whose parent is not in the table by the parent's id.
        lost = np.flatnonzero(self.parent < 0)
        family = np.zeros(len(table), dtype=np.int64)
        family[lost] = np.unique(table.parent_span_id[lost], return_inverse=True)[1].reshape(-1)
        self._forest = loops.forest(self.parent, self.by_start, self.thread, family, deepest=DEEPEST)
        self.above, self.depth, family, self.order = self._forest
        # above: as ``parent``, but a higher ancestor for spans that are too deep; -1 if the parents form a circle.
        # order: level by level, of each the children of one parent together, by thread and then by start.
        self.siblings = (self.depth * (len(table) + 1) + family) * (self.thread.max(initial=0) + 1) + self.thread
        """The same number for spans of one parent and thread, higher for deeper ones."""
        self._levels = np.searchsorted(self.depth[self.order], np.arange(self.depth.max(initial=-1) + 2)).tolist()

    def any_below(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the marked spans and all of their ancestors."""
        has_marked: npt.NDArray[np.bool_] = loops.raise_highest(self._forest, marked) != 0
        return has_marked

    def highest_below(self, values: Array) -> npt.NDArray[np.int64]:
        """Returns for each span the highest of its own value and those of its descendants."""
        return loops.raise_highest(self._forest, values)

    def preorder(self) -> npt.NDArray[np.int64]:
        """The rows such that each comes after its parent and before what does not hang under it; the root is the first."""
        sizes = loops.raise_sums(self._forest, np.ones(len(self.parent), dtype=np.int64))
        place = np.zeros(len(self.parent), dtype=np.int64)
        for level, (begin, end) in enumerate(zip(self._levels, self._levels[1:], strict=False)):
            nodes = self.order[begin:end]
            if level == 0 and self.root >= 0:
                nodes = np.concatenate(([self.root], nodes[nodes != self.root]))
            before = np.cumsum(sizes[nodes]) - sizes[nodes]
            if level == 0:
                place[nodes] = before
                continue
            above = self.above[nodes]
            first = np.concatenate(([True], above[1:] != above[:-1]))
            place[nodes] = place[above] + 1 + before - before[first][np.cumsum(first) - 1]
        rows = np.empty(len(place), dtype=np.int64)
        rows[place] = np.arange(len(place))
        return rows

    def topmost(self, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """For each span, its topmost marked ancestor; -1 for none."""
        topmost = np.full(len(marked), -1, dtype=np.int64)
        for begin, end in zip(self._levels[1:], self._levels[2:], strict=False):
            nodes = self.order[begin:end]
            above = self.above[nodes]
            topmost[nodes] = np.where(topmost[above] >= 0, topmost[above], np.where(marked[above], above, -1))
        return topmost


def _threads(table: SpanTable) -> npt.NDArray[np.int64]:
    threads = column_of(table, "thread.id")
    if threads is None:
        return np.zeros(len(table), dtype=np.int64)
    values, present = threads
    if present.all() and (values == values[:1]).all():  # as of most programs
        return np.zeros(len(table), dtype=np.int64)
    return np.unique(np.where(present, values, 0), return_inverse=True)[1].reshape(-1)
