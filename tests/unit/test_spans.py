"""ReadableSpan views of a span table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from recorded_tables import recorded_table

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, Scope
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._encode.otlp import encode
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._model.step_spans import RecordedStep

RESOURCE = Resource({"service.name": "trainer"})
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
SCOPE = InstrumentationScope("otel_torchprof", "1.2", "https://example.org/scope")
CURRENT = SpanContext(0xFEED, 0xBEEF, is_remote=True, trace_flags=SAMPLED, trace_state=TraceState([("vendor", "1")]))


def views(parent=None):
    """Two steps: a forward operator with a failed label inside, and its backward function."""
    batch = Batch.of(
        {
            "start": [110, 120, 310],
            "end": [190, 130, 320],
            "name": [1, 2, 3],
            "parent": [-1, 0, -1],
            "sequence_nr": [4, -1, 4],
            "fwd_thread": [0, 0, 1],
            "scope": [0, Scope.USER_SCOPE, Scope.BACKWARD_FUNCTION],
            "error_type": [0, 4, 0],
            "flags": [Flag.ASYNC, Flag.ERROR, 0],
        },
        ["", "aten::mm", "label", b"Mm\xffBackward", "ValueError"],
        (RecordedThread(5, 140_001, 1, "main"),),
    )
    ids = itertools.count(1)
    table = recorded_table(
        batch,
        start=0,
        end=400,
        steps=[RecordedStep(0, 100, 200), RecordedStep(1, 300, 400)],
        new_trace_id=lambda: next(ids),
        new_span_id=lambda: next(ids),
        parent=parent,
    )
    return SpanList(add_attributes(table, batch), resource=RESOURCE, scope=SCOPE)


def test_a_view_shows_the_span():
    """Name, kind, times, status, attributes with Python's own types, resource and scope are those of the table."""
    _, _, forward, label, backward = views()
    assert [span.name for span in (forward, label, backward)] == ["aten::mm", "label", "Mm�Backward"]
    assert (forward.kind, forward.start_time, forward.end_time) == (SpanKind.INTERNAL, 110, 190)
    assert [span.status.status_code for span in (forward, label)] == [StatusCode.UNSET, StatusCode.ERROR]
    assert dict(forward.attributes) == {
        "torch.op.scope": "function",
        "torch.op.sequence_nr": 4,
        "torch.self_duration": 70e-9,
        "thread.id": 140_001,
        "thread.name": "main",
        "torch.async": True,
    }
    assert [type(value) for value in forward.attributes.values()] == [str, int, float, int, str, bool]
    assert label.attributes["error.type"] == "ValueError"
    assert (forward.resource, forward.instrumentation_scope) == (RESOURCE, SCOPE)


def test_errors_have_no_span_event():
    """An exception is status ERROR with its class as `error.type`; nothing else is OK or has a message, and no span has a (deprecated) event."""
    spans = views()
    [message] = encode(spans.table, resource=RESOURCE, scope=SCOPE)
    sent = ExportTraceServiceRequest.FromString(message).resource_spans[0].scope_spans[0].spans
    assert [(span.name, span.status.code) for span in sent if span.status.code] == [("label", Status.STATUS_CODE_ERROR)]
    assert [span.name for span in sent if any(each.key == "error.type" for each in span.attributes)] == ["label"]
    assert not any(span.status.message or span.events for span in sent)
    assert not any(span.status.description or span.events for span in spans)


def test_views_are_related_by_their_contexts():
    """Parents, links and traces of the views refer to one another as SDK spans do."""
    first, second, forward, label, backward = views()
    assert first.parent is None
    assert forward.parent == first.context
    assert label.parent == forward.context
    assert backward.parent == second.context
    assert [link.context for link in second.links] == [first.context]
    assert [link.context for link in backward.links] == [forward.context]
    assert first.context.trace_id == forward.context.trace_id != second.context.trace_id
    assert all(span.context.is_valid and span.context.trace_flags.sampled for span in (first, forward))


def test_under_a_current_span():
    """Roots have the current context as parent, in another process if it is, and its trace state is kept on all spans."""
    first, _, forward, *_ = views(CURRENT)
    assert first.parent == CURRENT
    assert first.parent.is_remote
    assert not forward.parent.is_remote
    assert not first.context.is_remote
    assert first.context.trace_id == forward.context.trace_id == CURRENT.trace_id
    assert first.context.trace_state == forward.context.trace_state == CURRENT.trace_state


def test_it_is_an_immutable_sequence():
    """As of a tuple; exporters that take columns read table, rows, resource and scope, and a slice has the same but for its rows."""
    spans = views()
    assert isinstance(spans, Sequence)
    assert isinstance(spans[0], ReadableSpan)
    assert (len(spans), spans.rows) == (5, range(5))
    assert spans[-1].context == spans[4].context
    assert [span.name for span in spans[::-1][:2]] == [spans[4].name, spans[3].name]
    part = spans[1:4][1:]
    assert (part.table is spans.table, part.rows) == (True, range(2, 4))
    assert (part.resource, part.scope) == (RESOURCE, SCOPE)
    assert [span.context for span in part] == [spans[2].context, spans[3].context]
    with pytest.raises(TypeError):
        spans[0] = None
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"span index {index} out of range: there are 5 spans"):
            spans[index]


def test_exporters_take_them():
    """An SDK exporter keeps them, and the SDK's JSON of them can be read."""
    exporter = InMemorySpanExporter()
    exporter.export(views())
    finished = exporter.get_finished_spans()
    assert [json.loads(span.to_json())["name"] for span in finished][1:3] == ["torch.step", "aten::mm"]
