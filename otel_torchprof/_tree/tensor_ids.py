"""Which tensors of a recording are the same: numbers of storages and of tensors, as torch's profiler gives them.

The rules are those of ``calculateUniqueTensorIDs`` (``torch/csrc/profiler/data_flow.cpp``): an address stands for one
storage until that is freed, and for another one afterwards; storages are numbered as they come up in the tree, from 1, and
tensors are storages that some tensor was seen in, from 0. Torch holds on to tensors while it records, and gives two
storages one number where one tensor was seen in both, as it does all that tensors without memory are given later; here
nothing is held, and each storage is a tensor of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.frame_info import ModuleInfo, OptimizerInfo
from otel_torchprof._columns.schema import Kind, MemoryFlag

from .input_words import storages
from .memory_blocks import device_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from otel_torchprof._columns.frame_info import FrameInfo, ParameterInfo, TensorInfo

    from .recorded_tree import RecordedTree

Array = npt.NDArray[Any]


class TensorId(NamedTuple):
    """The two numbers of a tensor; None for what has no storage, or was not recorded."""

    tensor: int | None = None
    storage: int | None = None


NO_ID = TensorId()


@dataclass(frozen=True, eq=False)
class TensorIds:
    """Numbers of storages and tensors, -1 for none. Immutable."""

    of_storage: tuple[Array, Array]
    """Of each storage of the operators' inputs, in the order of :func:`~.input_words.storages`: tensor, storage."""
    first_storage: npt.NDArray[np.int64]
    """By row of the batch, which of these is the first of its inputs."""
    of_record: tuple[Array, Array]
    """Of each record of memory."""
    of_known: dict[int, TensorId]
    """Of what modules and optimizers have, by the ``id()`` of the :class:`TensorInfo`."""
    first_calls: dict[int, int]
    """Of modules and optimizers, the position of the first call: by the ``id()`` of what is known of them."""

    def of_input(self, row: int, number: int) -> TensorId:
        """Of the tensors among a row's inputs that have a storage, that of the one with this number."""
        return _at(self.of_storage, int(self.first_storage[row]) + number)

    def of_memory(self, record: int) -> TensorId:
        """Of a record of memory."""
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
    """The storages at addresses of devices, from 1 in the order of their first places; -1 for what is none."""
    found = np.full(len(place), -1, dtype=np.int64)
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
    found[order] = rank[storage]
    return found


def _tensors(storage: Array, is_tensor: Array) -> npt.NDArray[np.int64]:
    """The numbers of tensors, from 0 by number of storage; -1 where no tensor was seen in it."""
    has_tensor = np.zeros(int(storage.max(initial=0)) + 2, dtype=np.bool_)
    has_tensor[storage[is_tensor]] = True
    has_tensor[-1] = False  # of no storage
    numbers = np.where(has_tensor, np.cumsum(has_tensor) - 1, -1)
    found: npt.NDArray[np.int64] = numbers[storage]
    return found


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
