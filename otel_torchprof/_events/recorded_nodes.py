"""What the columns of a recording say of one node of its tree: of an event, or of memory that was allocated or freed."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.schema import Kind, MemoryFlag, Scope
from otel_torchprof._tree.devices import device_name, timed_rows
from otel_torchprof._tree.flops import flops_of
from otel_torchprof._tree.flows import forward_backward, numbered_rows
from otel_torchprof._tree.frames import MODULE_PREFIX, python_ids
from otel_torchprof._tree.memory import MEMORY_NAME, OUT_OF_MEMORY_NAME
from otel_torchprof._tree.recorded_tree import RecordedTree, recorded_tree, tensor_ids

from .function_event import DeviceType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from otel_torchprof._columns.batch import Batch, Thread
    from otel_torchprof._tree.devices import Timed
    from otel_torchprof._tree.frames import PythonIds
    from otel_torchprof._tree.recorded_tree import TensorIds

    from .function_event import FunctionEvent

CALL = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
"""How the name of a call of a Python function is made."""

_NS_PER_US = 1000


class Nodes:
    """The nodes of a batch's tree, and what is known of several of them. Immutable, hence safe to share between threads."""

    def __init__(self, batch: Batch, *, with_flops: bool = False) -> None:
        self.batch = batch
        self._with_flops = with_flops

    @cached_property
    def tree(self) -> RecordedTree:
        """What is around what."""
        return recorded_tree(self.batch)

    @cached_property
    def ids(self) -> TensorIds:
        """The numbers of tensors."""
        return tensor_ids(self.tree, _device_type)

    @cached_property
    def by_parent(self) -> tuple[Any, Any]:
        """Positions by parent, and where the children of each begin; what has no parent comes first."""
        order = np.argsort(self.tree.parent, kind="stable")
        return order, np.searchsorted(self.tree.parent[order], np.arange(-1, len(self.tree) + 1))

    def children(self, position: int) -> list[int]:
        """The positions directly inside another one, by start; of -1 those that nothing is around."""
        order, first = self.by_parent
        found: list[int] = order[first[position + 1] : first[position + 2]].tolist()
        return found

    @cached_property
    def correlation(self) -> Any:
        """By position, which of the operators and labels it is, from 1; 0 of all else."""
        rows, total = self.tree.row, len(self.batch)
        is_operator = rows < total
        is_operator[is_operator] = self.batch["kind"][rows[is_operator]] != Kind.FRAME
        return np.where(is_operator, np.cumsum(is_operator), 0)

    @cached_property
    def numbered(self) -> Any:
        """By row, the one whose autograd numbers it has."""
        return numbered_rows(self.batch)

    @cached_property
    def flops(self) -> Any:
        """By row."""
        return flops_of(self.batch) if self._with_flops else np.zeros(len(self.batch), np.uint64)

    @cached_property
    def flows(self) -> dict[int, tuple[int, bool]]:
        """By row, the number of the arrow from a forward operator to its backward function, and whether it begins there."""
        forward, backward = (rows.tolist() for rows in forward_backward(self.batch))
        ends = {row: (number, True) for number, row in enumerate(forward, 1)}
        return ends | {row: (number, False) for number, row in enumerate(backward, 1)}

    @cached_property
    def python_ids(self) -> PythonIds | None:
        """Torch's numbers of calls."""
        return python_ids(self.batch)

    @cached_property
    def allow_tf32(self) -> bool:
        """What torch says of it now: it is not recorded."""
        import torch

        return bool(torch.backends.cuda.matmul.allow_tf32)

    @cached_property
    def timed(self) -> Timed | None:
        """What devices were timed for."""
        return timed_rows(self.batch)


