"""``FunctionEvent``: one profiled call, the item of ``prof.events()``.

Names, constructor arguments and meanings are those of ``torch.autograd.profiler_util``, so code for torch's profiler
reads them unchanged. Times are in microseconds, sizes in bytes.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import json
import sys
import warnings
from collections import defaultdict
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._encode.table import format_time
from otel_torchprof._model.frames import HIDDEN_STACK_ENTRIES
from otel_torchprof._model.tree import HIDDEN_NAMES, display_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_torchprof._columns.frame_info import FunctionInfo, ModuleInfo, OptimizerInfo


class TorchEnum(enum.IntEnum):
    """Has the values and the text of torch's enumeration of the same name.

    ``ours == torchs`` holds for the same value; ``torchs == ours`` does not, since torch's enumeration knows only itself.
    """

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ == type(self).__name__:
            return int(self) == int(other)  # type: ignore[call-overload, no-any-return]  # torch's converts to int too
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class DeviceType(TorchEnum):
    """Type of device of an event: ``torch.autograd.DeviceType``, without torch.

    Examples:
        >>> otp.DeviceType.CUDA == torch.autograd.DeviceType.CUDA
        True
    """

    CPU = 0
    CUDA = 1
    MKLDNN = 2
    OPENGL = 3
    OPENCL = 4
    IDEEP = 5
    HIP = 6
    FPGA = 7
    MAIA = 8
    XLA = 9
    Vulkan = 10
    Metal = 11
    XPU = 12
    MPS = 13
    Meta = 14
    HPU = 15
    VE = 16
    Lazy = 17
    IPU = 18
    MTIA = 19
    PrivateUse1 = 20


class Interval:
    """A time interval on the time axis of a profile, in microseconds. Mirrors torch's class.

    Examples:
        >>> otp.Interval(1.0, 3.5).elapsed_us()
        2.5
    """

    __slots__ = ("end", "start")

    def __init__(self, start: float, end: float) -> None:
        self.start = start
        self.end = end

    def elapsed_us(self) -> float:
        """Returns end minus start, in microseconds."""
        return self.end - self.start

    def __repr__(self) -> str:
        return f"Interval(start={self.start}, end={self.end})"


class Kernel(NamedTuple):
    """A kernel that an operator launched on a device; the duration is in microseconds. Mirrors torch's class.

    Examples:
        >>> otp.Kernel("gemm", device=0, duration=12.5).duration
        12.5
    """

    name: str
    device: int
    duration: float


class DeviceWork(NamedTuple):
    """Device time between the two timing events of a profiled event on one stream."""

    device_type: Any
    """:class:`DeviceType`; the number of ``c10::DeviceType`` if it has no name here."""
    device_index: int
    stream: int
    """Torch's ``Stream.stream_id``."""
    start: float
    """Time when the device reached the first timing event: microseconds on the time axis of the profile."""
    duration: float
    """Time to the second timing event, by the device's clock, in microseconds."""


class FormattedTimesMixin:
    """Times per call and times as text, for classes with a count and the ``*_time_total`` attributes.

    Mirrors torch's class.

    Examples:
        >>> otp.FunctionEvent(id=0, name="add", thread=1, start_us=0, end_us=1500).cpu_time_total_str
        '1.500ms'
    """

    count: int
    cpu_time_total: Any
    device_time_total: Any
    self_cpu_time_total: Any
    self_device_time_total: Any

    @property
    def cpu_time(self) -> float:
        """CPU time per call, in microseconds."""
        return 0.0 if self.count == 0 else float(self.cpu_time_total / self.count)

    @property
    def device_time(self) -> float:
        """Device time per call, in microseconds."""
        return 0.0 if self.count == 0 else float(self.device_time_total / self.count)

    @property
    def cuda_time(self) -> Any:
        """Deprecated name of ``device_time``."""
        return _renamed(self, "cuda_time", "device_time")

    @property
    def cpu_time_str(self) -> str:
        """CPU time per call as text."""
        return format_time(self.cpu_time)

    @property
    def device_time_str(self) -> str:
        """Device time per call as text."""
        return format_time(self.device_time)

    @property
    def cpu_time_total_str(self) -> str:
        """CPU time of all calls as text."""
        return format_time(self.cpu_time_total)

    @property
    def device_time_total_str(self) -> str:
        """Device time of all calls as text."""
        return format_time(self.device_time_total)

    @property
    def self_cpu_time_total_str(self) -> str:
        """Self CPU time of all calls as text."""
        return format_time(self.self_cpu_time_total)

    @property
    def self_device_time_total_str(self) -> str:
        """Self device time of all calls as text."""
        return format_time(self.self_device_time_total)


