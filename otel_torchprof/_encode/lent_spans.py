"""Span tables as the native encoders take them (``otp_spans``), checked first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._native.ffi import ffi
from otel_torchprof._tree.units import LINK, AttributeType, extend_names

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Names
    from otel_torchprof._tree.units import AttributeColumn, SpanTable

_COLUMNS = (
    ("name", np.dtype(np.uint32), "uint32_t[]"),
    ("start", np.dtype(np.int64), "int64_t[]"),
    ("end", np.dtype(np.int64), "int64_t[]"),
    ("trace", np.dtype(np.uint32), "uint32_t[]"),
    ("span_id", np.dtype(np.uint64), "uint64_t[]"),
    ("parent_span_id", np.dtype(np.uint64), "uint64_t[]"),
    ("error", np.dtype(np.uint8), "uint8_t[]"),
)
_OPTIONAL_COLUMNS = (
    ("parent_is_remote", np.dtype(np.uint8), "uint8_t[]"),
    ("dropped_attributes", np.dtype(np.uint32), "uint32_t[]"),
    ("dropped_links", np.dtype(np.uint32), "uint32_t[]"),
)


class LentSpans:
    """The columns of a table, lent to C for as long as this object lives.

    ``rows`` are those that C will look at, rising without gaps. Raises ValueError when the table does not fit together.
    """

    def __init__(self, table: SpanTable, rows: range) -> None:
        self._alive: list[Any] = []
        self.rows = rows
        self.all_names, self._states = _with_states(table)
        """The names of the table, with its trace states after them."""
        self.spans = self._spans(table)
        """The ``otp_spans``."""

    def _array(self, name: str, values: Any, dtype: np.dtype[Any], ctype: str, count: int) -> Any:
        if values.dtype != dtype or len(values) != count:
            raise ValueError(f"column {name} holds {len(values)} {values.dtype}, but must hold {count} {dtype}")
        return self.keep(ffi.from_buffer(ctype, np.ascontiguousarray(values)))

    def keep(self, pointer: Any) -> Any:
        """Lets the pointer live as long as this object."""
        self._alive.append(pointer)
        return pointer

    def _spans(self, table: SpanTable) -> Any:
        """``otp_spans`` of a table, checked so that C reads nothing outside its arrays."""
        count, names, states = len(table), self.all_names, self._states
        _check_names(names)
        self._check_index("name", table.name, len(names))
        self._check_index("trace", table.trace, len(table.trace_ids))
        if table.trace_ids.dtype != np.uint8 or table.trace_ids.shape[1:] != (16,):
            raise ValueError(f"trace_ids has shape {table.trace_ids.shape}, but must hold 16 uint8 per trace")
        if not _rises(table.links["row"]):
            raise ValueError("links must be sorted by row")
        columns = {c: self._array(c, getattr(table, c), dtype, ctype, count) for c, dtype, ctype in _COLUMNS}
        columns |= {
            c: self._array(c, values, dtype, ctype, count)
            for c, dtype, ctype in _OPTIONAL_COLUMNS
            if (values := getattr(table, c)) is not None
        }
        if states is not None:
            columns["trace_state"] = self.keep(ffi.from_buffer("uint32_t[]", states))
        attributes = [self._attribute(column, count, len(names)) for column in table.attributes]
        links = self._array("links", table.links, LINK, "char[]", len(table.links))
        return self.keep(
            ffi.new(
                "otp_spans *",
                {
                    **columns,
                    "count": count,
                    "trace_ids": self.keep(ffi.from_buffer("uint8_t[]", np.ascontiguousarray(table.trace_ids))),
                    "attributes": self.keep(ffi.new("otp_attribute[]", attributes)),
                    "attribute_count": len(attributes),
                    "links": ffi.cast("otp_link *", links),
                    "link_count": len(table.links),
                    "names": self._names(names),
                },
            )
        )

    def _names(self, names: Names) -> dict[str, Any]:
        """``otp_names``."""
        return {
            "data": self._array("names.data", names.data, np.dtype(np.uint8), "uint8_t[]", len(names.data)),
            "ends": self._array("names.ends", names.ends, np.dtype(np.uint64), "uint64_t[]", len(names.ends)),
            "count": len(names.ends),
            **self._added(names.added),
        }

    def _added(self, added: Names | None) -> dict[str, Any]:
        if added is None:
            return {}
        return {
            "more_data": self._array("names.added.data", added.data, np.dtype(np.uint8), "uint8_t[]", len(added.data)),
            "more_ends": self._array("names.added.ends", added.ends, np.dtype(np.uint64), "uint64_t[]", len(added)),
        }

    def _check_index(self, column: str, values: Any, size: int) -> None:
        """Only the rows that are encoded: a table may go out in many pieces."""
        used = values[self.rows.start : self.rows.stop]
        if len(used) and int(used.max()) >= size:
            raise ValueError(f"column {column} points to entry {used.max()}, but the table it points into has {size}")

    def _attribute(self, column: AttributeColumn, count: int, names: int) -> Any:
        if column.type == AttributeType.NAME:
            self._check_index(column.key, column.values, names)
        key = column.key.encode()
        values = self._array(column.key, column.values, column.type.dtype, "char[]", count)
        present = ffi.NULL
        if column.present is not None:
            present = self._array(column.key, column.present, np.dtype(np.uint8), "uint8_t[]", count)
        return {
            "key": self.keep(ffi.from_buffer("char[]", key)),
            "key_size": len(key),
            "type": int(column.type),
            "values": ffi.cast("void *", values),
            "present": present,
        }


def _with_states(table: SpanTable) -> tuple[Names, npt.NDArray[np.uint32] | None]:
    """The names with the trace states after them, and where each trace's state is; None where there are none."""
    states = table.trace_states
    if states and len(states) != len(table.trace_ids):
        raise ValueError(f"trace_states holds {len(states)} states, but must hold {len(table.trace_ids)} or none")
    distinct = dict.fromkeys(state for state in states if state)
    if not distinct:
        return table.names, None
    first = len(table.names)
    places = {state: first + i for i, state in enumerate(distinct)}
    return (
        extend_names(table.names, list(distinct)),
        np.array([places.get(state, 0) for state in states], dtype=np.uint32),
    )


def _rises(values: Any) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_names(names: Names) -> None:
    if names.added is not None:
        _check_names(names.added)
    if names.is_shared:  # the recorder's, of which there may be many, are in order
        return
    if not _rises(names.ends) or (len(names.ends) and int(names.ends[-1]) > len(names.data)):
        raise ValueError(f"names.ends must rise, up to at most the {len(names.data)} bytes of names.data")
