"""``LegacyEvent``: a mark, begin, end or allocation in the lists of the legacy profiler, and its serialized form."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_torchprof._columns.batch import Batch

SERIAL_VERSION = 1
"""First value of :meth:`LegacyEvent.to_ivalue`; incremented when a later value changes its place or meaning."""

_NS_PER_US = 1000
_US_PER_MS = 1000


class EventKind(enum.IntEnum):
    """Kind of a legacy event; the numbers are torch's, and part of the serialized form."""

    MARK = 0
    PUSH = 1
    POP = 2
    MEMORY_ALLOC = 3


_KIND_TEXT = {
    EventKind.MARK: "mark",
    EventKind.PUSH: "push",
    EventKind.POP: "pop",
    EventKind.MEMORY_ALLOC: "memory_alloc",
}


class LegacyEvent:
    """A mark, the begin ("push") or end ("pop") of an operator or label, or a change of memory ("memory_alloc").

    The accessors are those of torch's ``ProfilerEvent``. Times are Unix microseconds, sizes bytes. Not thread-safe.

    Args:
        kind: kind of the event.
        name: name of the operator, label or mark; empty for ends and allocations.
        thread_id: torch's small id of the thread on which it happened.
        cpu_ns: time, Unix nanoseconds.
        handle: number that a begin shares with its end only; 0 for marks and allocations.
        shapes: dimensions of the inputs.
        node_id: id of the recording process, -1 for this one.
        is_async: whether it is declared asynchronous.
        is_remote: whether another process recorded it.
        cpu_memory_usage: allocated bytes on the CPU; negative for a release.
        cuda_memory_usage: the same on a device.
        device: index of the device of its device event, -1 for none.
        cuda_us: device time of a remote event in microseconds; -1 for none.
    """

    __slots__ = (
        "_cpu_memory_usage",
        "_cpu_ns",
        "_cuda_memory_usage",
        "_cuda_us",
        "_device",
        "_device_event",
        "_handle",
        "_is_async",
        "_is_remote",
        "_kind",
        "_name",
        "_node_id",
        "_shapes",
        "_thread_id",
    )

    def __init__(
        self,
        kind: EventKind,
        name: str,
        thread_id: int,
        *,
        cpu_ns: int,
        handle: int = 0,
        shapes: Sequence[Sequence[int]] = (),
        node_id: int = -1,
        is_async: bool = False,
        is_remote: bool = False,
        cpu_memory_usage: int = 0,
        cuda_memory_usage: int = 0,
        device: int = -1,
        cuda_us: int = -1,
    ) -> None:
        self._kind = kind
        self._name = name
        self._thread_id = thread_id
        self._cpu_ns = cpu_ns
        self._handle = handle
        self._shapes = shapes
        self._node_id = node_id
        self._is_async = is_async
        self._is_remote = is_remote
        self._cpu_memory_usage = cpu_memory_usage
        self._cuda_memory_usage = cuda_memory_usage
        self._device = device
        self._device_event: OnDevice | None = None
        self._cuda_us = cuda_us

    # ---- accessors ----

    def kind(self) -> str:
        """One of "mark", "push", "pop" and "memory_alloc"."""
        return _KIND_TEXT[self._kind]

    def name(self) -> str:
        """Returns the name of the operator or label, or the text of the mark."""
        return self._name

    def thread_id(self) -> int:
        """Returns the thread on which it happened; an end on another thread than its begin is in the begin's list."""
        return self._thread_id

    def handle(self) -> int:
        """Returns the number that a begin shares with its end."""
        return self._handle

    def node_id(self) -> int:
        """Returns the id of the recording process, -1 for this one."""
        return self._node_id

    def set_node_id(self, node_id: int) -> None:
        """Sets the id of the recording process."""
        self._node_id = node_id

    def is_remote(self) -> bool:
        """Whether another process recorded it."""
        return self._is_remote

    def is_async(self) -> bool:
        """Whether it was declared asynchronous."""
        return self._is_async

    def shapes(self) -> list[list[int]]:
        """Returns the dimensions of the inputs, if shapes were recorded."""
        return [list(shape) for shape in self._shapes]

    def stack(self) -> list[str]:
        """Returns its Python stack, innermost frame first, if stacks were recorded."""
        return []

    def scope(self) -> int:
        """``at::RecordScope``: 0 operator, 1 backward function, 7 label."""
        return 0

    def sequence_nr(self) -> int:
        """Pairs a backward function with its forward operator; -1 for none."""
        return -1

    def fwd_thread_id(self) -> int:
        """Thread of the forward operator, for backward functions; 0 for none."""
        return 0

    def flops(self) -> int:
        """Returns floating point operations, if they were requested and are known."""
        return 0

    def correlation_id(self) -> int:
        """Always 0: nothing that this engine records has one."""
        return 0

    def cpu_memory_usage(self) -> int:
        """Returns allocated bytes on the CPU; negative for a release."""
        return self._cpu_memory_usage

    def cuda_memory_usage(self) -> int:
        """Returns allocated bytes on a device; negative for a release."""
        return self._cuda_memory_usage

    def start_us(self) -> float:
        """Returns its time, Unix microseconds."""
        return self._cpu_ns / _NS_PER_US

    def cpu_elapsed_us(self, later: LegacyEvent) -> float:
        """Returns microseconds from this event to a later one."""
        return (later._cpu_ns - self._cpu_ns) / _NS_PER_US

    def __repr__(self) -> str:
        return f"<LegacyEvent {self.kind()} {self.name()!r} handle={self._handle} thread={self._thread_id}>"

    # ---- devices ----

    def has_cuda(self) -> bool:
        """Whether it has a device event, its own or that of another process."""
        return self._device_event is not None or (self._is_remote and self._device != -1)

    def device(self) -> int:
        """Returns the index of the device of its device event; -1 for none."""
        return self._device

    def set_device_event(self, device_event: OnDevice) -> None:
        """Sets the device event of a local event."""
        self._device, self._device_event = device_event.device, device_event

    def set_cuda_us(self, cuda_us: int) -> None:
        """Sets the device time, which replaces the device event in another process."""
        self._cuda_us = cuda_us

    def cuda_elapsed_us(self, later: LegacyEvent) -> float:
        """Returns the device time in microseconds to a later event.

        Between device events, or between remote events as received.

        Raises:
            TorchProfError: one of them has no device event, they are of different devices, or only one of them is
                remote.
        """
        if not (self.has_cuda() and later.has_cuda()):
            raise TorchProfError("Events were not recorded for CUDA")
        if self._device != later._device:
            raise TorchProfError(f"Events are not on the same device: {later._device} vs {self._device}")
        if self._is_remote and later._is_remote:
            return float(later._cuda_us - self._cuda_us)
        if self._device_event is None or later._device_event is None:
            raise TorchProfError("no device time between an event of this process and one of another")
        return self._device_event.event.elapsed_time(later._device_event.event) * _US_PER_MS

    # ---- serial form ----

    def to_ivalue(self) -> list[Any]:
        """Returns the event as a list of numbers, texts and lists, for another process: see :meth:`from_ivalue`.

        It has the fields of torch's serialized form: no stack, scope, sequence number and FLOPs.
        """
        return [
            SERIAL_VERSION,
            int(self._kind),
            self.name(),
            self._thread_id,
            self._handle,
            self._node_id,
            self._cpu_memory_usage,
            self._cpu_ns,
            self.has_cuda(),
            self._cuda_memory_usage,
            self._device,
            self._cuda_us,
            self.shapes(),
        ]

    @classmethod
    def from_ivalue(cls, values: Any) -> LegacyEvent:
        """Returns the event of a list from :meth:`to_ivalue`, as a remote one.

        Raises:
            ValueError: it is not a list, or the version, the length, a type or a range is wrong; the message says
                which.
        """
        kind, name, thread_id, handle, node_id, cpu_memory, cpu_ns, _, cuda_memory, device, cuda_us, shapes = _checked(
            values
        )
        return LegacyEvent(
            EventKind(kind),
            name,
            thread_id,
            cpu_ns=cpu_ns,
            handle=handle,
            shapes=shapes,
            node_id=node_id,
            is_remote=True,
            cpu_memory_usage=cpu_memory,
            cuda_memory_usage=cuda_memory,
            device=device,
            cuda_us=cuda_us,
        )

    def from_node(self, node_id: int | None) -> LegacyEvent:
        """Returns a copy as another process would send it: remote, and with the given node id."""
        copy = LegacyEvent.from_ivalue(self.to_ivalue())
        if node_id is not None:
            copy.set_node_id(node_id)
        return copy


