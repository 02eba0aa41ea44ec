"""Pieces of files as requests of a size that receivers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_torchprof._encode.otlp import RECEIVERS_MAX_BYTES, message_size

from .messages import common_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from .otlp_reading import Piece


@dataclass(frozen=True)
class FileRequest:
    """A serialized request, and what of a file is in it."""

    body: bytes
    spans: int
    offset: int
    """Where the first piece in it begins."""
    end: int
    """Where the last one ends."""


def requests_of(pieces: Iterable[Piece], max_bytes: int) -> Iterator[FileRequest]:
    """Small pieces together and large ones apart, in order. What ``pieces`` raises is raised once all before it went."""
    waiting: FileRequest | None = None
    try:
        for piece in pieces:
            request = FileRequest(piece.request.SerializeToString(), _count(piece.request), piece.offset, piece.end)
            if waiting is not None and len(waiting.body) + len(request.body) > max_bytes:
                yield waiting
                waiting = None
            if len(request.body) > max_bytes:
                yield from halves(request, max_bytes)
            elif waiting is None:
                waiting = request
            else:  # messages end to end are one
                spans = waiting.spans + request.spans
                waiting = FileRequest(waiting.body + request.body, spans, waiting.offset, request.end)
    except Exception:
        if waiting is not None:
            yield waiting
        raise
    if waiting is not None:
        yield waiting


def halves(request: FileRequest, max_bytes: int) -> Iterator[FileRequest]:
    """The same spans in requests of at most so many bytes, or what a large resource needs; one that alone is larger goes alone."""
    if request.spans <= 1 or len(request.body) <= _size(request, max_bytes):
        yield request
        return
    for half in in_two(request):
        yield from halves(half, max_bytes)


def in_two(request: FileRequest) -> Iterator[FileRequest]:
    """The first and the second half of the spans."""
    found = _parsed(request)
    middle = request.spans // 2
    for first, last in ((0, middle), (middle, request.spans)):
        body = _some(found, first, last).SerializeToString()
        yield FileRequest(body, last - first, request.offset, request.end)


def _size(request: FileRequest, max_bytes: int) -> int:
    common = common_size(_parsed(request))
    # Whether a resource alone is too large is the receiver's to say: it may take more than others do.
    return message_size(max_bytes, common) if common < RECEIVERS_MAX_BYTES else len(request.body)


def _parsed(request: FileRequest) -> ExportTraceServiceRequest:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(request.body)
    return found


def _some(request: ExportTraceServiceRequest, first: int, last: int) -> ExportTraceServiceRequest:
    """The spans from ``first`` to ``last`` with their resources and scopes."""
    part = type(request)()
    at = 0
    for resource_spans in request.resource_spans:
        resource = None
        for scope_spans in resource_spans.scope_spans:
            count = len(scope_spans.spans)
            chosen = scope_spans.spans[max(first - at, 0) : max(last - at, 0)]
            at += count
            if not chosen:
                continue
            if resource is None:
                resource = part.resource_spans.add(schema_url=resource_spans.schema_url)
                resource.resource.CopyFrom(resource_spans.resource)
            scope = resource.scope_spans.add(schema_url=scope_spans.schema_url, spans=chosen)
            scope.scope.CopyFrom(scope_spans.scope)
    return part


def _count(request: ExportTraceServiceRequest) -> int:
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
