"""Spans as columns, and the formula of their ids."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Names
from otel_torchprof._native import loops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._process.heap import Arena

Array = npt.NDArray[Any]


class AttributeType(enum.IntEnum):
    """Type of an attribute's values: ``otp_attribute_type`` in ``encode.h``."""

    INT64 = 1
    DOUBLE = 2
    BOOL = 3
    """One byte each, 0 or 1."""
    NAME = 4
    """Indices into :attr:`SpanTable.names`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of such values."""
        return _DTYPES[self]


_DTYPES: dict[AttributeType, np.dtype[Any]] = {
    AttributeType.INT64: np.dtype(np.int64),
    AttributeType.DOUBLE: np.dtype(np.float64),
    AttributeType.BOOL: np.dtype(np.uint8),
    AttributeType.NAME: np.dtype(np.uint32),
}


@dataclass(frozen=True, eq=False)
class AttributeColumn:
    """One attribute of all spans of a table (``otp_attribute`` in ``encode.h``)."""

    key: str
    type: AttributeType
    values: Array
    """Values of ``type.dtype``, one per span that has the attribute."""
    rows: npt.NDArray[np.integer[Any]] | None = None
    """Indices of these spans, ascending; None if all spans have it. Most attributes are only on steps, 25 of a drain's 40,000 spans."""

    def __post_init__(self) -> None:
        _set_types(self, {"values": self.type.dtype, "rows": _ROWS})

    @classmethod
    def where(cls, key: str, kind: AttributeType, values: Array, present: Array) -> AttributeColumn:
        """Creates a column from ``values``, one per span, for the spans where ``present`` is not 0."""
        rows = np.flatnonzero(present)
        if len(rows) == len(present):
            return cls(key, kind, np.ascontiguousarray(values))
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):  # as of events, which follow the steps
            return cls(key, kind, np.ascontiguousarray(values[rows[0] : rows[-1] + 1]), rows)
        return cls(key, kind, values[rows], rows)

    def spans(self, count: int) -> Array:
        """The spans that have a value, ascending; ``count``: of all spans."""
        return np.arange(count) if self.rows is None else self.rows

    def spread(self, spans: int) -> tuple[Array, npt.NDArray[np.bool_]]:
        """One value per span, 0 for none, and a mask of the spans that have one; copies, unless all have one."""
        if self.rows is None:
            return self.values, np.ones(spans, dtype=np.bool_)
        values, present = np.zeros(spans, dtype=self.values.dtype), np.zeros(spans, dtype=np.bool_)
        values[self.rows], present[self.rows] = self.values, True
        return values, present


def ascending(values: Array, rows: Array) -> tuple[Array, Array]:
    """Sorts values by their rows; of several for one row, the first counts."""
    if (rows[1:] > rows[:-1]).all():
        return values, rows
    order = np.argsort(rows, kind="stable")
    values, rows = values[order], rows[order]
    is_first = np.append([True], rows[1:] != rows[:-1])
    return values[is_first], rows[is_first]


