"""Encodes spans as OTLP: serialized ``ExportTraceServiceRequest`` messages.

Concatenated messages are one valid message (protobuf joins repeated fields), so a file of them can be posted to an
OTLP/HTTP receiver as it is, or read with ``TracesData``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._native.encoders import RequestParts, encode_otlp

from .spans import CheckedSpans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._model.span_table import SpanTable

DEFAULT_MAX_BYTES = 1024 * 1024
"""Receivers refuse gRPC messages over 4 MiB by default. A quarter of that is cheaper to encode, since the buffer stays in
cache (measured: 107 instead of 136 ns per span), and a Collector can add to the message."""
RECEIVERS_MAX_BYTES = 4 << 20
"""Largest message that gRPC receivers accept by default."""
PROTOBUF_MAX_BYTES = 2**31 - 1
"""Protobuf's own limit of a message."""


def encode(
    table: SpanTable,
    *,
    resource: Resource,
    scope: InstrumentationScope,
    max_bytes: int = DEFAULT_MAX_BYTES,
    rows: range | None = None,
) -> Iterator[bytes]:
    """Serializes the spans of ``table`` as OTLP trace requests of at most ``max_bytes`` bytes each.

    ``rows``: the rows to serialize, rising without gaps; default: all. The bytes equal those of OpenTelemetry's own encoder. A span that
    exceeds ``max_bytes`` is encoded too, alone in its message. If resource and scope, which are in each message, take more than half of
    ``max_bytes`` and half of a MiB, messages have up to 4 MiB. Without spans there is no message. Each message is encoded on demand,
    without the GIL; only one is in memory at a time. Thread-safe; an iterator belongs to one thread.

    Raises ValueError if ``max_bytes`` is not from 1 to 2^31 - 1 (protobuf's limit), if ``rows`` has gaps or exceeds the table, or if
    the table is inconsistent; at the first message, if resource and scope leave no room for spans. Raises MemoryError.
    """
    # Not a generator, which would check the arguments at the first message only.
    counted = encode_counted(table, resource=resource, scope=scope, max_bytes=max_bytes, rows=rows)
    return (bytes(message) for message, _ in counted)


def encode_counted(
    table: SpanTable,
    *,
    resource: Resource,
    scope: InstrumentationScope,
    max_bytes: int = DEFAULT_MAX_BYTES,
    rows: range | None = None,
) -> Iterator[tuple[memoryview, int]]:
    """As :func:`encode`, each message with the number of spans in it, and without a copy: it is released when the next one is requested."""
    spans = CheckedSpans(table, checked_rows(table, rows, max_bytes))
    return _messages(spans, request_parts(resource, scope), max_bytes)


def checked_rows(table: SpanTable, rows: range | None, max_bytes: int) -> range:
    """Returns the rows to encode. Raises ValueError as :func:`encode` does."""
    if not 1 <= max_bytes <= PROTOBUF_MAX_BYTES:
        raise ValueError(
            f"max_bytes is {max_bytes}, but must be from 1 to {PROTOBUF_MAX_BYTES}; gRPC receivers take 4 MiB by default"
        )
    rows = range(len(table)) if rows is None else rows
    if len(rows) and (rows.step != 1 or rows.start < 0 or rows.stop > len(table)):
        raise ValueError(f"rows is {rows}, but must be rising without gaps, within the {len(table)} of the table")
    return rows


def message_size(max_bytes: int, common: int) -> int:
    """Returns the limit of a message in bytes. ``common``: bytes of resource and scope, which each message repeats.

    Raises ValueError if they leave no room for spans.
    """
    if 2 * common <= max(max_bytes, DEFAULT_MAX_BYTES):
        return max_bytes
    size = max(max_bytes, RECEIVERS_MAX_BYTES)
    if common >= size:
        raise ValueError(
            f"resource and scope take {common} bytes of each message, which may have {size}: "
            "give the resource fewer or shorter attributes, or raise the limit, with the receiver's"
        )
    return size


def empty_request(resource: Resource, scope: InstrumentationScope) -> ExportTraceServiceRequest:
    """Returns a request with this resource and scope, and an empty span, from OpenTelemetry's own encoder."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

    context = SpanContext(1, 1, is_remote=False)
    span = ReadableSpan("", context, resource=resource, instrumentation_scope=scope, start_time=0, end_time=0)
    request: ExportTraceServiceRequest = encode_spans([span])
    return request


def request_parts(resource: Resource, scope: InstrumentationScope) -> RequestParts:
    """Returns resource and scope as OpenTelemetry's own encoder serializes them."""
    resource_spans = empty_request(resource, scope).resource_spans[0]
    scope_spans = resource_spans.scope_spans[0]
    return RequestParts(
        resource_spans.resource.SerializeToString(),
        resource_spans.schema_url.encode(),
        scope_spans.scope.SerializeToString(),
        scope_spans.schema_url.encode(),
    )


def _messages(spans: CheckedSpans, common: RequestParts, max_bytes: int) -> Iterator[tuple[memoryview, int]]:
    if spans.rows:
        yield from encode_otlp(spans.spans, common, spans.rows, message_size(max_bytes, sum(map(len, common))))
