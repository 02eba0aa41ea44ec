"""Everything that was recorded as one tree, memory too: what torch's ``experimental_event_tree()`` is made of.

Other than in the list of events nothing is hidden, merged or taken out of the function that called it; but modules, which
their calls stand for already, and pauses of the garbage collector, of which torch's tree cannot tell, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind

from .frames import COLLECTION_PREFIX, nested_parents
from .tree import lifted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RecordedTree:
    """The nodes in the order in which they began. Arrays have one entry per node. Immutable."""

    batch: Batch
    row: npt.NDArray[np.int64]
    """Row in the batch; of memory its record behind these: ``len(batch)`` plus the row in ``batch.memory``."""
    parent: npt.NDArray[np.int64]
    """Position of the node around it, -1 for none; always smaller than its own."""
    start: npt.NDArray[np.int64]
    """Unix ns."""
    position: npt.NDArray[np.int64]
    """By row, as ``row`` has them: the position of its node, -1 for none."""

    def __len__(self) -> int:
        return len(self.row)


def recorded_tree(batch: Batch) -> RecordedTree:
    """The tree of a batch. Costs some 100 ns per event and record of memory.

    A backward function that nothing is around on its thread hangs under what was open on the thread of its forward function.
    """
    memory: Mapping[str, Array] = batch.memory or {"time": np.empty(0, np.int64), "event": np.empty(0, np.uint64)}
    parent = np.concatenate((batch["parent"], rows_of(batch, memory["event"]))).astype(np.int64)
    start = np.concatenate((batch["start"], memory["time"]))
    end = np.concatenate((batch["end"], memory["time"]))
    hidden = np.zeros(len(parent), dtype=np.bool_)
    hidden[: len(batch)] = _hidden(batch)
    parent = _with_forward(batch, lifted(nested_parents(parent, start, end), hidden), hidden[: len(batch)])
    row = np.flatnonzero(~hidden)
    row = row[np.argsort(start[row], kind="stable")]
    position = np.full(len(parent) + 1, -1, dtype=np.int64)
    position[row] = np.arange(len(row))
    return RecordedTree(batch, row, position[parent[row]], start[row], position[:-1])


def _hidden(batch: Batch) -> npt.NDArray[np.bool_]:
    hidden: npt.NDArray[np.bool_] = batch["kind"] == Kind.MODULE
    pauses = batch.names.matching((), (COLLECTION_PREFIX,))
    return hidden if pauses is None else hidden | (pauses[batch["name"]] & (batch["kind"] == Kind.FRAME))


def _with_forward(batch: Batch, parent: Array, hidden: npt.NDArray[np.bool_]) -> Array:
    """The parents with the backward functions of other threads under what was open on their forward threads."""
    kind, forward = batch["kind"], batch["fwd_thread"]
    roots = np.flatnonzero((parent[: len(batch)] < 0) & (kind == Kind.OPERATOR) & (forward != 0))
    numbers = np.array([thread.torch_tid for thread in batch.threads])[batch["thread"]]
    roots = roots[numbers[roots] != forward[roots]]
    for thread in distinct_values(forward[roots]).tolist():
        there = np.flatnonzero((numbers == thread) & ~hidden)
        own = roots[forward[roots] == thread]
        parent[own] = _open_at(batch, there, parent, batch["start"][own])
    return parent


def _open_at(batch: Batch, rows: Array, parent: Array, times: Array) -> Array:
    """Of one thread's rows, which begin one after the other, the innermost that were open at some times; -1 for none."""
    last = np.searchsorted(batch["start"][rows], times, "right") - 1
    found = np.where(last >= 0, np.append(rows, -1)[last], -1)
    end, above = np.append(batch["end"], np.iinfo(np.int64).max), np.append(parent[: len(batch)], -1)
    moving = np.flatnonzero(end[found] < times)
    while moving.size:
        found[moving] = above[found[moving]]
        moving = moving[end[found[moving]] < times[moving]]
    return found
