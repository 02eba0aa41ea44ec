"""Further data of events as columns: stacks, overloads, memory, FLOPs and device times.

Averages, totals, tables, sort keys and the events themselves read these only from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.schema import Flag, MemoryFlag
from otel_torchprof._native.loops import subtract_from_parents

from .device_work import with_work_rows, work_times
from .devices import DisplayedTimes, displayed_times
from .flops import flops_of
from .frames import Stacks, stack_codes
from .inputs import overload_codes
from .memory import MemoryPeaks, MemoryUse, memory_of, peaks_of_view, places_of, with_memory_events
from .tree import torch_view

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

    Array = npt.NDArray[Any]


AMOUNTS = {
    "cpu_memory_usage": "cpu_memory",
    "self_cpu_memory_usage": "self_cpu_memory",
    "device_memory_usage": "device_memory",
    "self_device_memory_usage": "self_device_memory",
    "flops": "flops",
}
"""Attributes that averages add up besides times: torch's name, and the column of :class:`EventInfo`."""

DEVICE_TIMES = {"device_time_total": "total", "self_device_time_total": "own"}
"""Device times: torch's name of the attribute, and the field of :class:`DisplayedTimes`, in ns."""

PEAKS = ("cpu_memory_peak", "device_memory_peak")
"""Attributes of which averages have the maximum, and columns of :class:`EventInfo` of the same names; not in torch."""


class Values(Protocol):
    """A sequence of values by code; a value may be created on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, code: Any, /) -> Any: ...


class CodedValues(NamedTuple):
    """A column with few distinct values: a code per event, and the value of each code."""

    codes: Array
    """Per event an index into ``values``."""
    values: Values
    """Each value once, so that two events have the same code if and only if they have the same value."""

    def used(self) -> list[Any]:
        """The values that occur."""
        return [self.values[code] for code in distinct_values(self.codes).tolist()]


class CodedStacks(NamedTuple):
    """As :class:`CodedValues`, for stacks; they are created on access, since all of them would need too much memory."""

    codes: Array
    values: Stacks


def coded_texts(codes: Array, text_of: Callable[[int], str]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """The text of each code as an index into distinct texts, and these; several codes may have the same text. Sorts."""
    used, places = np.unique(codes, return_inverse=True)
    numbers: dict[str, int] = {}
    merged = np.array([numbers.setdefault(text_of(code), len(numbers)) for code in used.tolist()], dtype=np.int32)
    return merged[places], list(numbers)


class EventInfo:
    """Columns with one entry per position of a view, computed on first access; None for data that was not recorded.

    Columns that averages add up are int64 or float64. Reading is thread-safe: two threads may compute the same column.
    """

    def __init__(self, view: TreeView, *, with_flops: bool = False, with_devices: bool = False) -> None:
        self.view = view
        self._with_flops = with_flops
        self._with_devices = with_devices

    @classmethod
    def of(cls, batch: Batch, *, modules: bool, with_flops: bool, with_devices: bool) -> EventInfo:
        """The columns of a recording's events, with those that torch makes of changes of memory and of the work of devices."""
        view = torch_view(with_work_rows(with_memory_events(batch)), modules=modules)
        return cls(view, with_flops=with_flops, with_devices=with_devices)

    def with_modules(self) -> EventInfo:
        """The columns of a view that has the modules, too. Costs 25 ns per event."""
        view = torch_view(self.view.batch, modules=True)
        return EventInfo(view, with_flops=self._with_flops, with_devices=self._with_devices)

    @cached_property
    def stack_codes(self) -> CodedStacks | None:
        """Python stack of each event: a list of entries, innermost first."""
        codes, stacks = stack_codes(self.view)
        return CodedStacks(codes, stacks) if len(stacks) > 1 else None

    @cached_property
    def overload_codes(self) -> CodedValues | None:
        """Overload name of each operator, "" for none."""
        codes, names = overload_codes(self.view)
        return CodedValues(codes, names) if any(names) else None

    @cached_property
    def cpu_memory(self) -> Array | None:
        """Bytes allocated on the CPU minus bytes released there while each event was open."""
        return None if self._memory is None else self._memory.cpu

    @cached_property
    def device_memory(self) -> Array | None:
        """Bytes allocated on devices minus bytes released there while each event was open."""
        return None if self._memory is None else self._memory.device

    @cached_property
    def cpu_memory_peak(self) -> Array | None:
        """Most bytes in use on the CPU, as torch reported them at the allocations in each event; 0 without allocations."""
        return None if self._peaks is None else self._peaks.cpu

    @cached_property
    def device_memory_peak(self) -> Array | None:
        """Most bytes in use on a device, as :attr:`cpu_memory_peak`; of several devices, on the one with the most."""
        return None if self._peaks is None else self._peaks.device

    @cached_property
    def flops(self) -> Array | None:
        """Floating point operations of each event; 0 if unknown."""
        return flops_of(self.view.batch)[self.view.rows].astype(np.int64) if self._with_flops else None

    @cached_property
    def self_cpu_memory(self) -> Array | None:
        """``cpu_memory`` without the direct children's; 0 for asynchronous events."""
        return self._own(self.cpu_memory)

    @cached_property
    def self_device_memory(self) -> Array | None:
        """``device_memory`` without the direct children's; 0 for asynchronous events."""
        return self._own(self.device_memory)

    @cached_property
    def allocated(self) -> Array | None:
        """Bytes allocated in each event itself, on all devices, whether or not they were released again; none in asynchronous events."""
        memory, place = self.view.batch.memory, self._memory_places
        if memory is None:
            return None
        had = (memory["flags"] & MemoryFlag.OUT_OF_MEMORY) == 0
        counted = np.flatnonzero(had & (memory["bytes"] > 0) & (place >= 0))
        allocated = np.zeros(len(self.view), dtype=np.int64)
        np.add.at(allocated, place[counted], memory["bytes"][counted])
        return allocated

    @cached_property
    def device_times(self) -> DisplayedTimes | None:
        """Device times of each event, ns."""
        if not self._with_devices:
            return None
        return displayed_times(self.view) if self.view.batch.work is None else work_times(self.view)

    def device_time(self, name: str) -> Array | None:
        """The column of a device time, by torch's name of the attribute, ns; None if no device was timed."""
        times = self.device_times
        return None if times is None else getattr(times, DEVICE_TIMES[name])

    def amount(self, name: str) -> Array | None:
        """The column of an attribute of :data:`AMOUNTS` or :data:`PEAKS`; None if it was not recorded."""
        column: Array | None = getattr(self, AMOUNTS.get(name, name))
        return column

    def amounts(self) -> dict[str, Array]:
        """Every recorded column that averages add up, by torch's name of the attribute."""
        columns = {name: self.amount(name) for name in AMOUNTS}
        return {name: column for name, column in columns.items() if column is not None}

    def peaks(self) -> dict[str, Array]:
        """Every recorded column of which averages have the maximum, by the name of the attribute."""
        return {name: column for name in PEAKS if (column := self.amount(name)) is not None}

    @cached_property
    def _memory(self) -> MemoryUse | None:
        return memory_of(self.view, self._memory_places)

    @cached_property
    def _peaks(self) -> MemoryPeaks | None:
        return peaks_of_view(self.view, self._memory_places)

    @cached_property
    def _memory_places(self) -> Array:
        return places_of(self.view)

    def _own(self, inclusive: Array | None) -> Array | None:
        if inclusive is None:
            return None
        view, own = self.view, inclusive.copy()
        subtract_from_parents(own, view.parent, inclusive)
        own[(view.batch["flags"][view.rows] & Flag.ASYNC) != 0] = 0
        return own
