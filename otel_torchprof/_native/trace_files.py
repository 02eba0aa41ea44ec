"""The native reader of trace files: bytes in, columns out, or a merged trace (``trace_files.h``). Without the GIL. A reader is for one thread."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Names

from .ffi import ffi, lib, owner
from .loops import Array, pointer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

BLOCK = 1 << 16
"""Rows that are read at a time."""
LARGEST: int = lib.OTP_TRACE_LARGEST
"""Bytes of the largest event or member that is read."""
IDS: int = lib.OTP_TRACE_IDS
"""Number of ids of each rank in a merged trace: those of 1,024 ranks are exact in a double, as viewers store them."""

ONE_CHANGE = (1 << 64) - 1
"""The span of a change of memory that is none of a span."""
ROW_COLUMNS: Mapping[str, tuple[Any, int]] = {
    "start": (np.int64, 0),
    "duration": (np.int64, -1),
    "id": (np.uint64, 0),
    "span_id": (np.uint64, 0),
    "parent_id": (np.uint64, 0),
    "sequence_nr": (np.int64, -1),
    "inputs": (np.int64, -1),
    "name": (np.uint32, 0),
    "category": (np.uint32, 0),
    "track": (np.uint32, 0),
    "fwd_thread": (np.uint32, 0),
    "text": (np.uint32, 0),
    "trace": (np.uint32, 0),
    "phase": (np.uint8, 0),
    "flags": (np.uint8, 0),
}
"""Columns of ``otp_trace_rows``: type, and the value that means nothing."""
WORK_COLUMNS: Mapping[str, tuple[Any, int]] = {
    "row": (np.uint64, 0),
    "correlation": (np.int64, -1),
    "stream": (np.int64, -1),
    "bytes": (np.int64, -1),
    "device": (np.int32, -1),
}
"""Columns of ``otp_trace_works``."""
MEMORY_COLUMNS: Mapping[str, tuple[Any, int]] = {
    "time": (np.int64, 0),
    "bytes": (np.int64, 0),
    "address": (np.uint64, 0),
    "total_allocated": (np.int64, -1),
    "total_reserved": (np.int64, -1),
    "span": (np.uint64, ONE_CHANGE),
    "track": (np.uint32, 0),
    "device_type": (np.int32, 0),
    "device_index": (np.int32, -1),
    "flags": (np.uint8, 0),
}
"""Columns of ``otp_trace_memory``."""

ATTRIBUTE = np.dtype(
    [("row", np.uint64), ("event", np.uint64), ("offset", np.uint64), ("key", np.uint32), ("value", np.uint32)]
)
"""``otp_trace_attribute``."""

ROW_TIMED: int = lib.OTP_TRACE_TIMED
"""Flag of rows that are the time between two timing events of a device."""
ROW_APART: int = lib.OTP_TRACE_APART
"""Flag of spans in OTLP that are steps of ``profile.step()``, or a whole profile: no events of it."""


class Status(enum.IntEnum):
    """Why a call of :meth:`TraceReader.read` returned: ``otp_trace_status``."""

    MORE = 0
    FULL = 1
    MEMBER = 2
    END = 3
    UNEXPECTED = 4
    NO_MEMORY = 5
    PROCESS = 6


class Fault(enum.IntEnum):
    """The part that made an event unusable: ``otp_trace_fault``."""

    NONE = 0
    SIZE = 1
    EVENT = 2
    TS = 3
    DUR = 4
    NAME = 5
    ARGS = 6
    ID = 7
    MESSAGE = 8
    SPAN = 9
    TIME = 10
    PHASE = 11
    NO_ID = 12
    JSON = 13


class Expected(enum.IntEnum):
    """What was expected where something else is: ``otp_trace_expected``."""

    DOCUMENT = 1
    MEMBER = 2
    COLON = 3
    VALUE = 4
    ELEMENT = 5
    STRING_END = 6
    VALUE_END = 7
    EVENTS = 8


class Figures(NamedTuple):
    """Sums over what was read."""

    events: int
    unusable: int
    """Events with a part that cannot be read."""
    first_event: int
    """Number of the first of them, from 1."""
    first_offset: int
    first_fault: Fault
    without_duration: int
    dropped: int
    """Events that spans say were dropped."""
    has_flops: bool
    """Whether spans have numbers of floating-point operations."""
    is_live: bool
    """Whether steps have kinds, as those of a stream or of an instrumentation."""
    by_phase: Mapping[str, int]
    """Number of events that are no rows, by phase; empty: events without one."""


class _Block:
    """Arrays that the reader fills, and the full ones so far."""

    def __init__(self, c_type: str, columns: Mapping[str, tuple[Any, int]]) -> None:
        self._columns = columns
        self._arrays = {name: np.empty(BLOCK, dtype) for name, (dtype, _) in columns.items()}
        self._blocks: dict[str, list[Array | int]] = {name: [] for name in columns}
        self.native: Any = ffi.new(c_type, {name: pointer(array) for name, array in self._arrays.items()})
        self.native.capacity = BLOCK
        self.nbytes = 0
        """Bytes of the blocks."""

    def flush(self) -> None:
        """Keeps what the arrays have; of a column that says nothing, only its length."""
        count = self.native.count
        for name, (_, neutral) in self._columns.items():
            values = self._arrays[name][:count]
            is_empty = not (values != neutral).any()
            self._blocks[name].append(count if is_empty else values.copy())
            self.nbytes += 0 if is_empty else values.nbytes
        self.native.count = 0

    def take(self) -> dict[str, Array]:
        """Returns all columns, those that say nothing as views of one value. Call it once."""
        self.flush()
        columns: dict[str, Array] = {}
        for name, (dtype, neutral) in self._columns.items():
            blocks = self._blocks.pop(name)
            lengths = [block if isinstance(block, int) else len(block) for block in blocks]
            if all(isinstance(block, int) for block in blocks):
                columns[name] = np.broadcast_to(np.array(neutral, dtype), sum(lengths))
                continue
            columns[name] = np.concatenate(
                [np.full(block, neutral, dtype) if isinstance(block, int) else block for block in blocks]
            )
        return columns


class TraceReader:
    """Reads a document piece by piece.

    Args:
        limit: most bytes of names, inputs and attributes.
        attributes: read for sums only: these attributes of spans, and nothing that only single operators have. None: all of
            the operators, and attributes only of steps and of spans that stand for several.

    Raises:
        MemoryError: no memory is left.
    """

    def __init__(self, limit: int, attributes: Iterable[str] | None = None) -> None:
        self._reader = lib.otp_trace_open(limit)
        if self._reader == ffi.NULL:
            raise MemoryError("no memory left to read a trace")
        self._owner = owner(self._reader, "otp_trace_close")
        keys = None if attributes is None else "\n".join(attributes).encode()
        if keys is not None and lib.otp_trace_read_for_sums(self._reader, keys):
            raise MemoryError("no memory left to read a trace")
        self._rows = _Block("otp_trace_rows *", ROW_COLUMNS)
        self._works = _Block("otp_trace_works *", WORK_COLUMNS)
        self._memory = _Block("otp_trace_memory *", MEMORY_COLUMNS)
        self._step = ffi.new("otp_trace_step *")

    @property
    def nbytes(self) -> int:
        """Bytes of the columns so far."""
        return self._rows.nbytes + self._works.nbytes + self._memory.nbytes

    @property
    def step(self) -> Any:
        """The ``otp_trace_step`` of the last call."""
        return self._step

    def read(self, data: bytes, at: int, *, is_last: bool) -> Status:
        """Reads on from a position of ``data``, which begins with what was not consumed before."""
        view = ffi.from_buffer("uint8_t[]", data)
        natives = [block.native for block in self._blocks]
        return self._flushed(lib.otp_trace_read(self._reader, view + at, len(data) - at, is_last, *natives, self._step))

    def read_request(self, body: bytes, at: int, offset: int, *, is_json: bool) -> Status:
        """Reads a serialized request, or a line of OTLP/JSON, on from a position in it; it begins at ``offset`` of the file."""
        self._step.consumed = at
        view = ffi.from_buffer("uint8_t[]", body)
        natives = [block.native for block in self._blocks]
        return self._flushed(
            lib.otp_trace_read_request(self._reader, view, len(body), is_json, offset, *natives, self._step)
        )

    @property
    def _blocks(self) -> tuple[_Block, _Block, _Block]:
        return self._rows, self._works, self._memory

    def _flushed(self, status: int) -> Status:
        if status == Status.FULL:
            for block in self._blocks:
                block.flush()
        return Status(status)

    @property
    def events(self) -> int:
        """Number of events so far."""
        return int(lib.otp_trace_get_figures(self._reader).events)

    def figures(self) -> Figures:
        """Sums over what was read so far."""
        native = lib.otp_trace_get_figures(self._reader)
        by_phase = {chr(phase) if phase else "": native.by_phase[phase] for phase in range(256)}
        return Figures(
            native.events,
            native.unusable,
            native.first_event,
            native.first_offset,
            Fault(native.first_fault),
            native.without_duration,
            native.dropped,
            bool(native.has_flops),
            bool(native.is_live),
            {phase: count for phase, count in by_phase.items() if count},
        )

    def names(self) -> Names:
        """The names to which columns point."""
        names = lib.otp_trace_names(self._reader)
        ends = _copy(names.ends, names.count, np.uint64)
        return Names(_copy(names.data, int(ends[-1]), np.uint8), ends)

    def tracks(self) -> npt.NDArray[np.uint32]:
        """For each track, the names of its process and its thread, which are JSON texts."""
        count = ffi.new("uint64_t *")
        tracks = lib.otp_trace_tracks(self._reader, count)
        return _copy(tracks, 2 * count[0], np.uint32).reshape(-1, 2)

    def inputs(self) -> npt.NDArray[np.int64]:
        """Words of inputs, as those of a batch."""
        count = ffi.new("uint64_t *")
        inputs = lib.otp_trace_inputs(self._reader, count)
        return _copy(inputs, count[0], np.int64)

    def attributes(self) -> npt.NDArray[Any]:
        """Attributes of spans, an array of :data:`ATTRIBUTE`."""
        count = ffi.new("uint64_t *")
        attributes = lib.otp_trace_attributes(self._reader, count)
        return _copy(attributes, count[0], ATTRIBUTE)

    @property
    def unusable(self) -> int:
        """Number of events so far with a part that cannot be read."""
        return int(lib.otp_trace_get_figures(self._reader).unusable)

    def take(self) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Returns the columns of rows, works and memory. Call it once."""
        return self._rows.take(), self._works.take(), self._memory.take()