@dataclass(eq=False, repr=False)
class FunctionEvent(FormattedTimesMixin):
    """One call of an operator, a label or a kernel. Equal only to itself. Mirrors torch's class.

    The constructor takes torch's arguments in torch's order. Times are in microseconds, sizes in bytes. Not
    thread-safe.

    Examples:
        >>> event = otp.FunctionEvent(id=0, name="aten::add", thread=1, start_us=10, end_us=25)
        >>> event.cpu_time_total
        15
    """

    id: int
    """Unique within its list."""
    name: str
    """Name of the operator, label or kernel; numbered profiler steps are all ``ProfilerStep*``."""
    thread: int
    """Torch's small id of the thread on which it began; the system's id if torch never ran there."""
    start_us: InitVar[float]
    end_us: InitVar[float]
    overload_name: str | None = None
    fwd_thread: int | None = None
    """Thread of the forward operator, for a backward function; 0 for none."""
    input_shapes: Any = None
    """One list of dimensions per input: ``[[2, 3], [], ...]``; ``[]`` for a list of tensors."""
    stack: list[str] | None = None
    """Python frames, innermost first."""
    scope: int = 0
    """``at::RecordScope``: 0 operator, 1 backward function, 7 label."""
    use_device: str | None = None
    cpu_memory_usage: int = 0
    device_memory_usage: int = 0
    is_async: bool = False
    """Whether it ended on another thread, or is declared asynchronous: it has no parent, no children and no self
    time."""
    is_remote: bool = False
    sequence_nr: int = -1
    """Pairs a backward function with its forward operator; -1 for none."""
    node_id: int = -1
    device_type: Any = DeviceType.CPU
    device_index: int = 0
    device_resource_id: int | None = None
    """Stream of a device, system thread of the CPU; ``thread`` by default."""
    is_legacy: bool = False
    flops: float | None = None
    trace_name: str | None = None
    """The name with the number of the profiler step."""
    concrete_inputs: list[Any] | None = None
    kwinputs: dict[str, Any] | None = None
    is_user_annotation: bool | None = False
    """Whether it is a label of ``record_function``."""
    is_python_function: bool = False
    activity_type: str | None = None
    metadata_json: InitVar[str | None] = None
    flow_id: int | None = None
    flow_type: int | None = None
    flow_start: bool | None = None
    external_id: int = 0
    linked_correlation_id: int = 0
    extra_meta: InitVar[dict[str, str] | None] = None
    structured_input_shapes: list[Any] | None = None
    """Like ``input_shapes``, with a list of tensors as a list of their dimensions."""
    structured_input_strides: list[Any] | None = None
    input_dtypes: list[str] | None = None
    python_id: int = -1
    python_parent_id: int = -1
    python_module_id: int = -1
    typed_metadata: InitVar[dict[str, Any] | None] = None

    module_hierarchy: str = field(default="", init=False)
    """With ``with_modules``: the enclosing modules, ``GPT.blocks.0.attn``, from the class of the root."""
    function: FunctionInfo | None = field(default=None, init=False)
    """With ``with_stack``, for a call of a Python function: its name and source line."""
    module: ModuleInfo | None = field(default=None, init=False)
    """With ``with_stack``, for a call of a ``torch.nn.Module``: its full name, class and parameters."""
    optimizer: OptimizerInfo | None = field(default=None, init=False)
    """With ``with_stack``, for the call that ends an optimizer's step: its class, parameter groups and state."""
    device_work: DeviceWork | None = field(default=None, init=False)
    """Device and device time, if the event has its own timing events on a stream; child events may have others."""
    cpu_memory_peak: int = field(default=0, init=False)
    """With ``profile_memory``: peak of torch's bytes in use on the CPU, at allocations inside it or below; 0 if
    there were none."""
    device_memory_peak: int = field(default=0, init=False)
    """The same on a device; with several devices, on the one with the most."""
    count: int = field(default=1, init=False)
    time_range: Interval = field(init=False)
    kernels: list[Kernel] = field(default_factory=list, init=False)
    cpu_children: list[FunctionEvent] = field(default_factory=list, init=False)
    cpu_parent: FunctionEvent | None = field(default=None, init=False)
    self_cpu_percent: float = field(default=-1, init=False)
    total_cpu_percent: float = field(default=-1, init=False)
    total_device_percent: float = field(default=-1, init=False)

    metadata: dict[str, Any] | None = field(default=None, init=False)
    """Metadata of a device's own event, by torch's field names: the constructor's ``typed_metadata``. None for
    recorded events, whose devices are timed by torch's events and not by Kineto."""
    event_metadata: EventMetadata | None = field(default=None, init=False)
    """Metadata of a device's own event, from the constructor's ``extra_meta``."""
    _metadata_json: str | None = field(default=None, init=False)

    def __post_init__(
        self,
        start_us: float,
        end_us: float,
        metadata_json: str | None,
        extra_meta: dict[str, str] | None,
        typed_metadata: dict[str, Any] | None,
    ) -> None:
        self.time_range = Interval(start_us, end_us)
        self._metadata_json = metadata_json
        self.metadata = typed_metadata
        self.event_metadata = EventMetadata.of(extra_meta) if extra_meta else None
        if self.device_resource_id is None:
            self.device_resource_id = self.thread

    @property
    def key(self) -> str:
        """Key of the event in averages: its name."""
        return self.name

    def append_kernel(self, name: str, device: int, duration: float) -> None:
        """Adds a kernel that this CPU event launched; the duration is in microseconds.

        Raises:
            ValueError: this is not a CPU event.
        """
        _require_cpu(self, "kernels")
        self.kernels.append(Kernel(name, device, duration))

    def append_cpu_child(self, child: FunctionEvent) -> None:
        """Adds a direct child, whose time then no longer counts as this event's self time.

        Raises:
            TypeError: ``child`` is not a FunctionEvent.
            ValueError: this or ``child`` is not a CPU event.
        """
        _require_cpu(self, "children")
        _require_cpu(child, "a CPU parent")
        self.cpu_children.append(child)

    def set_cpu_parent(self, parent: FunctionEvent) -> None:
        """Sets the parent of this event.

        Raises:
            TypeError: ``parent`` is not a FunctionEvent.
            ValueError: this or ``parent`` is not a CPU event.
        """
        _require_cpu(self, "a CPU parent")
        _require_cpu(parent, "children")
        self.cpu_parent = parent

    @property
    def cpu_time_total(self) -> float:
        """Duration of a CPU event in microseconds; 0 on other devices."""
        return self.time_range.elapsed_us() if self.device_type == DeviceType.CPU else 0

    @property
    def self_cpu_time_total(self) -> float:
        """Duration minus that of the direct children, in microseconds.

        0 for asynchronous events and on other devices.
        """
        if not self._has_own_share():
            return 0
        return self.cpu_time_total - sum(child.cpu_time_total for child in self.cpu_children)

    @property
    def device_time_total(self) -> float:
        """Time of the kernels launched here and in children, in microseconds.

        For an event on a device, its duration.
        """
        if self.is_async or not self.use_device:
            return 0
        if self.device_type != DeviceType.CPU:
            return self.time_range.elapsed_us()
        own = sum(kernel.duration for kernel in self.kernels)
        return own if self.is_legacy else own + sum(child.device_time_total for child in self.cpu_children)

    @property
    def self_device_time_total(self) -> float:
        """Device time minus that of the direct children, in microseconds."""
        if self.is_async or not self.use_device:
            return 0
        if self.device_type != DeviceType.CPU:
            return self.device_time_total
        return self.device_time_total - sum(child.device_time_total for child in self.cpu_children)

    @property
    def self_cpu_memory_usage(self) -> int:
        """CPU memory allocated outside the direct children, in bytes."""
        if not self._has_own_share():
            return 0
        return self.cpu_memory_usage - sum(child.cpu_memory_usage for child in self.cpu_children)

    @property
    def self_device_memory_usage(self) -> int:
        """Device memory allocated outside the direct children, in bytes."""
        if not self._has_own_share():
            return 0
        return self.device_memory_usage - sum(child.device_memory_usage for child in self.cpu_children)

    @property
    def cuda_time_total(self) -> Any:
        """Deprecated name of ``device_time_total``."""
        return _renamed(self, "cuda_time_total", "device_time_total")

    @property
    def self_cuda_time_total(self) -> Any:
        """Deprecated name of ``self_device_time_total``."""
        return _renamed(self, "self_cuda_time_total", "self_device_time_total")

    @property
    def self_cuda_memory_usage(self) -> Any:
        """Deprecated name of ``self_device_memory_usage``."""
        return _renamed(self, "self_cuda_memory_usage", "self_device_memory_usage")

    def _has_own_share(self) -> bool:
        return not self.is_async and bool(self.device_type == DeviceType.CPU)

    def __repr__(self) -> str:
        device = self.use_device
        return (
            f"<FunctionEvent id={self.id} name={self.name} overload_name={self.overload_name} "
            f"device_type={self.device_type} node_id={self.node_id} cpu_time={self.cpu_time_str} "
            f"start_us={self.time_range.start} end_us={self.time_range.end} "
            f"cpu_children={[child.id for child in self.cpu_children]} {device}_time={self.device_time_str} "
            f"name={self.name} thread={self.thread} input_shapes={self.input_shapes} "
            f"cpu_memory_usage={self.cpu_memory_usage} {device}_memory_usage={self.device_memory_usage} "
            f"is_async={self.is_async} is_remote={self.is_remote} seq_nr={self.sequence_nr} is_legacy={self.is_legacy}>"
        )


