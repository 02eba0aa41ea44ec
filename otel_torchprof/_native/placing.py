"""Native passes over the nodes of a drain: its rows, then the events that are open. See ``placing.h``. Thread-safe; without the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._process.heap import Arena

from .ffi import ffi, lib
from .loops import pointer

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]
Members = dict[str, Any]


def _pointers(columns: dict[str, Array]) -> Members:
    """The members of a struct that point to columns, and keep them alive."""
    return {name: pointer(np.ascontiguousarray(column)) for name, column in columns.items()}


def _nodes(batch: Batch) -> Members:
    opens = batch.opens
    times = _pointers({"start": batch["start"], "end": batch["end"], "open_start": opens.start})
    return {"row_count": len(batch), "open_count": len(opens), **times}


def lasting_rows(batch: Batch, shortest: int) -> npt.NDArray[np.int64]:
    """Returns the rows that last at least ``shortest`` ns. Costs 1 ns per row."""
    nodes, rows = _nodes(batch), np.empty(len(batch), dtype=np.int64)
    return rows[: lib.otp_lasting_rows(ffi.new("otp_nodes *", nodes), shortest, pointer(rows))]


class Trees(NamedTuple):
    """The trees of nodes."""

    parent: npt.NDArray[np.int32]
    """Parent of each node; -1 for none."""
    root: npt.NDArray[np.int32]
    """Topmost ancestor of each node, or itself."""
    roots: npt.NDArray[np.int64]
    """Nodes without a parent, ascending."""
    outer: npt.NDArray[np.int64]
    """Rows whose parent is open, ascending."""
    is_moved: bool
    """Whether the parent of any row among the rows differs from that in the batch."""


_TREE_BYTES = 4 + 4 + 8 + 8
"""Per node, of the columns of :class:`Trees`."""


class LongNodes(NamedTuple):
    """Nodes that are parents only of nodes that began in the same step; one entry per node."""

    is_long: npt.NDArray[np.uint8]
    step: npt.NDArray[np.int64]
    """The step in which each node began."""


def trees(batch: Batch, enclosing: Array, known: Array, known_parent: Array, long: LongNodes | None) -> Trees:
    """Returns the trees: the parent of a node is the nearest enclosing one with its context, and open when it began.

    Args:
        batch: the drained batch.
        enclosing: node around each node, int32; -1 for none.
        known: nodes with a decided parent, int64.
        known_parent: these parents, int32.
        long: None if no node is long.
    """
    count = len(enclosing)
    room = Arena(count * _TREE_BYTES)
    written = {name: room.empty(count, np.int32) for name in ("parent", "root")}
    written |= {name: room.empty(count, np.int64) for name in ("roots", "outer")}
    columns = {"enclosing": enclosing, "known": known, "known_parent": known_parent, "row_parent": batch["parent"]}
    if "context" in batch.columns:
        columns |= {"context": batch["context"], "open_context": batch.opens.context}
    if long is not None:
        columns |= long._asdict()
    members = {"nodes": _nodes(batch), "known_count": len(known), **_pointers(columns), **_pointers(written)}
    native = ffi.new("otp_live_forest *", members)
    lib.otp_make_live_forest(native)
    parent, root, roots, outer = written.values()
    return Trees(parent, root, roots[: native.root_count], outer[: native.outer_count], native.moved > 0)


class GroupSums(NamedTuple):
    """Sums over the events of a drain; one entry per trace group, times in ns."""

    start: npt.NDArray[np.int64]
    """Of the first event, which may be open; the largest number if there is none."""
    end: npt.NDArray[np.int64]
    """Of the last ended event; ``start`` if there is none."""
    own_end: npt.NDArray[np.int64]
    """Of the last event that ended on a thread of the training loop; 0 if there is none."""
    child_time: npt.NDArray[np.int64]
    """Total duration of top-level events."""
    longest: npt.NDArray[np.int64]
    """Longest of these durations."""
    events: npt.NDArray[np.int64]
    """Number of ended events."""


class PlacedNodes(NamedTuple):
    """Ids of nodes by trace group."""

    group: npt.NDArray[np.int64]
    """Trace group of each node."""
    root_id: npt.NDArray[np.uint64]
    """For each node, the span id of the root of its trace group."""
    parent_span_id: npt.NDArray[np.uint64]
    """Of rows only."""
    is_root: npt.NDArray[np.bool_]
    """Whether each node has no parent, not even in an earlier drain."""
    sums: GroupSums


_ID_BYTES = 8 + 8 + 1
"""Per node, of the columns of :class:`PlacedNodes` without the group."""


def placed_nodes(batch: Batch, made: Trees, columns: dict[str, Array]) -> PlacedNodes:
    """Returns the ids of nodes. Costs some ns per node.

    ``columns``: the other members of ``otp_placing``; ``group`` is of nodes that are their own root, and is written for the others.
    """
    count, groups = len(made.parent), len(columns["group_root"])
    room = Arena(count * _ID_BYTES)
    written = {"root_id": room.empty(count, np.uint64), "parent_span_id": room.empty(len(batch), np.uint64)}
    written["is_root"] = room.empty(count, np.uint8)
    sums = np.empty((groups, len(GroupSums._fields)), dtype=np.int64)
    columns = {**columns, "thread": batch["thread"], "parent": made.parent, "root": made.root}
    members = {"nodes": _nodes(batch), "beyond_count": len(columns["beyond"]), "group_count": groups}
    members |= _pointers(columns) | _pointers(written)
    native = ffi.new("otp_placing *", members)
    native.sums = ffi.cast("otp_group_sums *", pointer(sums))
    lib.otp_place(native)
    root_id, parent_span_id, is_root = written.values()
    return PlacedNodes(columns["group"], root_id, parent_span_id, is_root.view(np.bool_), GroupSums(*sums.T))
