"""Call paths of events and sums by path, as for flame graphs and pprof's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import WORK_KIND, Scope

from .averages import grouped
from .call_tree import paths_of
from .device_work import work_places
from .frames import distinct
from .memory import places

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .event_info import EventInfo

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PathSums:
    """Sums of events by call path: a path is that of the enclosing event, and a name. All arrays but :attr:`path` have an entry per path.

    Paths are numbered from the top level down, so that a parent has a lower number than its children. Immutable, hence thread-safe.
    """

    parent: Integers
    """Number of the enclosing path; -1 at the top level."""
    name: npt.NDArray[np.uint32]
    """Index of the displayed name in ``view.batch.names``, see :func:`~otel_torchprof._model.tree.display_name`."""
    kind: npt.NDArray[np.uint8]
    """Kind of its events: a :class:`~otel_torchprof._columns.schema.Kind`, ``MEMORY_KIND`` or ``WORK_KIND``."""
    count: Integers
    """Number of calls."""
    total: Integers
    """Durations of the events, ns, children included; 0 for the work of devices."""
    self_time: Integers
    """Durations without those of direct children, ns, as in ``key_averages()``; 0 for asynchronous events."""
    allocated: Integers
    """Bytes allocated in the events themselves, on all devices, released or not; 0 if memory was not recorded."""
    flops: Integers
    """Floating point operations of the events themselves; 0 if unknown or not requested."""
    device: Integers
    """Time of devices, ns: of timed events without children, or of kernels, which are below the events that launched them."""
    path: Integers
    """Number of the path of each event of the view."""

    def __len__(self) -> int:
        return len(self.parent)


AMOUNTS = ("count", "total", "self_time", "allocated", "flops", "device")
"""The sums of :class:`PathSums`; the values of a path's children are not in those of the path, except in ``total``."""


def path_sums(info: EventInfo) -> PathSums:
    """Returns the sums by call path of the events of a view: operators, labels, phases, Python calls, kernels.

    For modules on the paths too, ``info`` must be of a view with modules: ``EventSource.with_modules()``. Names of numbered steps are one
    name. Costs some 250 ns per event, in numpy, and 16 bytes per event in the result. Thread-safe.
    """
    view = info.view
    codes, code = distinct(view.display_name[view.rows].astype(np.int64) << 8 | view.batch["kind"][view.rows])
    parents, keys, path = paths_of(_parents(info), code)
    codes = codes[keys] if len(codes) else keys
    amounts = event_amounts(info)
    sums = grouped(path, len(parents), len(path), amounts)
    places_of_paths = np.argsort(path[sums.first], kind="stable")  # ``grouped`` has them by first event
    by_path = {name: column[places_of_paths] for name, column in sums.amounts.items()}
    return PathSums(parents, (codes >> 8).astype(np.uint32), (codes & 255).astype(np.uint8), **by_path, path=path)


def event_amounts(info: EventInfo) -> Mapping[str, Integers]:
    """Returns what each event of a view adds to the sums of its path, by the names of :data:`AMOUNTS`."""
    view, none = info.view, np.zeros(len(info.view), dtype=np.int64)
    device = info.device_time("self_device_time_total")
    if device is not None and view.batch.work is not None:  # there the events that launched it have it too
        kind, scope = (view.batch[name][view.rows] for name in ("kind", "scope"))
        device = np.where((kind == WORK_KIND) & (scope != int(Scope.USER_SCOPE)), device, 0)
    columns = {
        "count": np.ones(len(view), dtype=np.int64) if view.calls is None else view.calls,
        "total": view.duration,
        "self_time": view.self_time if view.collapsed is None else view.self_time + view.collapsed,
        "allocated": info.allocated,
        "flops": info.flops,
        "device": device,
    }
    return {name: none if column is None else column for name, column in columns.items()}


def _parents(info: EventInfo) -> Integers:
    """The position of each event's parent; of work, that of what launched it."""
    view = info.view
    parent = view.parent.astype(np.int64)
    if view.batch.work is not None:
        at = work_places(view.batch)[view.rows]
        is_work = np.flatnonzero(at >= 0)
        launching = places(view, rows_of(view.batch, view.batch.work["event"]))
        parent[is_work] = launching[at[is_work]]
    return parent
