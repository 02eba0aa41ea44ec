"""Assigns a category to every memory block of a recording, and a new one at each write of an operator.

The rules are torch's (``torch/profiler/_memory_profiler.py``), on columns. Nodes are top-level operators with a schema in torch, backward
functions, and allocations and releases outside of both. A node reads the blocks of all inputs inside it, and creates new states of the
blocks that it writes to. Gradients and parameters are known; ``otp_memory_categories`` (``model.h``) derives the rest from the data flow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind, MemoryFlag, Scope
from otel_torchprof._native.loops import memory_categories, top_level

from .inputs import InputPart, decoded, has_inputs, numbered, storages
from .memory import Category, Changes, MemoryAction, changes_of_unknown, device_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._columns.batch import Batch

    from .inputs import InputKind

    WrittenInputs = Callable[[str, Sequence[InputKind]], tuple[bool, ...] | None]
    from collections.abc import Callable, Iterator, Mapping

    from otel_torchprof._columns.frame_info import FrameInfo, ParameterInfo, TensorInfo

Array = npt.NDArray[Any]


_WRITTEN, _READ, _UNCLEAR, _ALLOCATED, _RELEASED = 1, 2, 4, 8, 16
"""Bits: uses of a block in a node; unclear: it is an input of an operator without a schema."""

_ACCUMULATE, _FIRST_STEPS = "torch::autograd::AccumulateGrad", ("aten::detach", "aten::add_")
"""The node that adds to a parameter's gradient begins with one of these operators, whose first input is the gradient."""


def memory_changes(batch: Batch, written_inputs: WrittenInputs, device_type: Callable[[str], int]) -> Changes:
    """Returns all changes of the blocks of a batch with recorded memory, with categories.

    A tensor of torch's memory profiler is one block here: a tensor with a new storage is another block, and so is a reused address. Costs
    some microseconds per memory record and its operators.

    Args:
        batch: a batch; without operators' inputs, their storages and Python calls all categories are unknown.
        written_inputs: returns, for a name and the kinds of its inputs, the inputs that are written to; None if it is no operator.
        device_type: returns the number of a device type, given its name.
    """
    blocks = blocks_of(batch, device_type)
    operators = _Operators(batch, written_inputs)
    nodes = _Nodes(batch, blocks, operators.node)
    edges = _edges(blocks, nodes, operators)
    states = _States(blocks, edges)
    of_state = _categories(blocks, nodes, edges, states, _gradients(batch, blocks))
    tensors = _of_tensors(blocks, nodes, edges, states, of_state)
    is_other = ~blocks.is_tensor[blocks.of_record]
    others = changes_of_unknown({name: column[is_other] for name, column in blocks.memory.items()})
    changes = Changes(*(np.concatenate(pair) for pair in zip(tensors, others, strict=True)))
    return changes.in_time()


class _Operators:
    """Per row, the row of its node, and the use of its inputs."""

    def __init__(self, batch: Batch, written_inputs: WrittenInputs) -> None:
        self._number = np.full(len(batch), 0, dtype=np.int32)
        answers: list[tuple[bool, ...] | None] = [None]
        rows = batch.of_kind(Kind.OPERATOR)
        if has_inputs(batch) and rows.size:
            numbers, first = numbered(batch, InputPart.DTYPES, names=batch["name"][rows], rows=rows)
            self._number[rows] = numbers + 1
            for row in first.tolist():
                kinds = [one.kind for one in decoded(batch, row).inputs]
                answers.append(written_inputs(batch.names[batch["name"].item(row)], kinds))
        self._does = np.full((len(answers), max((len(a) for a in answers if a), default=0) + 1), _UNCLEAR, np.uint8)
        for number, answer in enumerate(answers):
            if answer is not None:
                self._does[number, : len(answer)] = [_WRITTEN if is_written else _READ for is_written in answer]
        is_node = np.array([answer is not None for answer in answers])[self._number]
        is_node |= batch["scope"] == Scope.BACKWARD_FUNCTION
        self.node = top_level(batch["parent"], is_node)

    def does(self, row: Array, argument: Array) -> npt.NDArray[np.uint8]:
        """The effects of rows on one of their inputs each."""
        effects: npt.NDArray[np.uint8] = self._does[self._number[row], np.minimum(argument, self._does.shape[1] - 1)]
        return effects


