"""What the events of a view are in a tree of calls: below what each is, and what it adds to the sums of its path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import WORK_KIND, Scope

from .device_work import work_places
from .memory import places

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .event_info import EventInfo

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]


def event_parents(info: EventInfo) -> Integers:
    """The position of each event's parent, -1 for none; of the work of devices, that of what launched it."""
    view = info.view
    parent = view.parent.astype(np.int64)
    if view.batch.work is not None:
        at = work_places(view.batch)[view.rows]
        is_work = np.flatnonzero(at >= 0)
        launching = places(view, rows_of(view.batch, view.batch.work["event"]))
        parent[is_work] = launching[at[is_work]]
    return parent


def event_amounts(info: EventInfo) -> Mapping[str, Integers]:
    """What each event itself adds to the sums of its path, without its children.

    ``calls``; ``time``, ns, as self times in ``key_averages()``; ``flops``, 0 if they are unknown or not requested; ``device``, ns: of timed
    events, or of kernels alone where these are below the events that launched them.
    """
    view, none = info.view, np.zeros(len(info.view), dtype=np.int64)
    device = info.device_time("self_device_time_total")
    if device is not None and view.batch.work is not None:  # there the events that launched it have it too
        kind, scope = (view.batch[name][view.rows] for name in ("kind", "scope"))
        device = np.where((kind == WORK_KIND) & (scope != int(Scope.USER_SCOPE)), device, 0)
    columns: dict[str, Array | None] = {
        "calls": np.ones(len(view), dtype=np.int64) if view.calls is None else view.calls,
        "time": view.self_time if view.collapsed is None else view.self_time + view.collapsed,
        "flops": info.flops,
        "device": device,
    }
    return {name: none if column is None else column for name, column in columns.items()}
