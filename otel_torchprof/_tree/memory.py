"""What each event allocated and freed, on columns.

A block belongs to the event that was open around it on its thread when it was allocated, and to all events around that
one; so does what is freed. Torch goes by the time instead: it adds what one thread allocates to whatever is open
on any other thread at that moment. On one thread the two are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import MEMORY_KIND, Flag, MemoryFlag
from otel_torchprof._native.loops import add_to_parents

from .span_table import extend_names
from .tree import hidden_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]

MEMORY_NAME = "[memory]"
OUT_OF_MEMORY_NAME = "[OutOfMemory]"

CPU_TYPES = (0, 2, 5)
"""``c10::DeviceType`` of what counts as the CPU's: CPU, MKLDNN, IDEEP."""
DEVICE_TYPES = (1, 6, 12, 20)
"""... and of what counts as a device's: CUDA, HIP, XPU, PrivateUse1. The others count for neither, as in torch."""


class MemoryUse(NamedTuple):
    """Bytes allocated minus bytes freed in each event of a view and below it."""

    cpu: npt.NDArray[np.int64]
    device: npt.NDArray[np.int64] | None
    """None where no device reported anything."""


class MovedMemory(NamedTuple):
    """Bytes that each row of a batch and what is below it allocated, and freed; as recorded, nothing left out."""

    allocated: npt.NDArray[np.int64]
    released: npt.NDArray[np.int64]


def with_memory_events(batch: Batch) -> Batch:
    """The batch with a row more for all memory that torch lists as an event of its own; itself where there is none.

    That is what no displayed event was open around, as ``[memory]``, and every time that an allocator had no more, as
    ``[OutOfMemory]``. The rows stand at the end, with the kind :data:`MEMORY_KIND`; in the new batch's ``memory`` what is
    ``[memory]`` belongs to its row. Costs some 20 ns per record, and a copy of the columns where there is such a row.
    """
    memory = batch.memory
    if memory is None or not len(memory["time"]):
        return batch
    enclosing = _listed_rows(batch, memory)
    failed = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) != 0
    alone = (enclosing < 0) & ~_during_async(batch, memory["time"])
    chosen = np.flatnonzero(alone | failed)
    if not chosen.size:
        return batch
    added, taken = _added_columns(batch, memory, chosen), chosen[~failed[chosen]]
    added["parent"] = enclosing[chosen]
    added["name"] = len(batch.names) + failed[chosen]
    event = memory["event"].copy()
    event[taken] = added["id"][~failed[chosen]]
    columns = {
        name: np.concatenate((column, np.asarray(added[name]).astype(column.dtype)))
        for name, column in batch.columns.items()
    }
    names = extend_names(batch.names, [MEMORY_NAME, OUT_OF_MEMORY_NAME])
    return replace(batch, columns=columns, names=names, memory={**memory, "event": event})


def memory_of(view: TreeView, place: Array | None = None) -> MemoryUse | None:
    """What the events of a view allocated and freed; None where that was not recorded.

    ``place``: the view's :func:`places_of`, where they are known already. Asynchronous events have what torch gives them: all that happened on any thread from their begin to their end. Costs
    some 100 ns per record and 5 per event.
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
    """What the rows of a batch moved on devices of these types; None where nothing of these was recorded.

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
    """Sizes of the records that count, added to their places and to all that is around these."""
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
    """Which of the times lie within an asynchronous event."""
    rows = np.flatnonzero(_is_async(batch))
    begun = np.searchsorted(np.sort(batch["start"][rows]), time, side="right")
    ended = np.searchsorted(np.sort(batch["end"][rows]), time, side="left")
    return np.asarray(begun > ended)


def _is_async(batch: Batch) -> npt.NDArray[np.bool_]:
    return np.asarray((batch["flags"] & Flag.ASYNC) != 0)


def _listed_rows(batch: Batch, memory: Mapping[str, Array]) -> npt.NDArray[np.int64]:
    """Row of the innermost event around each record that torch would list, -1 for none."""
    rows, hidden = rows_of(batch, memory["event"]), hidden_rows(batch, modules=False)
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
    """Position in the view of each row, or of the innermost event around it that is in the tree; -1 for none."""
    batch = view.batch
    position = np.full(len(batch) + 1, -1, dtype=np.int64)
    position[view.rows] = np.arange(len(view))
    apart = position[:-1] < 0
    apart |= _is_async(batch)
    return position[_climbed(batch, rows, apart)]


def _added_columns(batch: Batch, memory: Mapping[str, Array], chosen: Array) -> dict[str, Array]:
    """Rows for some records; names and parents are still to come."""
    # Not an id that a pair of marks has, whose event may have been dropped.
    taken = 0 if batch.devices is None else int(batch.devices["event"].max(initial=0))
    count, first = len(chosen), max(int(batch["id"].max(initial=0)), taken) + 1
    columns = {name: np.zeros(count, dtype=column.dtype) for name, column in batch.columns.items()}
    columns |= {name: np.full(count, -1, dtype=np.int64) for name in ("sequence_nr", "inputs")}
    columns["id"] = np.arange(first, first + count, dtype=np.uint64)
    columns["start"] = columns["end"] = memory["time"][chosen]
    columns["thread"] = columns["end_thread"] = memory["thread"][chosen]
    columns["kind"] = np.full(count, MEMORY_KIND)
    return columns
