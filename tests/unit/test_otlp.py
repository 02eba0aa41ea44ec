"""OTLP as bytes and as JSON, against what OpenTelemetry's own encoder makes of the same spans."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceState
from recorded_tables import recorded_table
from span_tables import RESOURCE, SCOPE, span_rows, tables

from otel_torchprof import FunctionInfo
from otel_torchprof._columns.batch import Batch, Names, RecordedThread
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.generation import Generation
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, MEMORY_COLUMNS, Flag, Kind, Scope
from otel_torchprof._encode.attributes import ATTRIBUTES, add_attributes
from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES, encode
from otel_torchprof._encode.otlp_json import encode_counted, line_of, request_of
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType
from otel_torchprof._model.step_spans import RecordedStep

BARE = {"resource": Resource({}), "scope": InstrumentationScope("")}
FULL = {"resource": RESOURCE, "scope": SCOPE}
CURRENT = SpanContext(0xFEED << 96, 0xBEEF, is_remote=True, trace_state=TraceState([("vendor", "1"), ("other", "x")]))


def official(table, **common):
    """The message that OpenTelemetry's own encoder makes of all spans of a table."""
    return encode_spans(SpanList(table, **common))


def decoded(message):
    """The message as the official protobuf reads it."""
    return ExportTraceServiceRequest.FromString(message)


def recorded():
    """A table made from a batch in which every attribute and every sort of link occurs."""
    batch = Batch.of(
        {
            "start": [110, 120, 310, 330, 350, 370, 371, 390],
            "end": [190, 130, 320, 340, 360, 380, 372, 395],
            "name": [1, 2, 3, 5, 1, 6, 7, 1],
            "parent": [-1, 0, -1, -1, -1, -1, 5, -1],
            "sequence_nr": [4, -1, 4, 2**62, -1, -1, -1, 4],
            "fwd_thread": [0, 0, 1, 0, 0, 8, 0, Part.FORWARD],
            "kind": [Kind.OPERATOR] * 4 + [Kind.MODULE, Kind.FRAME, Kind.FRAME, Kind.PHASE],
            "scope": [0, Scope.USER_SCOPE, Scope.BACKWARD_FUNCTION, 0, 0, 0, 0, Scope.USER_SCOPE],
            "error_type": [0, 4, 0, 0, 0, 0, 0, 0],
            "flags": [Flag.UNFINISHED | Flag.ASYNC, Flag.ERROR, Flag.LOSS_BEFORE, 0, 0, Flag.ERROR, 0, 0],
            "inputs": [0, 10, -1, 0, -1, -1, -1, -1],
        },
        [
            "",
            "aten::mm",
            'my "label"\n\0 für Größe',
            b"Mm\xff\xed\xa0\x80Backward",
            "ValueError",
            "CompiledFunction",
            "größe.py(7): f",
            "gc.collect: generation 1",
            "gloo",
            "float",
        ],
        (RecordedThread(5, 140_001, 1, "träger"),),
        inputs=np.array(
            [3 | 1 << 32, 1 | 2 << 32, 2, 3, 1 | 2 << 32, 3, 4, 3, 7, 10 | 4 << 32, 1, 8 | 2 << 32], dtype=np.int64
        ),
        memory={
            **{column.name: [0] * 4 for column in MEMORY_COLUMNS},
            "event": [1, 2, 2, 5],
            "bytes": [64, -32, 1 << 40, -8],
            "device_type": [0, 0, 1, 1],
        },
        devices={
            "event": [1, 3],
            "start": [0, 0],
            "duration": [50, 7],
            "stream": [7, -1],
            "device_type": [1, 12],
            "device_index": [0, 1],
        },
        collectives={
            **{column.name: [1] for column in COLLECTIVE_COLUMNS},
            "event": [4],
            "group": [8],
            "backend": [8],
            "dtype": [9],
            "reduce_op": [9],
            "flags": [2],
        },
        energy={"time": [0, 400, 0, 400], "joules": [0.0, 8.0, 5.0, 6.0], "device_index": [0, 0, 1, 1]},
        dropped={"budget": 4},
        frame_info=FrameInfo({6: FunctionInfo("größe.f", "/home/größe.py", 7)}),
        generations={8: Generation("größe/modell", 2, 6, 2, 12, 3, is_streamed=True, duration=0.5, first_token=0.1)},
    )
    ids = itertools.count(1)
    options = {"start": 0, "end": 400, "steps": [RecordedStep(0, 100, 200), RecordedStep(1, 300, 400)]}
    with patch.dict(os.environ, {"OTEL_TORCHPROF_RANKS": "aliases=nemo_lens"}):
        return [
            add_attributes(
                recorded_table(
                    batch, **options, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids), parent=parent
                ),
                batch,
                with_flops=True,
            )
            for parent in (None, CURRENT)
        ]