def _require_cpu(event: FunctionEvent, what: str) -> None:
    if not isinstance(event, FunctionEvent):
        raise TypeError(f"{event!r} is no FunctionEvent")
    if event.device_type != DeviceType.CPU:
        raise ValueError(f"event {event.name!r} ran on {event.device_type}: only CPU events have {what}")


def _renamed(event: object, old: str, new: str, attribute: str = "") -> Any:
    """Warns of a deprecated attribute and returns the value of the new one, or that of ``attribute``."""
    # The wording is torch's, so that filters for torch's warning match this one too.
    warnings.warn(f"`{old}` is deprecated. Use `{new}` instead.", FutureWarning, stacklevel=3)
    return getattr(event, attribute or new)


def _metadata_json(event: FunctionEvent) -> Any:
    """The device's own event as JSON; deprecated in favour of ``event_metadata``."""
    return _renamed(event, "metadata_json", "event_metadata", "_metadata_json")


# Set here, since in the class body a property of this name would be the default of the constructor's argument.
FunctionEvent.metadata_json = property(_metadata_json)  # type: ignore[attr-defined]


# ---- metadata from a device's own event of a kernel, a copy or a collective, as in torch's profiler ----


class EventMetadata(NamedTuple):
    """Metadata of one event on a device.

    None for a missing value. Sizes are in bytes, ``bandwidth_gb_s`` in GB/s. Immutable. Mirrors torch's class of that
    name.

    Examples:
        >>> metadata = otp.EventMetadata.of({"stream": "7", "grid": "[8, 1, 1]"})
        >>> metadata.stream, metadata.grid
        (7, [8, 1, 1])
    """

    registers_per_thread: int | None = None
    shared_memory: int | None = None
    grid: list[int] | None = None
    block: list[int] | None = None
    priority: int | None = None
    blocks_per_sm: float | None = None
    warps_per_sm: float | None = None
    occupancy: dict[str, Any] | None = None
    est_occupancy_pct: float | None = None
    queued: int | None = None
    graph_id: int | None = None
    graph_node_id: int | None = None
    stream: int | None = None
    context: int | None = None
    channel: int | None = None
    channel_type: int | None = None
    bytes: int | None = None
    bandwidth_gb_s: float | None = None
    collective_name: str | None = None
    dtype: str | None = None
    in_msg_nelems: int | None = None
    out_msg_nelems: int | None = None
    in_split_size: str | None = None
    out_split_size: str | None = None
    global_rank_start: int | None = None
    global_rank_stride: int | None = None
    group_size: int | None = None
    process_group_name: str | None = None
    process_group_desc: str | None = None
    group_ranks: str | None = None
    rank: int | None = None
    src_rank: int | None = None
    dst_rank: int | None = None
    seq: int | None = None
    is_async: bool | None = None

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> EventMetadata | None:
        """Parses metadata from the texts of a trace under Kineto's keys; returns None if none of the keys is known.

        Raises:
            ValueError: a text is not a value of its type.
        """
        known = {_FIELDS[key]: text for key, text in texts.items() if key in _FIELDS and text is not None}
        return cls(**{field: _READERS[field](text) for field, text in known.items()}) if known else None


