"""Memory that is in use: by the phase, module and operator in which it was allocated; of a recording, and while one runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import used_numbers
from otel_torchprof._columns.joined import rows_of, with_rows
from otel_torchprof._columns.schema import NEVER, Kind, MemoryFlag
from otel_torchprof._model.devices import device_name
from otel_torchprof._model.memory import device_number
from otel_torchprof._model.modules import module_hierarchy
from otel_torchprof._native.loops import roots_of

from .steps import KeptMemory, phase_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import numpy.typing as npt

    from otel_torchprof._columns.arrays import Flags, Integers
    from otel_torchprof._columns.batch import Batch, Names

_MOST_PLACES = 1 << 14
_MOST_BLOCKS = 1 << 22
_FEW = 1 << 16
_DEVICE_TYPES = 256


class _Origin(NamedTuple):
    """Where memory was allocated: the first fields of :class:`KeptMemory`, and its line."""

    phase: str
    module: str
    operator: str
    line: str


_NO_ORIGIN = _Origin("", "", "", "")


def kept_memory(batch: Batch, since: int, until: int, end: int) -> list[KeptMemory]:
    """The blocks that were allocated from ``since`` to ``until`` and are in use at ``end``, Unix ns; the largest sums first.

    A block that was freed on a thread that is not recorded counts as kept. Costs a sort of the records, and some 100 ns per event.
    """
    memory = batch.memory
    if memory is None or not len(memory["time"]):
        return []
    kept = _last_records(memory, end)
    kept = kept[(memory["bytes"][kept] > 0) & (memory["time"][kept] >= since) & (memory["time"][kept] < until)]
    places, number = _places(batch, memory["event"][kept])
    return _summed(places, number, memory["bytes"][kept])


class DeviceMemory(NamedTuple):
    """Memory of one device that is in use."""

    device: str
    """As torch names it; without an index if there is only one."""
    total: int
    """Bytes in use according to the allocator; -1 if it does not say."""
    kept: list[KeptMemory]


class MemoryInUse:
    """The blocks that are in use at the end of all batches so far, which come in order. Not thread-safe.

    Holds 24 bytes per block, of the 4 million largest, and no objects of the program.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Origin, int] = {}
        self._blocks: list[tuple[npt.NDArray[Any], ...]] = []
        """Device, address, size and number of the place; a block is where it comes last, with size 0 if it was freed."""
        self._totals: dict[int, int] = {}

    def add(self, batch: Batch) -> None:
        """Adds a drained batch; events that are open have a place, too. Costs a copy of its columns, and a sort of its records."""
        memory = batch.memory
        if memory is None or not len(memory["time"]):
            return
        last = _last_records(memory, NEVER)
        size = np.maximum(memory["bytes"][last], 0)
        places, number = _places(_with_opens(batch), np.where(size > 0, memory["event"][last], 0))
        numbers = np.array([self._number(place) for place in places], np.int32)
        device = _devices(memory)
        self._blocks.append((device[last].astype(np.int32), memory["address"][last], size, numbers[number]))
        for at in _last_of_each(device, np.argsort(memory["time"], kind="stable")):
            self._totals[int(device[at])] = int(memory["total_allocated"][at])
        first, *rest = (len(part[0]) for part in self._blocks)
        if sum(rest) > max(first, _FEW):
            self._merge()

    def by_device(self) -> list[DeviceMemory]:
        """What each device has; merges all blocks, some 300 ns each."""
        self._merge()
        places, found = list(self._numbers), []
        for number, total in self._totals.items():
            device, _, size, place = self._blocks[0]
            kept = _summed(places, place[device == number], size[device == number])
            kind, index = divmod(number, _DEVICE_TYPES)
            name = device_name(kind)
            found.append(DeviceMemory(name if name == "cpu" else f"{name}:{index}", total, kept))
        return found

    def _number(self, place: _Origin) -> int:
        if len(self._numbers) >= _MOST_PLACES:
            place = _NO_ORIGIN
        return self._numbers.setdefault(place, len(self._numbers))

    def _merge(self) -> None:
        columns = [np.concatenate(column) for column in zip(*self._blocks, strict=True)]
        if columns:
            device, address, size, _ = columns
            last = _last_of_each(device, np.lexsort((address, device)), address)
            last = last[size[last] > 0]
            if len(last) > _MOST_BLOCKS:
                last = last[np.argsort(size[last], kind="stable")[-_MOST_BLOCKS:]]
            self._blocks = [tuple(column[last] for column in columns)]


def _devices(memory: Mapping[str, Any]) -> Integers:
    numbers: Integers = device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64))
    return numbers


