"""ReadableSpan views of a span table."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from recorded_tables import recorded_table

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, Scope
from otel_torchprof._encode.attributes import add_attributes
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
    assert not forward.events


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


def test_spans_of_many_traces():
    """Each span has the state of its own entry, also where two entries share a trace id, and its own kind of parent."""
    table = views().table
    some = dataclasses.replace(
        table,
        trace=np.array([0, 2, 1, 2, 1], dtype=np.uint32),
        trace_ids=np.array([[1] * 16, [2] * 16, [1] * 16], dtype=np.uint8),
        trace_states=("", "a=1,b=2", "c=3"),
        parent_is_remote=np.array([0, 1, 1, 0, 0], dtype=np.uint8),
    )
    spans = list(SpanList(some, resource=RESOURCE, scope=SCOPE))
    assert [span.context.trace_state.to_header() for span in spans] == ["", "c=3", "a=1,b=2", "c=3", "a=1,b=2"]
    assert [span.context.trace_id % 256 for span in spans] == [1, 1, 2, 1, 2]
    assert [span.parent and span.parent.is_remote for span in spans] == [None, None, True, False, False]
    assert spans[2].parent.trace_state == spans[2].context.trace_state
    assert spans[2].context.trace_state is spans[4].context.trace_state


def test_what_was_dropped_is_counted():
    """The counts of a span's dropped attributes and links are those of the table, and what is left is still there."""
    plain = views()
    counted = dataclasses.replace(
        plain.table,
        dropped_attributes=np.array([0, 3, 0, 0, 0], dtype=np.uint32),
        dropped_links=np.array([2, 0, 0, 1, 0], dtype=np.uint32),
    )
    spans = SpanList(counted, resource=RESOURCE, scope=SCOPE)
    assert [span.dropped_attributes for span in spans] == [0, 3, 0, 0, 0]
    assert [span.dropped_links for span in spans] == [2, 0, 0, 1, 0]
    for span, before in zip(spans, plain, strict=True):
        assert dict(span.attributes) == dict(before.attributes)
        assert [link.context for link in span.links] == [link.context for link in before.links]
        json.loads(span.to_json())


def test_a_list_shows_what_it_is_made_of():
    """Exporters that take columns read table, rows, resource and scope; a slice has the same but for its rows."""
    spans = views()
    assert spans.rows == range(5)
    part = spans[1:4][1:]
    assert part.rows == range(2, 4)
    assert part.table is spans.table
    assert (part.resource, part.scope) == (RESOURCE, SCOPE)
    assert [span.context for span in part] == [spans[2].context, spans[3].context]


def test_it_is_an_immutable_sequence():
    """Index, negative index, slice, iteration and length work as on a tuple; there is no way to change it."""
    spans = views()
    assert isinstance(spans, Sequence)
    assert isinstance(spans[0], ReadableSpan)
    assert len(spans) == 5
    assert spans[-1].context == spans[4].context
    assert [span.name for span in spans[2:4]] == ["aten::mm", "label"]
    assert [span.name for span in spans[::-1][:2]] == [spans[4].name, spans[3].name]
    with pytest.raises(TypeError):
        spans[0] = None


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_out_of_range_is_named(index):
    """The error names the index and how many spans there are."""
    with pytest.raises(IndexError, match=f"span index {index} out of range: there are 5 spans"):
        views()[index]


def test_exporters_take_them():
    """An SDK exporter keeps them, and the SDK's JSON of them can be read."""
    exporter = InMemorySpanExporter()
    exporter.export(views())
    finished = exporter.get_finished_spans()
    assert [json.loads(span.to_json())["name"] for span in finished][1:3] == ["torch.step", "aten::mm"]
