"""Span tables as the native encoders take them (``otp_spans``), checked first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._native.span_columns import SpanAttribute, SpanColumns
from otel_torchprof._tree.span_table import AttributeType, extend_names

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Names
    from otel_torchprof._tree.span_table import Array, AttributeColumn, SpanTable

_COLUMNS = ("name", "start", "end", "trace", "span_id", "parent_span_id", "error")
_OPTIONAL_COLUMNS = ("parent_is_remote", "dropped_attributes", "dropped_links")


class CheckedSpans:
    """The columns of a table as C sees them, for as long as this object lives.

    ``rows`` are those that C will look at, rising without gaps. Raises ValueError when the table does not fit together.
    """

    def __init__(self, table: SpanTable, rows: range) -> None:
        self.rows = rows
        self.all_names, self._states = _with_states(table)
        """The names of the table, with its trace states after them."""
        self.spans = self._spans(table)

    def _spans(self, table: SpanTable) -> SpanColumns:
        """The columns of a table, checked so that C reads nothing outside its arrays."""
        count, names, states = len(table), self.all_names, self._states
        _check_names(names)
        self._check_index("name", table.name, len(names))
        self._check_index("trace", table.trace, len(table.trace_ids))
        if table.trace_ids.shape[1:] != (16,):
            raise ValueError(f"trace_ids has shape {table.trace_ids.shape}, but must hold 16 bytes per trace")
        if not _rises(table.links["row"]):
            raise ValueError("links must be sorted by row")
        columns = {c: _checked(c, getattr(table, c), count) for c in _COLUMNS}
        columns |= {
            c: _checked(c, values, count) for c in _OPTIONAL_COLUMNS if (values := getattr(table, c)) is not None
        }
        if states is not None:
            columns["trace_state"] = states
        attributes = [self._attribute(column, count, len(names)) for column in table.attributes]
        columns["trace_ids"] = table.trace_ids
        columns["links"] = table.links
        return SpanColumns(count, columns, attributes, len(table.links), names)

    def _check_index(self, column: str, values: Any, size: int) -> None:
        """Only the rows that are encoded: a table may go out in many pieces."""
        used = values[self.rows.start : self.rows.stop]
        if len(used) and int(used.max()) >= size:
            raise ValueError(f"column {column} points to entry {used.max()}, but the table it points into has {size}")

    def _attribute(self, column: AttributeColumn, count: int, names: int) -> SpanAttribute:
        if column.type == AttributeType.NAME:
            self._check_index(column.key, column.values, names)
        values = _checked(column.key, column.values, count)
        present = None if column.present is None else _checked(column.key, column.present, count)
        return SpanAttribute(column.key.encode(), int(column.type), values, present)


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


def _checked(name: str, values: Array, count: int) -> Array:
    """The types are right: the table sees to that."""
    if len(values) != count:
        raise ValueError(f"column {name} holds {len(values)} values, but must hold {count}")
    return values


def _rises(values: Any) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_names(names: Names) -> None:
    if names.added is not None:
        _checked("names.added.ends", names.added.ends, len(names.added))  # it adds none itself
        _check_names(names.added)
    for column, values, dtype in (("data", names.data, np.uint8), ("ends", names.ends, np.uint64)):
        if values.dtype != dtype:
            raise ValueError(f"names.{column} holds {values.dtype}, but must hold {np.dtype(dtype)}")
    if names.is_shared:  # the recorder's, of which there may be many, are in order
        return
    if not _rises(names.ends) or (len(names.ends) and int(names.ends[-1]) > len(names.data)):
        raise ValueError(f"names.ends must rise, up to at most the {len(names.data)} bytes of names.data")
