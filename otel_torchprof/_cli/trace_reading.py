"""Reading trace files event by event: Chrome JSON, this package's and torch's; OTLP, as protobuf and as lines of JSON.

Nothing in a file is trusted: whatever it holds, memory is bounded, what can be read is counted, and the rest is reported.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from otel_torchprof._export.byte_stream import UnexpectedError, opened, place
from otel_torchprof._export.json_stream import JsonStream, UnusableError
from otel_torchprof._export.otlp_reading import BYTE_ORDER_MARK, LARGEST_PARSED, contents
from otel_torchprof._tree.span_table import STEP_NAME
from otel_torchprof._tree.tree import STEP_PREFIX
from otel_torchprof.errors import TorchProfError

from .trace_sums import DURATIONS, UNFINISHED, WANTED, TraceSums

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._export.otlp_reading import Content

_NOT_SHOWN = frozenset(("Trace", "overhead", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"))
"""Categories of slices that are no work of the CPU."""
_STEPS_TRACK = 2**31 - 1
"""On which this package's profiles draw their steps, beside what they hold."""
_LARGEST_NUMBER = 1 << 61
"""Of nanoseconds: sums of two are 64-bit numbers."""
_LONGEST_KEY = 64
"""Characters of what tells tracks and traces apart."""


def read(path: str) -> tuple[TraceSums, list[str]]:
    """What a file holds, and what is to be said of it: nothing where all was read, and all is exact.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """
    reading = _Reading()
    try:
        with opened(path) as stream:
            reading.read(stream)
    except TorchProfError as error:
        if not len(reading.sums):
            raise
        reading.problems.append(f"{error}; what comes before that is counted")
    except KeyboardInterrupt:
        if not len(reading.sums):
            raise
        reading.problems.append(f"{path!r}: interrupted; what was read before that is counted")
    if reading.unusable:
        reading.problems.append(f"{path!r}: not counted: {reading.unusable:,}; the first: {reading.first}")
    if not len(reading.sums):
        raise TorchProfError(
            "; ".join(reading.problems) or f"{path!r} is a trace without a span; nothing is to be shown"
        )
    return reading.sums, reading.problems


class _MalformedError(ValueError):
    """An event that cannot be counted; those after it can."""


class _Reading:
    """A file on its way into sums."""

    def __init__(self) -> None:
        self.sums = TraceSums()
        self.problems: list[str] = []
        self.unusable = 0
        self.first = ""

    def read(self, stream: ByteStream) -> None:
        """Reads all of it. Raises UnexpectedError, or OSError, where no more can be read."""
        start = stream.peek(256)
        mark = BYTE_ORDER_MARK if start.startswith(BYTE_ORDER_MARK) else b""
        text = start.removeprefix(mark).lstrip()
        # A serialized message begins with what is white space in JSON, and its size may be a brace.
        if start[:1] == b"\n" or text[:1] not in {b"[", b"{"} or re.match(rb'\{\s*"resource', text):
            self._read_otlp(stream)
        else:
            stream.skip(len(mark))
            self._read_chrome(JsonStream(stream.some, stream.offset), stream)

    def _read_otlp(self, stream: ByteStream) -> None:
        for number, content in enumerate(contents(stream), 1):
            spans = _spans(content)
            unread = True
            while unread:
                try:
                    for span in spans:
                        add = _add_json_span if isinstance(span, dict) else _add_protobuf_span
                        add(span, self.sums)
                    unread = False
                except _MalformedError as error:  # noqa: PERF203 - one that cannot be counted does not stop the others
                    self._note(f"{error}, in message {number}, {place(stream, content.offset)}")

    def _read_chrome(self, text: JsonStream, stream: ByteStream) -> None:
        """What comes after the events is not looked at."""
        if text.peek() == "{":
            for name in text.members():
                if name == "traceEvents":
                    break
                text.skip()
            else:
                expected = "traceEvents of a Chrome trace, or resourceSpans of OTLP"
                raise UnexpectedError(text.offset, f"expected an object with {expected}, found one with neither")
        for number, _ in enumerate(text.elements(), 1):
            try:
                event = text.value()
                if type(event) is dict and event.get("ph") == "X":
                    _add_slice(event, self.sums)
            except (UnusableError, _MalformedError) as error:  # noqa: PERF203 - it does not stop the others
                self._note(f"{error}, event {number}, {place(stream, text.value_offset)}")

    def _note(self, text: str) -> None:
        self.unusable += 1
        self.first = self.first or text


# ---- Chrome JSON ----