def _unquoted(text: str) -> str:
    return text.strip('"')


def _truth(text: str) -> bool:
    return text in {"1", "true"}


_KEYS: tuple[tuple[Callable[[str], Any], dict[str, str]], ...] = (
    (
        int,
        {
            "registers per thread": "registers_per_thread",
            "shared memory": "shared_memory",
            "graph id": "graph_id",
            "graph node id": "graph_node_id",
            "In msg nelems": "in_msg_nelems",
            "Out msg nelems": "out_msg_nelems",
            "Global rank start": "global_rank_start",
            "Global rank stride": "global_rank_stride",
            "Group size": "group_size",
            "Rank": "rank",
            "Src Rank": "src_rank",
            "Dst Rank": "dst_rank",
            "Seq": "seq",
            **{key: key for key in ("priority", "queued", "stream", "context", "channel", "channel_type", "bytes")},
        },
    ),
    (
        float,
        {
            "blocks per SM": "blocks_per_sm",
            "warps per SM": "warps_per_sm",
            "est. achieved occupancy %": "est_occupancy_pct",
            "memory bandwidth (GB/s)": "bandwidth_gb_s",
        },
    ),
    (json.loads, {"grid": "grid", "block": "block", "occupancy": "occupancy"}),
    (
        _unquoted,
        {
            "Collective name": "collective_name",
            "dtype": "dtype",
            "In split size": "in_split_size",
            "Out split size": "out_split_size",
            "Process Group Name": "process_group_name",
            "Process Group Description": "process_group_desc",
            "Process Group Ranks": "group_ranks",
        },
    ),
    (_truth, {"Is asynchronized op": "is_async"}),
)
"""Parsers of texts, each with the Kineto keys that it parses and their fields."""

