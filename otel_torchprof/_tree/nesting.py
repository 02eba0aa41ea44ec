"""Which events nest in time on the thread that they ran on, as stacked slices have to: a row's ``parent`` does not say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.loops import with_crossing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch

Mask = npt.NDArray[np.bool_]


def nested_rows(batch: Batch) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """By thread of the system: its id and the rows that nest on it, by start, the longer of two first.

    Of these rows each begins after the one before it and either ends within it or begins when it has ended; so a stack of open rows
    is all that a writer of slices needs. :func:`not_nested` says which rows are missing. Costs a sort. Thread-safe.
    """
    nest = ~not_nested(batch)
    tids = _system_threads(batch)
    order = np.lexsort((-batch["end"], batch["start"], tids))
    order = order[nest[order]]
    begins = np.flatnonzero(np.diff(tids[order], prepend=-1))
    for rows in np.split(order, begins[1:]) if len(order) else ():
        yield int(tids[rows[0]]), rows


def not_nested(batch: Batch) -> Mask:
    """True for asynchronous events, for those that ended on another thread, and for what crosses another event.

    A label that is begun by one call and ended by another crosses the first call, from inside. There the call gives way: the
    label is what people look for on the thread's track. Costs two sorts.
    """
    given = ((batch["flags"] & Flag.ASYNC) != 0) | (batch["thread"] != batch["end_thread"])
    is_frame = batch["kind"] == Kind.FRAME
    track, start, end = _system_threads(batch), batch["start"], batch["end"]
    found = with_crossing(given, track, start, end)
    gives_way = np.flatnonzero(found & ~given & ~is_frame)
    if not len(gives_way) or not is_frame.any():
        return found
    parent = batch["parent"]
    for row in gives_way:
        above = parent[row]
        while above >= 0 and is_frame[above] and end[above] < end[row]:
            given[above] = True
            above = parent[above]
    return with_crossing(given, track, start, end)


def _system_threads(batch: Batch) -> npt.NDArray[np.int64]:
    return np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)[batch["thread"]]
