"""Memory that each event allocated and freed, totals over time, and peaks, as columns.

An allocation or release belongs to the event that was open on its thread at that time, and to the ancestors of that event. Torch
uses only the time: it also adds allocations of one thread to events that are open on other threads. For one thread the results are
the same.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.joined import rows_of, with_rows
from otel_torchprof._columns.schema import MEMORY_KIND, Flag, MemoryFlag
from otel_torchprof._native.loops import add_to_parents, max_to_parents

from .span_table import extend_names
from .tree import hidden_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]

MEMORY_NAME = "[memory]"
OUT_OF_MEMORY_NAME = "[OutOfMemory]"

CPU_TYPES = (0, 2, 5)
"""``c10::DeviceType`` of what counts as the CPU's: CPU, MKLDNN, IDEEP."""
DEVICE_TYPES = (1, 6, 12, 20)
"""... and of what counts as a device's: CUDA, HIP, XPU, PrivateUse1. The others count for neither, as in torch."""


def device_number(device_type: Any, device_index: Any) -> Any:
    """One number for a device; a missing index counts as 0."""
    return device_type * 256 + np.maximum(device_index, 0)


class MemoryUse(NamedTuple):
    """Bytes allocated minus bytes freed in each event of a view and below it."""

    cpu: npt.NDArray[np.int64]
    device: npt.NDArray[np.int64] | None
    """None if no device reported anything."""


class MovedMemory(NamedTuple):
    """Bytes allocated and freed by each row of a batch and its descendants, as recorded."""

    allocated: npt.NDArray[np.int64]
    released: npt.NDArray[np.int64]


def with_memory_events(batch: Batch) -> Batch:
    """Returns the batch with a row for each memory record that torch lists as an event; the batch itself if there is none.

    These are allocations and releases outside of displayed events, ``[memory]``, and failed allocations, ``[OutOfMemory]``. The rows are at
    the end, in the module that was open, and have the kind :data:`MEMORY_KIND`; in the new batch's ``memory`` the records of ``[memory]`` belong to them. Costs some
    20 ns per record, and a copy of the columns if there is such a row.
    """
    memory = batch.memory
    if memory is None or not len(memory["time"]):
        return batch
    rows = rows_of(batch, memory["event"])
    enclosing = _listed_rows(batch, rows)
    failed = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) != 0
    alone = (enclosing < 0) & ~_during_async(batch, memory["time"])
    chosen = np.flatnonzero(alone | failed)
    if not chosen.size:
        return batch
    time, thread = memory["time"][chosen], memory["thread"][chosen]
    added = {"start": time, "end": time, "thread": thread, "end_thread": thread, "parent": rows[chosen]}
    added |= {"name": len(batch.names) + failed[chosen], "kind": np.full(len(chosen), MEMORY_KIND)}
    extended = with_rows(batch, added, len(chosen))
    event = memory["event"].copy()
    event[chosen[~failed[chosen]]] = extended["id"][len(batch) :][~failed[chosen]]
    names = extend_names(batch.names, [MEMORY_NAME, OUT_OF_MEMORY_NAME])
    return replace(extended, names=names, memory={**memory, "event": event})


def memory_of(view: TreeView, place: Array | None = None) -> MemoryUse | None:
    """Returns the memory that the events of a view allocated and freed; None if memory was not recorded.

    ``place``: the view's :func:`places_of`, if known already. As in torch, asynchronous events get all records of any thread between their
    start and end. Costs some 100 ns per record and 5 per event.
    """
    memory = view.batch.memory
    if memory is None:
        return None
    place = places_of(view) if place is None else place
    had = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0
    is_device = np.isin(memory["device_type"], DEVICE_TYPES) & had
    device = _inclusive(view, memory, place, is_device) if is_device.any() else None
    return MemoryUse(_inclusive(view, memory, place, np.isin(memory["device_type"], CPU_TYPES) & had), device)


def moved_memory(batch: Batch, types: tuple[int, ...], rows: Array | None = None) -> MovedMemory | None:
    """Memory that the rows of a batch allocated and freed on devices of these types; None if none was recorded.

    ``rows``: the row of the event around each record, where they are known already.
    """
    memory = batch.memory
    if memory is None:
        return None
    had = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0
    counted = np.isin(memory["device_type"], types) & had
    if not counted.any():
        return None
    rows = rows_of(batch, memory["event"]) if rows is None else rows
    size = memory["bytes"]
    return MovedMemory(
        _summed(batch["parent"], rows, size, counted & (size > 0)),
        _summed(batch["parent"], rows, -size, counted & (size < 0)),
    )