_FIELDS = {key: field for _, fields in _KEYS for key, field in fields.items()}
_READERS = {field: read for read, fields in _KEYS for field in fields.values()}


# ---- rules for names: hidden events, events that share an entry, and demangled C++ names ----

MEMORY_EVENT_NAME = "[memory]"
OUT_OF_MEMORY_EVENT_NAME = "[OutOfMemory]"


def demangle(name: str) -> str:
    """Returns a C++ name in readable form; any other name, and every name without a C++ library, unchanged.

    Uses torch if it is imported, else the system's C++ library. The short ABI names of built-in types are demangled
    too: ``Pd`` becomes ``double*``. Mirrors torch's function of that name. Thread-safe; costs about a microsecond.

    Examples:
        >>> otp.demangle("_ZN2at6Tensor3addEv"), otp.demangle("aten::add")
        ('at::Tensor::add()', 'aten::add')
    """
    torch = sys.modules.get("torch")
    demangle_of_torch = getattr(getattr(torch, "_C", None), "_demangle", None)
    if demangle_of_torch is not None:
        return str(demangle_of_torch(name))
    return _demangled_by_the_system(name)


class StringTable(defaultdict[str, str]):
    """Dictionary from raw names to readable names that demangles each name once; names of one character stay unchanged.

    Mirrors torch's class of that name.

    Examples:
        >>> otp.StringTable()["_ZN2at6Tensor3addEv"]
        'at::Tensor::add()'
    """

    def __missing__(self, name: str) -> str:
        readable = self[name] = demangle(name) if len(name) > 1 else name
        return readable


def _filter_name(name: str) -> bool:
    """Whether events of this name are hidden in every list."""
    return name in HIDDEN_NAMES


def _rewrite_name(name: str, with_wildcard: bool = False) -> str:
    """Returns the display name of an event; ``with_wildcard`` gives all numbered profiler steps one name."""
    readable = StringTable()[name]
    return display_name(readable) if with_wildcard else readable


def _filter_stack_entry(entry: str) -> bool:
    """Whether a stack entry is displayed."""
    return not any(file in entry and function in entry for file, function in HIDDEN_STACK_ENTRIES)


def _demangled_by_the_system(name: str) -> str:
    functions = _cxx_functions()
    if functions is None or "\0" in name:
        return name
    demangled, free = functions
    status = ctypes.c_int()
    address = demangled(name.encode("utf-8", "surrogateescape"), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode("utf-8", "surrogateescape")
    finally:
        free(ctypes.c_void_p(address))


@functools.cache
def _cxx_functions() -> tuple[Any, Any] | None:
    """``__cxa_demangle`` of the system's C++ library, and the ``free`` for what it returns; None without one."""
    # By its path on macOS, where a bare name is also searched for in the working directory.
    for file in ("/usr/lib/libc++abi.dylib",) if sys.platform == "darwin" else ("libstdc++.so.6", "libc++abi.so.1"):
        try:
            library = ctypes.CDLL(file)
        except OSError:
            continue
        demangled, free = library["__cxa_demangle"], library["free"]
        demangled.restype, free.restype = ctypes.c_void_p, None
        return demangled, free
    return None