class _Nodes:
    """The nodes that use tensors, in order of begin."""

    def __init__(self, batch: Batch, blocks: Blocks, node_of_row: Array) -> None:
        of_storage = node_of_row[blocks.storages["row"]].astype(np.int64)
        enclosing = rows_of(batch, blocks.memory["event"])
        of_record = np.where(enclosing >= 0, np.append(node_of_row, -1)[enclosing], -1).astype(np.int64)
        alone = np.flatnonzero(of_record < 0)
        of_record[alone] = len(batch) + alone
        is_used = np.zeros(len(batch) + len(of_record), dtype=bool)
        is_used[of_storage[of_storage >= 0]] = True
        is_used[of_record] = True
        used = np.flatnonzero(is_used)
        start = np.concatenate((batch["start"], blocks.memory["time"]))[used]
        order = np.argsort(start, kind="stable")
        place = np.full(len(is_used) + 1, -1, dtype=np.int64)
        place[used[order]] = np.arange(len(used))
        self.count = len(used)
        self.start = start[order]
        self.of_storage, self.of_record = place[of_storage], place[of_record]
        is_backward = np.zeros(len(is_used), dtype=np.uint8)
        is_backward[: len(batch)] = batch["scope"] == Scope.BACKWARD_FUNCTION
        self.is_backward = is_backward[used[order]]


class _Edges(NamedTuple):
    """Uses of blocks by nodes: at most one per node and block, sorted by node."""

    node: Array
    block: Array
    is_allocated: npt.NDArray[np.bool_]
    is_released: npt.NDArray[np.bool_]
    is_written: npt.NDArray[np.bool_]
    """And not released."""


def _edges(blocks: Blocks, nodes: _Nodes, operators: _Operators) -> _Edges:
    inside = nodes.of_storage >= 0
    seen, reported = blocks.storages[inside], blocks.is_tensor[blocks.of_record]
    happens = np.where(blocks.memory["bytes"][reported] > 0, _ALLOCATED, _RELEASED).astype(np.uint8)
    pair = np.concatenate((nodes.of_storage[inside], nodes.of_record[reported])) * blocks.count
    pair += np.concatenate((blocks.of_storage[inside], blocks.of_record[reported]))
    happens = np.concatenate((operators.does(seen["row"], seen["input"]), happens))
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])) if len(pair) else np.empty(0, dtype=np.int64)
    happens = np.bitwise_or.reduceat(happens[order], first) if len(first) else happens
    is_released = (happens & _RELEASED) != 0
    unclear = (happens & (_WRITTEN | _READ | _UNCLEAR)) == _UNCLEAR
    is_written = (((happens & _WRITTEN) != 0) | unclear) & ~is_released
    node, block = np.divmod(pair[first], max(blocks.count, 1))
    return _Edges(node, block, (happens & _ALLOCATED) != 0, is_released, is_written)


class _States:
    """The states of blocks: one, and one more for every time that a node writes to a block that was there before."""

    def __init__(self, blocks: Blocks, edges: _Edges) -> None:
        rises = edges.is_written & ~edges.is_allocated
        count = np.bincount(edges.block[rises], minlength=blocks.count) + 1
        self.first = np.concatenate(([0], np.cumsum(count))).astype(np.int32)
        by_block = np.argsort(edges.block, kind="stable")
        risen: npt.NDArray[np.int64] = np.cumsum(rises[by_block], dtype=np.int64) - rises[by_block]
        own = edges.block[by_block]
        begins = np.append(True, own[1:] != own[:-1])[: len(own)]
        risen -= np.repeat(risen[begins], np.diff(np.append(np.flatnonzero(begins), len(own))))
        state_before = np.empty(len(own), dtype=np.int32)
        state_before[by_block] = self.first[own] + risen
        is_brief = edges.is_allocated & edges.is_released
        self.before = state_before
        self.reads = np.where(edges.is_allocated, -1, state_before).astype(np.int32)
        made = np.where(edges.is_allocated & ~is_brief, self.first[edges.block], -1)
        self.writes = np.where(rises, state_before + 1, made).astype(np.int32)
        self.is_temporary = np.zeros(blocks.count, dtype=bool)
        self.is_temporary[edges.block[is_brief]] = True


