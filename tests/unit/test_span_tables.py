"""Parts of span tables, several of them as one, and tables within OpenTelemetry's span limits."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from span_tables import span_rows, tables

from otel_torchprof._columns.batch import Names
from otel_torchprof._encode.otlp import encode
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export import sdk
from otel_torchprof._model import span_table
from otel_torchprof._model.limits import limited
from otel_torchprof._model.span_table import COLUMN_TYPES, LINK, AttributeColumn, AttributeType
from otel_torchprof._model.span_tables import joined_tables, packed, picked, taken
from otel_torchprof.errors import forget_warnings

COMMON = {"resource": Resource({}), "scope": InstrumentationScope("")}


def reported(table):
    """All that the spans of a table say, each as text; the order of attributes does not matter."""
    return [
        (json.loads(span.to_json()), span.dropped_attributes, span.dropped_links, dict(span.context.trace_state))
        for span in SpanList(table, **COMMON)
    ]


@pytest.mark.parametrize("few", [0, 1 << 40], ids=["searched for", "by place"])
@settings(max_examples=30, deadline=None)
@given(tables(), st.data())
def test_taken_rows_say_the_same(few, table, data):
    """Any rows of any table in any order, few of it or most, say what they said, and nothing is held that none of them uses."""
    rows = data.draw(st.lists(st.sampled_from(range(len(table))), unique=True)) if len(table) else []
    with mock.patch("otel_torchprof._model.span_tables._FEW", few):
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
@given(tables(), st.data())
def test_rows_without_gaps_are_not_copied(table, data):
    """They say what they said, with the links among them; most rows of a table in its memory, others in memory of their own."""
    begin = data.draw(st.integers(0, len(table)))
    end = data.draw(st.integers(begin, len(table)))
    whole = reported(table)
    found = picked(table, np.arange(begin, end))
    assert reported(found) == whole[begin:end]
    assert begin == end or np.shares_memory(found.start, table.start) == (2 * (end - begin) >= len(table))
    backwards = picked(table, np.arange(begin, end)[::-1])
    assert reported(backwards) == whole[begin:end][::-1]
    assert end - begin < 2 or not np.shares_memory(backwards.start, table.start)


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


# ---- OpenTelemetry's span limits ----


NONE = {"max_attributes": None, "max_links": None, "max_attribute_length": None}


def objects_of(table):
    """The spans of a table as objects."""
    return list(SpanList(table, **COMMON))


LIMIT = st.none() | st.integers(0, 4)


@given(tables(), LIMIT, LIMIT, LIMIT)
def test_any_table_keeps_its_limits(table, attributes, links, length):
    """Each span keeps its first attributes and links and the beginnings of its texts, and counts what is gone."""
    table = replace(table, dropped_attributes=None, dropped_links=None)
    found = limited(table, max_attributes=attributes, max_links=links, max_attribute_length=length)
    for span, before in zip(objects_of(found), objects_of(table), strict=True):
        texts = {k: v[:length] if isinstance(v, str) else v for k, v in before.attributes.items()}
        assert list(span.attributes.items()) == list(texts.items())[:attributes]
        assert span.dropped_attributes == len(before.attributes) - len(span.attributes)
        assert [link.context for link in span.links] == [link.context for link in before.links][:links]
        assert span.dropped_links == len(before.links) - len(span.links)
        assert (span.name, span.context, span.parent) == (before.name, before.context, before.parent)
    assert list(encode(found, **COMMON)) == (
        [encode_spans(objects_of(found)).SerializeToString()] if len(table) else []
    )


@given(tables())
def test_a_table_within_its_limits_is_not_copied(table):
    """Without limits, or with limits that nothing exceeds, the very same table comes back."""
    assert limited(table, **NONE) is table
    assert limited(table, max_attributes=5, max_links=4, max_attribute_length=200) is table
    apart = tuple(
        AttributeColumn(key, AttributeType.INT64, np.ones(1, int), np.array([at])) for at, key in enumerate("ab")
    )
    few = span_rows(["a", "b"], attributes=apart)
    assert limited(few, max_attributes=1, max_links=None, max_attribute_length=None) is few


def wide():
    """One span with five attributes, three links and a long name and text; one with two attributes and no link."""
    text = AttributeColumn("text", AttributeType.NAME, np.array([3, 4], np.uint32))
    numbers = [AttributeColumn(f"n{i}", AttributeType.INT64, np.array([i]), np.array([0])) for i in range(3)]
    last = AttributeColumn("last", AttributeType.BOOL, np.ones(2, np.uint8))
    links = np.array([(0, [1] * 16, i) for i in (7, 8, 9)], dtype=LINK)
    names = Names.of(["", "a long name", "b", "größere 🔥 texts", "short"])
    return replace(span_rows(["a", "b"], attributes=(text, *numbers, last), links=links), names=names)


@pytest.mark.parametrize("limits", [(3, 2, 8), (0, 0, 0), (1, 1, 9), (5, 3, 15), (None, None, None)])
def test_they_are_counted_and_cut_as_the_sdk_does(limits):
    """A span of the SDK under the same limits has as many attributes and links, as many dropped and the same cut texts.

    Which ones it keeps differs: the SDK's are the last.
    """
    attributes, links, length = (SpanLimits.UNSET if limit is None else limit for limit in limits)
    theirs = SpanLimits(max_span_attributes=attributes, max_links=links, max_span_attribute_length=length)
    tracer = TracerProvider(span_limits=theirs).get_tracer("test")
    found = limited(
        wide(),
        max_attributes=theirs.max_span_attributes,
        max_links=theirs.max_links,
        max_attribute_length=theirs.max_span_attribute_length,
    )
    for mine, whole in zip(objects_of(found), objects_of(wide()), strict=True):
        span = tracer.start_span(whole.name, attributes=dict(whole.attributes), links=whole.links)
        assert (len(mine.attributes), mine.dropped_attributes) == (len(span.attributes), span.dropped_attributes)
        assert (len(mine.links), mine.dropped_links) == (len(span.links), span.dropped_links)
        assert mine.name == span.name
        for key in mine.attributes.keys() & span.attributes.keys():
            assert mine.attributes[key] == span.attributes[key]


def test_counts_add_up():
    """What was dropped before, as by a sampler's own limit, stays in the counts."""
    before = replace(
        wide(), dropped_attributes=np.array([10, 20], np.uint32), dropped_links=np.array([1, 2], np.uint32)
    )
    found = limited(before, max_attributes=2, max_links=1, max_attribute_length=None)
    assert found.dropped_attributes.tolist() == [13, 20]
    assert found.dropped_links.tolist() == [3, 2]


