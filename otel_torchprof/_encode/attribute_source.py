"""The data from which attributes are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._model.compiled import Shares, shares_of_roots
from otel_torchprof._model.devices import DeviceTimes, device_times
from otel_torchprof._model.frames import distinct
from otel_torchprof._model.inputs import DistinctInputs
from otel_torchprof._model.memory import CPU_TYPES, DEVICE_TYPES, MovedMemory, moved_memory
from otel_torchprof._model.reductions import own_times
from otel_torchprof._model.span_table import AttributeType, ascending, events_after, numbers_between
from otel_torchprof._native.loops import event_attributes
from otel_torchprof._process.heap import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.frame_info import FunctionInfo
    from otel_torchprof._columns.generation import AttributeValue
    from otel_torchprof._model.span_table import AttributeColumn, SpanTable

Array = npt.NDArray[Any]
Values = tuple[Array, Array]
"""The values of an attribute, and the spans that have one each, ascending."""
_ATTRIBUTE_BYTES = 36
"""Estimated size of one span's attributes: its scope, self time and thread, and what they are made of."""
_THREADS = {("thread.id", AttributeType.INT64): "thread_id", ("thread.name", AttributeType.NAME): "thread_name"}
"""Keys and types of attributes of threads, and their names in ``otp_event_attributes``."""
_BY_ROW = ("kind", "scope", "sequence_nr", "fwd_thread", "thread")


def chosen(values: Values, mask: npt.NDArray[np.bool_]) -> Values:
    """The values where the mask is true."""
    return values[0][mask], values[1][mask]


def _is_run_up_to(rows: Array, end: int) -> bool:
    """Whether rising rows follow each other up to ``end``."""
    return len(rows) > 0 and bool(rows[-1] + 1 == end and rows[0] + len(rows) == end)