def _last_of_each(device: Any, order: Any, address: Any = None) -> Integers:
    """Of rows in an order in which those of one device, or address, stand together, the last of each; of a device alone, in any order."""
    if address is None:
        order = order[np.argsort(device[order], kind="stable")]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = device[order][1:] != device[order][:-1]
    if address is not None:
        is_last[:-1] |= address[order][1:] != address[order][:-1]
    last: Integers = order[is_last]
    return last


def _last_records(memory: Mapping[str, Any], end: int) -> Integers:
    """The last record of each block until then: of its allocation, or its release."""
    chosen = np.flatnonzero((memory["time"] <= end) & ((memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0))
    device, address = _devices(memory)[chosen], memory["address"][chosen]
    return chosen[_last_of_each(device, np.lexsort((memory["time"][chosen], address, device)), address)]


def _with_opens(batch: Batch) -> Batch:
    """The batch with rows for its open events, and with these as parents."""
    opens = batch.opens
    if not len(opens):
        return batch
    columns = {"id": opens.id, "start": opens.start, "end": opens.start, "thread": opens.thread, "name": opens.name}
    columns |= {"kind": opens.kind, "scope": opens.scope, "sequence_nr": opens.sequence_nr}
    whole = with_rows(batch, columns, len(opens))
    parent = whole["parent"].copy()
    parent[len(batch) :] = rows_of(whole, opens.parent)
    parent[batch.outer_rows.astype(np.int64)] = rows_of(whole, batch.outer_parents)
    return replace(whole, columns={**whole.columns, "parent": parent})


def _places(batch: Batch, events: Any) -> tuple[list[_Origin], Integers]:
    """Places, and the index of the place of each event in them, by id; 0: no event."""
    if not len(batch):
        return [_NO_ORIGIN], np.zeros(len(events), np.int64)
    rows, modules, name = rows_of(batch, events), module_hierarchy(batch), batch["name"]
    is_phase = _named(batch.names, name, lambda text: phase_of(text) is not None)
    is_operator = (batch["kind"] == int(Kind.OPERATOR)) & ~is_phase
    above = _nearest(batch, is_operator)
    is_line = (batch["kind"] == int(Kind.FRAME)) & _named(batch.names, name, _is_of_program)
    outermost = is_operator & ((batch["parent"] < 0) | (above[batch["parent"]] < 0))
    # Index 0 is no module, and no name.
    columns = [np.where(rows >= 0, modules.rows.astype(np.int64)[rows], 0)]
    for chosen in (is_phase, outermost, is_line):
        nearest = np.where(rows >= 0, _nearest(batch, chosen)[rows], -1)
        columns.append(np.where(nearest >= 0, name.astype(np.int64)[nearest], 0))
    first, number = _combined(columns)
    texts = zip(*(column[first].tolist() for column in columns), strict=True)
    return [
        _Origin(phase_of(batch.names[phase]) or "", modules.texts[module], batch.names[operator], batch.names[line])
        for module, phase, operator, line in texts
    ], number


def _named(names: Names, column: Any, is_chosen: Any) -> Flags:
    """Mask of the rows whose name is chosen; asks once per name."""
    mask = np.zeros(len(names), np.bool_)
    used = np.zeros(len(names), np.bool_)
    used[column] = True
    mask[[number for number in np.flatnonzero(used).tolist() if is_chosen(names[number])]] = True
    chosen: Flags = mask[column]
    return chosen


def _is_of_program(name: str) -> bool:
    """Whether the name of a call has a line of a file that is not torch's own."""
    return ".py(" in name and not name.startswith("torch/")


def _nearest(batch: Batch, chosen: Flags) -> Integers:
    """Row of the nearest event, in or around each, that is chosen; -1 for none."""
    rows = roots_of(np.where(chosen, -1, batch["parent"]))
    nearest: Integers = np.where(chosen[rows], rows, -1)
    return nearest


def _combined(columns: Sequence[Integers]) -> tuple[Integers, Integers]:
    """A row of each distinct combination of values, and the number of the combination of each row."""
    number, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        number, bound = number * width + column, count * width
        if bound <= 2 * max(len(number), _FEW):
            used = used_numbers(number, bound)
            index = np.empty(bound, np.int64)
            index[used] = np.arange(len(used))
            number, count = index[number], len(used)
        else:
            distinct, number = np.unique(number, return_inverse=True)
            count = len(distinct)
    first = np.empty(count, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    return first, number


def _summed(places: Sequence[_Origin], number: Integers, size: Integers) -> list[KeptMemory]:
    total = np.zeros(len(places), np.int64)
    np.add.at(total, number, size)
    blocks = np.bincount(number, minlength=len(places))
    order = np.argsort(-total, kind="stable")
    chosen = [(places[at], int(total[at]), int(blocks[at])) for at in order.tolist() if blocks[at]]
    return [KeptMemory(at.phase, at.module, at.operator, size, count, at.line) for at, size, count in chosen]


def byte_text(size: float) -> str:
    """A number of bytes with three digits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:.0f} B"
