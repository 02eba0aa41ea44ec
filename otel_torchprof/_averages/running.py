"""Averages over the life of a process: sums by name that grow with the names, never with the events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import Scope
from otel_torchprof._process import threads
from otel_torchprof._tree.tree import display_name

from .averages import Averages
from .named_sums import MAX_NAMES, OTHER_NAMES, Average, NamedSums

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Names
    from otel_torchprof._tree.displayed_devices import DisplayedTimes
    from otel_torchprof._tree.tree import TreeView

Array = Any


class RunningAverages:
    """Sums over batches, and over spans of the application. Thread-safe; reading costs a microsecond per name."""

    def __init__(self) -> None:
        self._lock = threads.RLock()  # a signal handler may ask in the middle
        self._groups = NamedSums(0)
        self._spans = NamedSums(OTHER_NAMES, lambda _name, _amounts: len(self._spans) < MAX_NAMES)
        self._device_type: int | None = None
        self._names: Names | None = None

    @property
    def device_type(self) -> int | None:
        """``c10::DeviceType`` of the first device that reported times; None where none did."""
        return self._device_type

    def add(self, view: TreeView, devices: DisplayedTimes | None = None) -> None:
        """Adds the events of a batch, and how long devices worked for them: 15 ns per event, 5 more with devices."""
        sums = Averages.of(view, amounts={} if devices is None else devices._asdict())
        if not len(sums):
            return
        amounts = [sums.count, sums.cpu_time_total, sums.self_cpu_time_total]
        amounts += [] if devices is None else [sums.amounts["total"], sums.amounts["own"]]
        entries = zip(*(column.tolist() for column in (_groups(view, sums.first), *amounts)), strict=True)
        with self._lock:
            self._names = view.batch.names
            for group, *of_group in entries:
                self._groups.add(group, of_group)
            if devices is not None:
                self._note_device(view)

    def _note_device(self, view: TreeView) -> None:
        reported = view.batch.devices
        if self._device_type is None and reported is not None and len(reported["device_type"]):
            self._device_type = reported["device_type"].item(0)

    def add_span(self, name: str, duration: int, self_time: int) -> None:
        """Adds one span of the application; ns."""
        with self._lock:
            self._spans.add(name, (1, duration, self_time))

    def read(self) -> list[Average]:
        """The sums so far, in the order in which the names first came; the application's spans first."""
        with self._lock:
            found = [Average(name, True, *sums) for name, sums in self._spans]
            for group, sums in self._groups:
                name = self._names[group >> 1] if self._names is not None else ""
                found.append(Average(display_name(name), bool(group & 1), *sums))
            return found


def _groups(view: TreeView, first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One number per name and sort (label or not), the same in every batch of a process: names keep their places."""
    rows = view.rows[first]
    is_label = view.batch["scope"][rows] == Scope.USER_SCOPE
    groups: npt.NDArray[np.int64] = view.display_name[rows].astype(np.int64) * 2 + is_label
    return groups
