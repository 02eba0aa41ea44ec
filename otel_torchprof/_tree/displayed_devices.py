"""Times of devices where some events are left out: what these had goes to the nearest event around them that remains."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._native.loops import add_to_parents, subtract_from_parents

from .devices import DeviceTimes, device_times
from .memory import places

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]

_PRIVATE_USE = 20
_NAMES = {
    0: "cpu", 1: "cuda", 2: "mkldnn", 3: "opengl", 4: "opencl", 5: "ideep", 6: "hip", 7: "fpga", 8: "maia", 9: "xla",
    10: "vulkan", 11: "metal", 12: "xpu", 13: "mps", 14: "meta", 15: "hpu", 16: "ve", 17: "lazy", 18: "ipu", 19: "mtia",
    _PRIVATE_USE: "privateuseone",
}  # fmt: skip


def device_name(number: int) -> str:
    """The name of a ``c10::DeviceType`` as ``torch.device.type`` has it; a private backend's own where it was given one."""
    torch = sys.modules.get("torch") if number == _PRIVATE_USE else None
    if torch is not None and hasattr(torch, "_C"):
        return str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001 - no other way
    return _NAMES.get(number, str(number))


class DisplayedTimes(NamedTuple):
    """One entry per event of a view, ns."""

    own: npt.NDArray[np.int64]
    """The time outside its child events; 0 for asynchronous events, whose time is what is around them's."""
    total: npt.NDArray[np.int64]
    """With all events that the view has inside of it."""


def displayed_times(view: TreeView, times: DeviceTimes | None = None) -> DisplayedTimes | None:
    """The times of the events that torch would show; None where no device's time is known.

    ``times`` are of the view's batch; default: computed from it. As in torch, asynchronous events have none. What nothing
    that is shown is around, such as the time of a module that no label is around, is in none of the sums.
    """
    found = device_times(view.batch) if times is None else times
    if found is None:
        return None
    displayed = _displayed(view, found.own)
    # Only times that are given know of children that are in no row.
    before = 0 if times is None else _displayed(view, _left_over(view.batch, times))
    return DisplayedTimes(displayed, add_to_parents(view.parent, displayed + before))


def remaining_times(whole: Batch, left: Batch) -> DeviceTimes | None:
    """The times of a batch from which rows were left out (:func:`~otel_torchprof._columns.joined.without`), theirs included."""
    times = device_times(whole)
    if times is None or left is whole:
        return times
    rows = rows_of(whole, left["id"])
    total, parent = times.total[rows], left["parent"]
    own = total.copy()
    subtract_from_parents(own, parent, total)
    return DeviceTimes(times.pair[rows], own, total)


def _displayed(view: TreeView, values: Array) -> npt.NDArray[np.int64]:
    """Values of rows as those of the events of a view that they belong to."""
    moved = np.flatnonzero(values)
    place = places(view, moved)
    inside = place >= 0
    found = np.zeros(len(view), dtype=np.int64)
    np.add.at(found, place[inside], values[moved[inside]])
    return found


def _left_over(batch: Batch, times: DeviceTimes) -> npt.NDArray[np.int64]:
    """What is in the totals and in no row: children that came in earlier drains."""
    found: npt.NDArray[np.int64] = times.total - times.own
    subtract_from_parents(found, batch["parent"], times.total)
    return found
