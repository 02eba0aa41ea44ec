"""Events that exist as columns until somebody looks at one of them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.schema import MEMORY_KIND, Flag, Kind, MemoryFlag, Scope
from otel_torchprof._model import inputs
from otel_torchprof._model.devices import device_name, timed_rows
from otel_torchprof._model.flops import flops_of
from otel_torchprof._model.flows import EVALUATION, forward_backward, numbered_rows
from otel_torchprof._model.frames import MODULE_PREFIX, PythonIds, python_ids
from otel_torchprof._model.memory import MEMORY_NAME, OUT_OF_MEMORY_NAME, with_memory_events
from otel_torchprof._model.modules import Hierarchy, module_hierarchy
from otel_torchprof._model.recorded_tree import RecordedTree, recorded_tree, tensor_ids
from otel_torchprof._model.tree import display_name, torch_view
from otel_torchprof._process import threads

from .event_info import CodedValues, EventInfo
from .function_event import DeviceType, DeviceWork, FunctionEvent, Interval, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from otel_torchprof._columns.batch import Batch, RecordedThread
    from otel_torchprof._model.devices import TimedRows
    from otel_torchprof._model.frames import PythonIds
    from otel_torchprof._model.recorded_tree import TensorIds


CALL = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
"""How the name of a call of a Python function is made."""

_NS_PER_US = 1000


# ---- the nodes of torch's tree of events ----


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
        return tensor_ids(self.tree, _number_of_device)

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
    def timed(self) -> TimedRows | None:
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

    def thread(self, column: str) -> RecordedThread:
        """The thread that it began on (``thread``), or ended on (``end_thread``)."""
        found: RecordedThread = self.nodes.batch.threads[self.value(column)]
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


def _number_of_device(name: str) -> int:
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


# ---- events ----


class EventSource:
    """Makes the events of a batch one by one, each at most once, and adds them up without making them.

    ``slots`` is where the events are kept: one entry per event, None until it is made. Safe to share between threads.
    """

    def __init__(self, batch: Batch, origin_ns: int, use_device: str | None, *, with_flops: bool = False) -> None:
        self.batch = with_memory_events(batch)
        self.view = torch_view(self.batch)
        self.info = EventInfo(self.view, with_flops=with_flops, with_devices=bool(use_device))
        self.use_device = use_device
        self.slots: list[RecordedEvent | None] = []
        self.missing = len(self.view)
        """How many events are not made yet."""
        self.edited = False
        """Whether a user changed an event, so that the columns no longer tell the truth about all of them."""
        self.origin_ns = origin_ns
        self._hierarchy: Hierarchy | None = None
        self.pid = os.getpid()
        self._lock = threads.Lock()

    def __len__(self) -> int:
        return len(self.view)

    def event(self, index: int) -> RecordedEvent:
        """The event at a position of the view."""
        # The slots may be the list subclass that asks this very method for its items, hence list's own methods.
        event = list.__getitem__(self.slots, index)
        if event is None:
            self.make(index, index + 1)
            event = list.__getitem__(self.slots, index)
        return event  # type: ignore[return-value]  # just made

    def make(self, begin: int, end: int) -> None:
        """Make all events of a range that are not there yet."""
        if None not in list.__getitem__(self.slots, slice(begin, end)):
            return
        with self._lock:
            for index in range(begin, end):
                if list.__getitem__(self.slots, index) is None:
                    is_memory = self.value("kind", index) == MEMORY_KIND
                    list.__setitem__(self.slots, index, (MemoryEvent if is_memory else RecordedEvent)(self, index))
                    self.missing -= 1

    def value(self, column: str, index: int) -> Any:
        """The value of an event in a column of the batch."""
        return self.batch[column].item(self.view.rows.item(index))

    def module_hierarchy(self, index: int) -> str:
        """The modules around an event, of the top-level class: ``GPT.blocks.0.attn``; empty where there is none."""
        with self._lock:
            if self._hierarchy is None:
                self._hierarchy = module_hierarchy(self.batch)
        return self._hierarchy.texts[self._hierarchy.rows.item(self.view.rows.item(index))]

    def _numbered(self, index: int) -> int:
        """The row whose autograd numbers an event shows: its own, or its backward function's around which it is the engine's.

        Torch makes that transfer when a profile ends, for two events that follow each other on a thread.
        """
        row: int = self.view.rows.item(index)
        thread, scope = self.batch["thread"], self.batch["scope"]
        follows = row + 1 < len(scope) and thread[row + 1] == thread[row] and scope[row + 1] == Scope.BACKWARD_FUNCTION
        enclosing = follows and scope[row] == Scope.FUNCTION and self.trace_name(index).startswith(EVALUATION)
        return row + int(enclosing)

    def sequence_nr(self, index: int) -> int:
        """Torch's number of the autograd node; -1 where there is none."""
        number: int = self.batch["sequence_nr"].item(self._numbered(index))
        return number

    def fwd_thread(self, index: int) -> int:
        """Torch's id of the forward thread; 0 where there is none, or no sequence number to go with it."""
        row = self._numbered(index)
        return self.batch["fwd_thread"].item(row) if self.batch["sequence_nr"].item(row) >= 0 else 0

    @cached_property
    def _flows(self) -> dict[int, tuple[int, bool]]:
        """Rows at an end of an arrow from a forward operator to its backward function: the arrow's number, and which end."""
        forward, backward = (rows.tolist() for rows in forward_backward(self.batch))
        ends = {row: (number, True) for number, row in enumerate(forward, 1)}
        return ends | {row: (number, False) for number, row in enumerate(backward, 1)}

    def flow(self, index: int) -> tuple[int, bool]:
        """Number of the arrow that begins or ends at an event, 0 for none, and whether it begins there."""
        return self._flows.get(self.view.rows.item(index), (0, False))

    def trace_name(self, index: int) -> str:
        """The name as it was recorded."""
        name: str = self.batch.names[self.value("name", index)]
        return name

    def thread(self, index: int) -> RecordedThread:
        """Where the event began."""
        thread: RecordedThread = self.batch.threads[self.value("thread", index)]
        return thread

    def thread_number(self, index: int) -> int:
        """Torch's id of the thread where the event began, the system's where torch never ran."""
        return self.thread(index).number

    def time_range(self, index: int) -> Interval:
        """When the event began and ended, in us since the origin."""
        start, end = (self.value(column, index) - self.origin_ns for column in ("start", "end"))
        return Interval(start / _NS_PER_US, end / _NS_PER_US)

    def parent(self, index: int) -> RecordedEvent | None:
        """The event around one."""
        parent = self.view.parent.item(index)
        return None if parent < 0 else self.event(parent)

    def children(self, index: int) -> list[RecordedEvent]:
        """The events directly inside one."""
        return [self.event(child) for child in self.view.children_of(index)]

    def self_cpu_total(self) -> float:
        """Self time of all events, us."""
        return int(self.view.self_time.sum()) / _NS_PER_US

    def coded(self, info_field: str, index: int) -> Any:
        """The value of a fact that is kept as codes; None where it was not recorded."""
        coded: CodedValues | None = getattr(self.info, info_field)
        return None if coded is None else coded.values[coded.codes.item(index)]

    def stack(self, index: int) -> list[str]:
        """The Python frames around an event, innermost first."""
        return list(self.coded("stack_codes", index) or ())

    @cached_property
    def _python_ids(self) -> PythonIds | None:
        return python_ids(self.batch)

    def python_id(self, which: str, index: int) -> int:
        """One of torch's numbers of calls; -1 for none."""
        ids = self._python_ids
        return -1 if ids is None else getattr(ids, which).item(self.view.rows.item(index))

    def call_info(self, index: int) -> FrameInfo:
        """What is known of the calls of an event's recording; nothing where the event is none."""
        info = self.batch.frame_info
        if info is None or self.value("kind", index) != Kind.FRAME:
            return FrameInfo()
        return info.at(self.value("start", index))

    def device_time(self, name: str, index: int) -> float:
        """A time of devices by torch's name, us."""
        column = self.info.device_time(name)
        return 0 if column is None else column.item(index) / _NS_PER_US

    @cached_property
    def _timed(self) -> TimedRows | None:
        return timed_rows(self.batch)

    def device_work(self, index: int) -> DeviceWork | None:
        """What an event's own pair of marks tells; None where it has none."""
        row, timed, devices = self.view.rows.item(index), self._timed, self.batch.devices
        if timed is None or devices is None or timed.pair[row] < 0:
            return None
        values = {name: column.item(timed.pair.item(row)) for name, column in devices.items()}
        return DeviceWork(
            _device_type(values["device_type"]),
            values["device_index"],
            values["stream"],
            (values["start"] - self.origin_ns) / _NS_PER_US,
            values["duration"] / _NS_PER_US,
        )

    def kernels(self, index: int) -> list[Kernel]:
        """As torch's legacy engine has it: one that stands for all that devices did for an event; none for nothing."""
        duration, timed, devices = self.device_time("device_time_total", index), self._timed, self.batch.devices
        if not duration or timed is None or devices is None:
            return []
        # Of an event without a pair the first inside of it, whose row comes next among those that have one.
        first = int(np.searchsorted(timed.rows, self.view.rows.item(index)))
        place = timed.pair[timed.rows[min(first, len(timed.rows) - 1)]]
        return [Kernel(self.trace_name(index), devices["device_index"].item(place), duration)]

    def amount(self, name: str, index: int) -> Any:
        """The value of an attribute that averages add up or compare; 0 where it was not recorded."""
        column = self.info.amount(name)
        return 0 if column is None else column.item(index)


