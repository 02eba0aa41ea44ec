"""Device events of the legacy profiler: which events have them, which operators never do, and elapsed times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_torchprof._columns.batch import Batch

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
        self._found: dict[int, tuple[int, int, int]] = {}
        for batch in batches:
            if batch.devices is not None:
                columns = (batch.devices[name].tolist() for name in ("device_index", "start", "duration"))
                self._found.update(zip(batch.devices["event"].tolist(), zip(*columns, strict=True), strict=True))

    def __len__(self) -> int:
        return len(self._found)

    def begun(self, handle: int) -> OnDevice | None:
        """Returns the timing event at the begin of an event, or None."""
        found = self._found.get(handle)
        return None if found is None else OnDevice(found[0], ResolvedEvent(found[1]))

    def ended(self, handle: int) -> OnDevice | None:
        """Returns the timing event at its end, or None."""
        found = self._found.get(handle)
        return None if found is None else OnDevice(found[0], ResolvedEvent(found[1] + found[2]))