_FIELDS = (
    ("kind", int),
    ("name", str),
    ("thread_id", int),
    ("handle", int),
    ("node_id", int),
    ("cpu_memory_usage", int),
    ("cpu_ns", int),
    ("has_cuda", bool),
    ("cuda_memory_usage", int),
    ("device", int),
    ("cuda_us", int),
    ("shapes", list),
)
"""The values after the version, in their order."""


def _checked(values: Any) -> list[Any]:
    """Returns the values after the version, checked for the constructor."""
    if not isinstance(values, list):
        raise ValueError(f"a serialized LegacyEvent is a list, not {type(values).__name__}")  # noqa: TRY004 - one kind of error
    if not values or type(values[0]) is not int or values[0] != SERIAL_VERSION:
        version = repr(values[0]) if values else "none"
        raise ValueError(f"a serialized LegacyEvent of version {version}: this package reads version {SERIAL_VERSION}")
    fields = values[1:]
    if len(fields) != len(_FIELDS):
        raise ValueError(
            f"Expected {len(_FIELDS) + 1} elements to reconstruct LegacyEvent, a version and {len(_FIELDS)} values, but got {len(values)}"
        )
    for (field, kind), value in zip(_FIELDS, fields, strict=True):
        if type(value) is not kind:
            raise ValueError(f"{field} of a serialized LegacyEvent is {value!r}; it must be a {kind.__name__}")
    _check_ranges(dict(zip((field for field, _ in _FIELDS), fields, strict=True)))
    return fields


