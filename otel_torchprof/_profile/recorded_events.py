"""Events of a batch of columns, created as objects on access."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.schema import MEMORY_KIND, WORK_KIND, Flag, Kind, MemoryFlag, Scope, WorkFlag
from otel_torchprof._model import inputs
from otel_torchprof._model.device_work import work_places
from otel_torchprof._model.devices import device_name, timed_rows
from otel_torchprof._model.event_info import CodedValues, EventInfo
from otel_torchprof._model.flops import flops_of
from otel_torchprof._model.flows import EVALUATION, forward_backward, numbered_rows
from otel_torchprof._model.frames import CALL, MODULE_PREFIX, PythonIds, python_ids
from otel_torchprof._model.memory import MEMORY_NAME, OUT_OF_MEMORY_NAME
from otel_torchprof._model.modules import Hierarchy, module_hierarchy
from otel_torchprof._model.recorded_tree import RecordedTree, recorded_tree, tensor_ids
from otel_torchprof._model.tree import display_name
from otel_torchprof._process import threads

from .function_event import DeviceType, DeviceWork, FunctionEvent, Interval, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.batch import Batch, RecordedThread
    from otel_torchprof._model.devices import TimedRows
    from otel_torchprof._model.frames import PythonIds
    from otel_torchprof._model.recorded_tree import TensorIds


_NS_PER_US = 1000


class _RowData:
    """Data of the rows of a batch, computed on first access."""

    batch: Batch

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
    def timed(self) -> TimedRows | None:
        """Rows with device times; None if no device was timed."""
        return timed_rows(self.batch)


# ---- the nodes of torch's tree of events ----


class Nodes(_RowData):
    """The nodes of a batch's tree, and data computed for all of them. Immutable, so threads may share it."""

    def __init__(self, batch: Batch, *, with_flops: bool = False) -> None:
        self.batch = batch
        self._with_flops = with_flops

    @cached_property
    def tree(self) -> RecordedTree:
        """Rows, parents and starts by position."""
        return recorded_tree(self.batch)

    @cached_property
    def ids(self) -> TensorIds:
        """Numbers of tensors and storages."""
        return tensor_ids(self.tree, _number_of_device)

    @cached_property
    def by_parent(self) -> tuple[Any, Any]:
        """Positions ordered by parent, top-level ones first, and the index at which the children of each begin."""
        order = np.argsort(self.tree.parent, kind="stable")
        return order, np.searchsorted(self.tree.parent[order], np.arange(-1, len(self.tree) + 1))

    def children(self, position: int) -> list[int]:
        """Positions of the children of a node, by start; for -1, of the top-level nodes."""
        order, first = self.by_parent
        positions: list[int] = order[first[position + 1] : first[position + 2]].tolist()
        return positions

    @cached_property
    def correlation(self) -> Any:
        """By position, the number of the operator or label, from 1; 0 for other events."""
        rows, total = self.tree.row, len(self.batch)
        is_operator = rows < total
        is_operator[is_operator] = self.batch["kind"][rows[is_operator]] != Kind.FRAME
        return np.where(is_operator, np.cumsum(is_operator), 0)

    @cached_property
    def numbered(self) -> Any:
        """By row, the row that has its autograd numbers."""
        return numbered_rows(self.batch)

    @cached_property
    def flops(self) -> Any:
        """Floating point operations by row; 0 if unknown or not requested."""
        return flops_of(self.batch) if self._with_flops else np.zeros(len(self.batch), np.uint64)

    @cached_property
    def allow_tf32(self) -> bool:
        """Torch's setting at the first access: it is not recorded."""
        import torch

        return bool(torch.backends.cuda.matmul.allow_tf32)


