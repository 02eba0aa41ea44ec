"""Splits serialized OTLP requests without parsing them: needs no memory for nested messages."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESOURCE_SPANS = 0x0A
"""Tag of ``resource_spans`` in a request: the number of the field, and its wire type, here length-delimited."""
_SCOPE_SPANS = 0x12
"""Tag of ``scope_spans`` in a ResourceSpans."""
_SPANS = 0x12
"""Tag of ``spans`` in a ScopeSpans."""
_IDS = {0x0A: 16, 0x12: 8}
"""By tag of ``trace_id`` and ``span_id`` in a Span, the size of the id in bytes."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def count_spans(request: bytes) -> int:
    """Number of spans in a serialized request; 3 us each.

    Raises:
        ValueError: it is not OTLP for traces. Metrics and logs have the same outer fields, but no ids of these sizes.
    """
    count = 0
    for scope_spans in _scopes(request):
        for tag, _, span in _fields(scope_spans):
            if tag == _SPANS:
                _check_ids(span)
                count += 1
    return count


def parts(request: bytes, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Splits a request into requests of at most ``max_bytes``; yields each with its number of spans. A larger span is alone in one.

    Each has the resource and the scope of its spans. If these take up most of the limit, the spans still get a quarter of it.
    """
    if len(request) <= max_bytes:
        yield request, count_spans(request)
        return
    for tag, _, resource_spans in _fields(memoryview(request)):
        if tag != _RESOURCE_SPANS:
            continue
        shared = _all_but(_SCOPE_SPANS, resource_spans)
        for inner, _, scope_spans in _fields(resource_spans):
            if inner == _SCOPE_SPANS:
                scope = _all_but(_SPANS, scope_spans)
                room = max(max_bytes - len(shared) - len(scope) - 24, max_bytes // 4)
                for spans in _batches(scope_spans, room):
                    body = _field(_SCOPE_SPANS, scope + b"".join(spans))
                    yield _field(_RESOURCE_SPANS, shared + body), len(spans)


def common_size(request: bytes) -> int:
    """Bytes of the largest resource with one of its scopes: these are repeated in every part of a split request."""
    largest = 0
    for tag, _, resource_spans in _fields(memoryview(request)):
        if tag == _RESOURCE_SPANS:
            scopes = (
                len(_all_but(_SPANS, value)) for inner, _, value in _fields(resource_spans) if inner == _SCOPE_SPANS
            )
            largest = max(largest, len(_all_but(_SCOPE_SPANS, resource_spans)) + max(scopes, default=0))
    return largest


def _all_but(left_out: int, message: memoryview) -> bytes:
    remaining = bytearray()  # a list of many small fields would take a hundred times as much memory
    for tag, field, _ in _fields(message):
        if tag != left_out:
            remaining += field
    return bytes(remaining)


def _batches(scope_spans: memoryview, room: int) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    size = 0
    for tag, field, span in _fields(scope_spans):
        if tag != _SPANS:
            continue
        _check_ids(span)
        if batch and size + len(field) > room:
            yield batch
            batch, size = [], 0
        batch.append(field)
        size += len(field)
    if batch:
        yield batch


def _scopes(request: bytes) -> Iterator[memoryview]:
    for tag, _, resource_spans in _fields(memoryview(request)):
        if tag == _RESOURCE_SPANS:
            for inner, _, scope_spans in _fields(resource_spans):
                if inner == _SCOPE_SPANS:
                    yield scope_spans


def _check_ids(span: memoryview) -> None:
    sizes = {0x0A: 0, 0x12: 0}
    for tag, _, value in _fields(span):
        if tag in _IDS:
            sizes[tag] = len(value)
            if sizes == _IDS:
                return
    trace_id, span_id = sizes.values()
    raise ValueError(
        f"expected spans with ids of 16 and 8 bytes, found one with {trace_id} and {span_id}: other OTLP than traces?"
    )


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yields tag, all bytes, and value of each field."""
    at, end = 0, len(message)
    while at < end:
        begin = at
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(message, at)
            stop = at + size
        elif kind == _VARINT:
            stop = _varint(message, at)[1]
        elif kind in {_FIXED64, _FIXED32}:
            stop = at + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"expected an OTLP message, found a field of type {kind}")
        if stop > end:
            raise ValueError(
                f"expected an OTLP message, found a field that is {stop - end} bytes longer than its message"
            )
        yield tag, message[begin:stop], message[at:stop]
        at = stop


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns the varint at ``at``, and its end."""
    value = shift = 0
    for byte in message[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
    raise ValueError("expected an OTLP message, found one that ends in a number, or a number of more than 64 bits")


def _field(tag: int, value: bytes) -> bytes:
    size, prefix = len(value), bytearray([tag])
    while size > 0x7F:  # noqa: PLR2004 - seven bits each
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + value


# ---- Allowed settings of an OTLP exporter ----


Number = TypeVar("Number", int, float)

GRPC = "grpc"
HTTP = "http/protobuf"
GZIP = "gzip"
NONE = "none"

_COMPRESSIONS = {"none": NONE, "nocompression": NONE, "gzip": GZIP}
"""By the names in the enums of grpc and of OpenTelemetry's exporters, in lower case."""
_RESOLVERS = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"}
"""Schemes of gRPC's own name resolvers."""


def protocol(value: str) -> str:
    name = value.strip().lower()
    if name not in {GRPC, HTTP}:
        raise ValueError(f"allowed are {GRPC!r} and {HTTP!r}")
    return name


def grpc_endpoint(value: str) -> tuple[str, str]:
    """Returns the scheme, or "" if it does not decide about TLS, and the target without user and password, which gRPC ignores."""
    parts = _split(value)
    if not parts.netloc or parts.scheme in _RESOLVERS:
        scheme, target = "", value.rpartition("@")[2]
    else:
        scheme, target = parts.scheme, parts.netloc.rpartition("@")[2]
    if not target or re.search(r"\s", target) or (parts.netloc and scheme and not parts.hostname):
        raise ValueError("allowed is http://host:port, https://host:port or host:port")
    return scheme, target


def http_endpoint(value: str) -> str:
    parts = _split(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or re.search(r"\s", value):
        raise ValueError("allowed is a URL that begins with http:// or https://")
    return value


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for one that is no number)
    except ValueError:
        raise ValueError("allowed is a URL with a host, and a port from 0 to 65535") from None
    return parts


def seconds(value: Any) -> float:
    seconds = _number(value, float)
    if not 0 < seconds < math.inf:
        raise ValueError("allowed is a number of seconds above 0")
    return seconds


def above_zero(value: Any, kind: type[Number]) -> Number:
    number = _number(value, kind)
    if not 0 < number < math.inf:
        raise ValueError(f"allowed is a {'whole ' if kind is int else ''}number above 0")
    return number


def _number(value: Any, kind: type[Number]) -> Number:
    """Returns the value as a number; 0, which no caller allows, if it is not one."""
    try:
        number = kind(value)
        return number if number == float(value) else kind(0)
    except (TypeError, ValueError, OverflowError):
        return kind(0)


def compression(value: Any) -> str:
    name = _COMPRESSIONS.get(str(getattr(value, "name", value)).strip().lower())
    if name is None:
        raise ValueError(f"allowed are {GZIP!r} and {NONE!r}")
    return name


def boolean(value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise ValueError("allowed are true and false")
    return value.lower() == "true"


def readable(value: Any) -> str:
    path = os.fspath(value)
    try:
        with Path(path).open("rb"):
            return str(path)
    except OSError as error:
        raise ValueError(f"it must be a file that can be read ({error.strerror})") from None
