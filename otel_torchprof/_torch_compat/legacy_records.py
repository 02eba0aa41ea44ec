"""Turns the rows of a batch into the lists of the legacy engine: one per thread, every event as its begin and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import Flag, Kind, MemoryFlag
from otel_torchprof._events.function_event import DeviceType
from otel_torchprof._events.recorded_events import EventSource
from otel_torchprof._process import threads
from otel_torchprof._tree.inputs import input_shapes

from .legacy_devices import may_have_device_event
from .legacy_event import EventKind, LegacyEvent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from otel_torchprof._columns.batch import Array, Batch
    from otel_torchprof._events.recorded_events import RecordedEvent

    from .legacy_devices import DeviceEvents

MemoryKey = tuple[int, int, int]
"""Time, address and bytes of a change of memory: the same in every recording that has it."""

_DEVICE_MEMORY = frozenset({DeviceType.CUDA, DeviceType.HIP})
_CPU_MEMORY = frozenset({DeviceType.CPU, DeviceType.MKLDNN, DeviceType.IDEEP})


class _Rows:
    """A batch whose rows say what torch's list of events says of them. Safe to share between threads."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._lock = threads.Lock()
        self._source: EventSource | None = None
        self._position: dict[int, int] = {}

    def event_of(self, row: int) -> RecordedEvent | None:
        """The event of a row as ``prof.events()`` has it; None where it is not among these (a merged duplicate)."""
        with self._lock:
            if self._source is None:
                source = EventSource(self.batch, 0, None)
                source.slots = [None] * len(source)
                self._position = {int(row): at for at, row in enumerate(source.view.rows.tolist())}
                self._source = source
        position = self._position.get(row)
        return None if position is None else self._source.event(position)


class _Begin(LegacyEvent):
    """The begin of a recorded event, which reads its columns when it is asked."""

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: _Rows, row: int, thread: int, *, cpu_ns: int, handle: int) -> None:
        super().__init__(EventKind.PUSH, "", thread, cpu_ns=cpu_ns, handle=handle)
        self._rows = rows
        self._row = row

    def _value(self, column: str) -> int:
        return int(self._rows.batch[column].item(self._row))

    def name(self) -> str:
        """What was called."""
        return str(self._rows.batch.names[self._value("name")])

    def is_async(self) -> bool:
        """Whether it was declared asynchronous, or ended on another thread."""
        return bool(self._value("flags") & Flag.ASYNC)

    def shapes(self) -> list[list[int]]:
        """The dimensions of the inputs, where shapes were recorded."""
        return input_shapes(self._rows.batch, self._row)

    def stack(self) -> list[str]:
        """The Python frames around it, innermost first, where stacks were recorded."""
        event = self._rows.event_of(self._row)
        return list(event.stack or ()) if event is not None else []

    def scope(self) -> int:
        """``at::RecordScope``: 0 operator, 1 backward function, 7 label."""
        return self._value("scope")

    def sequence_nr(self) -> int:
        """Pairs a backward function with its forward operator; -1 for none."""
        return self._value("sequence_nr")

    def fwd_thread_id(self) -> int:
        """Of a backward function the thread of its forward operator; 0 for none."""
        return self._value("fwd_thread")

    def flops(self) -> int:
        """Floating point operations, where they were asked for and are known."""
        event = self._rows.event_of(self._row)
        return int(event.flops or 0) if event is not None else 0


class LeftOut:
    """What another recording has, told apart by identity: an event is recorded once, however many record it."""

    def __init__(self) -> None:
        self._ids: list[Array] = []
        self.memory: set[MemoryKey] = set()

    def add(self, batch: Batch) -> None:
        """Everything in a batch."""
        self._ids.append(batch["id"])
        self.memory.update(_memory_keys(batch))

    def update(self, other: LeftOut) -> None:
        """Everything in another one."""
        self._ids += other._ids
        self.memory |= other.memory

    def rows(self, batch: Batch) -> Array:
        """Which rows of a batch are among it."""
        if not self._ids:
            return np.zeros(len(batch), dtype=np.bool_)
        return np.isin(batch["id"], np.concatenate(self._ids))