class Node:
    """A node of a tree. Immutable."""

    def __init__(self, nodes: Nodes, position: int) -> None:
        self.nodes, self.position = nodes, position
        self.row: int = nodes.tree.row.item(position)
        self.is_memory = self.row >= len(nodes.batch)

    def value(self, column: str) -> Any:
        """Value of a column of the event or, for a change of memory, of its record."""
        batch = self.nodes.batch
        if not self.is_memory:
            return batch[column].item(self.row)
        return batch.memory[column].item(self.row - len(batch))  # type: ignore[index]  # it has a record

    @property
    def parent(self) -> int:
        """Position of the parent; -1 for a top-level node."""
        parent: int = self.nodes.tree.parent.item(self.position)
        return parent

    def ancestors(self) -> Iterator[Node]:
        """Yields the enclosing nodes, innermost first."""
        position = self.parent
        while position >= 0:
            node = Node(self.nodes, position)
            yield node
            position = node.parent

    @property
    def start(self) -> int:
        """Start, Unix ns."""
        start: int = self.nodes.tree.start.item(self.position)
        return start

    @property
    def end(self) -> int:
        """End, Unix ns; equal to the start for a change of memory."""
        end: int = self.start if self.is_memory else self.value("end")
        return end

    @cached_property
    def name(self) -> str:
        """Recorded name; ``[memory]`` for an allocation or release."""
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
        """Metadata of the calls of its recording; empty for a change of memory."""
        info = None if self.is_memory else self.nodes.batch.frame_info
        return FrameInfo() if info is None else info.at(self.start)

    def thread(self, column: str) -> RecordedThread:
        """The thread on which it began (``thread``) or ended (``end_thread``)."""
        thread: RecordedThread = self.nodes.batch.threads[self.value(column)]
        return thread

    @property
    def sequence_nr(self) -> int:
        """Torch's number of the autograd node; -1 for none."""
        return -1 if self.is_memory else self.nodes.batch["sequence_nr"].item(self.nodes.numbered.item(self.row))

    @property
    def forward_thread(self) -> int:
        """Torch's id of the thread of the forward operator; 0 for none, and without a sequence number."""
        if self.sequence_nr < 0:
            return 0
        number: int = self.nodes.batch["fwd_thread"].item(self.nodes.numbered.item(self.row))
        return number

    def python_id(self, which: str) -> int:
        """One of torch's numbers of a call (``own``, ``caller``, ``module``); -1 for other events."""
        ids = None if self.is_memory else self.nodes.python_ids
        return -1 if ids is None else getattr(ids, which).item(self.row)

    def device_us(self, device_types: tuple[int, ...]) -> int:
        """Device time on a device of these types, whole us; -1 if it was not timed."""
        timed, devices = self.nodes.timed, self.nodes.batch.devices
        pair = -1 if self.is_memory or timed is None else timed.pair.item(self.row)
        if devices is None or pair < 0 or devices["device_type"].item(pair) not in device_types:
            return -1
        return int(devices["duration"].item(pair) // _NS_PER_US)


def _number_of_device(name: str) -> int:
    known = {device_name(kind): int(kind) for kind in DeviceType}
    return known.get(name, -1)


# ---- events ----


class EventSource(_RowData):
    """Creates the event objects of a batch on access, each at most once; sums are computed from the columns.

    ``slots`` has one entry per event, None until the event is created. ``has_modules``: modules are events. Thread-safe.
    """

    def __init__(
        self,
        batch: Batch,
        origin_ns: int,
        use_device: str | None,
        *,
        with_flops: bool = False,
        has_modules: bool = False,
        pid: int | None = None,
    ) -> None:
        self.use_device = use_device
        self.info = EventInfo.of(batch, modules=has_modules, with_flops=with_flops, with_devices=bool(use_device))
        self.view = self.info.view
        self.batch = self.view.batch
        self.slots: list[RecordedEvent | None] = []
        self.missing = len(self.view)
        """Number of events that are not created yet."""
        self.edited = False
        """Whether a user changed an event, so that the columns are no longer valid."""
        self.origin_ns = origin_ns
        self._hierarchy: Hierarchy | None = None
        self.pid = os.getpid() if pid is None else pid
        self._lock = threads.Lock()

    def __len__(self) -> int:
        return len(self.view)

    def with_modules(self) -> EventInfo:
        """The columns of a view that has the modules, too. Costs 25 ns per event."""
        return self.info.with_modules()

    def event(self, index: int) -> RecordedEvent:
        """The event at a position of the view."""
        # list's own methods: the slots may be an EventList, which calls this method to get an item.
        event = list.__getitem__(self.slots, index)
        if event is None:
            self.make(index, index + 1)
            event = list.__getitem__(self.slots, index)
        return event  # type: ignore[return-value]  # just made

    def make(self, begin: int, end: int) -> None:
        """Creates all missing events of a range of positions."""
        if None not in list.__getitem__(self.slots, slice(begin, end)):
            return
        with self._lock:
            for index in range(begin, end):
                if list.__getitem__(self.slots, index) is None:
                    make_event = _OTHER_EVENTS.get(self.value("kind", index), RecordedEvent)
                    list.__setitem__(self.slots, index, make_event(self, index))
                    self.missing -= 1

    def value(self, column: str, index: int) -> Any:
        """Value of an event in a column of the batch."""
        return self.batch[column].item(self.view.rows.item(index))

    def module_hierarchy(self, index: int) -> str:
        """The enclosing modules of an event, from the class of the root: ``GPT.blocks.0.attn``; empty for none."""
        with self._lock:
            if self._hierarchy is None:
                self._hierarchy = module_hierarchy(self.batch)
        return self._hierarchy.texts[self._hierarchy.rows.item(self.view.rows.item(index))]

    def _numbered(self, index: int) -> int:
        """The row whose autograd numbers an event displays.

        The row of the event itself or, for the engine's event around a backward function, that of the backward function. Torch
        copies these numbers when a profile ends, for two consecutive events of a thread.
        """
        row: int = self.view.rows.item(index)
        thread, scope = self.batch["thread"], self.batch["scope"]
        follows = row + 1 < len(scope) and thread[row + 1] == thread[row] and scope[row + 1] == Scope.BACKWARD_FUNCTION
        enclosing = follows and scope[row] == Scope.FUNCTION and self.trace_name(index).startswith(EVALUATION)
        return row + int(enclosing)

    def sequence_nr(self, index: int) -> int:
        """Torch's number of the autograd node; -1 for none."""
        number: int = self.batch["sequence_nr"].item(self._numbered(index))
        return number

    def fwd_thread(self, index: int) -> int:
        """Torch's id of the forward thread; 0 for none, and without a sequence number."""
        row = self._numbered(index)
        return self.batch["fwd_thread"].item(row) if self.batch["sequence_nr"].item(row) >= 0 else 0

    def flow(self, index: int) -> tuple[int, bool]:
        """Number of the arrow that begins or ends at an event, 0 for none, and whether it begins there."""
        return self.flows.get(self.view.rows.item(index), (0, False))

    def trace_name(self, index: int) -> str:
        """Recorded name."""
        name: str = self.batch.names[self.value("name", index)]
        return name

    def thread(self, index: int) -> RecordedThread:
        """The thread on which the event began."""
        thread: RecordedThread = self.batch.threads[self.value("thread", index)]
        return thread

    def thread_number(self, index: int) -> int:
        """Torch's id of the thread on which the event began; the system's id if torch never ran there."""
        return self.thread(index).number

    def time_range(self, index: int) -> Interval:
        """Start and end, in us since the origin."""
        start, end = (self.value(column, index) - self.origin_ns for column in ("start", "end"))
        return Interval(start / _NS_PER_US, end / _NS_PER_US)

    def calls(self, index: int) -> int:
        """Number of calls that an event stands for."""
        return 1 if self.view.calls is None else self.view.calls.item(index)

    def parent(self, index: int) -> RecordedEvent | None:
        """The enclosing event; None for a top-level event."""
        parent = self.view.parent.item(index)
        return None if parent < 0 else self.event(parent)

    def children(self, index: int) -> list[RecordedEvent]:
        """The direct children of an event."""
        return [self.event(child) for child in self.view.children_of(index)]

    def self_cpu_total(self) -> float:
        """Self time of all events, us."""
        return int(self.view.self_time.sum()) / _NS_PER_US

    def coded(self, info_field: str, index: int) -> Any:
        """Value of an event in a coded column of :class:`EventInfo`; None if it was not recorded."""
        coded: CodedValues | None = getattr(self.info, info_field)
        return None if coded is None else coded.values[coded.codes.item(index)]

    def stack(self, index: int) -> list[str]:
        """Enclosing Python frames, innermost first."""
        return list(self.coded("stack_codes", index) or ())

    def python_id(self, which: str, index: int) -> int:
        """One of torch's numbers of a call (``own``, ``caller``, ``module``); -1 for none."""
        ids = self.python_ids
        return -1 if ids is None else getattr(ids, which).item(self.view.rows.item(index))

    def call_info(self, index: int) -> FrameInfo:
        """Metadata of the calls of the event's recording; empty if the event is not a call."""
        info = self.batch.frame_info
        if info is None or self.value("kind", index) != Kind.FRAME:
            return FrameInfo()
        return info.at(self.value("start", index))

    def device_time(self, name: str, index: int) -> float:
        """A device time by torch's name, us."""
        column = self.info.device_time(name)
        return 0 if column is None else column.item(index) / _NS_PER_US

    def device_work(self, index: int) -> DeviceWork | None:
        """Device and device time from the event's own pair of timing events; None without one."""
        row, timed, devices = self.view.rows.item(index), self.timed, self.batch.devices
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
        """The kernels that an event launched.

        Without work of devices in the recording one kernel for all device time, as in torch's legacy profiler; empty without device time.
        """
        if self.batch.work is not None:
            return self._launched_kernels(index)
        duration, timed, devices = self.device_time("device_time_total", index), self.timed, self.batch.devices
        if not duration or timed is None or devices is None:
            return []
        # An event without timing events of its own uses those of its first descendant, the next row that has some.
        first = int(np.searchsorted(timed.rows, self.view.rows.item(index)))
        place = timed.pair[timed.rows[min(first, len(timed.rows) - 1)]]
        return [Kernel(self.trace_name(index), devices["device_index"].item(place), duration)]

    @cached_property
    def _work_place(self) -> Any:
        return work_places(self.batch)

    def work(self, column: str, index: int) -> Any:
        """Value of an event that is work of a device in a column of ``batch.work``."""
        return self.batch.work[column].item(self._work_place.item(self.view.rows.item(index)))  # type: ignore[index]

    @cached_property
    def _launched(self) -> dict[int, list[int]]:
        """By the id of an event, the places of the work that it launched."""
        launched: dict[int, list[int]] = {}
        work = self.batch.work or {}
        for place in np.flatnonzero((work["flags"] & WorkFlag.ANNOTATION) == 0).tolist():
            launched.setdefault(work["event"].item(place), []).append(place)
        return launched

    def _launched_kernels(self, index: int) -> list[Kernel]:
        work, names = self.batch.work or {}, self.batch.names
        places = self._launched.get(self.value("id", index), ())
        return [
            Kernel(names[work["name"][at]], work["device_index"].item(at), work["duration"].item(at) / _NS_PER_US)
            for at in places
        ]

    def amount(self, name: str, index: int) -> Any:
        """Value of an attribute of :data:`AMOUNTS` or :data:`PEAKS`; 0 if it was not recorded."""
        column = self.info.amount(name)
        return 0 if column is None else column.item(index)


class _OnDemand:
    """An attribute computed on first access and then stored in the instance, where it shadows this descriptor.

    Reading eleven columns for every created event would cost 3 us and 680 bytes each; most are never read.
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
        # setdefault: two threads that read at the same time get the same object.
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
    """An event of a batch: a FunctionEvent that stores only its position and reads attributes on access.

    Attributes can be set; its list then computes results from event objects instead of columns. Copies and pickles are
    plain FunctionEvents.
    """

    __slots__ = ("_index", "_source")
    _index: int
    _source: EventSource

    overload_name = _on_demand(lambda source, index: source.coded("overload_codes", index) or "")
    count = _on_demand(EventSource.calls)
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
    # As in torch: for CPU events, Kineto has the process id as the device.
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
    # Torch's name for CPU events that have device times because kernels are not events of their own.
    is_legacy = _on_demand(lambda source, _: source.info.device_times is not None and source.batch.work is None)
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
        """Adds a direct child, whose time then no longer counts as this event's self time."""
        self._source.edited = True
        super().append_cpu_child(child)

    @property
    def cpu_time_total(self) -> float:
        """Duration, us; of an event that stands for several calls, the sum of theirs."""
        view = self._source.view
        return super().cpu_time_total if view.calls is None else view.duration.item(self._index) / _NS_PER_US

    @property
    def self_cpu_time_total(self) -> float:
        """Duration minus that of the direct children, us; from the column unless events were changed."""
        view = self._source.view
        if not self._source.edited:
            return view.self_time.item(self._index) / _NS_PER_US
        own = super().self_cpu_time_total
        return own if view.collapsed is None else max(0, own - view.collapsed.item(self._index) / _NS_PER_US)

    @property
    def device_time_total(self) -> float:
        """Device time of the event and its descendants, us; from the column unless events were changed."""
        if self._source.edited:
            return super().device_time_total
        return self._source.device_time("device_time_total", self._index)

    @property
    def self_device_time_total(self) -> float:
        """Device time minus that of the direct children, us; from the column unless events were changed."""
        if self._source.edited:
            return super().self_device_time_total
        return self._source.device_time("self_device_time_total", self._index)

    @property
    def self_cpu_memory_usage(self) -> Any:
        """CPU memory allocated outside the direct children, bytes; from the column unless events were changed."""
        if self._source.edited:
            return super().self_cpu_memory_usage
        return self._source.amount("self_cpu_memory_usage", self._index)

    @property
    def self_device_memory_usage(self) -> Any:
        """Device memory allocated outside the direct children, bytes; from the column unless events were changed."""
        if self._source.edited:
            return super().self_device_memory_usage
        return self._source.amount("self_device_memory_usage", self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {**self.__dict__, **{field.name: getattr(self, field.name) for field in fields(self)}}
        view = self._source.view
        if view.calls is None or view.collapsed is None:
            return _blank, (FunctionEvent,), state
        state |= {"total_us": self.cpu_time_total, "collapsed_us": view.collapsed.item(self._index) / _NS_PER_US}
        return _blank, (ReducedEvent,), state


class ReducedEvent(FunctionEvent):
    """A copy of an event of a file with reduced traces: with the sum of the durations of its calls."""

    total_us: float
    collapsed_us: float
    """Total duration of collapsed calls inside the event."""

    @property
    def cpu_time_total(self) -> float:
        """As that of the copied event."""
        return self.total_us

    @property
    def self_cpu_time_total(self) -> float:
        """Total duration without that of the direct children, and of what was collapsed, us."""
        return max(0, super().self_cpu_time_total - self.collapsed_us)


class MemoryEvent(RecordedEvent):
    """``[memory]`` or ``[OutOfMemory]``: an instant with few attributes."""

    __slots__ = ()

    fwd_thread = _on_demand(EventSource.thread_number)
    device_resource_id = _on_demand(EventSource.thread_number)
    flops = trace_name = activity_type = concrete_inputs = kwinputs = None
    structured_input_shapes = structured_input_strides = input_dtypes = None
    external_id = device_index = 0


def _work(column: str) -> Any:
    return _OnDemand(lambda source, index: source.work(column, index))


class WorkEvent(RecordedEvent):
    """A kernel, a copy, or the time of a label's kernels, on a device."""

    __slots__ = ()

    device_type = _on_demand(lambda source, index: _device_type(source.work("device_type", index)))
    device_index = _work("device_index")
    device_resource_id = _work("stream")
    linked_correlation_id = _work("event")
    activity_type = _on_demand(lambda source, index: source.batch.names[source.work("category", index)])
    flops = None
    is_legacy = False


_OTHER_EVENTS = {MEMORY_KIND: MemoryEvent, WORK_KIND: WorkEvent}
"""Classes of events by kind; those of other kinds are of the base class."""


def _device_type(number: int) -> Any:
    """The member of :class:`DeviceType`; the number itself if there is none."""
    try:
        return DeviceType(number)
    except ValueError:
        return number


def _blank(of: type[FunctionEvent]) -> FunctionEvent:
    """An empty event, which a copy or pickle fills."""
    return of.__new__(of)