class TraceRewriter(TraceReader):
    """Writes the events of Chrome traces as those of one merged trace, file by file."""

    def __init__(self) -> None:
        super().__init__(LARGEST)
        self._named_process: Callable[[bytes], tuple[int, str]]

    def begin(
        self,
        base: int,
        merged_base: int,
        lines: Sequence[tuple[int, float, int]],
        ids: tuple[int, int],
        named_process: Callable[[bytes], tuple[int, str]],
    ) -> None:
        """Begins a file. Raises MemoryError.

        Args:
            base: Unix ns from which the times of the file count.
            merged_base: Unix ns from which those of the merged trace count.
            lines: corrections of the times, one after the other: offset, drift and origin, as of a ``ClockLine``.
            ids: the first id of flows and asynchronous events, of :data:`IDS`, and the process id of the rank.
            named_process: returns the id of a process, given as JSON, and events that describe it, each after a comma.
        """
        native = ffi.new("otp_clock_line[]", [(offset, origin, drift) for offset, drift, origin in lines])
        target = ffi.new("otp_trace_target *", (base, merged_base, native, len(lines), *ids))
        if lib.otp_trace_rewrite(self._reader, target):
            raise MemoryError("no memory left to merge a trace")
        self._named_process = named_process

    def read(self, data: bytes, at: int, *, is_last: bool) -> Status:
        view, none = ffi.from_buffer("uint8_t[]", data), ffi.NULL
        step = self._step
        status = lib.otp_trace_read(self._reader, view + at, len(data) - at, is_last, none, none, none, step)
        if status != Status.PROCESS:
            return Status(status)
        self.add_process(data[at + step.value : at + step.value + step.value_size])
        return Status.FULL

    def add_process(self, process: bytes) -> None:
        """Adds a process of the file, which is JSON. Raises MemoryError."""
        pid, events = self._named_process(process)
        text = events.encode()
        if lib.otp_trace_add_process(self._reader, process, len(process), pid, text, len(text)):
            raise MemoryError("no memory left to merge a trace")

    @property
    def size(self) -> int:
        """Bytes that were written and not taken."""
        return int(lib.otp_trace_output(self._reader).size)

    def taken(self) -> bytes:
        """Returns the bytes written since the last call."""
        output = lib.otp_trace_output(self._reader)
        content: bytes = ffi.buffer(output.data, output.size)[:] if output.size else b""
        output.size = 0
        return content


