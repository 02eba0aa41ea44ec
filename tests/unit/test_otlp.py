"""The OTLP bytes against what OpenTelemetry's own encoder makes of the same spans, and the framing of files."""

from __future__ import annotations

import dataclasses
import itertools
import math

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
from span_tables import span_rows, tables

from otel_torchprof._columns.batch import Batch, Names, RecordedThread
from otel_torchprof._columns.frame_info import FrameInfo, FunctionInfo
from otel_torchprof._columns.generation import Generation
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, MEMORY_COLUMNS, Flag, Kind, Scope
from otel_torchprof._encode.attributes import ATTRIBUTES, add_attributes
from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES, encode
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType
from otel_torchprof._model.step_spans import RecordedStep

RESOURCE = Resource({"service.name": "trainer", "rank": 3, "tags": ["a", "b"]}, "https://example.org/resource")
SCOPE = InstrumentationScope("otel_torchprof", "1.2", "https://example.org/scope", {"x": True})
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
    assert len({column.key for column in table.attributes}) == len(ATTRIBUTES)
    [message] = encode(table, **common)
    theirs = official(table, **common)
    assert decoded(message) == theirs
    assert message == theirs.SerializeToString()


@given(tables(), st.sampled_from([FULL, BARE]))
def test_any_table_is_the_bytes_of_the_official_encoder(table, common):
    """Whatever a table holds, the message is byte for byte what the official encoder and protobuf make of it."""
    theirs = [official(table, **common).SerializeToString()] if len(table) else []
    assert list(encode(table, **common)) == theirs


@given(tables(), st.integers(1, 3000))
def test_messages_keep_the_limit_and_lose_nothing(table, max_bytes):
    """Each message is within the limit or holds a single span; together they hold all spans in order, once."""
    spans = []
    for message in encode(table, **FULL, max_bytes=max_bytes):
        [resource_spans] = decoded(message).resource_spans
        [scope_spans] = resource_spans.scope_spans
        assert len(message) <= max_bytes or len(scope_spans.spans) == 1
        spans += scope_spans.spans
    theirs = official(table, **FULL).resource_spans
    assert spans == (list(theirs[0].scope_spans[0].spans) if theirs else [])


@given(tables(), st.data())
def test_some_rows_are_the_bytes_of_a_slice(table, data):
    """Any segment of the rows, with the links that are its own, is what the official encoder makes of that slice."""
    first = data.draw(st.integers(0, len(table)))
    rows = range(first, data.draw(st.integers(first, len(table))))
    part = SpanList(table, **FULL)[rows.start : rows.stop]
    theirs = [encode_spans(part).SerializeToString()] if rows else []
    assert list(encode(table, **FULL, rows=part.rows)) == theirs
    apart = b"".join(encode(table, **FULL, rows=part.rows, max_bytes=1))
    spans = [span for resource in decoded(apart).resource_spans for span in resource.scope_spans[0].spans]
    assert spans == (list(decoded(theirs[0]).resource_spans[0].scope_spans[0].spans) if theirs else [])


@pytest.mark.parametrize("rows", [range(3), range(-1, 1), range(1, -1, -1), range(0, 3, 2)])
def test_rows_that_are_no_segment_of_the_table_are_an_error(rows):
    """Rows beyond the table, backwards or with gaps are refused at the call, with their value."""
    with pytest.raises(ValueError, match=r"rows is range\(.* within the 2 of the table"):
        encode(span_rows(["a", "b"]), **FULL, rows=rows)


def test_not_a_number_stays_one():
    """NaN, which compares unequal to itself, arrives as NaN."""
    column = AttributeColumn("x", AttributeType.DOUBLE, np.array([math.nan]))
    [message] = encode(span_rows(["a"], attributes=(column,)), **BARE)
    [span] = decoded(message).resource_spans[0].scope_spans[0].spans
    assert math.isnan(span.attributes[0].value.double_value)


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


def test_a_table_without_spans_gives_no_message():
    """Nothing to send is no message rather than an empty one."""
    assert not list(encode(span_rows([]), **FULL))


@pytest.mark.parametrize("max_bytes", [0, -1, 2**31])
def test_a_bad_limit_is_an_error_at_the_call(max_bytes):
    """The error comes from encode() itself, before anything is iterated, and names the value and the range."""
    with pytest.raises(ValueError, match=rf"max_bytes is {max_bytes}, but must be from 1 to 2147483647"):
        encode(span_rows(["a"]), **FULL, max_bytes=max_bytes)


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


def test_messages_end_to_end_are_one_message():
    """A file of messages parses as one request with all spans, which is what export_otlp writes."""
    whole = b"".join(encode(span_rows(["a", "b", "c"]), **FULL, max_bytes=1))
    request = ExportTraceServiceRequest.FromString(whole)
    assert [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans] == ["a", "b", "c"]