class Node:
    """One of them. Immutable."""

    def __init__(self, nodes: Nodes, position: int) -> None:
        self.nodes, self.position = nodes, position
        self.row: int = nodes.tree.row.item(position)
        self.is_memory = self.row >= len(nodes.batch)

    def value(self, column: str) -> Any:
        """Of the event; of memory, of its record."""
        batch = self.nodes.batch
        if not self.is_memory:
            return batch[column].item(self.row)
        return batch.memory[column].item(self.row - len(batch))  # type: ignore[index]  # it has a record

    @property
    def parent(self) -> int:
        """The position of what was open around it, -1 for nothing."""
        parent: int = self.nodes.tree.parent.item(self.position)
        return parent

    def around(self) -> Iterator[Node]:
        """All that was open around it, the innermost first."""
        position = self.parent
        while position >= 0:
            node = Node(self.nodes, position)
            yield node
            position = node.parent

    @property
    def start(self) -> int:
        """Unix time, ns."""
        start: int = self.nodes.tree.start.item(self.position)
        return start

    @property
    def end(self) -> int:
        """Unix time, ns; of memory that of its start."""
        end: int = self.start if self.is_memory else self.value("end")
        return end

    @cached_property
    def name(self) -> str:
        """As it was recorded; ``[memory]`` where some was allocated or freed."""
        if self.is_memory:
            return OUT_OF_MEMORY_NAME if self.value("flags") & MemoryFlag.OUT_OF_MEMORY else MEMORY_NAME
        name: str = self.nodes.batch.names[self.value("name")]
        return name

    @cached_property
    def tag(self) -> str:
        """The name of torch's ``_EventType``."""
        if self.is_memory:
            return "Allocation" if self.name == MEMORY_NAME else "OutOfMemory"
        if self.value("kind") != Kind.FRAME:
            return "TorchOp"
        is_python = self.name.startswith(MODULE_PREFIX) or (
            not self.name.startswith("<built-in ") and CALL.fullmatch(self.name)
        )
        return "PyCall" if is_python else "PyCCall"

    @property
    def info(self) -> FrameInfo:
        """What is known of the calls of its recording."""
        info = None if self.is_memory else self.nodes.batch.frame_info
        return FrameInfo() if info is None else info.at(self.start)

    def thread(self, column: str) -> Thread:
        """The thread that it began on (``thread``), or ended on (``end_thread``)."""
        found: Thread = self.nodes.batch.threads[self.value(column)]
        return found

    @property
    def sequence_nr(self) -> int:
        """Torch's number of the autograd node; -1 for none."""
        return -1 if self.is_memory else self.nodes.batch["sequence_nr"].item(self.nodes.numbered.item(self.row))

    @property
    def forward_thread(self) -> int:
        """Torch's number of the thread of the forward operator; 0 where there is none, or no number to go with it."""
        if self.sequence_nr < 0:
            return 0
        number: int = self.nodes.batch["fwd_thread"].item(self.nodes.numbered.item(self.row))
        return number

    def python_id(self, which: str) -> int:
        """One of torch's numbers of a call; -1 of what is none."""
        ids = None if self.is_memory else self.nodes.python_ids
        return -1 if ids is None else getattr(ids, which).item(self.row)

    def device_us(self, device_types: tuple[int, ...]) -> int:
        """How long a device of these types took for it, whole us; -1 where none was timed."""
        timed, devices = self.nodes.timed, self.nodes.batch.devices
        pair = -1 if self.is_memory or timed is None else timed.pair.item(self.row)
        if devices is None or pair < 0 or devices["device_type"].item(pair) not in device_types:
            return -1
        return int(devices["duration"].item(pair) // _NS_PER_US)


def _device_type(name: str) -> int:
    known = {device_name(kind): int(kind) for kind in DeviceType}
    return known.get(name, -1)


# ---- the tree of events that are objects, from their times: what torch's ``EventList._build_tree`` does ----


def build_tree(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """Sets parents and children, and returns the events that remain, with the stacks of backward events set.

    Raises ValueError for an event that has a parent already. Costs a sort.
    """
    kept = list(events)
    _nest(kept)
    kept = _without_duplicates(kept)
    _hand_down_stacks(kept)
    return kept


def _nest(events: list[FunctionEvent]) -> None:
    """Puts each event under the shortest one of its thread and node that contains it in time.

    Asynchronous events and those of devices stand alone: what ran beside them is not known to be theirs.
    """
    threads: dict[Any, list[FunctionEvent]] = defaultdict(list)
    for event in events:
        if not event.is_async and event.device_type == DeviceType.CPU:
            threads[event.thread, event.node_id].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        enclosing: list[FunctionEvent] = []
        for event in thread:
            while enclosing and not _contains(enclosing[-1], event):
                enclosing.pop()
            if enclosing:
                if event.cpu_parent is not None:
                    raise ValueError(f"event {event.name!r} has a parent already: a tree is built once")
                enclosing[-1].append_cpu_child(event)
                event.set_cpu_parent(enclosing[-1])
            enclosing.append(event)


def _contains(parent: FunctionEvent, event: FunctionEvent) -> bool:
    outer, inner = parent.time_range, event.time_range
    return inner.start < outer.end and inner.end <= outer.end


def _without_duplicates(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """Merges an event into its parent where it is the only child and has the parent's name.

    One pass is enough, in any order: a merged event leaves its parent with its name and with its children.
    """
    kept = []
    for event in events:
        parent = event.cpu_parent
        if parent is None or parent.name != event.name or len(parent.cpu_children) != 1:
            kept.append(event)
            continue
        parent.cpu_children = event.cpu_children
        parent.kernels = event.kernels
        for child in event.cpu_children:
            child.cpu_parent = parent
    return kept


def _hand_down_stacks(events: list[FunctionEvent]) -> None:
    """Gives backward events, which no Python called, the stack of the forward operator that caused them."""
    backward = {id(event): _backward_function(event) for event in events}
    stacks: dict[tuple[int, int | None], list[str]] = {}
    for event in events:
        if backward[id(event)] is None and event.stack is not None:
            stacks.setdefault((event.sequence_nr, event.thread), event.stack)
    for event in events:
        cause = backward[id(event)]
        if cause is not None:
            event.stack = stacks.get((cause.sequence_nr, cause.fwd_thread), [])


def _backward_function(event: FunctionEvent | None) -> FunctionEvent | None:
    """The nearest backward function from an event outwards."""
    while event is not None and event.scope != Scope.BACKWARD_FUNCTION:
        event = event.cpu_parent
    return event
