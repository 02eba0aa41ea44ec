"""Resources that take most of a message: each message has its resource again, so the fewer messages the better."""

from __future__ import annotations

import grpc
import pytest
from fault_server import LONG, Abort, GrpcReceiver, HttpReceiver, status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from span_tables import span_rows

from otel_torchprof import ExportStats, OTLPExporter
from otel_torchprof._encode.spans import SpanList

SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
SCOPE = InstrumentationScope("otel_torchprof", "1.2")
RECEIVERS = {
    "grpc": (GrpcReceiver, Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max")),
    "http/protobuf": (HttpReceiver, status(413)),
}


@pytest.fixture(params=RECEIVERS)
def receiver(request):
    kind, too_large = RECEIVERS[request.param]
    with kind() as server:
        server.protocol, server.too_large = request.param, too_large
        yield server


@pytest.fixture
def exporter(receiver):
    made = OTLPExporter(receiver.url, protocol=receiver.protocol, timeout=LONG)
    yield made
    made.shutdown()


def with_resource(size, spans, span_bytes=4):
    """So many spans of a resource of so many bytes."""
    names = [f"{number:0{span_bytes}}" for number in range(spans)]
    return SpanList(span_rows(names), resource=Resource({"large": "x" * size}), scope=SCOPE)


@pytest.mark.parametrize("kind", [list, lambda spans: spans], ids=["objects", "SpanList"])
def test_a_large_resource(receiver, exporter, kind):
    """A resource above a MiB is sent once with all spans that fit into the 4 MiB that receivers take, not with each span."""
    assert exporter.export(kind(with_resource(1_500_000, 8))) is SUCCESS
    assert exporter.export(kind(with_resource(1_500_000, 40, span_bytes=100_000))) is SUCCESS
    sizes = [len(arrived.body) for arrived in receiver.arrived]
    assert exporter.stats.accepted_spans == 48
    assert len(sizes) == 3
    assert max(sizes) <= 4 << 20


@pytest.mark.parametrize("kind", [list, lambda spans: spans], ids=["objects", "SpanList"])
def test_a_resource_that_is_too_large(receiver, exporter, kind, caplog):
    """One above 4 MiB is not sent at all: its spans have failed, once, with the reason and the way out."""
    assert exporter.export(kind(with_resource(5_000_000, 8))) is FAILURE
    assert exporter.stats == ExportStats(failed_spans=8, last_error=exporter.stats.last_error)
    assert "resource and scope take 50000" in exporter.stats.last_error
    assert "give the resource fewer or shorter attributes" in exporter.stats.last_error
    assert [message.count("8 spans were not delivered: cannot be encoded") for message in caplog.messages] == [1]


@pytest.mark.parametrize("kind", [list, lambda spans: spans], ids=["objects", "SpanList"])
def test_a_resource_that_is_too_large_for_the_receiver(receiver, exporter, kind):
    """Where a single span with its resource is, the others of a batch that are no smaller are not tried one by one."""
    receiver.turns = [receiver.too_large] * 1000
    assert exporter.export(kind(with_resource(100_000, 256))) is FAILURE
    assert (exporter.stats.failed_spans, exporter.stats.requests) == (256, 9)
    receiver.turns = []
    assert exporter.export(kind(with_resource(100_000, 256))) is SUCCESS
