"""What is known of events besides names, times and parents: stacks, overloads, memory and FLOPs, as columns.

Averages, totals, tables, sort keys and the events themselves read these facts from here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.schema import MEMORY_KIND, Flag, Kind, Scope
from otel_torchprof._native.loops import subtract_from_parents
from otel_torchprof._tree.devices import DisplayedTimes, displayed_times
from otel_torchprof._tree.flops import flops_of
from otel_torchprof._tree.flows import numbered_rows
from otel_torchprof._tree.frames import Stacks, stack_codes
from otel_torchprof._tree.inputs import overload_codes, shape_keys
from otel_torchprof._tree.memory import MemoryPeaks, MemoryUse, memory_of, peaks_of_view, places_of
from otel_torchprof._tree.tree import display_name

from .function_event_avg import FunctionEventAvg

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._tree.tree import TreeView

    Array = npt.NDArray[Any]
    from collections.abc import Iterable, Sequence

    import pandas as pd

    from .recorded_events import EventSource

AMOUNTS = {
    "cpu_memory_usage": "cpu_memory",
    "self_cpu_memory_usage": "self_cpu_memory",
    "device_memory_usage": "device_memory",
    "self_device_memory_usage": "self_device_memory",
    "flops": "flops",
}
"""What averages add up besides times: torch's name of the attribute, and the fact that it is."""

DEVICE_TIMES = {"device_time_total": "total", "self_device_time_total": "own"}
"""Times of devices: torch's name of the attribute, and the field of :class:`DisplayedTimes` that it is, there in ns."""

PEAKS = ("cpu_memory_peak", "device_memory_peak")
"""What averages take the largest of: our own attributes, and the facts of the same names."""


class Values(Protocol):
    """What codes stand for, made when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, code: Any, /) -> Any: ...


class Coded(NamedTuple):
    """Something that few events differ in: a small number per event, and what each number stands for."""

    codes: Array
    """Per event an index into ``values``."""
    values: Values
    """Each value once, so that two events have the same code if and only if they have the same value."""

    def used(self) -> list[Any]:
        """The values that some event has."""
        return [self.values[code] for code in distinct_values(self.codes).tolist()]


class CodedStacks(NamedTuple):
    """As :class:`Coded`, of stacks, which are too many and too deep to make all of them."""

    codes: Array
    values: Stacks


class EventInfo:
    """One entry per position of a view, worked out when it is first asked for; None for what was not recorded.

    Every fact is one method; what is added up is int64, or float64. Reading is thread-safe: two threads may work out the
    same fact, with the same result.
    """

    def __init__(self, view: TreeView, *, with_flops: bool = False, with_devices: bool = False) -> None:
        self.view = view
        self._with_flops = with_flops
        self._with_devices = with_devices

    @cached_property
    def stack_codes(self) -> CodedStacks | None:
        """Python stack of each event: a list of entries, innermost first."""
        codes, stacks = stack_codes(self.view)
        return CodedStacks(codes, stacks) if len(stacks) > 1 else None

    @cached_property
    def overload_codes(self) -> Coded | None:
        """Overload name of each operator, "" for none."""
        codes, names = overload_codes(self.view)
        return Coded(codes, names) if any(names) else None

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
        """Most bytes in use on the CPU, as torch reported them at the allocations in each event; 0 where there was none."""
        return None if self._peaks is None else self._peaks.cpu

    @cached_property
    def device_memory_peak(self) -> Array | None:
        """Likewise on a device, of several the one with the most."""
        return None if self._peaks is None else self._peaks.device

    @cached_property
    def flops(self) -> Array | None:
        """Floating point operations of each event, 0 where they are not known."""
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
    def device_times(self) -> DisplayedTimes | None:
        """How long devices worked for each event, ns."""
        return displayed_times(self.view) if self._with_devices else None

    def device_time(self, name: str) -> Array | None:
        """The column of a time of devices, by torch's name of the attribute, ns; None where it is 0 for every event."""
        times = self.device_times
        return None if times is None else getattr(times, DEVICE_TIMES[name])

    def amount(self, name: str) -> Array | None:
        """The column of an attribute of :data:`AMOUNTS` or :data:`PEAKS`; None where it is 0 for every event."""
        column: Array | None = getattr(self, AMOUNTS.get(name, name))
        return column

    def amounts(self) -> dict[str, Array]:
        """Every recorded column that averages add up, by torch's name of the attribute."""
        found = {name: self.amount(name) for name in AMOUNTS}
        return {name: column for name, column in found.items() if column is not None}

    def peaks(self) -> dict[str, Array]:
        """Every recorded column that averages take the largest of, by the name of the attribute."""
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


# ---- pandas' data frames ----

_NS_PER_US = 1000
_IF_ANY = (*DEVICE_TIMES, *AMOUNTS, *PEAKS)
"""Numbers that have a column only where one of them is not 0."""
_TEXTS_IF_ANY = ("input_shapes", "overload_name", "stack")
"""Texts that have a column only where one of them is not empty."""


