"""Events that stand for several calls, as in files with reduced traces: what sums over a batch count for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._native.loops import self_times, subtract_from_parents

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

COLLAPSED = "(collapsed into others)"
"""The entry of averages for spans that were collapsed into others."""


class Weights(NamedTuple):
    """What the rows of a batch stand for, one entry each; times in ns."""

    calls: npt.NDArray[np.int64]
    duration: npt.NDArray[np.int64]
    collapsed: npt.NDArray[np.int64]
    """Total duration of collapsed calls inside the event."""
    flops: npt.NDArray[np.int64]
    """Floating-point operations of these calls, as in the file; -1: not in the file."""


def weights_of(batch: Batch) -> Weights | None:
    """What each row stands for; None where each is one call."""
    reductions = batch.reductions
    if reductions is None:
        return None
    rows = rows_of(batch, reductions["event"])
    here = rows >= 0
    ones, none = np.ones(len(batch), np.int64), np.zeros(len(batch), np.int64)
    weights = Weights(ones, batch["end"] - batch["start"], none, -ones)
    for values, name in zip(weights, ("calls", "duration", "collapsed_duration", "flops"), strict=True):
        values[rows[here]] = reductions[name][here]
    return weights


def own_times(batch: Batch) -> npt.NDArray[np.int64]:
    """The self time of each row, ns: without its children, and without what was collapsed."""
    weights, parent = weights_of(batch), batch["parent"]
    if weights is None:
        return self_times(parent, batch["start"], batch["end"])
    own: npt.NDArray[Any] = weights.duration - weights.collapsed
    subtract_from_parents(own, parent, weights.duration)
    return own
