"""The spans of one trace as a tree on columns: parents, order, and sums over descendants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._native.loops import positions_of

if TYPE_CHECKING:
    from .span_table import SpanTable

Array = npt.NDArray[Any]

DEEPEST = 1000
"""Maximum depth; deeper spans count as children of an ancestor at this depth."""


def rows_of_spans(table: SpanTable, span_ids: Array) -> npt.NDArray[np.int64]:
    """Indices in the table of the spans with these ids; -1 if missing, and for 0."""
    return positions_of(table.span_id, span_ids)


def column_of(table: SpanTable, key: str) -> tuple[Array, npt.NDArray[np.bool_]] | None:
    """The values of an attribute by span, and a mask of the spans that have it; None if no span has it."""
    column = next((column for column in table.attributes if column.key == key), None)
    return None if column is None else column.spread(len(table))


class SpanTree:
    """Parents and children among the spans of a table. Costs some 20 numpy passes, and a few per level."""

    def __init__(self, table: SpanTable, root: int = -1) -> None:
        self.parent = rows_of_spans(table, table.parent_span_id)
        """Row of each span's parent; -1 if it is not in the table."""
        self.root = root
        """Row of the common root, which is ordered first; -1 if it is not in the table."""
        depth = _depths(self.parent)
        self.above = _shallow(self.parent, depth)
        """As ``parent``, but a higher ancestor for spans that are too deep; -1 if the parents form a cycle."""
        self.depth = np.minimum(depth, DEEPEST) * (self.above >= 0)
        self.thread = _threads(table)
        """Index of the span's thread, from 0."""
        self.by_start = np.argsort(table.start, kind="stable")
        """The rows by start."""
        # Groups children by parent and thread; spans whose parent is not in the table by the parent's id.
        lost = np.flatnonzero(self.parent < 0)
        family = self.above + 1
        family[lost] = np.unique(table.parent_span_id[lost], return_inverse=True)[1].reshape(-1)
        self.siblings = (self.depth * (len(table) + 1) + family) * (self.thread.max(initial=0) + 1) + self.thread
        """A number per parent and thread, higher for deeper spans."""
        self.order = self.by_start[np.argsort(self.siblings[self.by_start], kind="stable")]
        """The rows by depth, parent, thread and start."""
        self._levels = np.searchsorted(self.depth[self.order], np.arange(self.depth.max(initial=-1) + 2)).tolist()

    def raise_up(self, values: Array, add: np.ufunc) -> Array:
        """Returns for each span its value and those of all its descendants, combined by ``add``."""
        combined = values.copy()
        for begin, end in zip(self._levels[-2:0:-1], self._levels[:0:-1], strict=False):
            nodes = self.order[begin:end]
            above = self.above[nodes]
            first = np.flatnonzero(np.concatenate(([True], above[1:] != above[:-1])))
            into = above[first]
            combined[into] = add(combined[into], add.reduceat(combined[nodes], first))
        return combined

    def preorder(self) -> npt.NDArray[np.int64]:
        """Returns the rows in preorder: each span is followed by its descendants; the root is first."""
        sizes = self.raise_up(np.ones(len(self.parent), dtype=np.int64), np.add)
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


def _depths(parent: Array) -> npt.NDArray[np.int64]:
    """Number of ancestors of each span; a very large number for circles."""
    depth, further = (parent >= 0).astype(np.int64), parent.copy()
    for _ in range(len(parent).bit_length() + 1):
        on = np.flatnonzero(further >= 0)
        if not on.size:
            return depth
        depth[on] += depth[further[on]]
        further[on] = further[further[on]]
    depth[further >= 0] = np.iinfo(np.int64).max
    return depth


def _shallow(parent: Array, depth: Array) -> npt.NDArray[np.int64]:
    above = np.where(depth < np.iinfo(np.int64).max, parent, -1)
    deep = np.flatnonzero((depth > DEEPEST) & (above >= 0))
    while deep.size:
        over = depth[above[deep]] >= DEEPEST
        deep = deep[over]
        above[deep] = above[above[deep]]
    return above


def _threads(table: SpanTable) -> npt.NDArray[np.int64]:
    threads = column_of(table, "thread.id")
    if threads is None:
        return np.zeros(len(table), dtype=np.int64)
    values, present = threads
    return np.unique(np.where(present, values, 0), return_inverse=True)[1].reshape(-1)
