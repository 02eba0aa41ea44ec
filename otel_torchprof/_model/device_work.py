"""Work of devices, such as kernels and copies, as rows of a batch, and the times of the events that launched it.

Traces of torch's profiler have such work. As in torch's lists, each kernel is an event with a device time and no CPU time, and its
time also counts for the operator that launched it and for what is around that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of, with_rows
from otel_torchprof._columns.schema import WORK_KIND, Scope, WorkFlag
from otel_torchprof._native.loops import add_to_parents

from .devices import DisplayedTimes
from .memory import places

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]


def with_work_rows(batch: Batch) -> Batch:
    """Returns the batch with a row of the kind :data:`WORK_KIND` for each piece of work, in its order; the batch itself without any."""
    work = batch.work
    if work is None or not len(work["start"]):
        return batch
    is_annotation = (work["flags"] & WorkFlag.ANNOTATION) != 0
    added = {
        "start": work["start"],
        "end": work["start"] + work["duration"],
        "name": work["name"],
        "thread": work["thread"],
        "end_thread": work["thread"],
        "kind": np.full(len(is_annotation), WORK_KIND),
        "scope": np.where(is_annotation, Scope.USER_SCOPE, Scope.FUNCTION),
    }
    return with_rows(batch, added, len(is_annotation))


def work_places(batch: Batch) -> npt.NDArray[np.int64]:
    """For each row of a batch its place in ``batch.work``; -1 for rows that are no work."""
    place = np.full(len(batch), -1, dtype=np.int64)
    is_work = batch["kind"] == WORK_KIND
    place[is_work] = np.arange(int(is_work.sum()))
    return place


def work_times(view: TreeView) -> DisplayedTimes | None:
    """Device times of the events of a view, ns: of work its own, of other events that of the work that they launched; None without work."""
    batch, work = view.batch, view.batch.work
    if work is None:
        return None
    launched = np.flatnonzero((work["flags"] & WorkFlag.ANNOTATION) == 0)
    place = places(view, rows_of(batch, work["event"][launched]))
    own = np.zeros(len(view), dtype=np.int64)
    np.add.at(own, place[place >= 0], work["duration"][launched[place >= 0]])
    total = add_to_parents(view.parent, own)
    at = work_places(batch)[view.rows]
    for times in (own, total):
        times[at >= 0] = work["duration"][at[at >= 0]]
    return DisplayedTimes(own, total)
