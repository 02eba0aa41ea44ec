"""Device events of the legacy engine: who has them, which operators never get one, and the time between two."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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