def _summed(parent: Array, place: Array, size: Array, counted: Array) -> npt.NDArray[np.int64]:
    """Returns the sums of the counted records at their places and at the ancestors of these."""
    values = np.zeros(len(parent), dtype=np.int64)
    inside = np.flatnonzero(counted & (place >= 0))
    np.add.at(values, place[inside], size[inside])
    return add_to_parents(parent, values)


def _inclusive(view: TreeView, memory: Mapping[str, Array], place: Array, counted: Array) -> npt.NDArray[np.int64]:
    values = _summed(view.parent, place, memory["bytes"], counted)
    alone = np.flatnonzero(_is_async(view.batch)[view.rows])
    if alone.size:
        rows = view.rows[alone]
        values[alone] = _during(memory, counted, view.batch["start"][rows], view.batch["end"][rows])
    return values


def _during(memory: Mapping[str, Array], counted: Array, start: Array, end: Array) -> Array:
    """Bytes of the records between two times each."""
    time, size = memory["time"][counted], memory["bytes"][counted]
    order = np.argsort(time, kind="stable")
    sums, time = np.concatenate(([0], np.cumsum(size[order]))), time[order]
    during: Array = sums[np.searchsorted(time, end, side="right")] - sums[np.searchsorted(time, start, side="left")]
    return during


def _during_async(batch: Batch, time: Array) -> npt.NDArray[np.bool_]:
    """Mask of the times that lie within an asynchronous event."""
    rows = np.flatnonzero(_is_async(batch))
    begun = np.searchsorted(np.sort(batch["start"][rows]), time, side="right")
    ended = np.searchsorted(np.sort(batch["end"][rows]), time, side="left")
    return np.asarray(begun > ended)


def _is_async(batch: Batch) -> npt.NDArray[np.bool_]:
    return np.asarray((batch["flags"] & Flag.ASYNC) != 0)


def _listed_rows(batch: Batch, rows: Array) -> npt.NDArray[np.int64]:
    """The innermost event in or around each row that torch would list, -1 for none."""
    hidden = hidden_rows(batch, modules=False)
    return rows if hidden is None else _climbed(batch, rows, hidden)


def _climbed(batch: Batch, rows: Array, passed: Array) -> npt.NDArray[np.int64]:
    """The rows, or where they are to be passed over the nearest around them that are not; -1 for none."""
    rows = rows.copy()
    moving = np.flatnonzero((rows >= 0) & passed[rows])
    while moving.size:
        above = batch["parent"][rows[moving]]
        rows[moving] = above
        moving = moving[(above >= 0) & passed[above]]
    return rows


def places_of(view: TreeView) -> npt.NDArray[np.int64]:
    """Position in the view of the innermost event around each record of memory that is in the tree, -1 for none.

    None of them for a batch without memory. Costs some 50 ns per record.
    """
    memory = view.batch.memory
    if memory is None:
        return np.empty(0, dtype=np.int64)
    return places(view, rows_of(view.batch, memory["event"]))


def places(view: TreeView, rows: Array) -> npt.NDArray[np.int64]:
    """Returns the position in the view of each row or of its innermost ancestor that is in the tree; -1 for none."""
    batch = view.batch
    position = np.full(len(batch) + 1, -1, dtype=np.int64)
    position[view.rows] = np.arange(len(view))
    apart = position[:-1] < 0
    apart |= _is_async(batch)
    return position[_climbed(batch, rows, apart)]


# ---- Changes of memory blocks over time, in torch's terms ----


class Category(enum.IntEnum):
    """Purpose of memory: torch's names, with their numbers in files."""

    PARAMETER = 0
    OPTIMIZER_STATE = 1
    INPUT = 2
    TEMPORARY = 3
    ACTIVATION = 4
    GRADIENT = 5
    AUTOGRAD_DETAIL = 6
    UNKNOWN = 7


class MemoryAction(enum.IntEnum):
    """A change of a block: the values of torch's ``MemoryAction``."""

    PREEXISTING = 1
    CREATE = 2
    INCREMENT_VERSION = 3
    DESTROY = 4


