"""Spans as OTLP: serialized ``ExportTraceServiceRequest`` messages.

Messages end to end are one valid message again (repeated fields of protobuf add up), so a file of them can be posted to an
OTLP/HTTP receiver as it is, or read back with ``TracesData``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._model.units import LINK, AttributeType
from otel_torchprof._native.ffi import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._columns.batch import Names
    from otel_torchprof._model.units import AttributeColumn, SpanTable

DEFAULT_MAX_BYTES = 1024 * 1024
"""Receivers refuse gRPC messages over 4 MiB by default. A quarter of that is cheaper to make, since the buffer stays
warm from one message to the next (measured: 107 against 136 ns per span), and leaves a Collector room to add to it."""
PROTOBUF_MAX_BYTES = 2**31 - 1
"""Protobuf's own limit of a message."""

_COLUMNS = (
    ("name", np.dtype(np.uint32), "uint32_t[]"),
    ("start", np.dtype(np.int64), "int64_t[]"),
    ("end", np.dtype(np.int64), "int64_t[]"),
    ("trace", np.dtype(np.uint32), "uint32_t[]"),
    ("span_id", np.dtype(np.uint64), "uint64_t[]"),
    ("parent_span_id", np.dtype(np.uint64), "uint64_t[]"),
    ("error", np.dtype(np.uint8), "uint8_t[]"),
)


def encode(
    table: SpanTable, *, resource: Resource, scope: InstrumentationScope, max_bytes: int = DEFAULT_MAX_BYTES
) -> Iterator[bytes]:
    """Serializes the spans of ``table`` as OTLP trace requests of at most ``max_bytes`` bytes each.

    The bytes are the same as those of OpenTelemetry's own encoder. A span that alone exceeds ``max_bytes`` still goes, alone.
    A table without spans gives no message. Each message is made when it is asked for, without the GIL; only one is in
    memory at a time. Thread-safe; one iterator belongs to one thread.

    Raises ValueError when ``max_bytes`` is not from 1 to 2^31 - 1 (protobuf's limit), or when the table does not fit
    together; MemoryError.
    """
    if not 1 <= max_bytes <= PROTOBUF_MAX_BYTES:
        raise ValueError(
            f"max_bytes is {max_bytes}, but must be from 1 to {PROTOBUF_MAX_BYTES}; gRPC receivers take 4 MiB by default"
        )
    return _Request(table, resource, scope).messages(max_bytes)


