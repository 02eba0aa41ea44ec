"""What memory is used for: every block of a recording by category, and again each time that an operator wrote to it.

The rules are torch's (``torch/profiler/_memory_profiler.py``), on columns: nodes are the top-level operators that torch has
a schema of, the functions of the backward pass, and what is allocated or freed outside of both. A node reads the blocks
of the inputs of all that runs in it, and leaves new states of those that it writes to. Gradients and parameters are known;
``otp_memory_categories`` (``model.h``) tells the rest by the flow of data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._native.loops import memory_categories, top_level

from .input_words import InputPart, decoded, has_inputs, numbered
from .memory_blocks import GRADIENT, PARAMETER, STATE, Blocks, blocks_of
from .memory_changes import Action, Category, Changes, changes_of_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._columns.batch import Batch

    from .input_words import InputKind

    WrittenInputs = Callable[[str, Sequence[InputKind]], tuple[bool, ...] | None]

Array = npt.NDArray[Any]


_WRITTEN, _READ, _UNCLEAR, _ALLOCATED, _RELEASED = 1, 2, 4, 8, 16
"""Bits: what happens to a block in a node; unclear is an input of what has no schema."""

_ACCUMULATE, _FIRST_STEPS = "torch::autograd::AccumulateGrad", ("aten::detach", "aten::add_")
"""The node that adds to a parameter's gradient begins with one of these operators, whose first input is the gradient."""


def memory_changes(batch: Batch, written_inputs: WrittenInputs, device_type: Callable[[str], int]) -> Changes:
    """All that happened to the blocks of a batch whose memory was recorded, by category.

    What torch's profiler calls one tensor is here one block: a tensor that is given another storage is another one, and an
    address that is used again never the same. Costs some microseconds per record of memory with the operators around it.

    Args:
        batch: without its operators' inputs, their storages and Python's calls everything is unknown.
        written_inputs: for a name and the kinds of its inputs, which of them are written to; None for what is no operator.
        device_type: the number of a type of devices, by its name.
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
    """Per row: the node that it is part of (the row of that), and what it does to its inputs."""

    def __init__(self, batch: Batch, written_inputs: WrittenInputs) -> None:
        self._number = np.full(len(batch), 0, dtype=np.int32)
        answers: list[tuple[bool, ...] | None] = [None]
        rows = np.flatnonzero(batch["kind"] == Kind.OPERATOR)
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
        """What rows do to one of their inputs each."""
        found: npt.NDArray[np.uint8] = self._does[self._number[row], np.minimum(argument, self._does.shape[1] - 1)]
        return found


class _Nodes:
    """What has to do with any tensor, in the order in which it began."""

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
    """What nodes have to do with blocks: at most one per node and block, by node."""

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
        found = np.empty(len(own), dtype=np.int32)
        found[by_block] = self.first[own] + risen
        is_brief = edges.is_allocated & edges.is_released
        self.before = found
        self.reads = np.where(edges.is_allocated, -1, found).astype(np.int32)
        made = np.where(edges.is_allocated & ~is_brief, self.first[edges.block], -1)
        self.writes = np.where(rises, found + 1, made).astype(np.int32)
        self.is_temporary = np.zeros(blocks.count, dtype=bool)
        self.is_temporary[edges.block[is_brief]] = True


def _gradients(batch: Batch, blocks: Blocks) -> npt.NDArray[np.bool_]:
    """Blocks that the backward pass adds gradients of parameters up in."""
    found = np.zeros(blocks.count, dtype=bool)
    adds = (batch["scope"] == Scope.BACKWARD_FUNCTION) & _is_named(batch, (_ACCUMULATE,))
    inside = np.flatnonzero((batch["kind"] == Kind.OPERATOR) & np.append(adds, False)[batch["parent"]])
    _, first = np.unique(batch["parent"][inside], return_index=True)
    begins = np.zeros(len(batch), dtype=bool)
    begins[inside[first]] = True
    begins &= _is_named(batch, _FIRST_STEPS)
    found[blocks.of_storage[begins[blocks.storages["row"]] & (blocks.storages["input"] == 0)]] = True
    return found


def _is_named(batch: Batch, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    used = distinct_values(batch["name"])
    is_one = np.zeros(int(used.max(initial=0)) + 1, dtype=bool)
    is_one[used] = [batch.names[name] in names for name in used.tolist()]
    found: npt.NDArray[np.bool_] = is_one[batch["name"]]
    return found


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
    """What happened to the blocks that tensors were seen in."""
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
        (np.full(len(before), -1), Action.PREEXISTING, before, states.first[before]),
        (begin[created], Action.CREATE, created, states.first[created]),
        (nodes.start[edges.node[rises]], Action.INCREMENT_VERSION, edges.block[rises], states.before[rises]),
        (end[released], Action.DESTROY, released, states.first[released + 1] - 1),
    )
    action = np.concatenate([np.full(len(block), action) for _, action, block, _ in parts])
    time, block, state = (np.concatenate([part[i] for part in parts]) for i in (0, 2, 3))
    category = of_state[state].astype(np.int64)
    later = category.copy()
    rising = action == Action.INCREMENT_VERSION
    later[rising] = of_state[state[rising] + 1]
    return Changes(time, action, blocks.bytes[block], category, later, blocks.device[block])