class Changes(NamedTuple):
    """Changes of blocks, in order of time and then of action."""

    time: npt.NDArray[np.int64]
    """Unix ns; -1 for blocks older than the recording."""
    action: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    """Size of the block."""
    category: npt.NDArray[np.int64]
    """Category of the block; for a change of category, the former one."""
    later: npt.NDArray[np.int64]
    """Category of the block after the change."""
    device: npt.NDArray[np.int64]
    """See :func:`~.memory_categories.device_number`."""

    def chosen(self, which: Array) -> Changes:
        """The changes selected by a mask or by indices."""
        return Changes(*(column[which] for column in self))

    def in_time(self) -> Changes:
        """The changes sorted by time, then action."""
        return self.chosen(np.lexsort((self.action, self.time)))


def changes_of_unknown(memory: Mapping[str, Array]) -> Changes:
    """Changes that the allocator reported for blocks without a known tensor, as in torch; unsorted.

    A block is identified by its address: an allocation at the address of a living block is its next version; a release
    without a living block is of one that existed before the recording.
    """
    in_time = np.argsort(memory["time"], kind="stable")
    device = device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64))[in_time]
    size, time, address = (memory[name][in_time] for name in ("bytes", "time", "address"))
    by_block = np.lexsort((address, device))
    lives = np.zeros(len(size), dtype=bool)
    same = address[by_block[1:]] == address[by_block[:-1]]
    same &= device[by_block[1:]] == device[by_block[:-1]]
    lives[by_block[1:]] = same & (size[by_block][:-1] > 0)
    before = (size <= 0) & ~lives
    action = np.where(
        size > 0, np.where(lives, MemoryAction.INCREMENT_VERSION, MemoryAction.CREATE), MemoryAction.DESTROY
    )
    count = int(before.sum())
    unknown = np.full(len(size) + count, Category.UNKNOWN, dtype=np.int64)
    return Changes(
        np.concatenate((np.full(count, -1), time)),
        np.concatenate((np.full(count, MemoryAction.PREEXISTING), action)),
        np.abs(np.concatenate((size[before], size))),
        unknown,
        unknown,
        np.concatenate((device[before], device)),
    )


# ---- Totals of each device's allocator over time ----

MOST_SAMPLES = 100_000
"""Most samples per quantity; larger series are thinned to those that a plot needs."""
_KEPT_OF_EACH_SEGMENT = 4


class Total(NamedTuple):
    """One quantity of one device, sorted by time; each sample holds until the next."""

    device_type: int
    """``c10::DeviceType``."""
    device_index: int
    """Index among devices of its type; -1 if there is only one."""
    quantity: str
    """``allocated``: bytes in use; ``reserved``: bytes that the allocator has from the system."""
    time: npt.NDArray[np.int64]
    """Unix ns."""
    bytes: npt.NDArray[np.int64]


def totals_over_time(memory: Mapping[str, Array], most: int = MOST_SAMPLES) -> Iterator[Total]:
    """Yields the totals that the allocator of each device reported, at their changes.

    ``memory`` is :attr:`Batch.memory`. Omits quantities that were not reported, and ``reserved`` if it is always 0, as on the CPU,
    whose allocator reserves nothing. At most ``most`` samples each: see :func:`thinned`.
    Costs some 50 ns per record, and a sort where several threads recorded. Pure.
    """
    devices = memory["device_type"].astype(np.int64) << 32 | memory["device_index"].astype(np.int64) & 0xFFFFFFFF
    for device in distinct_values(devices).tolist():
        rows = np.flatnonzero(devices == device)
        time = memory["time"][rows]
        if (time[1:] < time[:-1]).any():
            rows = rows[np.argsort(time, kind="stable")]
        for quantity in ("allocated", "reserved"):
            reported = memory[f"total_{quantity}"][rows]
            known = reported >= 0
            if not known.any() or (quantity == "reserved" and reported.max() == 0):
                continue
            first = rows[np.flatnonzero(known)[0]]
            samples = thinned(*_changes(memory["time"][rows[known]], reported[known]), most)
            yield Total(int(memory["device_type"][first]), int(memory["device_index"][first]), quantity, *samples)


