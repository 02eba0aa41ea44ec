"""The data from which attributes are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import find, take
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind
from otel_torchprof._model.compiled import Shares, shares_of_roots
from otel_torchprof._model.devices import DeviceTimes, device_times
from otel_torchprof._model.frames import distinct
from otel_torchprof._model.inputs import DistinctInputs
from otel_torchprof._model.memory import CPU_TYPES, DEVICE_TYPES, MovedMemory, moved_memory
from otel_torchprof._process.heap import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.frame_info import FunctionInfo
    from otel_torchprof._columns.generation import AttributeValue
    from otel_torchprof._model.span_table import AttributeType, SpanTable

Array = npt.NDArray[Any]
Values = tuple[Array, Array]
"""The values of an attribute and where they are present, both one per span."""
_ATTRIBUTE_BYTES = 48
"""Estimated size of one span's attributes: its number, scope, times and thread."""


class AttributeSource:
    """The data from which attributes are computed: a batch, its span table, and strings added on the way."""

    def __init__(
        self,
        batch: Batch,
        table: SpanTable,
        *,
        dropped_on: int | None,
        self_time: Array | None,
        with_flops: bool = False,
        callers: Array | None = None,
        device_times: DeviceTimes | None = None,
    ) -> None:
        self.batch = batch
        self.with_flops = with_flops
        self.table = table
        self.dropped_on = dropped_on
        self.self_time = self_time
        self._callers = callers
        self._device_times = device_times
        self.is_event: npt.NDArray[np.bool_] = table.row >= 0
        self.strings: list[str] = []
        self._shares: Shares | None = None
        # Usually the roots, then all events in the order of the batch: then copying costs a third of gathering.
        self._roots = len(table) - len(batch)
        self._in_order = self._roots >= 0 and not find(len(batch), self._is_elsewhere).size
        self._arena = Arena(len(table) * _ATTRIBUTE_BYTES)

    def _is_elsewhere(self, block: slice) -> npt.NDArray[np.bool_]:
        is_elsewhere: npt.NDArray[np.bool_] = self.table.row[self._roots :][block] != np.arange(block.start, block.stop)
        return is_elsewhere

    def spread(self, per_event: Array, values: Array | None = None, *, dtype: npt.DTypeLike | None = None) -> Array:
        """Converts one value per row of the batch to one per span; synthetic spans get an arbitrary one.

        ``values``: if given, ``per_event`` has indices into it. ``dtype``: of the result; default: unchanged.
        """
        spread = self._arena.empty(len(self.table), dtype or (per_event if values is None else values).dtype)
        if not len(per_event):
            spread[:] = 0
            return spread
        events = spread[self._roots :] if self._in_order else spread
        rows = per_event if self._in_order else per_event[self.table.row]
        spread[: len(spread) - len(events)] = 0
        if values is None:
            events[:] = rows
        else:
            take(values, rows, events)
        return spread

    def column(self, name: str) -> Array:
        """A column of the batch, one value per span."""
        return self.spread(self.batch[name])

    @cached_property
    def kind(self) -> Array:
        """The kinds of spans, see :class:`~otel_torchprof._columns.schema.Kind`."""
        return self.column("kind")

    @cached_property
    def any_flags(self) -> int:
        """Flags that any event has."""
        return int(np.bitwise_or.reduce(self.batch["flags"]))

    @cached_property
    def inputs(self) -> DistinctInputs:
        """The inputs of the batch."""
        return DistinctInputs(self.batch)

    def captured(self) -> Shares | None:
        """Shares of the events in compiled regions, by synthetic root; None without such regions."""
        if self._shares is None:
            self._shares = shares_of_roots(self.batch, self.table)
        return self._shares

    @cached_property
    def frames(self) -> npt.NDArray[np.int64] | None:
        """Positions of the spans that are calls; None if there are none."""
        positions = np.flatnonzero((self.kind == Kind.FRAME) & self.is_event)
        return positions if positions.size else None

    def frame_names(self, spans: Array) -> Array:
        """The names of calls as they were recorded: what facts are known by."""
        names: Array = self.batch["name"][self.table.row[spans]]
        return names

    @cached_property
    def functions(self) -> tuple[list[FunctionInfo], npt.NDArray[np.int64]] | None:
        """Python functions that spans are calls of or are directly inside, and the index of each span's function; -1 for none."""
        info = self.batch.frame_info
        if info is None or (self.frames is None and self._callers is None):
            return None
        name = np.zeros(len(self.table), dtype=np.int64)
        if self._callers is not None:
            name[:] = self.spread(self._callers)
        if self.frames is not None:
            name[self.frames] = self.frame_names(self.frames)
        used, which = distinct(np.where(self.is_event, name, 0))
        known = np.array([index in info.functions for index in used.tolist()], dtype=np.bool_)
        if not known.any():
            return None
        number = np.where(known, np.cumsum(known) - 1, -1)
        return [info.functions[index] for index in used[known].tolist()], number[which]

    @cached_property
    def device_times(self) -> DeviceTimes | None:
        """Device times of the rows of the batch; None if no device was timed."""
        return device_times(self.batch) if self._device_times is None else self._device_times

    @cached_property
    def collectives(self) -> npt.NDArray[np.int64] | None:
        """Per span its place in ``batch.collectives``, -1 where it is none; None where no span is."""
        reported = self.batch.collectives
        if reported is None or not len(reported["event"]):
            return None
        rows = rows_of(self.batch, reported["event"])
        of_row = np.full(len(self.batch), -1, dtype=np.int64)
        of_row[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        place = np.where(self.is_event, self.spread(of_row), -1)
        return place if (place >= 0).any() else None

    @cached_property
    def generations(self) -> list[tuple[int, Mapping[str, AttributeValue]]]:
        """Spans of calls of ``generate`` with metadata, each with its attributes."""
        known = self.batch.generations
        if not known:
            return []
        rows = rows_of(self.batch, np.fromiter(known, np.uint64, len(known)))
        spans = np.flatnonzero(self.is_event & np.isin(self.table.row, rows[rows >= 0]))
        ids = self.batch["id"][self.table.row[spans]].tolist()
        return [(span, known[event].attributes()) for span, event in zip(spans.tolist(), ids, strict=True)]

    @cached_property
    def cpu_memory(self) -> MovedMemory | None:
        """Memory that the rows of the batch allocated and freed on the CPU."""
        return moved_memory(self.batch, CPU_TYPES, self.memory_rows)

    @cached_property
    def device_memory(self) -> MovedMemory | None:
        """... and on devices."""
        return moved_memory(self.batch, DEVICE_TYPES, self.memory_rows)

    @cached_property
    def memory_rows(self) -> npt.NDArray[np.int64] | None:
        """The row of the event around each record of memory; None where memory was not recorded."""
        memory = self.batch.memory
        return None if memory is None else rows_of(self.batch, memory["event"])

    def add(self, strings: Sequence[str]) -> npt.NDArray[np.uint32]:
        """Adds strings to the names of the table and returns their indices."""
        first = len(self.table.names) + len(self.strings)
        self.strings.extend(strings)
        return np.arange(first, first + len(strings), dtype=np.uint32)


@dataclass(frozen=True)
class Attribute:
    """One attribute: its key and type, when a span has it, and how to compute it."""

    key: str
    type: AttributeType
    meaning: str
    present: str
    """When a span has the attribute, in words, for the documentation."""
    compute: Callable[[AttributeSource], Values | None]
    """Returns the values and which spans have them; None if no span has the attribute."""