@pytest.mark.parametrize("table", recorded(), ids=["own traces", "current trace"])
@pytest.mark.parametrize("common", [FULL, BARE], ids=["full", "bare"])
def test_recorded_spans_are_the_bytes_of_the_official_encoder(table, common):
    """Every attribute, links, errors, names with control characters and bad UTF-8: the same bytes as the SDK's."""
    assert {attribute.key for attribute in ATTRIBUTES} <= {column.key for column in table.attributes}
    [message] = encode(table, **common)
    theirs = official(table, **common)
    assert decoded(message) == theirs
    assert message == theirs.SerializeToString()


@given(tables(), st.sampled_from([FULL, BARE]), st.data())
def test_any_table_is_the_bytes_of_the_official_encoder(table, common, data):
    """Any table, and any segment of its rows with the links that are its own, is byte for byte the official message; as JSON it reads back as that."""
    first = data.draw(st.integers(0, len(table)))
    rows = range(first, data.draw(st.integers(first, len(table))))
    for part in (SpanList(table, **common), SpanList(table, **common)[rows.start : rows.stop]):
        theirs = [encode_spans(part).SerializeToString()] if part else []
        assert list(encode(table, **common, rows=part.rows)) == theirs
        lines = [bytes(line) for line, _ in encode_counted(table, **common, rows=part.rows)]
        assert all(line.count(b"\n") == 1 for line in lines)
        assert [request_of(line) for line in lines] == [decoded(message) for message in theirs]
        assert [request_of(line_of(decoded(message))) for message in theirs] == [decoded(message) for message in theirs]


def spans_of(messages):
    return [s for message in messages for resource in message.resource_spans for s in resource.scope_spans[0].spans]


@given(tables(), st.integers(1, 3000))
def test_messages_keep_the_limit_and_lose_nothing(table, max_bytes):
    """Each message, and each line of JSON, is within the limit or holds a single span; together they hold all spans in order, once."""
    messages = [decoded(message) for message in encode(table, **FULL, max_bytes=max_bytes)]
    lines = [(bytes(line), count) for line, count in encode_counted(table, **FULL, max_bytes=max_bytes)]
    for size, message in zip((message.ByteSize() for message in messages), messages, strict=True):
        assert size <= max_bytes or len(spans_of([message])) == 1
    for line, count in lines:
        assert len(spans_of([request_of(line)])) == count
        assert len(line) <= max_bytes or count == 1
    whole = spans_of([official(table, **FULL)]) if len(table) else []
    assert spans_of(messages) == spans_of(request_of(line) for line, _ in lines) == whole


@pytest.mark.parametrize("encoder", [encode, encode_counted])
@pytest.mark.parametrize(
    "keywords",
    [*({"rows": rows} for rows in (range(3), range(-1, 1), range(1, -1, -1), range(0, 3, 2)))]
    + [{"max_bytes": size} for size in (0, -1, 2**31)],
    ids=str,
)
def test_a_bad_call(encoder, keywords):
    """Rows beyond the table, backwards or with gaps, and a limit out of range are refused at the call, with value and range."""
    said = r"rows is range\(.* within the 2 of the table|max_bytes is -?\d+, but must be from 1 to 2147483647"
    with pytest.raises(ValueError, match=said):
        encoder(span_rows(["a", "b"]), **FULL, **keywords)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_arrives(value):
    """NaN, which compares unequal to itself, and the infinities, for which JSON has no number."""
    table = span_rows(["a"], attributes=(AttributeColumn("x", AttributeType.DOUBLE, np.array([value])),))
    [message], [line] = encode(table, **BARE), [bytes(line) for line, _ in encode_counted(table, **BARE)]
    for [span] in (spans_of([decoded(message)]), spans_of([request_of(line)])):
        assert repr(span.attributes[0].value.double_value) == repr(value)


