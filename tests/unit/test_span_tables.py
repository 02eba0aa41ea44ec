"""Parts of span tables, and several of them as one."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from span_tables import span_rows, tables

from otel_torchprof._encode.spans import SpanList
from otel_torchprof._model.span_table import COLUMN_TYPES, AttributeColumn, AttributeType
from otel_torchprof._model.span_tables import joined_tables, packed, taken

COMMON = {"resource": Resource({}), "scope": InstrumentationScope("")}


def reported(table):
    """All that the spans of a table say, each as text; the order of attributes does not matter."""
    return [
        (json.loads(span.to_json()), span.dropped_attributes, span.dropped_links, dict(span.context.trace_state))
        for span in SpanList(table, **COMMON)
    ]


@settings(max_examples=30, deadline=None)
@given(tables(), st.data())
def test_taken_rows_say_the_same(table, data):
    """Any rows of any table in any order say what they said, and nothing is held that none of them uses."""
    rows = data.draw(st.lists(st.sampled_from(range(len(table))), unique=True)) if len(table) else []
    found = taken(table, np.array(rows, dtype=np.int64))
    whole = reported(table)
    assert reported(found) == [whole[row] for row in rows]
    assert found.row.tolist() == rows
    texts = [c for c in found.attributes if c.type == AttributeType.NAME]
    used = {0, *found.name.tolist()}.union(*(c.values.tolist() for c in texts))
    assert used == set(range(len(found.names)))
    assert set(found.trace.tolist()) == set(range(len(found.trace_ids)))
    assert all(column.rows is None or len(column.rows) for column in found.attributes)


@settings(max_examples=30, deadline=None)
@given(st.lists(tables(), min_size=1, max_size=4))
def test_joined_tables_say_the_same(parts):
    """The spans of any tables follow one another and say what they said; no name is there twice."""
    found = joined_tables(parts)
    assert reported(found) == [span for part in parts for span in reported(part)]
    if len(parts) > 1:
        raw = [found.names.raw(i) for i in range(len(found.names))]
        assert len(set(raw)) == len(raw) or all(part.names is parts[0].names for part in parts)
        assert len({(c.key, c.type) for c in found.attributes}) == len(found.attributes)


def test_one_table_is_itself():
    """Nothing is copied for one table; none at all is an error."""
    table = span_rows(["a"])
    assert joined_tables([table]) is table
    with pytest.raises(ValueError, match="at least one"):
        joined_tables([])


@settings(max_examples=30, deadline=None)
@given(tables())
def test_packed_spans_say_the_same(table):
    """Any packed table says what the table said and shares no memory with it."""
    found = packed(table)
    assert reported(found) == reported(table)
    assert (found.row.tolist(), found.nbytes) == (table.row.tolist(), table.nbytes)
    assert not any(np.shares_memory(a, b) for a in found.arrays() for b in table.arrays())


@pytest.mark.parametrize("count", [2, 5_000], ids=["little", "much"])
def test_packed_spans_are_one_block(count):
    """All arrays of a packed table are views of one block of memory, on which they lie aligned and without overlap."""
    found = packed(span_rows(["a"] * count)).arrays()
    blocks = {id(_owner(array)) for array in found}
    places = sorted((array.__array_interface__["data"][0], array.nbytes) for array in found if array.nbytes)
    assert len(blocks) == 1
    assert all(address % 8 == 0 for address, _ in places)
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(places))


def _owner(array):
    """What the memory of an array belongs to."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


def test_tables_have_their_types_whatever_made_their_columns():
    """Columns of other integers are converted, those of other kinds refused, so that every table can be encoded."""
    links = np.array([(1, np.arange(16), 1 << 63)], dtype=[("row", ">i4"), ("trace_id", "u1", 16), ("span_id", ">u8")])
    flags = AttributeColumn("torch.async", AttributeType.BOOL, np.array([True, False]), np.array([0, 1]))
    changed = replace(
        span_rows(["a", "b"]),
        trace=np.zeros(2, np.int64),
        span_id=np.array([1, 2], ">i8"),
        parent_is_remote=np.array([True, False]),
        links=links,
        attributes=(flags,),
    )
    assert {key: getattr(changed, key).dtype for key in COLUMN_TYPES if getattr(changed, key) is not None} == {
        key: dtype for key, dtype in COLUMN_TYPES.items() if not key.startswith("dropped")
    }
    assert (changed.links["row"].item(), changed.links["span_id"].item()) == (1, 1 << 63)
    assert (flags.values.dtype, flags.rows.dtype) == (np.uint8, np.uint32)
    for refused in ({"start": np.array([0.5, 1])}, {"links": np.zeros(1, np.uint64)}):
        with pytest.raises(TypeError, match=f"column {next(iter(refused))} holds"):
            replace(changed, **refused)