def _add_slice(event: dict[str, Any], sums: TraceSums) -> None:
    name, category = _text(event.get("name", ""), "name"), event.get("cat")
    if isinstance(category, str) and category in _NOT_SHOWN:
        return
    start, duration = _rounded(event.get("ts", 0), 1000, "ts"), max(0, _rounded(event.get("dur", 0), 1000, "dur"))
    args = _object(event.get("args") or {}, "args")
    span_id = args.get("span_id")
    if isinstance(span_id, str):
        ids = _id(span_id, "span_id"), _id(args.get("parent_id") or "0", "parent_id"), _key(args.get("trace_id"))
        attributes = _object(args.get("attributes") or {}, "attributes")
        sums.add_span(
            STEP_NAME if name.startswith(STEP_PREFIX) else name,
            start,
            duration,
            ids,
            _amounts((key, attributes[key]) for key in WANTED & attributes.keys()),
        )
        return
    track = _key(event.get("pid")), _key(event.get("tid"))
    if track[1] == _STEPS_TRACK:
        sums.add_step(name, start, duration)
    else:
        sums.add_slice(name, start, duration, track)


# ---- OTLP ----


def _spans(content: Content) -> Iterator[Any]:
    """Of JSON the objects, of protobuf the messages."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = content.request
    if isinstance(request, dict):
        for resource in _objects(request, "resourceSpans"):
            for scope in _objects(resource, "scopeSpans"):
                yield from _objects(scope, "spans")
        return
    if len(request) > LARGEST_PARSED:
        raise _MalformedError(f"spans with {len(request):,} bytes of one span, or of their resource")
    for resource_spans in _parsed(ExportTraceServiceRequest, request).resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield from scope_spans.spans


def _parsed(kind: Any, message: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise _MalformedError(f"{len(message):,} bytes that are no OTLP message") from error


def _add_json_span(span: dict[str, Any], sums: TraceSums) -> None:
    name = _text(span.get("name", ""), "name")
    start, end = (_whole(span.get(f"{which}TimeUnixNano", 0), f"{which}TimeUnixNano") for which in ("start", "end"))
    ids = _id(span.get("spanId") or "0", "spanId"), _id(span.get("parentSpanId") or "0", "parentSpanId")
    found = ((a.get("key"), a.get("value")) for a in _objects(span, "attributes"))
    amounts = _amounts(
        (key, next(iter(_object(value, key).values()), 0))
        for key, value in found
        if isinstance(key, str) and key in WANTED
    )
    sums.add_span(name, start, max(0, end - start), (*ids, _key(span.get("traceId"))), amounts)


def _add_protobuf_span(span: Any, sums: TraceSums) -> None:
    ids = (*(int.from_bytes(each[-8:], "big") for each in (span.span_id, span.parent_span_id)), span.trace_id[:16])
    start, end = (_whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    found = (
        (a.key, getattr(a.value, a.value.WhichOneof("value") or "int_value"))
        for a in span.attributes
        if a.key in WANTED
    )
    sums.add_span(span.name, start, max(0, end - start), ids, _amounts(found))


# ---- what values may be ----


def _amounts(attributes: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """The attributes that are looked at, as numbers that can be added up."""
    return {
        key: bool(value) if key == UNFINISHED else _seconds(value, key) if key in DURATIONS else _whole(value, key)
        for key, value in attributes
    }


def _seconds(value: Any, what: str) -> float:
    return max(0, _rounded(value, 1e9, what)) / 1e9


def _rounded(value: Any, scale: float, what: str) -> int:
    try:
        found = round(float(value) * scale)
    except (TypeError, ValueError, OverflowError):
        raise _malformed(value, what, "a number") from None
    if abs(found) > _LARGEST_NUMBER:
        raise _malformed(value, what, f"at most {_LARGEST_NUMBER / scale:.0f}")
    return found


def _whole(value: Any, what: str) -> int:
    """A number from 0 on; protobuf writes those of 64 bits as texts into JSON."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        raise _malformed(value, what, "a whole number") from None
    if not 0 <= found <= _LARGEST_NUMBER:
        raise _malformed(value, what, f"a number from 0 to {_LARGEST_NUMBER}")
    return found


def _id(value: Any, what: str) -> int:
    try:
        found = int(value, 16)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found < 1 << 64:
        raise _malformed(value, what, "16 hexadecimal digits")
    return found


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _malformed(value, what, "a text")
    return value


def _key(value: Any) -> Any:
    """What may tell tracks, or traces, apart."""
    if isinstance(value, str):
        return value[:_LONGEST_KEY]
    return value if isinstance(value, int | float | None) else None


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(value, what, "an object")
    return value


def _objects(parent: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    found = parent.get(name) or []
    if not isinstance(found, list):
        raise _malformed(found, name, "a list")
    for each in found:
        yield _object(each, name)


def _malformed(value: Any, what: str, expected: str) -> _MalformedError:
    displayed = repr(value[:30]) if isinstance(value, str) else str(value) if isinstance(value, float | bool) else ""
    return _MalformedError(f"{what} is {displayed or 'of type ' + type(value).__name__}, expected {expected}")