def thinned(time: Array, value: Array, most: int) -> tuple[Array, Array]:
    """The samples, or if they are more than ``most`` the first, lowest, highest and last of each of ``most / 4`` segments.

    Segments have equal numbers of samples. Keeps all peaks, and adds no values.
    """
    count = len(time)
    if count <= most:
        return time, value
    width = -(-count // (most // _KEPT_OF_EACH_SEGMENT))
    segments = -(-count // width)
    padded = np.full(segments * width, value[-1], dtype=value.dtype)
    padded[:count] = value
    grid, begin = padded.reshape(segments, width), np.arange(segments) * width
    ends = (begin, begin + grid.argmin(axis=1), begin + grid.argmax(axis=1), begin + width - 1)
    selected = distinct_values(np.minimum(np.concatenate(ends), count - 1))
    return time[selected], value[selected]


def _changes(time: Array, value: Array) -> tuple[Array, Array]:
    """The samples that differ from the one before."""
    changed = np.flatnonzero(np.concatenate(([True], value[1:] != value[:-1])))
    return time[changed], value[changed]


# ---- Peak of memory in use during each event ----

Peaks = npt.NDArray[np.int64]

NO_PEAK = -1
"""Peak of an event that allocated nothing or has no reported total."""


class MemoryPeaks(NamedTuple):
    """Bytes per event of a view, 0 if it allocated nothing or the allocator reported no total."""

    cpu: Peaks
    device: Peaks | None
    """None if no device reported a total."""


def peaks_of_rows(batch: Batch, types: tuple[int, ...], rows: Array | None = None) -> Peaks | None:
    """Returns the peak of each row of a batch on devices of these types, or :data:`NO_PEAK`; None if no total was reported.

    Allocations of a row and its descendants count. ``rows``: the row of the enclosing event of each record, if known already. Costs some
    20 ns per record and 5 per row, and the search of the rows.
    """
    memory = batch.memory
    if memory is None:
        return None
    if not (np.isin(memory["device_type"], types) & (memory["total_allocated"] >= 0)).any():
        return None
    rows = rows_of(batch, memory["event"]) if rows is None else rows
    return _highest(batch["parent"], rows, memory, _handed_out(memory, types))


def peaks_between(batch: Batch, types: tuple[int, ...], start: Array, end: Array) -> Peaks:
    """The highest total on any thread in each time range (Unix ns), or :data:`NO_PEAK`."""
    memory = batch.memory
    if memory is None:
        return np.full(len(start), NO_PEAK, dtype=np.int64)
    return highest_between(memory, np.isin(memory["device_type"], types), start, end)


def peaks_of_view(view: TreeView, place: Array) -> MemoryPeaks | None:
    """Returns the peaks of the events of a view; None if memory was not recorded.

    ``place``: see :func:`~otel_torchprof._model.memory.places_of`. Asynchronous events have the highest total of any thread between their
    start and end. Costs as :func:`peaks_of_rows`; for asynchronous events as :func:`highest_between`.
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
    highest_totals = np.full(len(start), NO_PEAK, dtype=np.int64)
    # In pass k `highest` has, for each record, the maximum of the 2^k records from it on; two of these cover up to 2^(k+1) records.
    count, width = last - first, 1
    while (left := count >= width).any():
        here = np.flatnonzero(left & (count < 2 * width))
        highest_totals[here] = np.maximum(highest[first[here]], highest[last[here] - width])
        highest = np.maximum(highest[:-width], highest[width:])
        width *= 2
    return np.maximum(highest_totals, NO_PEAK)


def _of_view(view: TreeView, memory: Mapping[str, Array], place: Array, counted: Array) -> Peaks:
    peaks = _highest(view.parent, place, memory, counted)
    alone = np.flatnonzero((view.batch["flags"][view.rows] & Flag.ASYNC) != 0)
    if alone.size:
        rows = view.rows[alone]
        peaks[alone] = highest_between(memory, counted, view.batch["start"][rows], view.batch["end"][rows])
    return np.maximum(peaks, 0)


def _highest(parent: Array, place: Array, memory: Mapping[str, Array], counted: Array) -> Peaks:
    """Returns the highest total of the counted records at their places and at the ancestors of these."""
    peaks = np.full(len(parent), NO_PEAK, dtype=np.int64)
    inside = np.flatnonzero(counted & (place >= 0))
    np.maximum.at(peaks, place[inside], memory["total_allocated"][inside])
    return max_to_parents(parent, peaks)


def _handed_out(memory: Mapping[str, Array], types: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """The records of blocks that were handed out on such devices, with a total."""
    had = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0
    counted = np.isin(memory["device_type"], types) & had & (memory["bytes"] > 0) & (memory["total_allocated"] >= 0)
    return np.asarray(counted)
