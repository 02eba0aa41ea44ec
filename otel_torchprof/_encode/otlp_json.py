"""Encodes spans as OTLP/JSON: one ``ExportTraceServiceRequest`` per line, as in the specification of the file exporter.

This is protobuf's JSON, except that ids are hexadecimal digits and enumerations are numbers.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from otel_torchprof._native.encoders import LineParts, encode_otlp_json

from .otlp import DEFAULT_MAX_BYTES, checked_rows, empty_request, message_size
from .spans import CheckedSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._model.span_table import SpanTable

_IDS = ("traceId", "spanId", "parentSpanId")


def is_json(path: str) -> bool:
    """Whether the name of a file means JSON: ``.json`` or ``.jsonl``, with or without ``.gz``."""
    return path.removesuffix(".gz").endswith((".json", ".jsonl"))


def encode_counted(
    table: SpanTable,
    *,
    resource: Resource,
    scope: InstrumentationScope,
    max_bytes: int = DEFAULT_MAX_BYTES,
    rows: range | None = None,
) -> Iterator[tuple[memoryview, int]]:
    """As ``encode_counted`` of ``otlp``, but yields lines of at most ``max_bytes`` bytes, each with its number of spans.

    Each line is encoded on demand, without the GIL.
    """
    spans = CheckedSpans(table, checked_rows(table, rows, max_bytes))
    return _lines(spans, _enclosing(resource, scope), max_bytes)


def _lines(spans: CheckedSpans, enclosing: LineParts, max_bytes: int) -> Iterator[tuple[memoryview, int]]:
    if spans.rows:
        yield from encode_otlp_json(
            spans.spans, enclosing, spans.rows, message_size(max_bytes, sum(map(len, enclosing)))
        )


def _enclosing(resource: Resource, scope: InstrumentationScope) -> LineParts:
    """Returns the text of a request before and after its spans."""
    request = _as_dict(empty_request(resource, scope))
    # Spans are the last member, so that the text can be cut there; the order of members has no meaning.
    resource_spans = request["resourceSpans"][0]
    scope_spans = resource_spans.pop("scopeSpans")[0]
    del scope_spans["spans"]
    text = _text({**resource_spans, "scopeSpans": [{**scope_spans, "spans": []}]})
    end = "]}]}"
    return LineParts(b'{"resourceSpans":[' + text.removesuffix(end).encode(), end.encode() + b"]}\n")


def line_of(request: ExportTraceServiceRequest) -> bytes:
    """Encodes any request as a line. Costs some 50 us per span."""
    return _text(_as_dict(request)).encode() + b"\n"


def parsed(line: bytes) -> dict[str, Any]:
    """Parses a line of JSON: an object with ``resourceSpans``, otherwise unchecked.

    Raises:
        ValueError: it is not such an object; the message says why.
    """
    try:
        document = json.loads(line)
    except RecursionError as error:
        raise ValueError("expected an ExportTraceServiceRequest: it is nested too deeply") from error
    if not isinstance(document, dict) or not isinstance(document.get("resourceSpans"), list):
        members = ", ".join(sorted(document)[:5])[:200] if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"expected an object with resourceSpans, found {members or 'an empty one'}")  # noqa: TRY004 - of a file
    return document


def request_of(line: bytes | dict[str, Any]) -> ExportTraceServiceRequest:
    """Parses a line; ignores unknown members, as the specification requires.

    Args:
        line: its text, or the result of :func:`parsed`, which is modified.

    Raises:
        ValueError: it is not a trace request; the message says why.
    """
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    document = parsed(line) if isinstance(line, bytes) else line
    try:
        _change_ids(document, lambda digits: base64.b64encode(bytes.fromhex(digits)).decode())
        request: ExportTraceServiceRequest = json_format.ParseDict(
            document, ExportTraceServiceRequest(), ignore_unknown_fields=True
        )
    except RecursionError as error:
        raise ValueError("expected an ExportTraceServiceRequest: it is nested too deeply") from error
    # SystemError: raised by upb for a member whose name is a lone surrogate.
    except (json_format.ParseError, TypeError, AttributeError, LookupError, ArithmeticError, SystemError) as error:
        raise ValueError(f"expected an ExportTraceServiceRequest: {error}") from error
    return request


def _as_dict(request: ExportTraceServiceRequest) -> Any:
    from google.protobuf import json_format

    document = json_format.MessageToDict(request, use_integers_for_enums=True)
    _change_ids(document, lambda text: base64.b64decode(text).hex())
    return document


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _change_ids(request: dict[str, Any], changed: Callable[[str], str]) -> None:
    for resource_spans in request.get("resourceSpans") or ():
        for scope_spans in resource_spans.get("scopeSpans") or ():
            for span in scope_spans.get("spans") or ():
                for having in (span, *(span.get("links") or ())):
                    for name in _IDS:
                        if name in having:
                            having[name] = changed(having[name])