def _gradients(batch: Batch, blocks: Blocks) -> npt.NDArray[np.bool_]:
    """Mask of the blocks in which the backward pass accumulates gradients of parameters."""
    is_gradient = np.zeros(blocks.count, dtype=bool)
    adds = (batch["scope"] == Scope.BACKWARD_FUNCTION) & _is_named(batch, (_ACCUMULATE,))
    inside = np.flatnonzero((batch["kind"] == Kind.OPERATOR) & np.append(adds, False)[batch["parent"]])
    _, first = np.unique(batch["parent"][inside], return_index=True)
    begins = np.zeros(len(batch), dtype=bool)
    begins[inside[first]] = True
    begins &= _is_named(batch, _FIRST_STEPS)
    is_gradient[blocks.of_storage[begins[blocks.storages["row"]] & (blocks.storages["input"] == 0)]] = True
    return is_gradient


def _is_named(batch: Batch, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    used = distinct_values(batch["name"])
    is_one = np.zeros(int(used.max(initial=0)) + 1, dtype=bool)
    is_one[used] = [batch.names[name] in names for name in used.tolist()]
    is_named: npt.NDArray[np.bool_] = is_one[batch["name"]]
    return is_named


def _categories(
    blocks: Blocks, nodes: _Nodes, edges: _Edges, states: _States, gradients: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """The category of every state."""
    of_block = np.full(blocks.count, Category.UNKNOWN, dtype=np.uint8)
    of_block[gradients | blocks.is_known[GRADIENT]] = Category.GRADIENT
    of_block[blocks.is_known[PARAMETER]] = Category.PARAMETER
    of_state = np.full(int(states.first[-1]), Category.UNKNOWN, dtype=np.uint8)
    first_edge = np.searchsorted(edges.node, np.arange(nodes.count + 1)).astype(np.int64)
    columns: dict[str, Array] = {
        "first_edge": first_edge,
        "is_backward": nodes.is_backward,
        "block": edges.block.astype(np.int32),
        "first_state": states.first,
        "reads": states.reads,
        "writes": states.writes,
        "is_optimizer_state": blocks.is_known[STATE].astype(np.uint8),
    }
    memory_categories((nodes.count, blocks.count), columns, of_block, of_state)
    brief = np.flatnonzero(states.is_temporary & (of_block == Category.UNKNOWN))
    of_state[states.first[brief]] = Category.TEMPORARY
    return of_state


def _of_tensors(blocks: Blocks, nodes: _Nodes, edges: _Edges, states: _States, of_state: Array) -> Changes:
    """The changes of blocks with known tensors."""
    has_begin = np.zeros(blocks.count, dtype=bool)
    begin, end = np.zeros(blocks.count, dtype=np.int64), np.zeros(blocks.count, dtype=np.int64)
    is_begin = blocks.memory["bytes"] > 0
    has_begin[blocks.of_record[is_begin]] = True
    begin[blocks.of_record[is_begin]] = blocks.memory["time"][is_begin]
    end[blocks.of_record[~is_begin]] = blocks.memory["time"][~is_begin]
    followed = np.flatnonzero(blocks.is_followed)
    is_there = np.zeros(blocks.count, dtype=bool)
    is_there[edges.block] = True
    for known in blocks.is_known.values():
        is_there |= known
    followed = followed[is_there[followed]]
    end[followed] = begin[followed + 1]
    before = np.flatnonzero(is_there & ~has_begin)
    created, released = edges.block[edges.is_allocated], np.append(edges.block[edges.is_released], followed)
    rises = edges.is_written & ~edges.is_allocated
    parts = (
        (np.full(len(before), -1), MemoryAction.PREEXISTING, before, states.first[before]),
        (begin[created], MemoryAction.CREATE, created, states.first[created]),
        (nodes.start[edges.node[rises]], MemoryAction.INCREMENT_VERSION, edges.block[rises], states.before[rises]),
        (end[released], MemoryAction.DESTROY, released, states.first[released + 1] - 1),
    )
    action = np.concatenate([np.full(len(block), action) for _, action, block, _ in parts])
    time, block, state = (np.concatenate([part[i] for part in parts]) for i in (0, 2, 3))
    category = of_state[state].astype(np.int64)
    later = category.copy()
    rising = action == MemoryAction.INCREMENT_VERSION
    later[rising] = of_state[state[rising] + 1]
    return Changes(time, action, blocks.bytes[block], category, later, blocks.device[block])


# ---- Blocks: their lifetimes, their tensors, and the tensors of models among these ----

PARAMETER, GRADIENT, STATE = 1, 2, 3
"""Roles of a model's tensors."""

_DEVICE_SHIFT = np.uint64(56)


class KnownTensor(NamedTuple):
    """A tensor of a module or an optimizer."""

    role: int
    time: int
    """A time at which it existed, Unix ns: the first call of the module or of the optimizer's step."""
    end: int
    """End of the recording, Unix ns."""
    is_late: bool
    """Whether it existed at ``end``; maybe not yet at ``time``."""
    address: int
    bytes: int
    device: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks, and their tensors and memory records. Blocks are numbered by device, address and time."""

    count: int
    storages: Array
    """Storages of operators' inputs: see ``STORAGE`` of ``_native/torch_library.py``."""
    of_storage: Array
    """Block of each storage."""
    memory: Mapping[str, Array]
    """Allocations and releases, without failed allocations."""
    of_record: Array
    """Block of each memory record."""
    device: npt.NDArray[np.int64]
    """Device of each block, see :func:`device_number`."""
    bytes: npt.NDArray[np.int64]
    """Size as reported by the allocator; for blocks older than the recording, as needed by their tensors."""
    is_followed: npt.NDArray[np.bool_]
    """Whether its release was not reported, and another block was allocated at its address."""
    is_tensor: npt.NDArray[np.bool_]
    """Whether any tensor was seen in it."""
    is_known: Mapping[int, npt.NDArray[np.bool_]]
    """By role, the mask of blocks that contained a tensor with that role."""


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
    is_known = _masks_by_role(lives, placed)
    is_tensor = np.zeros(lives.count, dtype=bool)
    for of_tensors in (of_storage, of_displayed, *(np.flatnonzero(blocks) for blocks in is_known.values())):
        is_tensor[of_tensors] = True
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


def _with_places(known: list[KnownTensor], places: _Places, reported: Array) -> list[tuple[KnownTensor, int, bool]]:
    """Returns each tensor with its place, and whether it counts as an occurrence at that place.

    Tensors that existed at the first call count. For optimizer state this is unknown, so it counts only if no record has the place.
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


def _masks_by_role(lives: _Lives, placed: list[tuple[KnownTensor, int, bool]]) -> dict[int, npt.NDArray[np.bool_]]:
    """By role, a mask of the blocks that contain known tensors."""
    is_in_block = {role: np.zeros(lives.count, dtype=bool) for role in (PARAMETER, GRADIENT, STATE)}
    for one, place, _ in placed:
        block = lives.at(place, one.end) if one.is_late else -1
        if block < 0 and (not one.is_late or one.role == STATE):
            block = lives.at(place, one.time)
        if block >= 0:
            is_in_block[one.role][block] = True
    return is_in_block


# ---- Tensors of models ----


def _known(batch: Batch, device_type: Callable[[str], int]) -> Iterator[KnownTensor]:
    info = batch.frame_info
    if info is None:
        return
    rows = batch.of_kind(Kind.FRAME)
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
    """The first start, by number, of the rows with one of the numbers in a column."""
    chosen = rows[np.isin(batch[column][rows], numbers)]
    chosen = chosen[np.argsort(batch["start"][chosen], kind="stable")]
    first_numbers, first = np.unique(batch[column][chosen], return_index=True)
    return dict(zip(first_numbers.tolist(), batch["start"][chosen[first]].tolist(), strict=True))


def _of_parameter(
    parameter: ParameterInfo, times: tuple[int, int], device_type: Callable[[str], int]
) -> Iterator[KnownTensor]:
    tensors = [(PARAMETER, False, parameter.tensor), (GRADIENT, parameter.has_late_gradient, parameter.gradient)]
    for role, is_late, tensor in (*tensors, *((STATE, True, state) for state in parameter.state.values())):
        if tensor is not None and tensor.storage_data_ptr:
            name, _, index = tensor.device.partition(":")
            device = int(device_number(device_type(name), int(index or 0)))
            yield KnownTensor(role, *times, is_late, tensor.storage_data_ptr, _bytes(tensor), device)


def _bytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor up to its last element; the size of an element follows from names like ``torch.float32``."""
    if 0 in tensor.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=False))
    bits = re.search(r"\d+", tensor.dtype)
    return (last + 1) * (-(-int(bits[0]) // 8) if bits else 1)
