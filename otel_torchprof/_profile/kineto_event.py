"""``kineto_results.events()``: the recorded events in order, in the form of torch's ``_KinetoEvent``."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.joined import rows_of, without
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._encode import chrome
from otel_torchprof._model import inputs
from otel_torchprof._native import torch_library

from .function_event import DeviceType, TorchEnum
from .profiler_events import EventTree
from .recorded_events import Node, Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch

    from .profiler_events import ProfilerEvent

    Filters = Mapping["ProfilerActivity", AbstractSet[str]]


# ---- groups of events that a profile can collect, with or without torch ----


class ProfilerActivity(TorchEnum):
    """Activity groups.

    ``torch.profiler.ProfilerActivity``, without torch. Every argument of this package takes either class.

    Examples:
        >>> otp.ProfilerActivity.CPU == torch.profiler.ProfilerActivity.CPU
        True
    """

    CPU = 0
    XPU = 1
    CUDA = 2
    HPU = 3
    MTIA = 4
    PrivateUse1 = 5


def supported_activities() -> set[ProfilerActivity]:
    """Returns the activity groups that every profile of this package can collect: the CPU.

    Mirrors ``torch.profiler.supported_activities``.

    Examples:
        >>> [activity.name for activity in otp.supported_activities()]
        ['CPU']
    """
    return {ProfilerActivity.CPU}


def kineto_available() -> bool:
    """Whether torch was built with Kineto; False without torch. This package does not need Kineto.

    Mirrors ``torch.autograd.kineto_available``.

    Examples:
        >>> isinstance(otp.kineto_available(), bool)
        True
    """
    if torch_library.installed_torch() is None:
        return False
    from torch.autograd import kineto_available as torchs

    return bool(torchs())


# ---- filters of activity types, applied to Chrome traces ----

_GROUPS = {
    ProfilerActivity.CUDA: (DeviceType.CUDA, DeviceType.HIP),
    ProfilerActivity.XPU: (DeviceType.XPU,),
    ProfilerActivity.HPU: (DeviceType.HPU,),
    ProfilerActivity.MTIA: (DeviceType.MTIA,),
    ProfilerActivity.PrivateUse1: (DeviceType.PrivateUse1,),
}
_WORK = frozenset(("CONCURRENT_KERNEL", "HPU_OP", "MTIA_CCP_EVENTS"))
"""Activity types of work on devices; here the device time of an operator stands for all of them."""


def displayed_events(batch: Batch, filters: Filters) -> Batch:
    """The batch without events that the filter of the CPU's group excludes."""
    types = filters.get(ProfilerActivity.CPU)
    if types is None:
        return batch
    label, frame = batch["scope"] == Scope.USER_SCOPE, batch["kind"] == Kind.FRAME
    displayed = np.zeros(len(batch), dtype=np.bool_)
    for name, rows in (("CPU_OP", ~label & ~frame), ("USER_ANNOTATION", label), ("PYTHON_FUNCTION", frame)):
        if name in types:
            displayed |= rows
    filtered = without(batch, ~displayed)
    return filtered if "CPU_INSTANT_EVENT" in types else replace(filtered, memory=None)


def displayed_devices(batch: Batch, filters: Filters) -> Batch:
    """The batch with all events, without device times that the filters of the devices' groups exclude."""
    devices = batch.devices
    if devices is None or not any(group in filters for group in _GROUPS):
        return batch
    displayed = np.ones(len(devices["event"]), dtype=np.bool_)
    annotation = _of_annotations(batch, devices["event"])
    for group, kinds in _GROUPS.items():
        types = filters.get(group)
        if types is not None:
            requested = np.where(annotation, "GPU_USER_ANNOTATION" in types, not _WORK.isdisjoint(types))
            displayed &= requested | ~np.isin(devices["device_type"], kinds)
    return replace(batch, devices={name: column[displayed] for name, column in devices.items()})


