"""Which backward function belongs to which forward operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import Scope

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch


def forward_backward(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs each backward function with the forward operator that made it.

    Returns two arrays of the same length, rows of forward operators and rows of backward functions, sorted by the
    latter. A backward function is in at most one pair; a forward operator in as many as it has backward passes
    (``retain_graph``).

    Torch gives a backward function the sequence number of its graph node and the id of the thread that made the node.
    An operator records the number that the *next* node of its thread will have, so every operator that surrounds or
    comes shortly before the making of a node carries the node's number; the one that made it is the latest to start.
    Hence: same number, ``torch_tid`` of the thread equal to ``fwd_thread``, not itself a backward function, latest
    start not after that of the backward function (of equal starts the deeper row). An operator *inside* a backward
    function is a candidate like any other: there activation checkpointing runs the forward again, and ``create_graph``
    makes the nodes of the second derivative. Without either, gradients are off there and operators carry no number.

    O(n log n) in the events that have a sequence number. Pure; safe from any thread.
    """
    numbered = np.flatnonzero(batch["sequence_nr"] >= 0)
    backward = batch["scope"][numbered] == Scope.BACKWARD_FUNCTION
    torch_tids = np.array([thread.torch_tid for thread in batch.threads], dtype=np.int64)
    made_on = np.where(backward, batch["fwd_thread"][numbered], torch_tids[batch["thread"][numbered]])
    known = made_on != 0
    rows, backward, made_on = numbered[known], backward[known], made_on[known]

    # In this order the forward operator of a backward function is the last one before it, if that has the same key. The
    # sort is stable, so of equal starts the later row, which is the deeper one, comes last.
    order = np.lexsort((backward, batch["start"][rows], batch["sequence_nr"][rows], made_on))
    rows, backward, made_on = rows[order], backward[order], made_on[order]
    number = batch["sequence_nr"][rows]
    positions = np.arange(len(rows))
    last_forward = np.maximum.accumulate(np.where(backward, -1, positions))

    at = positions[backward & (last_forward >= 0)]
    to = last_forward[at]
    same = (number[to] == number[at]) & (made_on[to] == made_on[at])
    forward_rows, backward_rows = rows[to[same]], rows[at[same]]
    by_backward = np.argsort(backward_rows, kind="stable")
    return forward_rows[by_backward], backward_rows[by_backward]
