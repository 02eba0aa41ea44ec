"""Spans as OTLP messages, each with the number of spans in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._encode import otlp, otlp_json
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._process import process_changes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.trace import ReadableSpan


def import_encoders(*, json: bool = False) -> None:
    """Imports what :func:`messages` needs, for an exporter that may be used by threads of this package."""
    process_changes.import_now("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    if json:
        process_changes.import_now("google.protobuf.json_format")


def messages(
    spans: Sequence[ReadableSpan], max_bytes: int, *, json: bool = False
) -> Iterator[tuple[bytes, int]] | Iterator[tuple[memoryview, int]]:
    """Yields serialized ``ExportTraceServiceRequest`` messages of at most ``max_bytes``, each with its number of spans, in order.

    A message is valid until the next one is requested; a larger span is alone in one; for a large resource see ``message_size``. ``json``: lines of OTLP/JSON instead of protobuf.
    A SpanList without gaps is encoded from its table, without an object per span; other spans by OpenTelemetry's encoder, whose
    exceptions are passed on.
    """
    if isinstance(spans, SpanList) and spans.rows.step == 1:
        encode_counted = otlp_json.encode_counted if json else otlp.encode_counted
        return encode_counted(
            spans.table, rows=spans.rows, resource=spans.resource, scope=spans.scope, max_bytes=max_bytes
        )
    return _encoded(spans, max_bytes, json=json)


def _encoded(spans: Sequence[ReadableSpan], max_bytes: int, *, json: bool) -> Iterator[tuple[bytes, int]]:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    if not spans:
        return
    request = encode_spans(spans)
    message = otlp_json.line_of(request) if json else request.SerializeToString()
    if len(message) > max_bytes:
        max_bytes = otlp.message_size(max_bytes, common_size(request, json=json))
    if len(message) <= max_bytes or len(spans) == 1:
        yield message, len(spans)
        return
    # The sizes of spans are not known before they are encoded, so it is halves, and halves again.
    middle = len(spans) // 2
    yield from _encoded(spans[:middle], max_bytes, json=json)
    yield from _encoded(spans[middle:], max_bytes, json=json)


def common_size(request: ExportTraceServiceRequest, *, json: bool = False) -> int:
    """Bytes of the largest resource with its scopes, which each message with a span of it has again."""
    largest = 0
    for resource_spans in request.resource_spans:
        part = type(request)(resource_spans=[resource_spans])
        for scope_spans in part.resource_spans[0].scope_spans:
            del scope_spans.spans[:]
        largest = max(largest, len(otlp_json.line_of(part)) if json else part.ByteSize())
    return largest
