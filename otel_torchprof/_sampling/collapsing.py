"""Spans too short to be seen leave, and the nearest one above that stays says how many they were and how long they took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._spans.span_sizes import span_sizes
from otel_torchprof._spans.span_tree import SpanTree, column_of
from otel_torchprof._tree.span_table import AttributeType, SpanTable

from .absorbing import (
    COLLAPSED_COUNT,
    COLLAPSED_DURATION,
    absorbed,
    collapsed_of,
    counts_of,
    durations_of,
    phases,
    precious,
    with_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Array = npt.NDArray[Any]

_COLLAPSED_SIZE = 80
"""Bytes that the two attributes add to a span, at most."""


def collapsed(table: SpanTable, root: int, longest: float, fits: Callable[[int, int], bool]) -> tuple[SpanTable, Array]:
    """The table with as few spans collapsed as will do, of those with nothing below them that took more than ``longest`` ns.

    The shortest go first; what is in error, or looked for by others, goes last. What hangs under nothing in the table stays, as
    ``root`` and phases do. ``fits`` is asked for numbers of spans and bytes. Returns too for each row the one that it went into.
    """
    tree = SpanTree(table, root)
    goes = _order_of_leaving(table, tree, longest)
    if not goes.size:
        return table, np.arange(len(table))
    sizes = span_sizes(table)
    count = _fewest(len(goes), lambda count: fits(len(table) - count, _bytes_left(tree, sizes, goes[:count])))
    return _without(table, tree, goes[:count])


def _order_of_leaving(table: SpanTable, tree: SpanTree, longest: float) -> npt.NDArray[np.int64]:
    """The rows that may go: each before what is above it."""
    key = tree.raise_up(durations_of(table), np.maximum)
    late = tree.raise_up(precious(table) | (table.error != 0), np.logical_or)
    has_phase = tree.raise_up(phases(table), np.logical_or)
    rows = np.flatnonzero((key <= longest) & (tree.above >= 0) & ~has_phase)
    in_order: npt.NDArray[np.int64] = rows[np.lexsort((-tree.depth[rows], key[rows], late[rows]))]
    return in_order


def _fewest(most: int, enough: Callable[[int], bool]) -> int:
    """The smallest count that is enough, or ``most``."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _bytes_left(tree: SpanTree, sizes: Array, goes: Array) -> int:
    left = int(sizes.sum() - sizes[goes].sum())
    above = np.zeros(len(sizes), dtype=np.bool_)
    above[tree.above[goes]] = True
    above[goes] = False
    return left + int(above.sum()) * _COLLAPSED_SIZE


def _without(table: SpanTable, tree: SpanTree, goes: Array) -> tuple[SpanTable, Array]:
    gone = np.zeros(len(table), dtype=np.bool_)
    gone[goes] = True
    into = np.where(gone, tree.above, np.arange(len(table)))
    while (on := np.flatnonzero(gone[into])).size:
        into[on] = into[into[on]]
    rows = distinct_values(into[goes])
    counts = np.bincount(into[goes], weights=(counts_of(table) + collapsed_of(table))[goes], minlength=len(table))
    top_level = goes[~gone[tree.parent[goes]]]
    nanoseconds = np.zeros(len(table), dtype=np.int64)
    np.add.at(nanoseconds, into[top_level], durations_of(table)[top_level])
    before = column_of(table, COLLAPSED_DURATION)
    if before is not None:
        nanoseconds += np.where(before[1], np.rint(before[0] * 1e9), 0).astype(np.int64)
    whole = with_values(table, COLLAPSED_COUNT, AttributeType.INT64, rows, (counts + collapsed_of(table))[rows])
    whole = with_values(whole, COLLAPSED_DURATION, AttributeType.DOUBLE, rows, nanoseconds[rows] / 1e9)
    # The links of what nobody sees any more would be noise on what is left.
    return absorbed(whole, tree, into, with_links=False), into