def _of_annotations(batch: Batch, events: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """For each event id, whether the event is a label or a module."""
    annotation = np.isin(batch["kind"], (Kind.LABEL, Kind.MODULE)) | (batch["scope"] == Scope.USER_SCOPE)
    rows = rows_of(batch, events)
    return np.where(rows >= 0, np.append(annotation, False)[rows], False)


# ---- ``kineto_results.events()`` ----


_CUDA_TYPES, _PRIVATE_USE = (1, 6), 20
"""Values of ``c10::DeviceType``: those that torch reports as CUDA, and that of private backends."""


class KinetoEvent:
    """An event with the methods of torch's ``_KinetoEvent``. Immutable.

    No event stands for a kernel: a timed operator has the device time of the work that it launched.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"<{self.activity_type()} {self.name()!r}, {self.duration_ns()} ns>"

    def _column(self, column: str, of_memory: Any) -> Any:
        return of_memory if self._node.is_memory else self._node.value(column)

    def _inputs(self, read: Any, nothing: Any) -> Any:
        return nothing if self._node.is_memory else read(self._node.nodes.batch, self._node.row)

    def _flow(self) -> tuple[int, bool]:
        return self._node.nodes.flows.get(self._node.row, (0, False))

    def name(self) -> str:
        """Returns the recorded name; ``[memory]`` for an allocation or release."""
        return self._node.name

    def activity_type(self) -> str:
        """``cpu_op``, ``user_annotation``, ``python_function`` or ``cpu_instant_event``."""
        if self._node.is_memory:
            return "cpu_instant_event"
        if self.is_python_function():
            return "python_function"
        return "user_annotation" if self.is_user_annotation() else "cpu_op"

    def start_ns(self) -> int:
        """Returns the start, Unix ns."""
        return self._node.start

    def end_ns(self) -> int:
        """Returns the end, Unix ns."""
        return self._node.end

    def duration_ns(self) -> int:
        """Returns end minus start."""
        return self._node.end - self._node.start

    def device_type(self) -> Any:
        """Returns the device of an allocation or release; the CPU for other events."""
        import torch

        return torch.autograd.DeviceType(self._node.value("device_type") if self._node.is_memory else 0)

    def device_index(self) -> int:
        """Returns the device index of an allocation or release; the process for other events."""
        index: int = max(self._node.value("device_index"), 0) if self._node.is_memory else os.getpid()
        return index

    def device_resource_id(self) -> int:
        """Returns the system's id of its thread."""
        return self._node.thread("thread").os_tid

    def start_thread_id(self) -> int:
        """Returns torch's id of the thread on which it began."""
        return self._node.thread("thread").number

    def end_thread_id(self) -> int:
        """Returns torch's id of the thread on which it ended."""
        return self._node.thread("thread" if self._node.is_memory else "end_thread").number

    def is_async(self) -> bool:
        """Whether it ended on another thread."""
        return bool(self._column("flags", 0) & Flag.ASYNC)

    def correlation_id(self) -> int:
        """Returns the number of the operator or label in the profile, from 1; 0 for other events."""
        return int(self._node.nodes.correlation[self._node.position])

    def linked_correlation_id(self) -> int:
        """Returns 0: there are no kernels of other events."""
        return 0

    def external_id(self) -> int:
        """The same as ``correlation_id``."""
        return int(self._node.nodes.correlation[self._node.position])

    def sequence_nr(self) -> int:
        """Torch's number of the autograd node; -1 for none."""
        return self._node.sequence_nr

    def fwd_thread_id(self) -> int:
        """Returns torch's id of the thread of the forward operator; 0 for none."""
        return self._node.forward_thread

    def scope(self) -> int:
        """The number of torch's ``RecordScope``."""
        number: int = self._column("scope", 0)
        return number

    def is_user_annotation(self) -> bool:
        """Whether it is a label."""
        return self.scope() == Scope.USER_SCOPE

    def is_hidden_event(self) -> bool:
        """Returns False: no event is hidden."""
        return False

    def is_python_function(self) -> bool:
        """Whether it is a call of a Python or C function."""
        return bool(self._column("kind", 0) == Kind.FRAME)

    def python_id(self) -> int:
        """Returns torch's number of the call; -1 for other events."""
        return self._node.python_id("own")

    def python_parent_id(self) -> int:
        """Returns torch's number of the enclosing call."""
        return self._node.python_id("caller")

    def python_module_id(self) -> int:
        """Returns torch's number of the called module among those of its class; -1 for other events."""
        return self._node.python_id("module")

    def overload_name(self) -> str:
        """Returns the overload of an operator, if overloads were recorded; else empty."""
        return str(self._inputs(inputs.overload_name, ""))

    def shapes(self) -> list[list[int]]:
        """Returns the dimensions of each input."""
        return self._inputs(inputs.input_shapes, [])  # type: ignore[no-any-return]  # what it reads

    def structured_input_shapes(self) -> list[Any]:
        """Returns the dimensions of each input; a list of tensors has a list of them."""
        return self._inputs(inputs.structured_input_shapes, [])  # type: ignore[no-any-return]  # what it reads

    def structured_input_strides(self) -> list[Any]:
        """Returns the strides of each input."""
        return self._inputs(inputs.structured_input_strides, [])  # type: ignore[no-any-return]  # what it reads

    def dtypes(self) -> list[str]:
        """Returns the type of each input."""
        return self._inputs(inputs.input_dtypes, [])  # type: ignore[no-any-return]  # what it reads

    def concrete_inputs(self) -> list[Any]:
        """Returns the value of each input that is a scalar or a list of scalars."""
        return self._inputs(inputs.concrete_inputs, [])  # type: ignore[no-any-return]  # what it reads

    def kwinputs(self) -> dict[str, Any]:
        """Returns the inputs that were passed by keyword."""
        return self._inputs(inputs.kwinputs, {})  # type: ignore[no-any-return]  # what it reads

    def stack(self) -> list[str]:
        """Returns the calls that enclose an operator or label, innermost first; empty for other events."""
        if self._node.tag != "TorchOp":
            return []
        return [node.name for node in self._node.ancestors() if node.tag in {"PyCall", "PyCCall"}]

    def nbytes(self) -> int:
        """Returns the size of an allocation in bytes, negative for a release; 0 for other events."""
        size: int = self._node.value("bytes") if self._node.is_memory else 0
        return size

    def flops(self) -> int:
        """Returns the operator's floating point operations, from its inputs; 0 if unknown or not requested."""
        return 0 if self._node.is_memory else int(self._node.nodes.flops[self._node.row])

    def cuda_elapsed_us(self) -> int:
        """Returns the GPU time in microseconds; -1 if it was not timed."""
        return self._node.device_us(_CUDA_TYPES)

    def privateuse1_elapsed_us(self) -> int:
        """Returns the time of a private backend's device in microseconds; -1 if it was not timed."""
        return self._node.device_us((_PRIVATE_USE,))

    def flow_id(self) -> int:
        """Returns the number of the arrow from a forward operator to its backward function; 0 for none."""
        return self._flow()[0]

    def flow_type(self) -> int:
        """Returns 1 if an arrow begins or ends here; else 0."""
        return int(self._flow()[0] > 0)

    def flow_start(self) -> bool:
        """Whether the arrow begins here."""
        return self._flow()[1]

    def metadata_json(self) -> str:
        """Returns an empty text: recorded events have no metadata."""
        return ""

    def extra_meta(self) -> dict[str, str]:
        """Returns an empty dictionary: recorded events have no metadata."""
        return {}

    def typed_metadata(self) -> dict[str, Any]:
        """Returns an empty dictionary: recorded events have no metadata."""
        return {}


# ---- ``kineto_results.trace_activities()``: what torch's writer of Chrome traces in Python reads (torch 2.13) ----

_ON_TRACKS = frozenset(("cpu_op", "user_annotation", "python_function"))


class TraceActivity:
    """``_ITraceActivity``: an event with the arguments that it has in a Chrome trace. Immutable."""

    def __init__(self, event: KinetoEvent, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self.name = event.name
        self.type = event.activity_type
        self.timestamp = event.start_ns
        self.duration = event.duration_ns
        self.resource_id = event.device_resource_id
        self.correlation_id = event.correlation_id
        self.linked_correlation_id = event.linked_correlation_id
        self.flow_id = event.flow_id
        self.flow_type = event.flow_type
        self.flow_start = event.flow_start

    def device_id(self) -> int:
        """Returns the process: no event is one of a device."""
        return os.getpid()

    def linked_activity(self) -> None:
        """Returns None: no event is a kernel."""
        return

    def metadata_json(self) -> str:
        """Returns its arguments as JSON, without the braces."""
        return json.dumps({key: value for key, value in self._arguments.items() if key != "External id"})[1:-1]


def arguments_of(batch: Batch) -> Sequence[Mapping[str, Any]]:
    """The ``args`` of each event, and after these of each change of memory, in the Chrome trace."""
    written = json.loads(b"".join(chrome.encode(batch)))["traceEvents"]
    events = [event for event in written if event.get("cat") in _ON_TRACKS and event["ph"] in "Xb"]
    memory = [event for event in written if event.get("cat") == "cpu_instant_event"]
    return [event.get("args", {}) for event in events + memory]


# ---- ``prof.profiler.kineto_results``: torch's ``_ProfilerResult``, made from a recording of this package ----


class ProfilerResult:
    """A recording in torch's form, as a tree and as a list. Thread-safe; needs torch."""

    def __init__(self, batch: Batch, start_ns: int, save: Callable[[str], None], *, with_flops: bool) -> None:
        self._nodes = Nodes(batch, with_flops=with_flops)
        self._tree = EventTree(self._nodes)
        self._start_ns = start_ns
        self._save = save

    def experimental_event_tree(self) -> list[ProfilerEvent]:
        """Returns the top-level events, by start, with all others below them.

        Each event is one object during the life of this one, created on access: about 20 us each with its name and
        fields.
        """
        return self._tree.children(-1)

    def events(self) -> list[KinetoEvent]:
        """Returns all events by start; some microseconds each."""
        return [KinetoEvent(Node(self._nodes, position)) for position in range(len(self._nodes.tree))]

    def trace_activities(self) -> list[TraceActivity]:
        """Returns all events with their arguments in a Chrome trace, which is created for it; 30 to 60 us each."""
        arguments = arguments_of(self._nodes.batch)
        events = zip(self.events(), self._nodes.tree.row.tolist(), strict=True)
        return [TraceActivity(event, arguments[row]) for event, row in events]

    def trace_start_ns(self) -> int:
        """Returns the start of the recording, Unix ns."""
        return self._start_ns

    def save(self, path: str) -> None:
        """Writes the trace, as ``export_chrome_trace``."""
        self._save(path)


# ---- allocation records, searched by time ----


class MemRecordsAcc:
    """Index of allocation records by start time; mirrors torch's class of that name.

    Costs one sort when it is made and two binary searches per query. Queries do not change it, so threads may share it.

    Args:
        mem_records: sequences whose first item has a method ``start_ns()``, in ns.

    Examples:
        >>> from types import SimpleNamespace
        >>> records = [(SimpleNamespace(start_ns=lambda: 30), "b"), (SimpleNamespace(start_ns=lambda: 10), "a")]
        >>> [name for _, name in otp.MemRecordsAcc(records).in_interval(0, 20)]
        ['a']
    """

    def __init__(self, mem_records: Sequence[Any]) -> None:
        starts = [record[0].start_ns() for record in mem_records]
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self._starts = [starts[place] for place in order]
        self._records = [mem_records[place] for place in order]

    def in_interval(self, start_ns: int, end_ns: int) -> Iterator[Any]:
        """Yields the records that start from ``start_ns`` to ``end_ns`` (both included, in ns), ordered by start."""
        yield from self._records[bisect_left(self._starts, start_ns) : bisect_right(self._starts, end_ns)]