def legacy_events(
    batch: Batch,
    *,
    left_out: LeftOut,
    until: Mapping[int, int],
    device_events: DeviceEvents | None,
) -> dict[int, list[LegacyEvent]]:
    """The events of a batch by the system's id of the thread they began on, each list in order of time.

    An event that has not ended has a begin only. ``until`` has a Unix time in ns for threads of which nothing counts that
    began later. Two threads of one id, of which the system used it again, share a list. Costs some 5 us per event.
    """
    requested = np.isin(batch["kind"], (Kind.OPERATOR, Kind.LABEL)) & ~left_out.rows(batch)
    rows, last = _Rows(batch), _last_inside(batch)
    memory = _memory_by_thread(batch, left_out.memory)
    found: dict[int, list[LegacyEvent]] = {}
    for index, thread in enumerate(batch.threads):
        own = requested & (batch["thread"] == index)
        limit = until.get(thread.os_tid)
        if limit is not None:
            own &= batch["start"] <= limit
        changes = [change for change in memory.get(index, ()) if limit is None or change[0] <= limit]
        events = _in_order(rows, np.flatnonzero(own), last, changes, device_events)
        if events:
            found.setdefault(thread.os_tid, []).extend(events)
    return found


def _last_inside(batch: Batch) -> list[int]:
    """For every row the last one that began inside it; the row itself where none did."""
    last = list(range(len(batch)))
    for row, parent in zip(reversed(last.copy()), reversed(batch["parent"].tolist()), strict=True):
        if parent >= 0:
            last[parent] = max(last[parent], last[row])
    return last


_Change = tuple[int, int, int, int, int]
"""Of memory: time, row of the event around it or -1, bytes on the CPU, bytes on a device, thread."""

_BEGIN, _MEMORY, _END = range(3)

_UNFINISHED = int(Flag.UNFINISHED)


def _in_order(
    rows: _Rows, own: Array, last: list[int], changes: list[_Change], device_events: DeviceEvents | None
) -> list[LegacyEvent]:
    """Begins, ends and changes of memory of one thread, in the order in which they happened.

    What has the same time stands as the tree says: an event ends after all that began inside it, and before what comes next.
    """
    batch = rows.batch
    threads = [thread.number for thread in batch.threads]
    keyed: list[tuple[int, int, int, int, LegacyEvent]] = []
    columns = (batch[name][own].tolist() for name in ("start", "end", "id", "thread", "end_thread", "flags"))
    for row, start, stop, handle, thread, end_thread, flags in zip(own.tolist(), *columns, strict=True):
        begin = _Begin(rows, row, threads[thread], cpu_ns=start, handle=handle)
        keyed.append((start, row, _BEGIN, row, begin))
        end = None
        if not flags & _UNFINISHED:
            end = LegacyEvent(EventKind.POP, "", threads[end_thread], cpu_ns=stop, handle=handle)
            keyed.append((stop, last[row], _END, -row, end))
        if device_events is not None and may_have_device_event(begin.name()):
            _add_device_events(device_events, begin, end)
    for time, enclosing, cpu, device, thread in changes:
        event = LegacyEvent(
            EventKind.MEMORY_ALLOC, "", threads[thread], cpu_ns=time, cpu_memory_usage=cpu, cuda_memory_usage=device
        )
        keyed.append((time, enclosing, _MEMORY, 0, event))
    keyed.sort(key=lambda entry: entry[:4])
    return [entry[4] for entry in keyed]


def _add_device_events(device_events: DeviceEvents, begin: LegacyEvent, end: LegacyEvent | None) -> None:
    begun = device_events.begun(begin.handle())
    if begun is not None:
        begin.set_device_event(begun)
    ended = device_events.ended(begin.handle()) if end is not None else None
    if end is not None and ended is not None:
        end.set_device_event(ended)


def _memory_keys(batch: Batch) -> Collection[MemoryKey]:
    memory = batch.memory
    if memory is None:
        return ()
    return set(zip(*(memory[name].tolist() for name in ("time", "address", "bytes")), strict=True))


def _memory_by_thread(batch: Batch, left_out: Collection[MemoryKey]) -> dict[int, list[_Change]]:
    """The changes of memory by index of the thread, without those that an allocator could not make."""
    memory = batch.memory
    found: dict[int, list[_Change]] = {}
    if memory is None:
        return found
    row_of = dict(zip(batch["id"].tolist(), range(len(batch)), strict=True))
    made = memory["flags"] & MemoryFlag.OUT_OF_MEMORY == 0
    columns = ("time", "address", "bytes", "event", "thread", "device_type")
    for time, address, size, event, thread, device in zip(
        *(memory[name][made].tolist() for name in columns), strict=True
    ):
        if (time, address, size) in left_out:
            continue
        cpu, other = size * (device in _CPU_MEMORY), size * (device in _DEVICE_MEMORY)
        found.setdefault(thread, []).append((time, row_of.get(event, -1), cpu, other, thread))
    return found
