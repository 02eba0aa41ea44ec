"""Everything that was recorded as one tree, memory too: what torch's ``experimental_event_tree()`` is made of.

Other than in the list of events nothing is hidden, merged or taken out of the function that called it; but modules, which
their calls stand for already, and pauses of the garbage collector, of which torch's tree cannot tell, are left out.
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
    """Row in the batch; of memory its record behind these: ``len(batch)`` plus the row in ``batch.memory``."""
    parent: npt.NDArray[np.int64]
    """Position of the node around it, -1 for none; always smaller than its own."""
    start: npt.NDArray[np.int64]
    """Unix ns."""
    position: npt.NDArray[np.int64]
    """By row, as ``row`` has them: the position of its node, -1 for none."""

    def __len__(self) -> int:
        return len(self.row)


def recorded_tree(batch: Batch) -> RecordedTree:
    """The tree of a batch. Costs some 100 ns per event and record of memory.

    A backward function that nothing is around on its thread hangs under what was open on the thread of its forward function.
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
    """The parents with the backward functions of other threads under what was open on their forward threads."""
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
    """The innermost of a thread's rows, which are sorted by start, that were open at given times; -1 for none."""
    last = np.searchsorted(batch["start"][rows], times, "right") - 1
    open_rows = np.where(last >= 0, np.append(rows, -1)[last], -1)
    end, above = np.append(batch["end"], np.iinfo(np.int64).max), np.append(parent[: len(batch)], -1)
    moving = np.flatnonzero(end[open_rows] < times)
    while moving.size:
        open_rows[moving] = above[open_rows[moving]]
        moving = moving[end[open_rows[moving]] < times[moving]]
    return open_rows


# ---- which tensors are the same: numbers of storages and of tensors, as torch's profiler gives them ----


class TensorId(NamedTuple):
    """The two numbers of a tensor; None for what has no storage, or was not recorded."""

    tensor: int | None = None
    storage: int | None = None


NO_ID = TensorId()


@dataclass(frozen=True, eq=False)
class TensorIds:
    """Numbers of storages and tensors, -1 for none. Immutable."""

    of_storage: tuple[Array, Array]
    """Of each storage of the operators' inputs, in the order of :func:`~.inputs.storages`: tensor, storage."""
    first_storage: npt.NDArray[np.int64]
    """By row of the batch, which of these is the first of its inputs."""
    of_record: tuple[Array, Array]
    """Ids of each memory record: tensor, storage."""
    of_known: dict[int, TensorId]
    """Of what modules and optimizers have, by the ``id()`` of the :class:`TensorInfo`."""
    first_calls: dict[int, int]
    """Of modules and optimizers, the position of the first call: by the ``id()`` of what is known of them."""

    def of_input(self, row: int, number: int) -> TensorId:
        """Of the tensors among a row's inputs that have a storage, that of the one with this number."""
        return _at(self.of_storage, int(self.first_storage[row]) + number)

    def of_memory(self, record: int) -> TensorId:
        """Ids of a memory record."""
        return _at(self.of_record, record)


def _at(numbers: tuple[Array, Array], index: int) -> TensorId:
    tensor, storage = (column.item(index) for column in numbers)
    return TensorId(None if tensor < 0 else tensor, None if storage < 0 else storage)


def tensor_ids(tree: RecordedTree, device_type: Callable[[str], int]) -> TensorIds:
    """The numbers of a tree's tensors. ``device_type``: the number of a type of devices, by its name.

    Costs some 300 ns per tensor and record of memory.
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
    """Numbers of the storages at addresses of devices, from 1 in the order of their first places; -1 for none."""
    numbers = np.full(len(place), -1, dtype=np.int64)
    chosen = np.flatnonzero(~failed & (place >= 0))
    order = chosen[np.lexsort((place[chosen], address[chosen], device[chosen]))]
    begins = np.ones(len(order), dtype=np.bool_)
    before, this = order[:-1], order[1:]
    begins[1:] = (device[this] != device[before]) | (address[this] != address[before]) | is_free[before]
    storage = np.cumsum(begins) - 1
    # In the order of first sight: of one node's tensors, in the order of its inputs.
    first = order[begins]
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.lexsort((first, place[first]))] = np.arange(1, len(first) + 1)
    numbers[order] = rank[storage]
    return numbers


def _tensors(storage: Array, is_tensor: Array) -> npt.NDArray[np.int64]:
    """Numbers of tensors, from 0 by number of storage; -1 for storages without a known tensor."""
    has_tensor = np.zeros(int(storage.max(initial=0)) + 2, dtype=np.bool_)
    has_tensor[storage[is_tensor]] = True
    has_tensor[-1] = False  # of no storage
    numbers = np.where(has_tensor, np.cumsum(has_tensor) - 1, -1)
    tensor_numbers: npt.NDArray[np.int64] = numbers[storage]
    return tensor_numbers


def _first_calls(tree: RecordedTree) -> Iterator[tuple[int, tuple[int, ModuleInfo | OptimizerInfo]]]:
    """For what is called first, by the ``id()`` of what is known of it: the position of the call, and that."""
    batch, done = tree.batch, set[int]()
    info = batch.frame_info
    if info is None:
        return
    calls = np.flatnonzero(batch["kind"] == Kind.FRAME)
    is_module = np.isin(batch["name"][calls], np.fromiter(info.modules, np.int64))
    is_step = np.isin(batch["fwd_thread"][calls], np.fromiter(info.optimizers, np.int64))
    calls = calls[is_module | is_step]
    for row in calls[np.argsort(tree.position[calls], kind="stable")].tolist():
        for owner in called(tree, row, info.at(batch["start"].item(row))):
            if owner is not None and id(owner) not in done:
                done.add(id(owner))
                yield id(owner), (tree.position.item(row), owner)


def _tensors_of_owner(owner: ModuleInfo | OptimizerInfo) -> list[TensorInfo]:
    """All of its tensors in torch's order."""
    parameters: Iterable[ParameterInfo]
    if isinstance(owner, ModuleInfo):
        parameters = owner.parameters
    else:
        parameters = (parameter for group in owner.groups for parameter in group.parameters)
    return [tensor for parameter in parameters for tensor in tensors_of(parameter)]


def called(tree: RecordedTree, row: int, info: FrameInfo) -> tuple[ModuleInfo | None, OptimizerInfo | None]:
    """The module that is called, and the optimizer that makes a step; None for none."""
    batch = tree.batch
    return info.modules.get(batch["name"].item(row)), info.optimizers.get(batch["fwd_thread"].item(row))


def tensors_of(parameter: ParameterInfo) -> Iterator[TensorInfo]:
    """What a parameter had at the first call, as torch looks at it then: itself, its gradient, what an optimizer keeps of it."""
    if parameter.tensor is not None:
        yield parameter.tensor
    if parameter.gradient is not None and not parameter.has_late_gradient:
        yield parameter.gradient
    yield from (tensor for name, tensor in parameter.state.items() if name not in parameter.late_state)


def _device(info: TensorInfo, device_type: Callable[[str], int]) -> int:
    name, _, index = info.device.partition(":")
    return int(device_number(device_type(name), int(index or 0)))
