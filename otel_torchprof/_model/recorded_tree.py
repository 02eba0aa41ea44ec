"""All recorded events and memory records as one tree, for torch's ``experimental_event_tree()``.

Unlike in the list of events, nothing is hidden, merged or moved to another parent. Left out are modules, since the tree has their calls,
and pauses of the garbage collector, which torch's tree cannot represent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.frame_info import ModuleInfo, OptimizerInfo
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind, MemoryFlag

from .frames import COLLECTION_PREFIX, nested_parents
from .inputs import storages
from .memory import device_number
from .tree import lifted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.frame_info import FrameInfo, ParameterInfo, TensorInfo

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RecordedTree:
    """The nodes in the order in which they began. Arrays have one entry per node. Immutable."""

    batch: Batch
    row: npt.NDArray[np.int64]
    """Row in the batch; for a memory record, ``len(batch)`` plus its row in ``batch.memory``."""
    parent: npt.NDArray[np.int64]
    """Position of the parent node, -1 for none; always smaller than the node's own."""
    start: npt.NDArray[np.int64]
    """Unix ns."""
    position: npt.NDArray[np.int64]
    """By the numbers in ``row``, the position of the node; -1 for none."""

    def __len__(self) -> int:
        return len(self.row)


def recorded_tree(batch: Batch) -> RecordedTree:
    """Returns the tree of a batch. Costs some 100 ns per event and memory record.

    A backward function without a parent on its own thread gets as its parent the event that was open on the thread of its forward operator.
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
    """Returns the parents; backward functions on other threads get the event that was open on their forward thread."""
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
    """Returns for each time the innermost row of a thread that was open then; -1 for none. ``rows`` are sorted by start."""
    last = np.searchsorted(batch["start"][rows], times, "right") - 1
    open_rows = np.where(last >= 0, np.append(rows, -1)[last], -1)
    end, above = np.append(batch["end"], np.iinfo(np.int64).max), np.append(parent[: len(batch)], -1)
    moving = np.flatnonzero(end[open_rows] < times)
    while moving.size:
        open_rows[moving] = above[open_rows[moving]]
        moving = moving[end[open_rows[moving]] < times[moving]]
    return open_rows


# ---- Identity of tensors: numbers of storages and of tensors, as torch's profiler assigns them ----


class TensorId(NamedTuple):
    """The two numbers of a tensor; None if it has no storage, or was not recorded."""

    tensor: int | None = None
    storage: int | None = None


NO_ID = TensorId()


@dataclass(frozen=True, eq=False)
class TensorIds:
    """Numbers of storages and tensors, -1 for none. Immutable."""

    of_storage: tuple[Array, Array]
    """Tensor and storage number of each storage of the operators' inputs, in the order of :func:`~.inputs.storages`."""
    first_storage: npt.NDArray[np.int64]
    """By row of the batch, the index in ``of_storage`` of its first input."""
    of_record: tuple[Array, Array]
    """Tensor and storage number of each memory record."""
    of_known: dict[int, TensorId]
    """Ids of the tensors of modules and optimizers, by the ``id()`` of the :class:`TensorInfo`."""
    first_calls: dict[int, int]
    """Position of the first call of each module and optimizer, by the ``id()`` of its :class:`ModuleInfo` or :class:`OptimizerInfo`."""

    def of_input(self, row: int, number: int) -> TensorId:
        """Returns the id of a row's input; ``number`` counts only tensors that have a storage."""
        return _at(self.of_storage, int(self.first_storage[row]) + number)

    def of_memory(self, record: int) -> TensorId:
        """Returns the id of the tensor of a memory record."""
        return _at(self.of_record, record)


def _at(numbers: tuple[Array, Array], index: int) -> TensorId:
    tensor, storage = (column.item(index) for column in numbers)
    return TensorId(None if tensor < 0 else tensor, None if storage < 0 else storage)


def tensor_ids(tree: RecordedTree, device_type: Callable[[str], int]) -> TensorIds:
    """Numbers the tensors of a tree. ``device_type``: returns the number of a device type, given its name.

    Costs some 300 ns per tensor and memory record.
    """
    batch = tree.batch
    seen = storages(batch)
    memory = batch.memory or {name: np.empty(0, np.int64) for name in _OF_MEMORY}
    first_calls = dict(_first_calls(tree))
    known = [(place, tensor) for place, owner in first_calls.values() for tensor in _tensors_of_owner(owner)]
    infos = [info for _, info in known]
    record = len(batch) + np.arange(len(memory["time"]))
    address = (seen["address"], memory["address"], np.array([info.storage_data_ptr for info in infos], np.uint64))
    device = (
        device_number(seen["device_type"].astype(np.int64), seen["device_index"].astype(np.int64)),
        device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64)),
        np.array([_device(info, device_type) for info in infos], np.int64),
    )
    place = (tree.position[seen["row"]], tree.position[record], np.array([place for place, _ in known], np.int64))
    sizes = [len(part) for part in place]
    is_memory = np.repeat((False, True, False), sizes)
    is_free = np.zeros(len(is_memory), dtype=np.bool_)
    is_free[is_memory] = memory["bytes"] < 0
    failed = np.zeros(len(is_memory), dtype=np.bool_)
    failed[is_memory] = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) != 0
    numbers = _numbered(np.concatenate(place), np.concatenate(device), np.concatenate(address), is_free, failed)
    tensors = _tensors(numbers, ~is_memory & (np.concatenate(address) != 0))
    parts = [
        (tensor, number)
        for tensor, number in zip(*(np.split(a, np.cumsum(sizes)[:-1]) for a in (tensors, numbers)), strict=True)
    ]
    of_known = {id(info): _at(parts[2], index) for index, info in enumerate(infos)}
    first = np.searchsorted(seen["row"], np.arange(len(batch)))
    places = {owner: place for owner, (place, _) in first_calls.items()}
    return TensorIds(parts[0], first, parts[1], of_known, places)