class _Counted:
    """Numbers from 0 on, of which columns are views: most drains have nothing else in them, and as many as the drain before."""

    LEAST, BEFORE = 1 << 16, 1 << 10

    def __init__(self) -> None:
        self.numbers = np.empty(0, np.uint32)
        self.rows = np.full(self.BEFORE, -1)
        """-1 as many times as there may be synthetic spans, then the rows of events."""

    def up_to(self, end: int) -> _Counted:
        """These, and more of them if need be. Thread-safe: replaced as a whole."""
        global _counted  # noqa: PLW0603 - as above
        if end <= len(self.numbers):
            return self
        more = _Counted()
        more.numbers = np.arange(max(end + end // 4, self.LEAST), dtype=np.uint32)
        more.rows = np.maximum(np.arange(-self.BEFORE, len(more.numbers)), -1)
        more.numbers.flags.writeable = more.rows.flags.writeable = False
        _counted = more
        return more


_counted = _Counted()


def numbers_between(begin: int, end: int) -> npt.NDArray[np.uint32]:
    """The numbers from ``begin`` up to ``end``, rising; read-only, costs nothing per number."""
    return _counted.up_to(end).numbers[begin:end]


def rows_after(synthetic: int, events: int) -> npt.NDArray[np.int64]:
    """The column ``row`` of some synthetic spans, and all events of a batch after them; read-only, mostly costs nothing per span."""
    first = _Counted.BEFORE - synthetic
    if first < 0:
        return np.concatenate((np.full(synthetic, -1), np.arange(events)))
    return _counted.up_to(events).rows[first : _Counted.BEFORE + events]


def events_after(row: npt.NDArray[np.int64]) -> int | None:
    """The number of synthetic spans of a column made by :func:`rows_after`; None for other columns, and for parts that begin with an event."""
    if row.base is not _counted.rows or not row.flags.c_contiguous or (len(row) and row[0] > 0):
        return None
    return len(row) - 1 - int(row[-1]) if len(row) else 0


_ROWS = np.dtype(np.uint32)
LINK = np.dtype([("row", np.uint64), ("trace_id", np.uint8, 16), ("span_id", np.uint64)])
"""``otp_link`` in ``encode.h``, in native byte order, which NumPy gives to concatenated arrays. The target may be in another table."""

STEP_NAME = "torch.step"
"""Name of the spans of steps: one for all, since the number is an attribute."""
STEP_NUMBER = "torch.step.number"
"""Attribute with the number of a step. Not ``torch.step``: an attribute may not be the namespace of others."""
STEP_KIND = "torch.step.kind"
"""Attribute that says which :class:`~otel_torchprof._columns.phases.Segment` a span is."""


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Spans of any number of traces as columns, laid out as ``otp_spans`` in ``encode.h``; one entry per span.

    The constructor converts columns to the required integer types. Immutable, hence thread-safe.

    Raises:
        TypeError: a column has values of another kind, such as floats for times.
    """

    name: npt.NDArray[np.uint32]
    """Index into ``names``."""
    start: npt.NDArray[np.int64]
    """Unix ns."""
    end: npt.NDArray[np.int64]
    """Unix ns."""
    trace: npt.NDArray[np.uint32]
    """Index into ``trace_ids`` and ``trace_states``."""
    trace_ids: npt.NDArray[np.uint8]
    """Shape (traces, 16): big-endian ids; one that occurs with several states has an entry for each."""
    span_id: npt.NDArray[np.uint64]
    parent_span_id: npt.NDArray[np.uint64]
    """0 for the root of a trace."""
    error: npt.NDArray[np.uint8]
    """1 where the status is ERROR: an exception left a label, a module or an operator."""
    row: npt.NDArray[np.int64]
    """Row in the batch, -1 for a synthetic span."""
    step: npt.NDArray[np.int64]
    """Number of the step, for the spans of steps; else -1."""
    links: npt.NDArray[Any]
    """Array of :data:`LINK`, by rising row."""
    names: Names
    """The names of the batch, with those of synthetic spans and of attributes added to them."""
    attributes: tuple[AttributeColumn, ...] = ()
    trace_states: tuple[str, ...] = ()
    """The W3C tracestate of each entry of ``trace_ids``, as ``TraceState.to_header`` gives it; empty where all are."""
    parent_is_remote: npt.NDArray[np.uint8] | None = None
    """1 where the parent is a span of another process; None where none is."""
    dropped_attributes: npt.NDArray[np.uint32] | None = None
    """Number of attributes that a limit removed from each span; None if none was removed."""
    dropped_links: npt.NDArray[np.uint32] | None = None
    """Likewise for links."""

    def __post_init__(self) -> None:
        _set_types(self, COLUMN_TYPES)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, those that it shares with the batch or with other tables among them; not the recorder's names."""
        return sum(array.nbytes for array in self.arrays()) + self.names.nbytes

    def arrays(self) -> list[Array]:
        """All arrays of the table, including attributes, without duplicates."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        for column in self.attributes:
            arrays += [column.values] if column.rows is None else [column.values, column.rows]
        return list({id(array): array for array in arrays}.values())

    def __len__(self) -> int:
        return len(self.name)


COLUMN_TYPES: dict[str, np.dtype[Any]] = {
    "name": np.dtype(np.uint32),
    "start": np.dtype(np.int64),
    "end": np.dtype(np.int64),
    "trace": np.dtype(np.uint32),
    "trace_ids": np.dtype(np.uint8),
    "span_id": np.dtype(np.uint64),
    "parent_span_id": np.dtype(np.uint64),
    "error": np.dtype(np.uint8),
    "row": np.dtype(np.int64),
    "step": np.dtype(np.int64),
    "links": LINK,
    "parent_is_remote": np.dtype(np.uint8),
    "dropped_attributes": np.dtype(np.uint32),
    "dropped_links": np.dtype(np.uint32),
}
"""The dtypes of the columns of a :class:`SpanTable`."""


def _set_types(table: SpanTable | AttributeColumn, types: Mapping[str, np.dtype[Any]]) -> None:
    """Converts the columns that have another type; the table is being made."""
    for column, dtype in types.items():
        values = getattr(table, column)
        if values is not None and values.dtype != dtype:
            if not _is_converted(values.dtype, dtype):
                raise TypeError(f"column {column} holds {values.dtype}, but must hold {dtype}")
            object.__setattr__(table, column, values.astype(dtype))


def _is_converted(given: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    return given.names == dtype.names if dtype.names else given.kind in ("biuf" if dtype.kind == "f" else "biu")


def extend_names(names: Names, extra: Sequence[str]) -> Names:
    """The same names at the same indices, with ``extra`` after them."""
    return names.followed_by(Names.of(extra)) if extra else names


def event_span_ids(ids: npt.NDArray[np.uint64], key: int, room: Arena | None = None) -> npt.NDArray[np.uint64]:
    """The span ids of events: distinct for distinct event ids, never 0, and spread over all 64 bits.

    The id times an odd key, through the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
    Generators", 2014; constants: Stafford's mix 13). Each operation is a bijection that maps 0 to 0, and event ids are not 0;
    adding the key or XOR-ing with it instead would map one event to 0, OpenTelemetry's invalid id.
    """
    return loops.event_span_ids(ids, key, room)
