"""Blocks of memory in a recording: when each lived, which tensors were in it, and which are known to be a model's.

An address stands for one block after the other. A block begins where it is allocated, or where a tensor in it is seen first,
and ends where it is freed or where the next one is allocated at its place: on the CPU torch does not report the end of
what was allocated before the recording.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._columns.schema import Kind, MemoryFlag

from .input_words import storages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.frame_info import FrameInfo, ParameterInfo, TensorInfo

Array = npt.NDArray[Any]

PARAMETER, GRADIENT, STATE = 1, 2, 3
"""What a tensor is to a model."""

_DEVICE_SHIFT = np.uint64(56)


class Known(NamedTuple):
    """A tensor that a module or an optimizer has."""

    role: int
    time: int
    """When it was there, Unix ns: at the first call of the module or of the optimizer's step."""
    end: int
    """When the recording stopped."""
    is_late: bool
    """There at that time instead, or at both."""
    address: int
    bytes: int
    device: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks, and what happened to them. Numbers of blocks rise by device and address, then by time."""

    count: int
    storages: Array
    """Of operators' inputs: see ``STORAGE`` of ``_native/input_words.py``."""
    of_storage: Array
    """The block of each."""
    memory: Mapping[str, Array]
    """What was allocated and freed, without what could not be."""
    of_record: Array
    """The block of each record."""
    device: npt.NDArray[np.int64]
    """Of each block: see :func:`device_number`."""
    bytes: npt.NDArray[np.int64]
    """As the allocator told it; of what was there before as its tensors do."""
    is_followed: npt.NDArray[np.bool_]
    """Whether its end was not reported, and the next block was allocated at its place."""
    is_tensor: npt.NDArray[np.bool_]
    """Whether any tensor was seen in it."""
    is_known: Mapping[int, npt.NDArray[np.bool_]]
    """By role, whether a tensor with that role was in it."""


def device_number(device_type: Any, device_index: Any) -> Any:
    """One number for a device; one without an index has 0."""
    return device_type * 256 + np.maximum(device_index, 0)


def blocks_of(batch: Batch, device_type: Callable[[str], int]) -> Blocks:
    """The blocks of a batch whose memory was recorded. ``device_type``: the number of a type of devices, by its name.

    Costs some 300 ns per tensor and record.
    """
    memory: Mapping[str, Array] = batch.memory or {}
    had = ((memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0) & (memory["bytes"] != 0)
    memory = {name: column[had] for name, column in memory.items()}
    seen = storages(batch)
    seen = seen[seen["address"] != 0]
    devices = (
        device_number(seen["device_type"].astype(np.int64), seen["device_index"].astype(np.int64)),
        device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64)),
    )
    known = list(_known(batch, device_type))
    places = _Places(np.concatenate((*devices, np.array([one.device for one in known], dtype=np.int64))))
    key = (places.keys(seen["address"], devices[0]), places.keys(memory["address"], devices[1]))
    placed = _with_places(known, places, np.concatenate(key))
    displayed = [(one, place) for one, place, is_displayed in placed if is_displayed]
    lives = _Lives(
        key=np.concatenate((*key, np.array([place for _, place in displayed], dtype=np.uint64))),
        time=np.concatenate(
            (batch["start"][seen["row"]], memory["time"], np.array([one.time for one, _ in displayed], dtype=np.int64))
        ),
        change=np.concatenate(
            (np.zeros(len(seen), np.int64), memory["bytes"], np.zeros(len(displayed), dtype=np.int64))
        ),
    )
    of_storage, of_record, of_displayed = np.split(lives.block, np.cumsum((len(seen), len(memory["time"]))))
    is_known = _found(lives, placed)
    is_tensor = np.zeros(lives.count, dtype=bool)
    for found in (of_storage, of_displayed, *(np.flatnonzero(blocks) for blocks in is_known.values())):
        is_tensor[found] = True
    size = np.zeros(lives.count, dtype=np.int64)
    np.maximum.at(size, of_displayed, np.array([one.bytes for one, _ in displayed], dtype=np.int64))
    np.maximum.at(size, of_storage, seen["bytes"].astype(np.int64))
    size[of_record[::-1]] = np.abs(memory["bytes"][::-1])
    device = places.numbers[(lives.first_key >> _DEVICE_SHIFT).astype(np.int64)]
    return Blocks(
        lives.count, seen, of_storage, memory, of_record, device, size, lives.is_followed, is_tensor, is_known
    )


class _Places:
    """Devices and addresses as one number: addresses of the processes that there are have less than 57 bits."""

    def __init__(self, devices: npt.NDArray[np.int64]) -> None:
        self.numbers = distinct_values(devices)

    def keys(self, address: Array, device: Array) -> npt.NDArray[np.uint64]:
        which = np.searchsorted(self.numbers, device).astype(np.uint64)
        return (address & ((np.uint64(1) << _DEVICE_SHIFT) - np.uint64(1))) | which << _DEVICE_SHIFT


