"""A batch: the columns of one drain, with the names and threads that they point to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .schema import COLLECTIVE_COLUMNS, COLUMNS, DEVICE_COLUMNS, ENERGY_COLUMNS, MEMORY_COLUMNS, OPTIONAL

if TYPE_CHECKING:
    from .frame_facts import FrameFacts

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Thread:
    """A thread that recorded something."""

    os_tid: int
    """The system's thread id (``gettid``)."""
    ident: int
    """``threading.get_ident()`` of the thread, which OpenTelemetry's ``thread.id`` wants."""
    torch_tid: int
    """Torch's small logical id (``RecordFunction::currentThreadId``); 0 when torch never ran there."""
    name: str = ""


class Names(Sequence[str]):
    """The interned names of a batch: bytes end to end, and where each one ends.

    Index 0 is the empty name. Decoded only when asked for: invalid UTF-8 becomes U+FFFD. ``data`` and ``ends`` are what the
    native encoders take.
    """

    __slots__ = ("_cache", "data", "ends")

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.uint64]) -> None:
        self.data = data
        self.ends = ends
        self._cache: dict[int, str] = {}

    @classmethod
    def of(cls, names: Sequence[str | bytes]) -> Names:
        """Builds the table from a list (tests, merged batches)."""
        raw = [name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass") for name in names]
        data = np.frombuffer(b"".join(raw), dtype=np.uint8)
        return cls(data, np.cumsum([len(name) for name in raw], dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, index: int) -> bytes:
        """The name as the bytes that were recorded."""
        start = int(self.ends[index - 1]) if index else 0
        return self.data[start : int(self.ends[index])].tobytes()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"name index {index} out of range: the batch has {len(self)} names")
        name = self._cache.get(index)
        if name is None:
            name = self._cache[index] = self.raw(index).decode("utf-8", "replace")
        return name

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class OpenEvents:
    """Events that were open at a drain, and so are no rows yet: by thread, outermost first.

    Only a drain of a running recording has any; each comes as a row, with the same id and start, of the drain after its
    end. Immutable.
    """

    id: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    parent: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Ids of the events around them, 0 for none; one that has ended may be a row of this batch or of an earlier one."""
    start: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """When they began, Unix ns."""
    context: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Numbers of the spans that they began in; 0 for none, and where the recording follows no spans."""
    name: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Indices into ``Batch.names``."""
    kind: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """What they are: see :class:`~otel_torchprof._columns.schema.Kind`."""
    thread: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Indices into ``Batch.threads``: where they began."""
    scope: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """``at::RecordScope``: see :class:`~otel_torchprof._columns.schema.Scope`."""

    def __len__(self) -> int:
        return len(self.id)

    def chosen(self, mask: Array) -> OpenEvents:
        """Those where the mask is true."""
        return OpenEvents(*(getattr(self, f.name)[mask] for f in fields(self)))

    def joined(self, other: OpenEvents) -> OpenEvents:
        """These, then the others."""
        return OpenEvents(*(np.concatenate((getattr(self, f.name), getattr(other, f.name))) for f in fields(self)))


@dataclass(frozen=True)
class Batch:
    """The events of one drain as columns (see :data:`~otel_torchprof._columns.schema.COLUMNS`).

    The arrays are read-only views of native memory that lives as long as any of them does. Immutable, hence safe to share
    between threads.
    """

    columns: Mapping[str, Array]
    names: Names
    threads: Sequence[Thread]
    inputs: npt.NDArray[np.int64] | None = None
    """Inputs of the events, in words of 64 bits: those of a row begin at ``columns["inputs"][row]``. The format stands at
    ``otp_input_kind`` in ``record_format.h``; ``dtype`` there is ``c10::ScalarType`` + 1, 0 where unknown."""
    kept: int = -1
    """What the inputs may hold: bits of ``otp_input_kept`` in ``inputs.h``, so that nobody looks for what nobody wanted."""
    memory: Mapping[str, Array] | None = None
    """What was allocated and given back, as arrays of their own (see :data:`~otel_torchprof._columns.schema.MEMORY_COLUMNS`);
    None where that was not recorded."""
    devices: Mapping[str, Array] | None = None
    """How long devices took for the work of events, as arrays of their own (see
    :data:`~otel_torchprof._columns.schema.DEVICE_COLUMNS`); None where that was not recorded."""
    energy: Mapping[str, Array] | None = None
    """Readings of the energy counters of devices, as arrays of their own (see
    :data:`~otel_torchprof._columns.schema.ENERGY_COLUMNS`); None where none were read."""
    collectives: Mapping[str, Array] | None = None
    """What is known of the collectives among the events, those that are still open too, as arrays of their own (see
    :data:`~otel_torchprof._columns.schema.COLLECTIVE_COLUMNS`); None where operators were not recorded."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Events that were produced but are not here, by reason."""
    outer_rows: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Rows whose parent is not in this batch (still open when it was made, or in an earlier one), ascending ..."""
    outer_parents: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """... and the ids of these parents."""
    opens: OpenEvents = field(default_factory=OpenEvents)
    """What was open when it was made."""
    frame_facts: FrameFacts | None = None
    """What is known of the functions, modules and optimizers that Python's calls are of; None where none were recorded."""

    def __len__(self) -> int:
        return len(self.columns["start"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @classmethod
    def of(
        cls, columns: Mapping[str, Any], names: Sequence[str | bytes], threads: Sequence[Thread] = (), **rest: Any
    ) -> Batch:
        """Builds a batch from plain lists; columns that are not given are filled with their neutral value.

        ``names`` must begin with the empty name. Used by tests and wherever events do not come from the recorder.
        """
        rows = len(columns["start"])
        neutral = {"sequence_nr": -1, "parent": -1, "kind": 1}
        full = {c.name: np.full(rows, neutral.get(c.name, 0), dtype=c.dtype) for c in COLUMNS}
        full["id"] = np.arange(1, rows + 1, dtype=np.uint64)
        types = {c.name: c.dtype for c in (*COLUMNS, *OPTIONAL)}
        full.update({name: np.asarray(values, dtype=types[name]) for name, values in columns.items()})
        tables = {
            "memory": MEMORY_COLUMNS,
            "devices": DEVICE_COLUMNS,
            "energy": ENERGY_COLUMNS,
            "collectives": COLLECTIVE_COLUMNS,
        }
        for name, table in tables.items():
            if rest.get(name) is not None:
                rest[name] = {column.name: np.asarray(rest[name][column.name], column.dtype) for column in table}
        if "end_thread" not in columns:
            full["end_thread"] = full["thread"]
        return cls(full, Names.of(names), threads or (Thread(1, 1, 1, "main"),), **rest)
