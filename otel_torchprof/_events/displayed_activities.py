"""What of a recording a Chrome trace shows where some types of activities only were asked for.

Torch leaves the others out of the trace and of nothing else. Names are those of torch's activity types.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.joined import rows_of, without
from otel_torchprof._columns.schema import Kind, Scope

from .activities import ProfilerActivity
from .function_event import DeviceType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch

    Filters = Mapping[ProfilerActivity, AbstractSet[str]]

_GROUPS = {
    ProfilerActivity.CUDA: (DeviceType.CUDA, DeviceType.HIP),
    ProfilerActivity.XPU: (DeviceType.XPU,),
    ProfilerActivity.HPU: (DeviceType.HPU,),
    ProfilerActivity.MTIA: (DeviceType.MTIA,),
    ProfilerActivity.PrivateUse1: (DeviceType.PrivateUse1,),
}
_WORK = frozenset(("CONCURRENT_KERNEL", "HPU_OP", "MTIA_CCP_EVENTS"))
"""What devices do for operators; here it is told by the span around all of it."""


def displayed_events(batch: Batch, filters: Filters) -> Batch:
    """Without what the filter of the CPU's group leaves out."""
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
    """With all events, but without the times of devices that the filters of the devices' groups leave out."""
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
    """Which events, by id, are labels or modules."""
    annotation = np.isin(batch["kind"], (Kind.LABEL, Kind.MODULE)) | (batch["scope"] == Scope.USER_SCOPE)
    rows = rows_of(batch, events)
    return np.where(rows >= 0, np.append(annotation, False)[rows], False)