_OF_MEMORY = ("time", "bytes", "address", "device_type", "device_index", "flags")


def _numbered(place: Array, device: Array, address: Array, is_free: Array, failed: Array) -> npt.NDArray[np.int64]:
    """Returns numbers of storages, from 1 in the order of their first positions in the tree; -1 for none."""
    numbers = np.full(len(place), -1, dtype=np.int64)
    chosen = np.flatnonzero(~failed & (place >= 0))
    order = chosen[np.lexsort((place[chosen], address[chosen], device[chosen]))]
    begins = np.ones(len(order), dtype=np.bool_)
    before, this = order[:-1], order[1:]
    begins[1:] = (device[this] != device[before]) | (address[this] != address[before]) | is_free[before]
    storage = np.cumsum(begins) - 1
    # By first occurrence; tensors of one node by the order of its inputs.
    first = order[begins]
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.lexsort((first, place[first]))] = np.arange(1, len(first) + 1)
    numbers[order] = rank[storage]
    return numbers


def _tensors(storage: Array, is_tensor: Array) -> npt.NDArray[np.int64]:
    """Returns numbers of tensors, from 0 in the order of storage numbers; -1 for storages without a known tensor."""
    has_tensor = np.zeros(int(storage.max(initial=0)) + 2, dtype=np.bool_)
    has_tensor[storage[is_tensor]] = True
    has_tensor[-1] = False  # index -1: no storage
    numbers = np.where(has_tensor, np.cumsum(has_tensor) - 1, -1)
    tensor_numbers: npt.NDArray[np.int64] = numbers[storage]
    return tensor_numbers


def _first_calls(tree: RecordedTree) -> Iterator[tuple[int, tuple[int, ModuleInfo | OptimizerInfo]]]:
    """Yields for each module and optimizer the ``id()`` of its info, the position of its first call, and the info."""
    batch, done = tree.batch, set[int]()
    info = batch.frame_info
    if info is None:
        return
    calls = batch.of_kind(Kind.FRAME)
    is_module = np.isin(batch["name"][calls], np.fromiter(info.modules, np.int64))
    is_step = np.isin(batch["fwd_thread"][calls], np.fromiter(info.optimizers, np.int64))
    calls = calls[is_module | is_step]
    for row in calls[np.argsort(tree.position[calls], kind="stable")].tolist():
        for owner in called(tree, row, info.at(batch["start"].item(row))):
            if owner is not None and id(owner) not in done:
                done.add(id(owner))
                yield id(owner), (tree.position.item(row), owner)


def _tensors_of_owner(owner: ModuleInfo | OptimizerInfo) -> list[TensorInfo]:
    """Returns all tensors of a module or an optimizer in torch's order."""
    parameters: Iterable[ParameterInfo]
    if isinstance(owner, ModuleInfo):
        parameters = owner.parameters
    else:
        parameters = (parameter for group in owner.groups for parameter in group.parameters)
    return [tensor for parameter in parameters for tensor in tensors_of(parameter)]


def called(tree: RecordedTree, row: int, info: FrameInfo) -> tuple[ModuleInfo | None, OptimizerInfo | None]:
    """Returns the module that a row calls, and the optimizer whose step it is; None for none."""
    batch = tree.batch
    return info.modules.get(batch["name"].item(row)), info.optimizers.get(batch["fwd_thread"].item(row))


def tensors_of(parameter: ParameterInfo) -> Iterator[TensorInfo]:
    """Yields the tensors of a parameter at the first call, as torch records them: itself, its gradient, its optimizer state."""
    if parameter.tensor is not None:
        yield parameter.tensor
    if parameter.gradient is not None and not parameter.has_late_gradient:
        yield parameter.gradient
    yield from (tensor for name, tensor in parameter.state.items() if name not in parameter.late_state)


def _device(info: TensorInfo, device_type: Callable[[str], int]) -> int:
    name, _, index = info.device.partition(":")
    return int(device_number(device_type(name), int(index or 0)))