def of_columns(source: EventSource) -> pd.DataFrame:
    """The frame of recorded events."""
    pandas = _pandas()
    batch, view = source.batch, source.view
    rows, numbered = view.rows, numbered_rows(source.batch)[view.rows]
    names = view.display_name[rows]
    threads = np.array([thread.number for thread in batch.threads], dtype=np.int64)
    thread = threads[batch["thread"][rows]]
    sequence = batch["sequence_nr"][numbered]
    forward = np.where(sequence >= 0, batch["fwd_thread"][numbered], 0).astype(np.int64)
    is_memory = batch["kind"][rows] == MEMORY_KIND
    columns = {
        "name": _coded(pandas, names, lambda index: display_name(batch.names[index])),
        "id": batch["id"][rows].astype(np.int64),
        "parent": view.parent.astype(np.int64),
        "thread": thread,
        "start": (batch["start"][rows] - source.origin_ns) / _NS_PER_US,
        "end": (batch["end"][rows] - source.origin_ns) / _NS_PER_US,
        "cpu_time_total": view.duration / _NS_PER_US,
        "self_cpu_time_total": view.self_time / _NS_PER_US,
        "scope": batch["scope"][rows].astype(np.int64),
        "sequence_nr": sequence,
        # Torch gives memory the thread that it was on.
        "fwd_thread": np.where(is_memory, thread, forward),
        "is_async": (batch["flags"][rows] & Flag.ASYNC) != 0,
        "is_user_annotation": batch["scope"][rows] == Scope.USER_SCOPE,
        "is_python_function": batch["kind"][rows] == Kind.FRAME,
    }
    for name in DEVICE_TIMES:
        times = source.info.device_time(name)
        if times is not None and times.any():
            columns[name] = times / _NS_PER_US
    numbers = source.info.amounts() | source.info.peaks()
    columns |= {name: column for name, column in numbers.items() if column.any()}
    return pandas.DataFrame(columns | _texts(pandas, source))


def of_objects(events: Sequence[Any]) -> pd.DataFrame:
    """The frame of events or averages that are objects."""
    pandas = _pandas()
    averages = bool(events) and isinstance(events[0], FunctionEventAvg)
    columns = _average_columns(pandas, events) if averages else _event_columns(pandas, events)
    for name in _IF_ANY:
        values = [getattr(event, name) or 0 for event in events]
        if any(values):
            columns[name] = values
    for name in _TEXTS_IF_ANY:
        texts = [_text(name, getattr(event, name)) for event in events]
        if any(texts):
            columns[name] = pandas.Categorical(texts)
    return pandas.DataFrame(columns)


def _event_columns(pandas: Any, events: Sequence[Any]) -> dict[str, Any]:
    place = {id(event): index for index, event in enumerate(events)}
    names = ("cpu_time_total", "self_cpu_time_total", "scope", "sequence_nr", "fwd_thread", "is_async")
    return {
        "name": pandas.Categorical([event.name for event in events]),
        "id": [event.id for event in events],
        "parent": [place.get(id(event.cpu_parent), -1) for event in events],
        "thread": [event.thread for event in events],
        "start": [event.time_range.start for event in events],
        "end": [event.time_range.end for event in events],
        **{name: [getattr(event, name) for event in events] for name in names},
        "is_user_annotation": [bool(event.is_user_annotation) for event in events],
        "is_python_function": [bool(event.is_python_function) for event in events],
    }


def _average_columns(pandas: Any, averages: Iterable[Any]) -> dict[str, Any]:
    names = ("count", "cpu_time_total", "self_cpu_time_total", "cpu_time", "is_async")
    return {
        "key": pandas.Categorical([average.key for average in averages]),
        **{name: [getattr(average, name) for average in averages] for name in names},
        "is_user_annotation": [bool(average.is_user_annotation) for average in averages],
    }


def _texts(pandas: Any, source: EventSource) -> dict[str, Any]:
    """The columns of :data:`_TEXTS_IF_ANY` of recorded events."""
    keys, shapes = shape_keys(source.batch)
    coded: dict[str, tuple[Array, Values]] = {"input_shapes": (keys[source.view.rows], shapes)}
    overloads, stacks = source.info.overload_codes, source.info.stack_codes
    if overloads is not None:
        coded["overload_name"] = overloads
    if stacks is not None:
        coded["stack"] = stacks
    found = {}
    for name, (codes, values) in coded.items():
        texts = {code: _text(name, values[code]) for code in distinct_values(codes).tolist()}
        if any(texts.values()):
            found[name] = _coded(pandas, codes, texts.__getitem__)
    return found


def _text(name: str, value: Any) -> str:
    """A stack as lines, shapes as torch prints them; empty for none."""
    if name == "stack":
        return "\n".join(value or ())
    return str(value) if value and value != "[]" else ""


def _coded(pandas: Any, codes: Array, text_of: Any) -> Any:
    """A categorical of texts that are known by number; several numbers may have one text."""
    used, places = np.unique(codes, return_inverse=True)
    numbers: dict[str, int] = {}
    merged = np.array([numbers.setdefault(text_of(index), len(numbers)) for index in used.tolist()], dtype=np.int64)
    return pandas.Categorical.from_codes(merged[places], list(numbers))


def _pandas() -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(
            "to_pandas() needs pandas, which is not installed: pip install 'otel-torchprof[pandas]'"
        ) from error
    return pd
