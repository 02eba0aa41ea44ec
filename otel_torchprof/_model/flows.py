"""Pairs of backward functions and their forward operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.schema import Scope
from otel_torchprof._native import loops

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Array, Batch

EVALUATION = "autograd::engine::evaluate_function: "
"""Prefix of the autograd engine's event around each backward function; torch's lists give the event the numbers of that function."""
_COLUMNS = ("sequence_nr", "start", "kind", "scope", "thread", "fwd_thread")


def forward_backward(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs each backward function with the forward operator that made it.

    Returns two arrays of the same length, rows of forward operators and rows of backward functions, sorted by the
    latter. A backward function is in at most one pair; a forward operator in as many as it has backward passes
    (``retain_graph``).

    Torch gives a backward function the sequence number of its graph node and the id of the thread that made the node.
    An operator records the number that the *next* node of its thread will have, so every operator that encloses or shortly
    precedes the creation of a node has the node's number; the one that created it is the latest to start. Hence: same number, ``torch_tid`` of the thread equal to ``fwd_thread``, not itself a backward function, latest
    start not after that of the backward function (with equal starts, the deeper row). An operator *inside* a backward
    function is a candidate like any other: there activation checkpointing runs the forward again, and ``create_graph``
    makes the nodes of the second derivative. Without either, gradients are off there and operators carry no number.

    Linear in the events. Thread-safe.
    """
    if not has_backward(batch):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    numbered = numbered_events(batch)
    forward, backward = pair(numbered)
    return numbered.row[forward], numbered.row[backward]


def has_backward(batch: Batch) -> bool:
    """Whether the batch has a backward function."""
    return bool((batch["scope"] == int(Scope.BACKWARD_FUNCTION)).any())


class NumberedEvents(NamedTuple):
    """The events with an autograd sequence number and a known thread; one entry each."""

    row: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    made_on: npt.NDArray[np.int64]
    """Torch's id of the thread on which the node of the graph was made."""
    start: npt.NDArray[np.int64]
    is_backward: npt.NDArray[np.bool_]

    def at(self, which: npt.NDArray[Any]) -> NumberedEvents:
        """Returns the events at the given positions, or where the mask is true."""
        return NumberedEvents(*(column[which] for column in self))

    def followed_by(self, other: NumberedEvents) -> NumberedEvents:
        """Returns these events, then those of ``other``."""
        return NumberedEvents(*(np.concatenate(columns) for columns in zip(self, other, strict=True)))


def numbered_events(batch: Batch) -> NumberedEvents:
    """Returns the events of a batch that can be in a pair, in the order of their rows: few are."""
    torch_tids = np.array([thread.torch_tid for thread in batch.threads], dtype=np.int64)
    return NumberedEvents(
        **loops.numbered_events({**{name: batch[name] for name in _COLUMNS}, "torch_tid": torch_tids})
    )


def latest_forward(events: NumberedEvents) -> NumberedEvents:
    """Returns the forward operators with which later backward functions can be paired. ``events`` are in the order of their rows.

    Consecutive operators of a thread with the same number are candidates for the same backward function; the last one is its
    operator. If gradients are on but nothing needs any, one operator of all remains.
    """
    at = np.flatnonzero(~events.is_backward)
    number, made_on = events.number[at], events.made_on[at]
    is_last = np.ones(len(at), dtype=np.bool_)
    is_last[:-1] = (number[1:] != number[:-1]) | (made_on[1:] != made_on[:-1])
    return events.at(at[is_last])


def pair(events: NumberedEvents) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the positions of forward operators and of their backward functions, sorted by the latter."""
    return loops.paired_events(events._asdict())


def numbered_rows(batch: Batch) -> Array:
    """Returns for each row the row whose autograd numbers torch displays: itself, or for the engine's event the backward function inside.

    Torch copies the numbers when a profile ends, for two consecutive events of a thread.
    """
    rows = np.arange(len(batch))
    thread, scope = batch["thread"], batch["scope"]
    is_evaluation = batch.names.matching((), (EVALUATION,))
    if is_evaluation is None:
        return rows
    enclosing = (
        is_evaluation[batch["name"][:-1]] & (scope[:-1] == Scope.FUNCTION) & (scope[1:] == Scope.BACKWARD_FUNCTION)
    )
    rows[:-1] += enclosing & (thread[1:] == thread[:-1])
    return rows
