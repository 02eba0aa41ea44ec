"""Spans as OTLP, written natively (``encode_otlp.h``, ``encode_otlp_json.h``). Thread-safe; without the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .ffi import ffi, lib
from .pieces import pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .span_columns import SpanColumns


class RequestParts(NamedTuple):
    """What all spans of a request have in common, serialized (``otp_otlp_common``)."""

    resource: bytes
    resource_schema_url: bytes
    scope: bytes
    scope_schema_url: bytes


class LineParts(NamedTuple):
    """The text of a request around its spans (``otp_otlp_json_frame``)."""

    head: bytes
    tail: bytes


def encode_otlp(spans: SpanColumns, parts: RequestParts, rows: range, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Serializes the spans of some rows, without gaps and rising: messages of ``max_bytes``, each with its number of spans.

    Raises:
        MemoryError: there is none left.
    """
    frame, _alive = _frame("otp_otlp_common *", parts)
    yield from pieces(
        lambda row, buffer: lib.otp_encode_otlp(spans.native, frame, row, rows.stop, max_bytes, buffer), rows
    )


def encode_otlp_json(spans: SpanColumns, parts: LineParts, rows: range, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """As :func:`encode_otlp`, lines of JSON."""
    frame, _alive = _frame("otp_otlp_json_frame *", parts)
    yield from pieces(
        lambda row, buffer: lib.otp_encode_otlp_json(spans.native, frame, row, rows.stop, max_bytes, buffer), rows
    )


def _frame(c_type: str, parts: RequestParts | LineParts) -> tuple[Any, object]:
    """A struct of ``otp_bytes``, and what must live as long."""
    views = {name: ffi.from_buffer("uint8_t[]", part) for name, part in parts._asdict().items()}
    return ffi.new(c_type, {name: {"data": part, "size": len(part)} for name, part in views.items()}), views