def pair_ends(rows: Mapping[str, Array]) -> tuple[npt.NDArray[np.int64], int]:
    """Returns the durations of rows with those of begins (phases B and b) up to their ends, and the number of ends without a begin."""
    columns = {name: np.ascontiguousarray(rows[name]) for name in ROW_COLUMNS if name != "duration"}
    duration = np.array(rows["duration"])
    native = ffi.new("otp_trace_rows *", {name: pointer(column) for name, column in columns.items()})
    native.duration, native.count = pointer(duration), len(duration)
    unmatched = lib.otp_trace_pair(native)
    if unmatched < 0:
        raise MemoryError("no memory left for the events of the trace")
    return duration, unmatched


def enclosing_rows(
    track: Array, start: Array, end: Array, apart: Array | None = None, *, whole: bool = False
) -> npt.NDArray[np.int32]:
    """Returns the row of the innermost event of its track that is open when each begins, -1 for none and where ``apart``.

    Rows are sorted by track, start, and the longer first. Events ``apart`` contain none. ``whole``: and that ends no earlier.
    """
    parent = np.empty(len(track), np.int32)
    apart = np.zeros(len(track), np.uint8) if apart is None else np.ascontiguousarray(apart, np.uint8)
    track = np.ascontiguousarray(track, np.uint32)
    start, end = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
    lib.otp_trace_nest(len(parent), *map(pointer, (track, start, end, apart)), whole, pointer(parent))
    return parent


def _copy(values: Any, count: int, dtype: Any) -> Array:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(ffi.buffer(values, size)[:], dtype) if size else np.empty(0, dtype)
