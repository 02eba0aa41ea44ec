"""A trace that is too large as several that are linked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Names
from otel_torchprof._spans.span_sizes import LINK_SIZE, span_sizes
from otel_torchprof._spans.span_tables import joined_tables, taken
from otel_torchprof._spans.span_tree import SpanTree
from otel_torchprof._tree.span_table import LINK, AttributeType, SpanTable

from .absorbing import linked_rows, links_once, with_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = npt.NDArray[Any]

STEP, PART = "torch.step", "torch.part"
_PART_ROOT_SIZE = 256
"""Bytes of the root of a part beside its name and its trace state, at most."""


class TargetTrace(NamedTuple):
    """The root of a trace group: the span of a step, or a top-level event."""

    trace_id: int
    span_id: int
    name: str
    step: int
    """Number of the step, -1 for none."""
    trace_state: str = ""
    """W3C tracestate of the trace."""


class Part(NamedTuple):
    """A trace that a trace group's other spans went to, and its root there."""

    trace_id: int
    span_id: int


def split(
    table: SpanTable,
    target: TargetTrace,
    first: tuple[int, int],
    most: tuple[int, int],
    *,
    before: int,
    stays: bool,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
) -> tuple[SpanTable, list[Part]]:
    """The spans of one trace as those of several, trace by trace with its root first, and the roots of the new ones.

    ``first`` and ``most`` are the numbers of spans and bytes that the trace of ``target`` and every other one may have. What is
    cut is the order in which each span comes after its parent, so a trace has a segment of it. All go to new traces unless the
    first segment ``stays``, numbered after the ``before`` that there were. A span in another trace than its parent hangs under the root
    there and links to its parent, save where that is ``target``, to which the roots link, or not in the table: it went before, or
    goes later, and where is not known.
    """
    tree = SpanTree(table, _row_of(table, target))
    part = _parts(table, tree, target, (first, most), 0 if stays else 1)
    count = int(part.max(initial=0))
    parts = [Part(new_trace_id(), new_span_id()) for _ in range(count)]
    whole = joined_tables([table, _roots(table, part, target, [made.span_id for made in parts], before)])
    trace_ids = _trace_ids([target.trace_id, *(made.trace_id for made in parts)])
    span_ids = np.array([target.span_id, *(made.span_id for made in parts)], dtype=np.uint64)
    known = np.where(tree.parent >= 0, part[tree.parent], np.where(part > 0, -1, 0))
    moved = np.concatenate((known != part, np.zeros(count, np.bool_)))
    trace = np.concatenate((part, np.arange(1, count + 1)))
    parent = np.where(moved, span_ids[trace], whole.parent_span_id)
    apart = moved[: len(table)] & (tree.parent >= 0) & (table.parent_span_id != span_ids[0])
    links = _links(table, tree, part, np.flatnonzero(apart), trace_ids)
    to_home = _link_rows(np.arange(len(table), len(whole)), trace_ids[:1], np.full(count, target.span_id))
    links = np.concatenate((links, to_home))
    remote = whole.parent_is_remote
    whole = replace(
        whole,
        trace=trace.astype(np.uint32),
        trace_ids=trace_ids,
        trace_states=(target.trace_state,) * len(trace_ids) if target.trace_state else (),
        parent_span_id=parent,
        parent_is_remote=None if remote is None else np.where(moved, 0, remote),
        links=links_once(links),
    )
    is_event = np.arange(len(whole)) < len(table)
    is_root = whole.span_id == np.uint64(target.span_id)
    return taken(whole, np.lexsort((is_event & ~is_root, trace))), parts


def _row_of(table: SpanTable, target: TargetTrace) -> int:
    found = np.flatnonzero(table.span_id == np.uint64(target.span_id))
    return int(found[0]) if found.size else -1


def _parts(
    table: SpanTable, tree: SpanTree, target: TargetTrace, limits: tuple[tuple[int, int], tuple[int, int]], number: int
) -> npt.NDArray[np.int64]:
    """The number of each span's part, from ``number`` on; 0 is the trace of ``target``."""
    rows = tree.preorder()
    ends = np.cumsum(span_sizes(table)[rows] + LINK_SIZE + 2)
    spare = _PART_ROOT_SIZE + 3 * len(target.name.encode()) + 2 * len(target.trace_state)
    part = np.empty(len(rows), dtype=np.int64)
    begin = 0
    while begin < len(rows):
        spans, size = limits[0] if number == 0 else (limits[1][0] - 1, limits[1][1] - spare)
        bytes_before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, bytes_before + size, side="right"))
        end = max(min(end, begin + spans), begin + 1)
        part[rows[begin:end]] = number
        begin, number = end, number + 1
    return part


def _roots(table: SpanTable, part: Array, target: TargetTrace, span_ids: Sequence[int], before: int) -> SpanTable:
    """The spans that the parts hang under."""
    count = len(span_ids)
    start = np.full(count + 1, np.iinfo(np.int64).max)
    end = np.zeros(count + 1, dtype=np.int64)
    np.minimum.at(start, part, table.start)
    np.maximum.at(end, part, table.end)
    numbers = np.arange(count)
    roots = SpanTable(
        name=np.ones(count, dtype=np.uint32),
        start=start[1:],
        end=end[1:],
        trace=np.zeros(count, dtype=np.uint32),
        trace_ids=np.zeros((1, 16), dtype=np.uint8),
        span_id=np.array(span_ids, dtype=np.uint64),
        parent_span_id=np.zeros(count, dtype=np.uint64),
        error=np.zeros(count, dtype=np.uint8),
        row=np.full(count, -1),
        step=np.full(count, target.step),
        links=np.empty(0, dtype=LINK),
        names=Names.of(["", target.name]),
    )
    if target.step >= 0:
        roots = with_values(roots, STEP, AttributeType.INT64, numbers, target.step)
    return with_values(roots, PART, AttributeType.INT64, numbers, before + 1 + numbers)


def _trace_ids(ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(number.to_bytes(16, "big") for number in ids), dtype=np.uint8).reshape(-1, 16)


def _links(table: SpanTable, tree: SpanTree, part: Array, apart: Array, trace_ids: Array) -> Array:
    """Those that there were, to where their targets are now; and of the rows ``apart`` from their parents those to them."""
    links = table.links.copy()
    if len(links):
        target, inside = linked_rows(table)
        links["trace_id"][inside] = trace_ids[part[target[inside]]]
    return np.concatenate((links, _link_rows(apart, trace_ids[part[tree.parent[apart]]], table.parent_span_id[apart])))


def _link_rows(rows: Array, trace_ids: Array, span_ids: Array) -> Array:
    links = np.zeros(len(rows), dtype=LINK)
    links["row"], links["trace_id"], links["span_id"] = rows, trace_ids, span_ids
    return links


def with_links(table: SpanTable, row: int, parts: Sequence[Part]) -> SpanTable:
    """The table with links from a row to the roots of parts."""
    added = _link_rows(
        np.full(len(parts), row),
        _trace_ids([part.trace_id for part in parts]),
        np.array([part.span_id for part in parts], dtype=np.uint64),
    )
    links = np.concatenate((table.links, added))
    return replace(table, links=links[np.argsort(links["row"], kind="stable")])
