"""How much memory was in use at most in each event, as the allocators told it, on columns.

An allocator says with each block that it hands out how much it has given out then, in all. The peak of an event is the
largest of these totals that was told inside of it, which is what was in use at that moment, by whomever; where several
devices have memory, the largest of any one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Flag, MemoryFlag
from otel_torchprof._native.loops import max_to_parents

from .memory import CPU_TYPES, DEVICE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]
Peaks = npt.NDArray[np.int64]

NO_PEAK = -1
"""Of what allocated nothing, or was told no total."""


class MemoryPeaks(NamedTuple):
    """Bytes per event of a view, 0 where it allocated nothing or the allocator told no total."""

    cpu: Peaks
    device: Peaks | None
    """None where no device reported any total."""


def peaks_of_rows(batch: Batch, types: tuple[int, ...], rows: Array | None = None) -> Peaks | None:
    """The peak of each row of a batch on devices of these types, or :data:`NO_PEAK`; None where no total was told at all.

    What a row and everything below it allocated counts. ``rows``: the row of the event around each record, where they are known
    already. Costs some 20 ns per record and 5 per row, and what it takes to find the rows.
    """
    memory = batch.memory
    if memory is None:
        return None
    if not (np.isin(memory["device_type"], types) & (memory["total_allocated"] >= 0)).any():
        return None
    rows = rows_of(batch, memory["event"]) if rows is None else rows
    return _highest(batch["parent"], rows, memory, _handed_out(memory, types))


def peaks_between(batch: Batch, types: tuple[int, ...], start: Array, end: Array) -> Peaks:
    """The highest total that was told between two times each (Unix ns), at whatever, on any thread; or :data:`NO_PEAK`."""
    memory = batch.memory
    if memory is None:
        return np.full(len(start), NO_PEAK, dtype=np.int64)
    return highest_between(memory, np.isin(memory["device_type"], types), start, end)


def peaks_of_view(view: TreeView, place: Array) -> MemoryPeaks | None:
    """The peaks of the events of a view; None where memory was not recorded.

    ``place``: see :func:`~otel_torchprof._tree.memory.places_of`. Asynchronous events have the highest total of all that any
    thread allocated from their begin to their end, as with what they allocate. Costs as :func:`peaks_of_rows`; for them, as :func:`highest_between`.
    """
    memory = view.batch.memory
    if memory is None:
        return None
    device = _handed_out(memory, DEVICE_TYPES)
    return MemoryPeaks(
        _of_view(view, memory, place, _handed_out(memory, CPU_TYPES)),
        _of_view(view, memory, place, device) if device.any() else None,
    )


def highest_between(memory: Mapping[str, Array], counted: Array, start: Array, end: Array) -> Peaks:
    """The highest total of the records that count between two times each, both included; :data:`NO_PEAK` for none.

    Costs a sort of the records where they do not stand by time, and for intervals of up to n records log2(n) passes over them.
    """
    time, highest = memory["time"][counted], memory["total_allocated"][counted].astype(np.int64)
    if (time[1:] < time[:-1]).any():
        order = np.argsort(time, kind="stable")
        time, highest = time[order], highest[order]
    first, last = np.searchsorted(time, start, side="left"), np.searchsorted(time, end, side="right")
    found = np.full(len(start), NO_PEAK, dtype=np.int64)
    # In pass k `highest` holds the maximum of 2^k records from each on; two of these cover an interval of up to twice as many.
    count, width = last - first, 1
    while (left := count >= width).any():
        here = np.flatnonzero(left & (count < 2 * width))
        found[here] = np.maximum(highest[first[here]], highest[last[here] - width])
        highest = np.maximum(highest[:-width], highest[width:])
        width *= 2
    return np.maximum(found, NO_PEAK)


def _of_view(view: TreeView, memory: Mapping[str, Array], place: Array, counted: Array) -> Peaks:
    peaks = _highest(view.parent, place, memory, counted)
    alone = np.flatnonzero((view.batch["flags"][view.rows] & Flag.ASYNC) != 0)
    if alone.size:
        rows = view.rows[alone]
        peaks[alone] = highest_between(memory, counted, view.batch["start"][rows], view.batch["end"][rows])
    return np.maximum(peaks, 0)


def _highest(parent: Array, place: Array, memory: Mapping[str, Array], counted: Array) -> Peaks:
    """The highest total of the records that count, at their places and at all that is around these."""
    peaks = np.full(len(parent), NO_PEAK, dtype=np.int64)
    inside = np.flatnonzero(counted & (place >= 0))
    np.maximum.at(peaks, place[inside], memory["total_allocated"][inside])
    return max_to_parents(parent, peaks)


def _handed_out(memory: Mapping[str, Array], types: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """The records of blocks that were handed out on such devices, with a total."""
    had = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0
    counted = np.isin(memory["device_type"], types) & had & (memory["bytes"] > 0) & (memory["total_allocated"] >= 0)
    return np.asarray(counted)
