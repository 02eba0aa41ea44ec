"""Lines of OTLP/JSON against the protobuf messages of the same spans, which are held against OpenTelemetry's own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from span_tables import span_rows, tables

from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._model.span_table import AttributeColumn, AttributeType

RESOURCE = Resource({"service.name": "trainer", "rank": 3, "tags": ["a", "b"]}, "https://example.org/resource")
SCOPE = InstrumentationScope("otel_torchprof", "1.2", "https://example.org/scope", {"x": True})
BARE = {"resource": Resource({}), "scope": InstrumentationScope("")}
FULL = {"resource": RESOURCE, "scope": SCOPE}


def lines(table, **keywords):
    return [line for line, _ in otlp_json.encode_counted(table, **keywords)]


@given(tables(), st.sampled_from([FULL, BARE]))
def test_any_table_reads_back_as_its_message(table, common):
    """Whatever a table holds, its line is one line of JSON, and reads back as the message that protobuf has of it."""
    messages = [ExportTraceServiceRequest.FromString(message) for message in otlp.encode(table, **common)]
    found = lines(table, **common)
    assert all(line.count(b"\n") == 1 for line in found)
    assert [otlp_json.request_of(line) for line in found] == messages
    assert [otlp_json.request_of(otlp_json.line_of(message)) for message in messages] == messages


@given(tables(), st.integers(1, 3000))
def test_lines_keep_the_limit_and_lose_nothing(table, max_bytes):
    """Each line is within the limit or holds a single span; together they hold all spans in order, once."""
    spans = []
    for line, count in otlp_json.encode_counted(table, **FULL, max_bytes=max_bytes):
        found = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
        assert len(found) == count
        assert len(line) <= max_bytes or count == 1
        spans += found
    whole = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in lines(table, **FULL)]
    assert spans == (whole[0] if whole else [])


def test_what_json_has_no_number_for():
    """NaN and the infinities arrive."""
    for value in (math.nan, math.inf, -math.inf):
        column = AttributeColumn("x", AttributeType.DOUBLE, np.array([value]))
        (line,) = lines(span_rows(["a"], attributes=(column,)), **BARE)
        (span,) = otlp_json.request_of(line).resource_spans[0].scope_spans[0].spans
        assert repr(span.attributes[0].value.double_value) == repr(value)


@pytest.mark.parametrize("keywords", [{"max_bytes": 0}, {"rows": range(3)}, {"rows": range(0, 2, 2)}], ids=str)
def test_a_bad_call(keywords):
    """A limit or rows that cannot be are an error at the call."""
    with pytest.raises(ValueError, match=f"{next(iter(keywords))} is "):
        otlp_json.encode_counted(span_rows(["a", "b"]), **FULL, **keywords)
