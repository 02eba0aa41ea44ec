"""What comes out behind a real collector is what was recorded: every span once, with everything that it had."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from examples import one_in

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from collectors import KINDS, running  # noqa: E402
from fault_server import LONG  # noqa: E402
from opentelemetry import trace  # noqa: E402
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.sdk.resources import Resource  # noqa: E402
from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: E402
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._export.otlp import OTLPExporter  # noqa: E402
from otel_torchprof._export.response import Backoff  # noqa: E402

RESOURCE = Resource({"service.name": "trainer", "service.instance.id": "7"}, "https://example.org/resource")
REQUEST = SpanContext(
    0xFEED << 64, 0xBEEF, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("v", "1")])
)
KNOWS_ITS_PARENT, REMOTE_PARENT = 0x100, 0x200
"""OTLP's flags: whether the parent is in another process is known, and it is."""


@dataclass(frozen=True)
class Sent:
    """How spans are sent."""

    protocol: str
    compression: str
    as_objects: bool = False
    """As ReadableSpans instead of as a SpanList."""


CONFIGURATIONS = [
    Sent("grpc", "gzip"),
    Sent("grpc", "none"),
    Sent("http/protobuf", "none"),
    Sent("http/protobuf", "gzip", as_objects=True),
    Sent("http/protobuf", "gzip"),
    Sent("grpc", "none", as_objects=True),
]


@pytest.fixture(scope="module", params=KINDS)
def collector(request, tmp_path_factory):
    kind = KINDS[request.param]
    binary = kind.find()
    if binary is None:
        pytest.skip(kind.missing)
    with running(kind, binary, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture(scope="module")
def recorded():
    """Two steps of a small GPT-2, of which the second is linked to the first, and one inside a request of another process."""
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 97, (2, 12))

    def step():
        optimizer.zero_grad()
        with otp.record_function("forward"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()

    with otp.profile(record_shapes=True) as alone:
        step()
        alone.step()
        step()
        with pytest.raises(ValueError, match="bad batch"), otp.record_function("input"):
            raise ValueError("bad batch")
    with trace.use_span(NonRecordingSpan(REQUEST)), otp.profile(record_shapes=True) as inside:
        step()
    return [profile.spans(resource=RESOURCE) for profile in (alone, inside)]


def attributes(pairs: Any) -> frozenset[Any]:
    """Attributes with the type of each value, since 1, 1.0 and True are equal."""
    return frozenset((name, type(value).__name__, value) for name, value in pairs)


def of_message(key_values: Any) -> frozenset[Any]:
    """The same of protobuf's."""
    return attributes((pair.key, getattr(pair.value, str(pair.value.WhichOneof("value")))) for pair in key_values)


def as_recorded(span: Any) -> dict[str, Any]:
    """Every field of a ReadableSpan, ids as integers."""
    return {
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "trace state": span.context.trace_state.to_header(),
        "parent": span.parent.span_id if span.parent else 0,
        "flags": KNOWS_ITS_PARENT | (REMOTE_PARENT if span.parent and span.parent.is_remote else 0),
        "name": span.name,
        "kind": span.kind.name,
        "times": (span.start_time, span.end_time),
        "attributes": attributes(span.attributes.items()),
        "links": tuple((link.context.trace_id, link.context.span_id) for link in span.links),
        "events": len(span.events),
        "status": (span.status.status_code.name, span.status.description or ""),
        "dropped": (span.dropped_attributes, span.dropped_links, span.dropped_events),
        "resource": (attributes(span.resource.attributes.items()), span.resource.schema_url),
        "scope": (
            span.instrumentation_scope.name,
            span.instrumentation_scope.version,
            span.instrumentation_scope.schema_url,
        ),
    }


def as_arrived(resource: Any, scope: Any, span: Any) -> dict[str, Any]:
    """The same fields of a span of a message."""
    return {
        "trace": int.from_bytes(span.trace_id, "big"),
        "id": int.from_bytes(span.span_id, "big"),
        "trace state": span.trace_state,
        "parent": int.from_bytes(span.parent_span_id, "big"),
        "flags": span.flags,
        "name": span.name,
        "kind": type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        "times": (span.start_time_unix_nano, span.end_time_unix_nano),
        "attributes": of_message(span.attributes),
        "links": tuple((int.from_bytes(k.trace_id, "big"), int.from_bytes(k.span_id, "big")) for k in span.links),
        "events": len(span.events),
        "status": (("UNSET", "OK", "ERROR")[span.status.code], span.status.message),
        "dropped": (span.dropped_attributes_count, span.dropped_links_count, span.dropped_events_count),
        "resource": (of_message(resource.resource.attributes), resource.schema_url),
        "scope": (scope.scope.name, scope.scope.version, scope.schema_url),
    }


def arrived(bodies: list[bytes]) -> list[dict[str, Any]]:
    """All spans of some messages."""
    return [
        as_arrived(resource, scope, span)
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@pytest.mark.parametrize("sent", one_in(3, CONFIGURATIONS), ids=str)
def test_everything_comes_out_behind(collector, recorded, sent):
    """Ids, parents, times, links, attributes, status, scope and resource of every span are the same, in every store."""
    for store in collector.stores:
        store.arrived.clear()
    endpoint = collector.endpoints[sent.protocol]
    exporter = OTLPExporter(endpoint, protocol=sent.protocol, compression=sent.compression, timeout=LONG)
    exporter._sender.backoff = Backoff(first=0.05, longest=0.05)  # until the collector listens
    expected = [as_recorded(span) for spans in recorded for span in spans]
    for spans in recorded:
        assert exporter.export(list(spans) if sent.as_objects else spans) is SpanExportResult.SUCCESS, (
            collector.log.read_text()
        )
    exporter.shutdown()
    assert exporter.stats.accepted_spans == len(expected)

    for store in collector.stores:
        with store.came:
            assert store.came.wait_for(lambda: len(store.names) >= len(expected), LONG), collector.log.read_text()  # noqa: B023 - called here
        found = arrived([request.body for request in store.arrived])
        for field in expected[0]:
            assert Counter(span[field] for span in found) == Counter(span[field] for span in expected), field
        assert Counter(tuple(span.values()) for span in found) == Counter(tuple(span.values()) for span in expected)


def test_what_is_compared_is_there(recorded):
    """The recorded spans have what the comparison is about: links, errors, shapes, remote parents, several traces."""
    spans = [as_recorded(span) for spans in recorded for span in spans]
    assert len(spans) > 1000
    assert len({span["trace"] for span in spans}) == 3
    assert sum(len(span["links"]) for span in spans) > 100
    assert {span["status"][0] for span in spans} == {"UNSET", "ERROR"}
    assert {span["flags"] for span in spans} == {KNOWS_ITS_PARENT, KNOWS_ITS_PARENT | REMOTE_PARENT}
    assert {span["trace state"] for span in spans} == {"", "v=1"}
    assert {kind for span in spans for _, kind, _ in span["attributes"]} == {"str", "int", "float"}