class _OnDemand:
    """An attribute that is made when it is first read and then kept in the instance, where it shadows this descriptor.

    Reading eleven columns for every event that is touched cost 3 us and 680 bytes per event; most are never asked for.
    """

    def __init__(self, make: Callable[[EventSource, int], Any]) -> None:
        self._make = make
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, event: RecordedEvent | None, owner: type | None = None) -> Any:
        if event is None:
            return self
        value = self._make(event._source, event._index)  # noqa: SLF001 - the two belong together
        # setdefault, so that two threads that read at the same time get the same object
        return event.__dict__.setdefault(self._name, value)


def _on_demand(make: Callable[[EventSource, int], Any]) -> Any:
    return _OnDemand(make)


def _amount(name: str) -> Any:
    return _OnDemand(lambda source, index: source.amount(name, index))


def _column(name: str) -> Any:
    return _OnDemand(lambda source, index: source.value(name, index))


def _of_row(read: Callable[[Batch, int], Any]) -> Any:
    return _OnDemand(lambda source, index: read(source.batch, source.view.rows.item(index)))


class RecordedEvent(FunctionEvent):
    """An event out of a batch: a FunctionEvent that knows its position only and finds the rest when it is asked for.

    Its attributes can be set like any other's; its list then adds up its events instead of its columns. Copies and pickles
    are plain FunctionEvents.
    """

    __slots__ = ("_index", "_source")
    _index: int
    _source: EventSource

    overload_name = _on_demand(lambda source, index: source.coded("overload_codes", index) or "")
    cpu_memory_usage = _amount("cpu_memory_usage")
    device_memory_usage = _amount("device_memory_usage")
    cpu_memory_peak = _amount("cpu_memory_peak")
    device_memory_peak = _amount("device_memory_peak")
    flops = _amount("flops")
    id = _column("id")
    sequence_nr = _on_demand(EventSource.sequence_nr)
    fwd_thread = _on_demand(EventSource.fwd_thread)
    scope = _column("scope")
    external_id = _column("id")
    name = _on_demand(lambda source, index: display_name(source.trace_name(index)))
    trace_name = _on_demand(EventSource.trace_name)
    time_range = _on_demand(EventSource.time_range)
    thread = _on_demand(EventSource.thread_number)
    device_resource_id = _on_demand(lambda source, index: source.thread(index).os_tid)
    # Torch has the process here for what ran on the CPU, since Kineto counts a process as a device.
    device_index = _on_demand(lambda source, _: source.pid)
    flow_id = _on_demand(lambda source, index: source.flow(index)[0])
    flow_type = _on_demand(lambda source, index: int(source.flow(index)[0] > 0))
    flow_start = _on_demand(lambda source, index: source.flow(index)[1])
    is_async = _on_demand(lambda source, index: source.value("flags", index) & Flag.ASYNC != 0)
    is_user_annotation = _on_demand(lambda source, index: source.value("scope", index) == Scope.USER_SCOPE)
    activity_type = _on_demand(
        lambda source, index: (
            "python_function"
            if source.value("kind", index) == Kind.FRAME
            else "user_annotation"
            if source.value("scope", index) == Scope.USER_SCOPE
            else "cpu_op"
        )
    )
    is_python_function = _on_demand(lambda source, index: source.value("kind", index) == Kind.FRAME)
    python_id = _on_demand(lambda source, index: source.python_id("own", index))
    python_parent_id = _on_demand(lambda source, index: source.python_id("caller", index))
    python_module_id = _on_demand(lambda source, index: source.python_id("module", index))
    cpu_parent = _on_demand(EventSource.parent)
    cpu_children = _on_demand(EventSource.children)
    input_shapes = _of_row(inputs.input_shapes)
    structured_input_shapes = _of_row(inputs.structured_input_shapes)
    structured_input_strides = _of_row(inputs.structured_input_strides)
    input_dtypes = _of_row(inputs.input_dtypes)
    concrete_inputs = _of_row(inputs.concrete_inputs)
    kwinputs = _of_row(inputs.kwinputs)
    use_device = _on_demand(lambda source, _: source.use_device)
    kernels = _on_demand(EventSource.kernels)
    device_work = _on_demand(EventSource.device_work)
    # What torch calls so is an event of the CPU that carries the device's time, where kernels are no events themselves.
    is_legacy = _on_demand(lambda source, _: source.info.device_times is not None)
    stack = _on_demand(EventSource.stack)
    module_hierarchy = _on_demand(EventSource.module_hierarchy)
    function = _on_demand(lambda source, index: source.call_info(index).functions.get(source.value("name", index)))
    module = _on_demand(lambda source, index: source.call_info(index).modules.get(source.value("name", index)))
    optimizer = _on_demand(
        lambda source, index: source.call_info(index).optimizers.get(source.value("fwd_thread", index))
    )

    def __init__(self, source: EventSource, index: int) -> None:
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_index", index)

    def __setattr__(self, name: str, value: Any) -> None:
        self._source.edited = True
        super().__setattr__(name, value)

    def append_cpu_child(self, child: FunctionEvent) -> None:
        """Add a direct child, whose time is then no longer this event's own."""
        self._source.edited = True
        super().append_cpu_child(child)

    @property
    def self_cpu_time_total(self) -> float:
        """Duration without the direct children, from the column unless somebody changed events."""
        if self._source.edited:
            return super().self_cpu_time_total
        return self._source.view.self_time.item(self._index) / _NS_PER_US

    @property
    def device_time_total(self) -> float:
        """Time that devices worked for it and all that is inside of it, from the column unless somebody changed events."""
        if self._source.edited:
            return super().device_time_total
        return self._source.device_time("device_time_total", self._index)

    @property
    def self_device_time_total(self) -> float:
        """The same without the direct children's."""
        if self._source.edited:
            return super().self_device_time_total
        return self._source.device_time("self_device_time_total", self._index)

    @property
    def self_cpu_memory_usage(self) -> Any:
        """CPU memory without the direct children's, from the column unless somebody changed events."""
        if self._source.edited:
            return super().self_cpu_memory_usage
        return self._source.amount("self_cpu_memory_usage", self._index)

    @property
    def self_device_memory_usage(self) -> Any:
        """Device memory without the direct children's, from the column unless somebody changed events."""
        if self._source.edited:
            return super().self_device_memory_usage
        return self._source.amount("self_device_memory_usage", self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (), {**self.__dict__, **{field.name: getattr(self, field.name) for field in fields(self)}}


class MemoryEvent(RecordedEvent):
    """``[memory]`` or ``[OutOfMemory]``: an instant, of which little is known."""

    __slots__ = ()

    fwd_thread = _on_demand(EventSource.thread_number)
    device_resource_id = _on_demand(EventSource.thread_number)
    flops = trace_name = activity_type = concrete_inputs = kwinputs = None
    structured_input_shapes = structured_input_strides = input_dtypes = None
    external_id = device_index = 0


def _device_type(number: int) -> Any:
    """A member where there is one."""
    try:
        return DeviceType(number)
    except ValueError:
        return number


def _blank() -> FunctionEvent:
    """What a copy or a pickle fills."""
    return FunctionEvent.__new__(FunctionEvent)