class _Lives:
    """Occurrences by place and time, and the block that each is of. Args: one value per occurrence, in any order."""

    def __init__(self, key: Array, time: Array, change: Array) -> None:
        order = np.argsort(time, kind="stable")
        order = order[np.argsort(key[order], kind="stable")]
        self._key, self._time, change = key[order], time[order], change[order]
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (self._key[1:] != self._key[:-1]) | (change[1:] > 0) | (change[:-1] < 0)
        self._block = np.cumsum(begins) - 1
        self.block = np.empty(len(order), dtype=np.int64)
        self.block[order] = self._block
        self.count = int(begins.sum())
        self.first_key = self._key[begins]
        ends = np.flatnonzero(np.append(begins[1:], True)) if len(order) else np.empty(0, dtype=np.int64)
        self._is_open = change[ends] >= 0
        self.is_followed = self._is_open & np.append(self.first_key[1:] == self.first_key[:-1], False)[: self.count]

    def at(self, key: int, time: int) -> int:
        """The block that was at a place at some time, or else -1."""
        begin, end = (
            np.searchsorted(self._key, np.uint64(key), "left"),
            np.searchsorted(self._key, np.uint64(key), "right"),
        )
        last = begin + int(np.searchsorted(self._time[begin:end], time, "right")) - 1
        if last < begin:
            return -1
        block = int(self._block[last])
        is_over = not self._is_open[block] and (last + 1 >= end or self._block[last + 1] != block)
        return -1 if is_over else block


def _with_places(known: list[Known], places: _Places, reported: Array) -> list[tuple[Known, int, bool]]:
    """Each with its place, and whether it is one more occurrence of it.

    What was there at the first call is; of what an optimizer keeps it is not known whether it was, so only where nothing
    else names the place.
    """
    device, address = (
        (np.array(values) for values in zip(*((one.device, one.address) for one in known), strict=True))
        if known
        else ([], [])
    )
    keys = places.keys(np.asarray(address, dtype=np.uint64), np.asarray(device, dtype=np.int64))
    is_reported = np.isin(keys, reported)
    return [
        (one, int(key), not one.is_late or (one.role == STATE and not reported))
        for one, key, reported in zip(known, keys.tolist(), is_reported.tolist(), strict=True)
    ]


def _found(lives: _Lives, placed: list[tuple[Known, int, bool]]) -> dict[int, npt.NDArray[np.bool_]]:
    """By role, which blocks the known tensors are in."""
    found = {role: np.zeros(lives.count, dtype=bool) for role in (PARAMETER, GRADIENT, STATE)}
    for one, place, _ in placed:
        block = lives.at(place, one.end) if one.is_late else -1
        if block < 0 and (not one.is_late or one.role == STATE):
            block = lives.at(place, one.time)
        if block >= 0:
            found[one.role][block] = True
    return found


# ---- what is known of a model ----


def _known(batch: Batch, device_type: Callable[[str], int]) -> Iterator[Known]:
    info = batch.frame_info
    if info is None:
        return
    rows = np.flatnonzero(batch["kind"] == Kind.FRAME)
    for part, begin, end in _recordings(info):
        inside = rows[(batch["start"][rows] >= begin) & (batch["start"][rows] < end)]
        calls = _first_calls(batch, inside, "name", np.fromiter(part.modules, dtype=np.int64))
        steps = _first_calls(batch, inside, "fwd_thread", np.fromiter(part.optimizers, dtype=np.int64))
        for number, time in calls.items():
            for parameter in part.modules[number].parameters:
                yield from _of_parameter(parameter, (time, end), device_type)
        for number, time in steps.items():
            for group in part.optimizers[number].groups:
                for parameter in group.parameters:
                    yield from _of_parameter(parameter, (time, end), device_type)


def _recordings(info: FrameInfo) -> Iterator[tuple[FrameInfo, int, int]]:
    """The facts of each recording, and from when to when they hold."""
    parts = info.recordings or (info,)
    ends = [*(part.since for part in parts[1:]), np.iinfo(np.int64).max]
    for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
        yield part, part.since if number else np.iinfo(np.int64).min, end


def _first_calls(batch: Batch, rows: Array, column: str, numbers: Array) -> dict[int, int]:
    """When each number first stands in a column, of those that do."""
    chosen = rows[np.isin(batch[column][rows], numbers)]
    chosen = chosen[np.argsort(batch["start"][chosen], kind="stable")]
    found, first = np.unique(batch[column][chosen], return_index=True)
    return dict(zip(found.tolist(), batch["start"][chosen[first]].tolist(), strict=True))


def _of_parameter(
    parameter: ParameterInfo, times: tuple[int, int], device_type: Callable[[str], int]
) -> Iterator[Known]:
    tensors = [(PARAMETER, False, parameter.tensor), (GRADIENT, parameter.has_late_gradient, parameter.gradient)]
    for role, is_late, tensor in (*tensors, *((STATE, True, kept) for kept in parameter.state.values())):
        if tensor is not None and tensor.storage_data_ptr:
            name, _, index = tensor.device.partition(":")
            device = int(device_number(device_type(name), int(index or 0)))
            yield Known(role, *times, is_late, tensor.storage_data_ptr, _bytes(tensor), device)


def _bytes(tensor: TensorInfo) -> int:
    """What a tensor takes, up to its last element; ``torch.float32`` and the like say how many bits one has."""
    if 0 in tensor.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=False))
    bits = re.search(r"\d+", tensor.dtype)
    return (last + 1) * (-(-int(bits[0]) // 8) if bits else 1)
