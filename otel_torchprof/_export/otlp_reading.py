"""OTLP files, read in bounded memory: what ``OTLPFileExporter``, ``export_otlp`` and a Collector's file exporter write."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof._encode import otlp_json
from otel_torchprof.errors import TorchProfError

from .file import GZIP_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

LARGEST_PIECE = 64 << 20
"""Bytes of one line, or of one message: a piece is in memory as a whole."""
_READ_SIZE = 1 << 16
_RESOURCE_SPANS = 0x0A
_LONGEST_VARINT = 10
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Piece:
    """A part of a file that is a request by itself."""

    request: ExportTraceServiceRequest
    offset: int
    """Where it begins, in bytes before compression."""
    end: int


def pieces(path: str, offset: int = 0) -> Iterator[Piece]:
    """What is in the file from ``offset`` on, in order: one piece per line or message, each made when it is asked for.

    Raises:
        TorchProfError: the file cannot be read, is cut off or holds something else: after the last piece before that.
    """
    try:
        with Path(path).open("rb") as file:
            stream = _Stream(file)
            try:
                kind = stream.peek()
                stream.skip(offset)
                # A Collector's file exporter puts four bytes with its size before each message: none is above 16 MiB.
                yield from _lines(stream) if kind == b"{" else _sized(stream) if kind == b"\0" else _messages(stream)
            except _UnexpectedError as error:
                raise TorchProfError(f"{path}: at byte {error.offset}: {error}") from error
    except OSError as error:
        raise TorchProfError(f"cannot read {path!r}: {error.strerror or error}") from error


class _UnexpectedError(Exception):
    """Something else than what was expected is at an offset."""

    def __init__(self, offset: int, text: str) -> None:
        super().__init__(text)
        self.offset = offset


def _lines(stream: _Stream) -> Iterator[Piece]:
    while line := stream.line():
        offset = stream.offset - len(line)
        if not line.strip():
            continue
        try:
            request = otlp_json.request_of(line)
        except json.JSONDecodeError as error:
            if not line.endswith(b"\n"):
                raise _cut_off(offset, f"a line of JSON, of which {len(line)} bytes are there") from error
            raise _UnexpectedError(offset, f"expected a line of OTLP/JSON, found no JSON ({error})") from error
        except ValueError as error:  # of text that is no UTF-8 too
            raise _UnexpectedError(offset, f"{error}, in a line of {len(line)} bytes") from error
        yield _checked(request, offset, stream.offset)


def _messages(stream: _Stream) -> Iterator[Piece]:
    while tag := stream.take(1):
        offset = stream.offset - 1
        if tag[0] != _RESOURCE_SPANS:
            raise _UnexpectedError(
                offset,
                "expected OTLP for traces, as protobuf or as lines of JSON, maybe compressed with gzip; "
                f"found {(tag + stream.take(3)).hex(' ')}",
            )
        prefix = tag + stream.varint(offset)
        yield _parsed(prefix + stream.take_all(_size_of(prefix[1:], offset), offset), offset, stream.offset)


def _sized(stream: _Stream) -> Iterator[Piece]:
    while stream.peek():
        offset = stream.offset
        size = int.from_bytes(stream.take_all(4, offset), "big")
        if size > LARGEST_PIECE:
            raise _too_large(offset, size)
        yield _parsed(stream.take_all(size, offset), offset, stream.offset)


def _size_of(varint: bytes, offset: int) -> int:
    size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))
    if size > LARGEST_PIECE:
        raise _too_large(offset, size)
    return size


def _parsed(message: bytes, offset: int, end: int) -> Piece:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ExportTraceServiceRequest.FromString(message)
    except DecodeError as error:
        raise _UnexpectedError(offset, f"expected an OTLP message, found {len(message)} bytes that are none") from error
    return _checked(request, offset, end)


def _checked(request: ExportTraceServiceRequest, offset: int, end: int) -> Piece:
    """Metrics and logs look like spans from afar, but no ids of theirs would be as long."""
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if (len(span.trace_id), len(span.span_id)) != (16, 8):
                    raise _UnexpectedError(
                        offset,
                        "expected spans with ids of 16 and 8 bytes, "
                        f"found one with {len(span.trace_id)} and {len(span.span_id)}: other OTLP than traces?",
                    )
    return Piece(request, offset, end)


def _cut_off(offset: int, what: str) -> _UnexpectedError:
    return _UnexpectedError(offset, f"the file is cut off: here begins {what}")


def _too_large(offset: int, size: int) -> _UnexpectedError:
    return _UnexpectedError(offset, f"expected pieces of at most {LARGEST_PIECE} bytes, found one of {size}")


class _Stream:
    """Bytes of a file, decompressed where it is gzip; what is cut off ends there."""

    def __init__(self, file: BinaryIO) -> None:
        self.offset = 0
        """Of the next byte."""
        self._file = file
        self._buffer = bytearray()
        self._at = 0
        self._packed = file.read(_READ_SIZE)
        self._compressed = self._packed.startswith(_GZIP)
        self._unpacker = zlib.decompressobj(GZIP_FORMAT)

    def peek(self) -> bytes:
        """The next byte, if there is one."""
        self._fill(1)
        return bytes(self._buffer[self._at : self._at + 1])

    def take(self, size: int) -> bytes:
        """So many bytes, or what there is."""
        self._fill(size)
        return self._taken(min(size, len(self._buffer) - self._at))

    def take_all(self, size: int, begun: int) -> bytes:
        """So many bytes of what began at an offset. Raises _UnexpectedError where there are fewer."""
        found = self.take(size)
        if len(found) < size:
            raise _cut_off(begun, f"a message of {size} bytes, of which {len(found)} are there")
        return found

    def varint(self, begun: int) -> bytes:
        """The bytes of a number. Raises _UnexpectedError where there is none."""
        found = self.take_all(1, begun)
        while found[-1] & 0x80:
            if len(found) == _LONGEST_VARINT:
                raise _UnexpectedError(begun, f"expected the size of a message, found {found.hex(' ')}")
            found += self.take_all(1, begun)
        return found

    def line(self) -> bytes:
        """The next line with its end, the rest where it has none; empty when there is nothing more."""
        looked = 0
        while (end := self._buffer.find(b"\n", self._at + looked)) < 0:
            looked = len(self._buffer) - self._at
            if looked > LARGEST_PIECE:
                raise _too_large(self.offset, looked)
            if not self._fill(looked + 1):
                return self._taken(looked)
        return self._taken(end + 1 - self._at)

    def skip(self, size: int) -> None:
        """Passes over so many bytes, or what there is."""
        while size > 0 and (found := self.take(min(size, _READ_SIZE))):
            size -= len(found)

    def _taken(self, size: int) -> bytes:
        found = bytes(self._buffer[self._at : self._at + size])
        self._at += size
        self.offset += size
        return found

    def _fill(self, size: int) -> bool:
        """Reads until so many bytes are there; whether they are."""
        while len(self._buffer) - self._at < size:
            more = self._read()
            if not more:
                return False
            del self._buffer[: self._at]
            self._at = 0
            self._buffer += more
        return True

    def _read(self) -> bytes:
        """Some more bytes, nothing at the end."""
        while True:
            if not self._packed:
                self._packed = self._file.read(_READ_SIZE)
            packed, self._packed = self._packed, b""
            if not self._compressed or not packed:
                return packed
            try:
                found = self._unpacker.decompress(packed, _READ_SIZE)
            except zlib.error as error:
                raise _UnexpectedError(
                    self.offset, f"expected gzip, found something else after this byte ({error})"
                ) from error
            if self._unpacker.eof:
                self._packed = self._unpacker.unused_data.lstrip(b"\0")
                self._unpacker = zlib.decompressobj(GZIP_FORMAT)
            else:
                self._packed = self._unpacker.unconsumed_tail
            if found:
                return found
