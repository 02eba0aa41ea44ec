"""Device events of the legacy engine: who has them, which operators never get one, and the time between two."""

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
"""Operators that launch nothing on a device, so that a device event for them would only cost time."""


def may_have_device_event(name: str) -> bool:
    """Whether an operator or label of that name gets device events where these are recorded."""
    return name not in VIEW_LIKE_OPERATORS


_NS_PER_MS = 1_000_000


class DeviceEvent(Protocol):
    """A point in the work of a device, as ``torch.cuda.Event`` and ``torch.Event`` have it."""

    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """Milliseconds from this event to a later one of the same device, which both have come to pass."""


class OnDevice(NamedTuple):
    """A device event and where it was recorded."""

    device: int
    """Index of the device."""
    event: DeviceEvent


class DeviceEvents(Protocol):
    """Where the legacy engine finds the device events of what was recorded."""

    def begun(self, handle: int) -> OnDevice | None:
        """The one at the begin of an event of the recorder, None where there is none."""

    def ended(self, handle: int) -> OnDevice | None:
        """The one at its end."""


class ResolvedEvent:
    """A mark that the device came to long ago: a time, Unix ns."""

    __slots__ = ("time_ns",)

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to another one."""
        return float(end_event.time_ns - self.time_ns) / _NS_PER_MS


class ResolvedEvents:
    """The device events of the recording itself: the pairs of marks in batches. Immutable, hence safe to share.

    Args:
        batches: a pair may be in another one than its event.
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
        """The mark at the begin of an event; None where it has none."""
        found = self._found.get(handle)
        return None if found is None else OnDevice(found[0], ResolvedEvent(found[1]))

    def ended(self, handle: int) -> OnDevice | None:
        """The one at its end."""
        found = self._found.get(handle)
        return None if found is None else OnDevice(found[0], ResolvedEvent(found[1] + found[2]))