class _Request:
    """A table, its resource and scope as C wants them; lends their memory to C for as long as this object lives."""

    def __init__(self, table: SpanTable, resource: Resource, scope: InstrumentationScope) -> None:
        self._alive: list[Any] = []
        self._spans = self.spans(table)
        self._common = self.common(table, resource, scope)

    def messages(self, max_bytes: int) -> Iterator[bytes]:
        """See :func:`encode`."""
        buffer = ffi.new("otp_buffer *")
        row = 0
        try:
            while row < self._spans.count:
                buffer.size = 0
                row = lib.otp_encode_otlp(self._spans, self._common, row, max_bytes, buffer)
                if row < 0:
                    raise MemoryError(f"no memory for an OTLP message of up to {max_bytes} bytes")
                yield bytes(ffi.buffer(buffer.data, buffer.size))
        finally:
            lib.otp_buffer_free(buffer)

    def array(self, name: str, values: Any, dtype: np.dtype[Any], ctype: str, count: int) -> Any:
        if values.dtype != dtype or len(values) != count:
            raise ValueError(f"column {name} holds {len(values)} {values.dtype}, but must hold {count} {dtype}")
        return self._keep(ffi.from_buffer(ctype, np.ascontiguousarray(values)))

    def raw(self, data: bytes) -> Any:
        return {"data": self._keep(ffi.from_buffer("uint8_t[]", data)), "size": len(data)}

    def _keep(self, pointer: Any) -> Any:
        self._alive.append(pointer)
        return pointer

    def spans(self, table: SpanTable) -> Any:
        """``otp_spans`` of a table, checked so that C reads nothing outside its arrays."""
        count, names = len(table), table.names
        _check_names(names)
        _check_index("name", table.name, len(names))
        _check_index("trace", table.trace, len(table.trace_ids))
        if table.trace_ids.dtype != np.uint8 or table.trace_ids.shape[1:] != (16,):
            raise ValueError(f"trace_ids has shape {table.trace_ids.shape}, but must hold 16 uint8 per trace")
        if not _rises(table.links["row"]):
            raise ValueError("links must be sorted by row")
        columns = {c: self.array(c, getattr(table, c), dtype, ctype, count) for c, dtype, ctype in _COLUMNS}
        attributes = [self.attribute(column, count, len(names)) for column in table.attributes]
        link_count = len(table.links)
        links = self.array("links", table.links, LINK, "char[]", link_count)
        return self._keep(
            ffi.new(
                "otp_spans *",
                {
                    **columns,
                    "count": count,
                    "trace_ids": self._keep(ffi.from_buffer("uint8_t[]", np.ascontiguousarray(table.trace_ids))),
                    "attributes": self._keep(ffi.new("otp_attribute[]", attributes)),
                    "attribute_count": len(attributes),
                    "links": ffi.cast("otp_link *", links),
                    "link_count": link_count,
                    "names": {
                        "data": self.array("names.data", names.data, np.dtype(np.uint8), "uint8_t[]", len(names.data)),
                        "ends": self.array("names.ends", names.ends, np.dtype(np.uint64), "uint64_t[]", len(names)),
                        "count": len(names),
                    },
                },
            )
        )

    def attribute(self, column: AttributeColumn, count: int, names: int) -> Any:
        if column.type == AttributeType.NAME:
            _check_index(column.key, column.values, names)
        key = column.key.encode()
        values = self.array(column.key, column.values, column.type.dtype, "char[]", count)
        present = ffi.NULL
        if column.present is not None:
            present = self.array(column.key, column.present, np.dtype(np.uint8), "uint8_t[]", count)
        return {
            "key": self._keep(ffi.from_buffer("char[]", key)),
            "key_size": len(key),
            "type": int(column.type),
            "values": ffi.cast("void *", values),
            "present": present,
        }

    def common(self, table: SpanTable, resource: Resource, scope: InstrumentationScope) -> Any:
        """``otp_otlp_common``: resource and scope as OpenTelemetry's own encoder serializes them."""
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext

        span = ReadableSpan(
            "",
            SpanContext(1, 1, is_remote=False),
            resource=resource,
            instrumentation_scope=scope,
            start_time=0,
            end_time=0,
        )
        resource_spans = encode_spans([span]).resource_spans[0]
        scope_spans = resource_spans.scope_spans[0]
        parent = table.parent
        return self._keep(
            ffi.new(
                "otp_otlp_common *",
                {
                    "resource": self.raw(resource_spans.resource.SerializeToString()),
                    "resource_schema_url": self.raw(resource_spans.schema_url.encode()),
                    "scope": self.raw(scope_spans.scope.SerializeToString()),
                    "scope_schema_url": self.raw(scope_spans.schema_url.encode()),
                    "trace_state": self.raw(parent.trace_state.to_header().encode() if parent else b""),
                    "remote_parent_span_id": parent.span_id if parent and parent.is_remote else 0,
                },
            )
        )


def _rises(values: Any) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_names(names: Names) -> None:
    if not _rises(names.ends) or (len(names) and int(names.ends[-1]) > len(names.data)):
        raise ValueError(f"names.ends must rise, up to at most the {len(names.data)} bytes of names.data")


def _check_index(column: str, values: Any, size: int) -> None:
    if len(values) and int(values.max()) >= size:
        raise ValueError(f"column {column} points to entry {values.max()}, but the table it points into has {size}")