class AttributeSource:
    """The data from which attributes are computed: a batch, its span table, and strings added on the way."""

    def __init__(
        self,
        batch: Batch,
        table: SpanTable,
        *,
        dropped_on: int | None,
        self_time: Callable[[Arena], Array] | None,
        with_flops: bool = False,
        callers: Array | None = None,
        device_times: DeviceTimes | None = None,
    ) -> None:
        self.batch = batch
        self.with_flops = with_flops
        self.table = table
        self.dropped_on = dropped_on
        self._self_time = self_time
        self._callers = callers
        self._device_times = device_times
        self._room = Arena(len(table) * _ATTRIBUTE_BYTES)
        self.strings: list[str] = []
        self._shares: Shares | None = None

    @cached_property
    def of_events(self) -> Mapping[str, Values]:
        """The attributes that most events have, see :func:`~otel_torchprof._native.loops.event_attributes`; with :attr:`threads_before`."""
        batch, threads = self.batch, self.batch.threads
        own = self._self_time
        named = self.add([thread.name for thread in threads])
        columns = {
            "self_time": own_times(batch) if own is None else own(self._room),
            "name_of_scope": self.add([scope.name.lower() for scope in Scope]),
            "name_of_thread": named * np.array([bool(thread.name) for thread in threads], dtype=np.uint32),
            "id_of_thread": np.array([thread.ident for thread in threads], dtype=np.int64),
        }
        columns |= {name: batch[name] for name in _BY_ROW}
        front = {_THREADS[key, column.type]: column.values for key, column in self.threads_before.items()}
        rows = None if self._before is not None else self.rows
        of_all, made = event_attributes(self.events, rows, columns, self._room, front)
        for name, values in of_all.items():
            with_before = (
                numbers_between(len(self.table) - len(values), len(self.table)) if name in front else self.events
            )
            made[name] = values, with_before
        if not all(thread.name for thread in threads):
            made["thread_name"] = chosen(made["thread_name"], made["thread_name"][0] != 0)
        return made

    @cached_property
    def threads_before(self) -> Mapping[str, AttributeColumn]:
        """The columns with the threads of the synthetic spans right before the events, by key."""
        if self._before is None:
            return {}
        return {
            column.key: column
            for column in self.table.attributes
            if (column.key, column.type) in _THREADS
            and column.rows is not None
            and _is_run_up_to(column.rows, self._before)
        }

    @cached_property
    def _before(self) -> int | None:
        """The number of synthetic spans, if they are followed by all events of the batch, in its order; else None."""
        before = events_after(self.table.row)
        return before if before is not None and len(self.table) - before == len(self.batch) else None

    @cached_property
    def events(self) -> npt.NDArray[np.uint32]:
        """The spans of events, ascending."""
        if self._before is not None:
            return numbers_between(self._before, len(self.table))
        return np.flatnonzero(self.table.row >= 0).astype(np.uint32)

    @cached_property
    def rows(self) -> Array:
        """The row of each of these."""
        events = self.events
        # Usually all behind each other: then nothing is copied.
        is_block = len(events) and events[-1] - events[0] + 1 == len(events)
        rows: Array = self.table.row[slice(events[0], events[-1] + 1) if is_block else events]
        return rows

    @cached_property
    def synthetic(self) -> Array:
        """The spans of no event, ascending."""
        return np.flatnonzero(self.table.row < 0) if self._before is None else np.arange(self._before)

    def where(self, mask: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
        """The spans of events where a mask by row is true, ascending, and their rows."""
        if self._before is not None:
            rows = np.flatnonzero(mask)
            return rows + self._before, rows
        at = np.flatnonzero(mask[self.rows]) if mask.any() else np.empty(0, dtype=np.int64)
        return self.events[at], self.rows[at]

    def nonzero(self, values: Array) -> Values:
        """The values by row that are not 0."""
        spans, rows = self.where(values != 0)
        return values[rows], spans

    def of_kind(self, kind: Kind) -> tuple[Array, Array]:
        """The spans of events of a kind, ascending, and their rows."""
        return self.where(self.batch["kind"] == int(kind))  # not with the enum, which numpy compares as int64

    def joined(self, *parts: Values) -> Values:
        """The values of all parts; of several for one span, the first counts."""
        values, spans = (self._end_to_end(arrays) for arrays in zip(*parts, strict=True))
        return ascending(values, spans)

    def _end_to_end(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays, out=self._room.empty(sum(map(len, arrays)), np.result_type(*arrays)))

    @cached_property
    def any_flags(self) -> int:
        """Flags that any event has."""
        flags = self.batch["flags"]
        return int(np.bitwise_or.reduce(flags)) if flags.max(initial=0) else 0

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
    def phases(self) -> tuple[Array, Array]:
        """The spans that are phases, and their rows."""
        return self.of_kind(Kind.PHASE)

    @cached_property
    def frames(self) -> tuple[Array, Array] | None:
        """The spans that are calls, and their rows; None if there are none."""
        frames = self.of_kind(Kind.FRAME)
        return frames if frames[0].size else None

    @cached_property
    def functions(self) -> tuple[list[FunctionInfo], Array, Array] | None:
        """Python functions that spans are calls of or are directly inside; the index of the function of each such span; these spans."""
        info = self.batch.frame_info
        if info is None or (self.frames is None and self._callers is None):
            return None
        name = np.zeros(len(self.events), dtype=np.int64) if self._callers is None else self._callers[self.rows]
        is_frame = self.batch["kind"][self.rows] == int(Kind.FRAME)
        used, which = distinct(np.where(is_frame, self.batch["name"][self.rows], name))
        known = np.array([index in info.functions for index in used.tolist()], dtype=np.bool_)
        if not known.any():
            return None
        has = known[which]
        return (
            [info.functions[index] for index in used[known].tolist()],
            (np.cumsum(known) - 1)[which[has]],
            self.events[has],
        )

    @cached_property
    def device_times(self) -> DeviceTimes | None:
        """Device times of the rows of the batch; None if no device was timed."""
        return device_times(self.batch) if self._device_times is None else self._device_times

    @cached_property
    def collectives(self) -> Values | None:
        """The place in ``batch.collectives`` of each span that is a collective; None where no span is."""
        reported = self.batch.collectives
        if reported is None or not len(reported["event"]):
            return None
        rows = rows_of(self.batch, reported["event"])
        of_row = np.full(len(self.batch), -1, dtype=np.int64)
        of_row[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        spans, rows = self.where(of_row >= 0)
        return (of_row[rows], spans) if spans.size else None

    @cached_property
    def generations(self) -> list[tuple[int, Mapping[str, AttributeValue]]]:
        """Spans of calls of ``generate`` with metadata, each with its attributes."""
        known = self.batch.generations
        if not known:
            return []
        rows = rows_of(self.batch, np.fromiter(known, np.uint64, len(known)))
        is_known = np.zeros(len(self.batch), dtype=np.bool_)
        is_known[rows[rows >= 0]] = True
        spans, rows = self.where(is_known)
        ids = self.batch["id"][rows].tolist()
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
    """Returns the values and the spans that have them; None if no span has the attribute."""
