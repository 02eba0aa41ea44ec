"""Averages over many events: the items of ``key_averages()``, with the names and meanings of torch's profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .function_event import DeviceType, FormattedTimesMixin, FunctionEvent

if TYPE_CHECKING:
    from typing_extensions import Self

_DESCRIPTION = (
    "key",
    "node_id",
    "is_async",
    "is_remote",
    "overload_name",
    "input_shapes",
    "stack",
    "scope",
    "device_type",
    "is_legacy",
    "use_device",
    "is_user_annotation",
)
_SUMS = (
    "count",
    "cpu_time_total",
    "device_time_total",
    "self_cpu_time_total",
    "self_device_time_total",
    "cpu_memory_usage",
    "device_memory_usage",
    "self_cpu_memory_usage",
    "self_device_memory_usage",
)
_LARGEST = ("cpu_memory_peak", "device_memory_peak")


class FunctionEventAvg(FormattedTimesMixin):
    """Sums over all events of one key; other fields are those of the first event. Times are in microseconds.

    Mirrors torch's class of that name. ``cpu_memory_peak`` and ``device_memory_peak``, the largest of any event in
    bytes, are additions.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + torch.ones(3)
        >>> ones = next(average for average in prof.key_averages() if average.key == "aten::ones")
        >>> ones.count, ones.cpu_time_total >= ones.self_cpu_time_total
        (2, True)
    """

    def __init__(self) -> None:
        self.key: str | None = None
        self.count = 0
        self.node_id = 0
        self.is_async = False
        self.is_remote = False
        self.use_device: str | None = None
        self.cpu_time_total: float = 0
        self.device_time_total: float = 0
        self.self_cpu_time_total: float = 0
        self.self_device_time_total: float = 0
        self.input_shapes: Any = None
        self.overload_name: str | None = None
        self.stack: list[str] | None = None
        self.scope: int | None = None
        self.cpu_memory_usage = 0
        self.device_memory_usage = 0
        self.self_cpu_memory_usage = 0
        self.self_device_memory_usage = 0
        self.cpu_memory_peak = 0
        self.device_memory_peak = 0
        self.device_type: Any = DeviceType.CPU
        self.is_legacy = False
        self.flops: float | None = 0
        self.is_user_annotation: bool | None = False
        self._first: FunctionEvent | FunctionEventAvg | None = None

    @property
    def cpu_parent(self) -> FunctionEvent | None:
        """Parent of the first event, or None."""
        return None if self._first is None else self._first.cpu_parent

    @property
    def cpu_children(self) -> list[FunctionEvent] | None:
        """Children of the first event; None before an event was added."""
        return None if self._first is None else self._first.cpu_children

    def describe(self, first: FunctionEvent | FunctionEventAvg) -> None:
        """Copies the fields that are not sums from the first event of the key."""
        self._first = first
        for name in _DESCRIPTION:
            setattr(self, name, getattr(first, name))

    def add(self, other: FunctionEvent | FunctionEventAvg) -> Self:
        """Adds an event, or an average of the same key, and returns self.

        Raises:
            TypeError: ``other`` is neither.
            ValueError: its key is another one.
        """
        if not isinstance(other, FunctionEvent | FunctionEventAvg):
            raise TypeError(f"cannot add {other!r}: only a FunctionEvent or a FunctionEventAvg can be added")
        if self.key is None:
            self.describe(other)
        if other.key != self.key:
            raise ValueError(
                f"cannot add an event of {other.key!r} to the average of {self.key!r}: one average, one key"
            )
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.flops = other.flops if self.flops is None else self.flops + (other.flops or 0)
        return self

    def __iadd__(self, other: FunctionEvent | FunctionEventAvg) -> Self:
        return self.add(other)

    def __repr__(self) -> str:
        device = self.use_device or "cuda"
        return (
            f"<FunctionEventAvg key={self.key} self_cpu_time={self.self_cpu_time_total_str} cpu_time={self.cpu_time_str} "
            f" self_{device}_time={self.self_device_time_total_str} {device}_time={self.device_time_str} "
            f"input_shapes={self.input_shapes} "
            f"cpu_memory_usage={self.cpu_memory_usage} {device}_memory_usage={self.device_memory_usage}>"
        )


class ModuleAverage(FunctionEventAvg):
    """Sums over the calls of a module, or over the backward pass of its forward operators, in ``group_by_module``.

    Totals and ``flops`` include modules called inside it, self times and the other ``self`` attributes do not; a call
    inside a call of the same module counts once. ``count``: calls of the module, or backward functions.
    """

    module = ""
    """Its name, from the class of the root: ``GPT.blocks.0.attn``; empty for what is in no module."""
    module_class = ""
    """Its class, ``Linear``; empty if it was not recorded."""
    is_backward = False
    """Whether these are the sums of its backward pass; ``key`` says so, too."""
    self_flops = 0
    """Floating point operations without those of modules called inside it."""