def test_only_texts_of_attributes_are_looked_at():
    """A long name that is no attribute's, or only of spans that lack the attribute, is neither cut nor added to."""
    column = AttributeColumn("k", AttributeType.NAME, np.array([2], np.uint32), np.array([1]))
    table = span_rows(["a very long name", "b"], attributes=(column,))
    assert limited(table, max_attributes=None, max_links=None, max_attribute_length=3) is table


def test_limits_of_a_provider(monkeypatch):
    """Of an SDK provider its own limits, also of the global one; of another one those of the environment."""
    limits = SpanLimits(max_links=3)
    provider = TracerProvider(span_limits=limits)
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "4")
    assert sdk.span_limits(provider) is limits
    assert sdk.span_limits(trace.NoOpTracerProvider()).max_links == 4
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    assert sdk.span_limits() is limits


def test_bad_limits_in_the_environment(monkeypatch, caplog):
    """A value that is no limit is warned of once and the defaults are used, whatever the provider."""
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "many")
    forget_warnings()
    found = [sdk.span_limits(provider) for provider in (trace.NoOpTracerProvider(), object())]
    assert {limits.max_links for limits in found} == {128}
    assert {limits.max_span_attributes for limits in found} == {128}
    assert {limits.max_span_attribute_length for limits in found} == {None}
    [record] = caplog.records
    assert "OTEL_SPAN_LINK_COUNT_LIMIT must be a non-negative integer but got many" in record.getMessage()


def test_synthetic_spans_have_rows_before_any_event_had_one(monkeypatch):
    """A first table without events has a row for each of its synthetic spans."""
    monkeypatch.setattr(span_table, "_counted", span_table._Counted())
    assert span_table.rows_after(2, 0).tolist() == [-1, -1]
    assert span_table.rows_after(2, 3).tolist() == [-1, -1, 0, 1, 2]