def test_messages_are_filled_and_under_four_mebibytes_by_default():
    """Many spans go out in the fewest messages, each of which a gRPC receiver takes."""
    count = 60_000
    table = span_rows([b"x" * 50] * count)
    sizes = [len(message) for message in encode(table, **FULL)]
    assert max(sizes) <= DEFAULT_MAX_BYTES < 4 * 1024 * 1024
    assert len(sizes) == math.ceil(sum(sizes) / DEFAULT_MAX_BYTES) > 1


@pytest.mark.parametrize(
    "length", [0, 1, 40, 60, 61, 62, 63, 64, 65, 66, 127, 128, 129, 16_300, 16_383, 16_384, 2_100_000]
)
def test_lengths_of_every_width(length):
    """Names whose sizes change the width of the lengths around them, at each edge, keep the bytes official."""
    table = span_rows([b"x" * length, "next"])
    assert b"".join(encode(table, **BARE, max_bytes=4 << 20)) == official(table, **BARE).SerializeToString()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": np.array([5], dtype=np.uint32)}, "column name points to entry 5, .* has 2"),
        ({"trace": np.array([1], dtype=np.uint32)}, "column trace points to entry 1, .* has 1"),
        ({"start": np.array([1, 2])}, "column start holds 2 values, but must hold 1"),
        (
            {"attributes": (AttributeColumn("k", AttributeType.NAME, np.array([2], dtype=np.uint32)),)},
            "column k points to entry 2",
        ),
        (
            {"attributes": (AttributeColumn("k", AttributeType.BOOL, np.ones(2, np.uint8), np.zeros(1, np.uint32)),)},
            "column k holds 2 values, but must hold 1",
        ),
        (
            {"attributes": (AttributeColumn("k", AttributeType.BOOL, np.ones(2, np.uint8), np.zeros(2, np.uint32)),)},
            "the rows of column k must rise",
        ),
        ({"trace_states": ("a=1", "b=2")}, "trace_states holds 2 states, but must hold 1 or none"),
        ({"dropped_links": np.ones(2, np.uint32)}, "column dropped_links holds 2 values, but must hold 1"),
        ({"trace_ids": np.zeros((1, 8), dtype=np.uint8)}, r"trace_ids has shape \(1, 8\)"),
        ({"links": np.array([(1, [0] * 16, 1), (0, [0] * 16, 1)], dtype=LINK)}, "links must be sorted by row"),
        ({"names": Names(np.zeros(1, np.uint8), np.array([0, 2], np.uint64))}, "names.ends must rise, .* the 1 bytes"),
        ({"names": Names(np.zeros(3, np.uint8), np.array([3, 2], np.uint64))}, "names.ends must rise, .* the 3 bytes"),
    ],
)
def test_a_table_that_does_not_fit_together_is_an_error(change, message):
    """A column of wrong length, or an index out of range, is refused before C reads it."""
    with pytest.raises(ValueError, match=message):
        encode(dataclasses.replace(span_rows(["a"]), **change), **FULL)


def test_strided_columns_are_encoded():
    """Columns need not be contiguous."""
    table = span_rows(["a", "b"], start=np.array([1, 0, 2, 0])[::2])
    assert b"".join(encode(table, **FULL)) == official(table, **FULL).SerializeToString()


def test_an_iterator_outlives_what_it_was_made_from():
    """Messages still to come stay right after the caller has let go of the table, and one may stop half way."""
    theirs = list(encode(span_rows(["a", "b"]), **FULL, max_bytes=1))
    messages = encode(span_rows(["a", "b"]), **FULL, max_bytes=1)
    assert next(messages) == theirs[0]
    np.zeros(100_000)
    assert list(messages) == theirs[1:]
    next(encode(span_rows(["a", "b"]), **FULL, max_bytes=1))
