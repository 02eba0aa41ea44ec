"""Reads OTLP files of ``OTLPFileExporter``, ``export_otlp`` and a Collector's file exporter, in bounded memory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._encode import otlp_json
from otel_torchprof.errors import TorchProfError

from .byte_stream import LARGEST_PIECE, UnexpectedError, opened, too_large
from .json_stream import LARGEST_VALUE, JsonStream, UnusableError
from .otlp_wire import count_spans, parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .byte_stream import ByteStream

_RESOURCE_SPANS = 0x0A
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SNIFFED = 256
"""Bytes at the start of a file from which its format is detected."""
_SPACE = b" \t\r\n"
_MOST_SPACE = 64
"""Bytes of white space that no serialized message begins with: fields whose tags and sizes look like it do not nest so deeply."""
_JSON = re.compile(rb'\[[ \t\r\n]*(?:\]|\{)|\{[ \t\r\n]*(?:\}|"[^\x00-\x1f]|[ \t\r\n]{64})')
MOST_EMPTY = 100_000
"""Consecutive messages without a span: each costs up to 20 us, and a small file can have very many."""
_LONGEST_REASON = 500
"""Characters: errors of other libraries quote their input."""
LARGEST_PARSED = 1 << 20
"""Bytes of a message that is parsed whole: its objects take up to 90 times as much. Larger ones are split first."""
_MOST_BESIDE_SPANS = 1 << 18
"""Bytes of the resources and scopes in a large line."""


class Content(NamedTuple):
    """A part of a file that is a request by itself: serialized, or as JSON."""

    request: bytes | dict[str, Any]
    offset: int
    """Start in the file, in uncompressed bytes."""
    end: int
    """Its end; for a split request, its begin until the last part."""
    spans: int = -1
    """Number of spans in a serialized request; -1 for JSON."""


@dataclass(frozen=True)
class Piece:
    """A serialized request, and its place in the file."""

    body: bytes
    spans: int
    offset: int
    """Start in the file, in uncompressed bytes."""
    end: int


def pieces(path: str, offset: int = 0, watch: Callable[[ByteStream], None] = lambda _stream: None) -> Iterator[Piece]:
    """Iterates over the requests of a file from ``offset`` on; each is read on demand.

    ``watch`` gets the file, to see how far it has been read.

    Raises:
        TorchProfError: the file cannot be read, is cut off or has other content; the requests before it are yielded first.
    """
    with opened(path) as stream:
        watch(stream)
        try:
            for content in contents(stream, offset):
                yield _checked(content)
        except UnexpectedError as error:
            if error.end is None:
                raise
            way_out = f"{error}; --from {error.end} sends what follows it"
            raise UnexpectedError(error.offset, way_out) from error


class Frame(NamedTuple):
    """A request as it is in the file: serialized, or a line of JSON."""

    body: bytes
    offset: int
    """Start in the file, in uncompressed bytes."""
    end: int
    is_json: bool


def contents(stream: ByteStream, offset: int = 0) -> Iterator[Content]:
    """Yields the requests from ``offset`` on; large ones are split.

    Raises:
        UnexpectedError: the file has other content; the requests before it are yielded first.
    """
    empty = 0
    for frame in frames(stream, offset):
        for content in _parsed_line(frame, stream) if frame.is_json else _parts(frame):
            empty = 0 if content.spans else empty + 1
            if empty > MOST_EMPTY:
                raise without_spans(content.offset)
            if content.spans:
                yield content


def without_spans(offset: int) -> UnexpectedError:
    """The error for a file with more than :data:`MOST_EMPTY` messages in a row without a span."""
    return UnexpectedError(offset, f"expected spans, found {MOST_EMPTY:,} messages in a row without one")


def frames(stream: ByteStream, offset: int = 0) -> Iterator[Frame]:
    """Yields the requests from ``offset`` on as they are in the file.

    Raises:
        UnexpectedError: the file has other content; the requests before it are yielded first.
    """
    start = stream.peek(SNIFFED)
    kind = start[:4]
    if not kind:
        stream.check_end()
        raise UnexpectedError(0, "the file is empty")
    if (passed := stream.skip(offset)) < offset:
        raise TorchProfError(
            f"--from is {offset}, and the file has {passed} bytes: give the number that the last run said"
        )
    # A Collector's file exporter puts four bytes with its size before each message: none is above 16 MiB.
    if kind[:1] == b"\0":
        yield from _sized(stream)
    elif is_json(start):
        yield from _lines(stream)
    elif kind[0] == _RESOURCE_SPANS:
        yield from _messages(stream)
    else:
        raise UnexpectedError(
            offset,
            "expected OTLP for traces, as protobuf or as lines of JSON, maybe compressed with gzip; "
            f"found {kind.hex(' ')}",
        )
    stream.check_end()


def is_json(start: bytes) -> bool:
    """Whether a file with this start is JSON. A byte order mark or white space may precede it: Kineto writes a line feed.

    A serialized message begins with a line feed too, and the byte of its size may be a brace or a bracket; but none of its fields
    begins like a member of an object, with a quotation mark and a character that is no control character.
    """
    text = start.removeprefix(BYTE_ORDER_MARK).lstrip(_SPACE)
    if start[:1] != b"\n" or not text or len(start) - len(text) >= _MOST_SPACE:
        return text[:1] in {b"{", b"[", b""}
    return _JSON.match(text) is not None


# ---- lines of JSON ----


def _lines(stream: ByteStream) -> Iterator[Frame]:
    if stream.peek(3) == BYTE_ORDER_MARK:
        stream.skip(3)
    while stream.skip_space():
        offset = stream.offset
        yield Frame(stream.line(), offset, stream.offset, is_json=True)


def _parsed_line(frame: Frame, stream: ByteStream) -> Iterator[Content]:
    line, offset = frame.body, frame.offset
    if len(line) > LARGEST_VALUE:
        yield from _with_end(_parts_of_line(line, offset), frame.end)
        return
    try:
        yield Content(otlp_json.parsed(line), offset, frame.end)
    except json.JSONDecodeError as error:
        if not line.endswith(b"\n"):
            raise line_cut_off(stream, frame) from error
        text = f"expected a line of OTLP/JSON, found no JSON ({error})"
        raise UnexpectedError(offset, text, frame.end) from error
    except ValueError as error:  # includes UnicodeDecodeError
        text = f"{str(error)[:_LONGEST_REASON]}, in a line of {len(line)} bytes"
        raise UnexpectedError(offset, text, frame.end) from error


def line_cut_off(stream: ByteStream, frame: Frame) -> UnexpectedError | OSError:
    """The error for a last line that is no JSON and has no end."""
    return stream.cut_off(frame.offset, f"a line of JSON, of which {len(frame.body)} bytes are there")


def _parts_of_line(line: bytes, offset: int) -> Iterator[Content]:
    """Splits a large line into several requests with the same spans in the same order."""
    text = _text_of(line, offset)
    has_spans = False
    for name in text.members():
        has_spans |= name == "resourceSpans"
        if name != "resourceSpans":
            text.skip()
            continue
        for _ in text.elements():
            yield from _parts_of_resource(line, text, offset)
    if not has_spans:
        raise UnexpectedError(offset, "expected an object with resourceSpans, found another one")


def _parts_of_resource(line: bytes, text: JsonStream, offset: int) -> Iterator[Content]:
    """Splits one ResourceSpans. Resource and scope may follow their spans, so all of it is read before a part is yielded."""
    resource: dict[str, Any] = {}
    scopes: list[tuple[dict[str, Any], list[tuple[int, int]]]] = []
    begin, of_spans = text.offset, 0
    for name in text.members():
        if name != "scopeSpans":
            resource[name] = _small(text)
            continue
        for _ in text.elements():
            scope: dict[str, Any] = {}
            batches: list[tuple[int, int]] = []
            for inner in text.members():
                if inner == "spans":
                    batches += _batches(text)
                else:
                    scope[inner] = _small(text)
            scopes.append((scope, batches))
            of_spans += sum(last - first for first, last in batches)
            if text.offset - begin - of_spans > _MOST_BESIDE_SPANS:
                raise UnexpectedError(
                    begin, f"expected resources and scopes of at most {_MOST_BESIDE_SPANS} bytes; write smaller batches"
                )
    for scope, batches in scopes:
        for first, last in batches:
            spans = json.loads(b"[" + line[first - offset : last - offset] + b"]")
            request = {"resourceSpans": [{**resource, "scopeSpans": [{**scope, "spans": spans}]}]}
            yield Content(request, offset, offset)


def _batches(text: JsonStream) -> list[tuple[int, int]]:
    """Splits an array of spans into batches of at most :data:`LARGEST_PARSED` bytes; returns the start and end of each."""
    batches: list[tuple[int, int]] = []
    first = last = -1
    for _ in text.elements():
        _small(text)
        begin, end = text.value_offset, text.offset
        if first >= 0 and end - first > LARGEST_PARSED:
            batches.append((first, last))
            first = begin
        first, last = (begin if first < 0 else first), end
    return [*batches, *([(first, last)] if first >= 0 else [])]


def _small(text: JsonStream) -> Any:
    try:
        return text.value()
    except UnusableError as error:
        raise UnexpectedError(text.value_offset, f"expected values that are not too large, found {error}") from error


def _text_of(line: bytes, offset: int) -> JsonStream:
    blocks = iter([line[at : at + (1 << 16)] for at in range(0, len(line), 1 << 16)])
    return JsonStream(lambda: next(blocks, b""), offset)


# ---- protobuf ----


def _messages(stream: ByteStream) -> Iterator[Frame]:
    while tag := stream.take(1):
        offset = stream.offset - 1
        if tag[0] != _RESOURCE_SPANS:
            raise UnexpectedError(
                offset, f"expected OTLP for traces, as protobuf; found {(tag + stream.take(3)).hex(' ')}"
            )
        prefix = tag + stream.varint(offset)
        body = prefix + stream.take_all(_size_of(prefix[1:], offset), offset)
        yield Frame(body, offset, stream.offset, is_json=False)


def _sized(stream: ByteStream) -> Iterator[Frame]:
    while stream.peek():
        offset = stream.offset
        size = int.from_bytes(stream.take_all(4, offset), "big")
        if size > LARGEST_PIECE:
            raise too_large(offset, size)
        if not size:
            raise UnexpectedError(offset, "expected the size of a message, found 0")
        yield Frame(stream.take_all(size, offset), offset, stream.offset, is_json=False)


def _size_of(varint: bytes, offset: int) -> int:
    size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))
    if size > LARGEST_PIECE:
        raise too_large(offset, size)
    return size


def _parts(frame: Frame) -> Iterator[Content]:
    offset = frame.offset
    try:
        bodies = parts(frame.body, LARGEST_PARSED)
        yield from _with_end((Content(body, offset, offset, spans) for body, spans in bodies), frame.end)
    except ValueError as error:
        raise UnexpectedError(offset, str(error), frame.end) from error


def _with_end(parts: Iterator[Content], end: int) -> Iterator[Content]:
    """Sets the end of the last part to that of the whole request."""
    last: Content | None = None
    for part in parts:
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last._replace(end=end)


def _checked(content: Content) -> Piece:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request, spans = content.request, content.spans
    end = content.end if content.end > content.offset else None
    try:
        if isinstance(request, dict):
            request = otlp_json.request_of(request).SerializeToString()
            spans = count_spans(request)
        elif len(request) <= LARGEST_PARSED:  # larger only for a single span: the receiver decides
            ExportTraceServiceRequest.FromString(request)
    except DecodeError as error:
        text = f"expected an OTLP message, found {len(request)} bytes that are none"
        raise UnexpectedError(content.offset, text, end) from error
    except ValueError as error:
        raise UnexpectedError(content.offset, str(error)[:_LONGEST_REASON], end) from error
    return Piece(request, spans, content.offset, content.end)