def _check_ranges(fields: dict[str, Any]) -> None:
    if fields["kind"] not in _KIND_TEXT:
        raise ValueError(f"kind of a serialized LegacyEvent is {fields['kind']}; allowed are 0 to {max(_KIND_TEXT):d}")
    if fields["cpu_ns"] <= 0:
        raise ValueError(f"cpu_ns of a serialized LegacyEvent is {fields['cpu_ns']}; it must be above 0")
    for shape in fields["shapes"]:
        if not (isinstance(shape, list) and all(type(size) is int for size in shape)):
            raise ValueError(f"shapes of a serialized LegacyEvent has {shape!r}; each must be a list of int")
    if fields["has_cuda"] is (fields["device"] == -1):
        raise ValueError(f"a serialized LegacyEvent has has_cuda {fields['has_cuda']} and device {fields['device']}")
    if fields["has_cuda"] and min(fields["device"], fields["cuda_us"]) < 0:
        raise ValueError(
            f"a serialized LegacyEvent of device {fields['device']} has cuda_us {fields['cuda_us']}: neither may be below 0"
        )


# ---- device events of the legacy profiler ----


VIEW_LIKE_OPERATORS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::as_strided",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::expand",
        "aten::resize_",
        "aten::size",
        "aten::slice",
        "aten::squeeze",
        "aten::stride",
        "aten::t",
        "aten::transpose",
        "aten::unsqueeze",
        "aten::view",
    }
)
"""Operators that launch nothing on a device, for which a device event would only cost time."""


def may_have_device_event(name: str) -> bool:
    """Whether an operator or label of that name gets device events."""
    return name not in VIEW_LIKE_OPERATORS


_NS_PER_MS = 1_000_000


class DeviceEvent(Protocol):
    """A timing event of a device, in the form of ``torch.cuda.Event`` and ``torch.Event``."""

    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """Returns milliseconds to a later event of the same device; the device must have reached both."""


class OnDevice(NamedTuple):
    """A device event and its device."""

    device: int
    """Index of the device."""
    event: DeviceEvent


class DeviceEvents(Protocol):
    """Source of the device events of recorded events."""

    def begun(self, handle: int) -> OnDevice | None:
        """Returns the device event at the begin of a recorded event, or None."""

    def ended(self, handle: int) -> OnDevice | None:
        """Returns the device event at its end, or None."""


class ResolvedEvent:
    """A timing event that the device has reached: a time, Unix ns."""

    __slots__ = ("time_ns",)

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns

    def elapsed_time(self, end_event: Any, /) -> float:
        """Returns milliseconds to another timing event."""
        return float(end_event.time_ns - self.time_ns) / _NS_PER_MS


class ResolvedEvents:
    """Device events from the recording itself: pairs of timing events in batches. Immutable, so threads may share it.

    Args:
        batches: batches of the recording; a pair may be in another batch than its event.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._times: dict[int, tuple[int, int, int]] = {}
        """Device, start and duration in ns, by event id."""
        for batch in batches:
            if batch.devices is not None:
                columns = (batch.devices[name].tolist() for name in ("device_index", "start", "duration"))
                self._times.update(zip(batch.devices["event"].tolist(), zip(*columns, strict=True), strict=True))

    def __len__(self) -> int:
        return len(self._times)

    def begun(self, handle: int) -> OnDevice | None:
        """Returns the timing event at the begin of an event, or None."""
        times = self._times.get(handle)
        return None if times is None else OnDevice(times[0], ResolvedEvent(times[1]))

    def ended(self, handle: int) -> OnDevice | None:
        """Returns the timing event at its end, or None."""
        times = self._times.get(handle)
        return None if times is None else OnDevice(times[0], ResolvedEvent(times[1] + times[2]))
