"""A batch: the columns of one drain, with their names and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .schema import (
    COLLECTIVE_COLUMNS,
    COLUMNS,
    DEVICE_COLUMNS,
    ENERGY_COLUMNS,
    MEMORY_COLUMNS,
    NEVER,
    OPTIONAL,
    REDUCTION_COLUMNS,
)

if TYPE_CHECKING:
    from .file_spans import FileSpans
    from .frame_info import FrameInfo
    from .generation import Generation
    from .samples import Samples

Array = npt.NDArray[Any]


class RecordedThread(NamedTuple):
    """A thread that recorded events."""

    os_tid: int
    """The system's thread id (``gettid``)."""
    ident: int
    """``threading.get_ident()`` of the thread, the value of OpenTelemetry's ``thread.id``."""
    torch_tid: int
    """Torch's small logical id (``RecordFunction::currentThreadId``); 0 if torch never ran there."""
    name: str = ""

    @property
    def number(self) -> int:
        """Torch's id, or ``ident`` if torch never ran there; unique."""
        return self.torch_tid or self.ident


class Names(Sequence[str]):
    """The names of a batch or a table: concatenated bytes, and the end of each name.

    Index 0 is the empty name. Names are decoded on access; invalid UTF-8 becomes U+FFFD. ``data`` and ``ends`` are the
    arguments of the native encoders. All batches of a process share the recorder's names, each up to the state at
    its drain: there is no work per name and batch. ``added`` are further names with the indices after them.
    """

    __slots__ = ("_known", "added", "data", "ends", "is_shared")

    def __init__(
        self,
        data: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.uint64],
        added: Names | None = None,
        known: KnownNames | None = None,
    ) -> None:
        self.data = data
        self.ends = ends
        self.added = added
        self._known = KnownNames() if known is None else known
        self.is_shared = known is not None
        """Whether ``data`` and ``ends`` are the recorder's."""

    @classmethod
    def of(cls, names: Sequence[str | bytes]) -> Names:
        """Builds the table from a list (tests, merged batches)."""
        raw = [name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass") for name in names]
        data = np.frombuffer(b"".join(raw), dtype=np.uint8)
        return cls(data, np.cumsum([len(name) for name in raw], dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.ends) + (0 if self.added is None else len(self.added))

    @property
    def nbytes(self) -> int:
        """Memory of these names alone, in bytes."""
        own = 0 if self.is_shared else self.data.nbytes + self.ends.nbytes
        return own + (0 if self.added is None else self.added.nbytes)

    def followed_by(self, more: Names) -> Names:
        """Appends names at the next indices. Copies those added before, and no others."""
        added = more if self.added is None else Names(*_end_to_end(self.added, more))
        return Names(self.data, self.ends, added, self._known if self.is_shared else None)

    def flat(self) -> Names:
        """Returns all names in ``data`` and ``ends``, with none added."""
        return self if self.added is None else Names(*_end_to_end(Names(self.data, self.ends), self.added))

    def is_of_table(self, other: Names) -> bool:
        """Whether both are the recorder's names of one process, with equal names at equal indices."""
        return self._known is other._known

    def raw(self, index: int) -> bytes:
        """Returns the recorded bytes of a name."""
        if self.added is not None and index >= len(self.ends):
            return self.added.raw(index - len(self.ends))
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
        if self.added is not None and index >= len(self.ends):
            return self.added[index - len(self.ends)]
        texts = self._known.texts
        name = texts.get(index)
        if name is None:
            name = texts[index] = self.raw(index).decode("utf-8", "replace")
        return name

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def matching(
        self, whole: tuple[str, ...], prefixes: tuple[str, ...] = (), parts: tuple[str, ...] = ()
    ) -> npt.NDArray[np.bool_] | None:
        """Returns a mask of the names that are in ``whole``, begin with one of ``prefixes`` or contain one of ``parts``; None if none does.

        Compares each of the recorder's names once per process, for some ns per name.
        """
        own = self._known.matching(self, _Patterns(whole, prefixes, parts))
        if self.added is None:
            return own
        added = self.added.matching(whole, prefixes, parts)
        if own is None and added is None:
            return None
        both = ((own, len(self.ends)), (added, len(self.added)))
        return np.concatenate([np.zeros(n, dtype=np.bool_) if mask is None else mask for mask, n in both])


def _end_to_end(names: Names, more: Names) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    size = int(names.ends[-1]) if len(names.ends) else 0
    return np.concatenate((names.data[:size], more.data)), np.concatenate((names.ends, more.ends + np.uint64(size)))


class _Patterns(NamedTuple):
    whole: tuple[str, ...]
    prefixes: tuple[str, ...]
    parts: tuple[str, ...]

    def texts(self) -> Iterator[tuple[bytes, Callable[[bytes, bytes], bool]]]:
        """Yields each pattern as bytes, and the comparison of a name that contains it."""
        for texts, is_match in (
            (self.whole, bytes.__eq__),
            (self.prefixes, bytes.startswith),
            (self.parts, bytes.__contains__),
        ):
            yield from ((text.encode(), is_match) for text in texts)


class _Matches(NamedTuple):
    mask: npt.NDArray[np.bool_]
    """By index of the name; entries from ``seen`` on are not yet valid."""
    seen: int
    """Number of names checked so far."""
    first: int
    """The lowest index that matches; no index where none does."""


class KnownNames:
    """Cached results of searches in a table of names that only grows; lives as long as the table.

    Thread-safe: two threads may compute the same result, and write equal values.
    """

    __slots__ = ("_matches", "looked_at", "texts")

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self._matches: dict[_Patterns, _Matches] = {}
        self.looked_at = 0
        """Number of names checked so far, over all searches."""

    def matching(self, names: Names, query: _Patterns) -> npt.NDArray[np.bool_] | None:
        """Answers :meth:`Names.matching` for names of this table, without those that were added to it."""
        count = len(names.ends)
        matches = self._matches.get(query) or _Matches(np.zeros(0, dtype=np.bool_), 0, _NEVER)
        if matches.seen < count:
            matches = self._matches[query] = self._with_new_names(names, matches, query)
        return matches.mask[:count] if matches.first < count else None

    def _with_new_names(self, names: Names, before: _Matches, query: _Patterns) -> _Matches:
        seen, count = before.seen, len(names.ends)
        mask, first = before.mask, before.first
        if len(mask) < count:
            mask = np.concatenate((mask, np.zeros(max(2 * count, 1024) - len(mask), dtype=np.bool_)))
        begin = int(names.ends[seen - 1]) if seen else 0
        joined = names.data[begin : int(names.ends[-1])].tobytes()
        for requested, is_match in query.texts():
            at = joined.find(requested)
            while at >= 0:
                index = int(np.searchsorted(names.ends, begin + at, side="right"))
                if is_match(names.raw(index), requested):
                    mask[index], first = True, min(first, index)
                at = joined.find(requested, at + 1)
        self.looked_at += count - seen
        return _Matches(mask, count, first)


_NEVER = 1 << 32
"""No index of a name."""


@dataclass(frozen=True)
class OpenEvents:
    """Events that were open at a drain, which have no rows yet: by thread, top-level first.

    Only a drain of a running recording has any. Each becomes a row, with the same id and start, of the drain after its
    end. Immutable.
    """

    id: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    parent: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Ids of their parents, 0 for none; a parent that has ended may be a row of this batch or of an earlier one."""
    start: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Start times, Unix ns."""
    context: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Numbers of their parent spans; 0 for none, and if the recording follows no spans."""
    name: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Indices into ``Batch.names``."""
    kind: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """Members of :class:`~otel_torchprof._columns.schema.Kind`."""
    thread: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Indices into ``Batch.threads``: where they began."""
    scope: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """``at::RecordScope``: see :class:`~otel_torchprof._columns.schema.Scope`."""
    fwd_thread: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """As in the column."""
    sequence_nr: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """As in the column."""

    def __len__(self) -> int:
        return len(self.id)

    def chosen(self, mask: Array) -> OpenEvents:
        """The events where the mask is true."""
        return OpenEvents(*(getattr(self, f.name)[mask] for f in fields(self)))

    def joined(self, other: OpenEvents) -> OpenEvents:
        """These, then the others."""
        return OpenEvents(*(np.concatenate((getattr(self, f.name), getattr(other, f.name))) for f in fields(self)))


@dataclass(frozen=True)
class Batch:
    """The events of one drain as columns (see :data:`~otel_torchprof._columns.schema.COLUMNS`).

    The arrays are read-only views of native memory, which lives as long as any of them. Immutable, so threads may share
    it.
    """

    columns: Mapping[str, Array]
    names: Names
    threads: Sequence[RecordedThread]
    inputs: npt.NDArray[np.int64] | None = None
    """Inputs of the events, in words of 64 bits: those of a row begin at ``columns["inputs"][row]``, and rows with the same inputs may share
    them. For the format see
    ``otp_input_kind`` in ``record_format.h``; ``dtype`` there is ``c10::ScalarType`` + 1, 0 where unknown."""
    kept: int = -1
    """Recorded properties of inputs: bits of ``otp_input_kept`` in ``inputs.h``."""
    memory: Mapping[str, Array] | None = None
    """Allocations and releases, as arrays of their own (see :data:`~otel_torchprof._columns.schema.MEMORY_COLUMNS`);
    None if they were not recorded."""
    devices: Mapping[str, Array] | None = None
    """Device times of events, as arrays of their own (see :data:`~otel_torchprof._columns.schema.DEVICE_COLUMNS`);
    None if they were not recorded."""
    work: Mapping[str, Array] | None = None
    """Kernels, copies and other work of devices, as arrays of their own (see :data:`~otel_torchprof._columns.schema.WORK_COLUMNS`);
    None in recordings of this package, which time events (:attr:`devices`) instead."""
    energy: Mapping[str, Array] | None = None
    """Readings of energy counters, as arrays of their own (see
    :data:`~otel_torchprof._columns.schema.ENERGY_COLUMNS`); None if there are none."""
    collectives: Mapping[str, Array] | None = None
    """Info about collectives, including open ones, as arrays of their own (see
    :data:`~otel_torchprof._columns.schema.COLLECTIVE_COLUMNS`); None without operators."""
    reductions: Mapping[str, Array] | None = None
    """Calls that spans of a file stand for, as arrays of their own (see
    :data:`~otel_torchprof._columns.schema.REDUCTION_COLUMNS`); None where each event is one call."""
    spans: FileSpans | None = None
    """The spans of the file from which the batch was read; None without any."""
    samples: Samples | None = None
    """Samples of Python stacks, with rows of their own; None if none were taken."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped events, by reason."""
    watermark: int = NEVER
    """Unix ns: later begins and ends come with a later drain; :data:`NEVER` for a complete batch."""
    outer_rows: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """Rows whose parent is not in this batch (still open when it was made, or in an earlier one), ascending ..."""
    outer_parents: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """... and the ids of these parents."""
    opens: OpenEvents = field(default_factory=OpenEvents)
    """Events that were open at the drain."""
    roots: Mapping[int, str] = field(default_factory=dict)
    """Names of the root modules of phases, by id."""
    generations: Mapping[int, Generation] = field(default_factory=dict)
    """Info about calls of transformers' ``generate``, by event id."""
    frame_info: FrameInfo | None = None
    """Info about functions, modules and optimizers of Python calls; None if no calls were recorded."""

    @property
    def is_last(self) -> bool:
        """Whether the batch has every event before the drain."""
        return self.watermark == NEVER

    def __len__(self) -> int:
        return len(self.columns["start"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def of_kind(self, kind: int) -> npt.NDArray[np.intp]:
        """Rows of a kind. Not compared with the enum, which numpy takes for int64: that costs three times as much."""
        return np.flatnonzero(self.columns["kind"] == int(kind))

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Any],
        names: Sequence[str | bytes],
        threads: Sequence[RecordedThread] = (),
        **rest: Any,
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
            "reductions": REDUCTION_COLUMNS,
        }
        for name, table in tables.items():
            if rest.get(name) is not None:
                rest[name] = {column.name: np.asarray(rest[name][column.name], column.dtype) for column in table}
        if "end_thread" not in columns:
            full["end_thread"] = full["thread"]
        return cls(full, Names.of(names), threads or (RecordedThread(1, 1, 1, "main"),), **rest)


class WaitingStack(NamedTuple):
    """The calls in which a thread was all the time of a recording."""

    thread: RecordedThread
    """The thread; where torch ran on it, a batch knows more of it."""
    names: tuple[int, ...]
    """Index into ``Batch.names`` per call, outermost first."""
    identities: tuple[int, ...]
    """Identity of the generator or coroutine per call (as in the column ``fwd_thread``), 0 for none."""
