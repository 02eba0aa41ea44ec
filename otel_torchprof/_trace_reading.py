"""Reading trace files event by event: Chrome JSON, this package's and torch's; OTLP, as protobuf and as lines of JSON."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ._export.file import GZIP_FORMAT
from ._trace_sums import WANTED, TraceSums
from .errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CHUNK = 1 << 20
_LARGEST_EVENT = 64 << 20
"""Characters; what is not whole by then never will be."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_RESOURCE_SPANS = 0x0A
"""The first byte of an ``ExportTraceServiceRequest``: field 1, a message."""
_NOT_SHOWN = frozenset(("Trace", "overhead", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"))
"""Categories of slices that are no work of the CPU."""
_STEPS_TRACK = 2**31 - 1
"""On which this package's profiles draw their steps, beside what they hold."""


def read(path: str) -> tuple[TraceSums, str]:
    """What a file holds, and a note where it ends too early or cannot be understood from some place on; else the empty text.

    Raises:
        TorchProfError: it cannot be read, or is no trace.
    """
    sums = TraceSums()
    try:
        with _opened(path) as file:
            start = file.peek(64).lstrip()[:16]
            note = _reader(start)(file, sums)
    except OSError as error:
        raise TorchProfError(f"{path!r} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        note = f"the file is cut short, or damaged ({error})"
    if not len(sums):
        raise TorchProfError(
            f"{path!r} has no span that can be read: it holds none, is cut short before the first, or is neither Chrome JSON nor OTLP"
        )
    return sums, note


@contextlib.contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    with Path(path).open("rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            yield io.BufferedReader(_Inflated(file), _CHUNK)
        else:
            yield file


class _Inflated(io.RawIOBase):
    """What gzip made of a stream; one that is cut short ends where the data do, and the last of them are there."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._inflater = zlib.decompressobj(GZIP_FORMAT)
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found:
            data = self._inflater.unconsumed_tail or self._waiting or self._file.read(_CHUNK)
            self._waiting = b""
            if not data:
                return 0
            found = self._inflater.decompress(data, len(buffer))
            if self._inflater.eof:  # another member may follow
                self._waiting = self._inflater.unused_data
                self._inflater = zlib.decompressobj(GZIP_FORMAT)
        buffer[: len(found)] = found
        return len(found)


def _reader(start: bytes) -> Callable[[BinaryIO, TraceSums], str]:
    if start[:1] == b"[":
        return _read_chrome
    if start[:1] == b"{":
        return _read_otlp_json if re.match(rb'\{\s*"resource', start) else _read_chrome
    return _read_protobuf


# ---- Chrome JSON ----


def _read_chrome(file: BinaryIO, sums: TraceSums) -> str:
    events = _Elements(file)
    for event in events:
        if type(event) is dict and event.get("ph") == "X" and event.get("cat") not in _NOT_SHOWN:
            _add_slice(event, sums)
    return events.note


class _Elements:
    """The events of a document one by one; more of it than the next one is never held."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self.note = ""

    def __iter__(self) -> Iterator[Any]:
        if not self._find_events():
            return
        decode, at = json.JSONDecoder().raw_decode, 0
        skip = re.compile(r"[\s,]*").match
        while True:
            at = skip(self._text, at).end()  # type: ignore[union-attr]
            if self._text[at : at + 1] == "]":
                return
            try:
                event, at = decode(self._text, at)
            except json.JSONDecodeError:
                self._text, at = self._text[at:], 0
                if len(self._text) > _LARGEST_EVENT or not self._more():
                    self.note = "the file is cut short, or damaged: what comes after that is not counted"
                    return
            else:
                yield event

    def _find_events(self) -> bool:
        while self._more():
            found = _EVENTS.search(self._text)
            begin = found.end() if found else 1 if self._text.lstrip()[:1] == "[" else 0
            if begin:
                self._text = self._text.lstrip()[1:] if not found else self._text[begin:]
                return True
            if len(self._text) > _LARGEST_EVENT:
                break
        self.note = "there is no list of events in it"
        return False

    def _more(self) -> bool:
        data = self._file.read(_CHUNK)
        self._text += self._decoder.decode(data, final=not data)
        return bool(data)


def _add_slice(event: dict[str, Any], sums: TraceSums) -> None:
    name, args = str(event.get("name", "")), event.get("args") or {}
    start, duration = round(float(event.get("ts", 0)) * 1000), round(float(event.get("dur", 0)) * 1000)
    span_id = args.get("span_id")
    if isinstance(span_id, str):
        parent, trace = args.get("parent_id") or "0", args.get("trace_id")
        attributes = args.get("attributes") or {}
        sums.add_span(name, start, duration, (int(span_id, 16), int(parent, 16), trace), attributes)
        return
    track = event.get("pid"), event.get("tid")
    if track[1] == _STEPS_TRACK:
        sums.add_step(name, start, duration)
    else:
        sums.add_slice(name, start, duration, track)


# ---- OTLP ----


def _read_otlp_json(file: BinaryIO, sums: TraceSums) -> str:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            return f"line {number} is cut short, or damaged ({error}): what comes after that is not counted"
        for resource in request.get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    _add_json_span(span, sums)
    return ""


def _add_json_span(span: dict[str, Any], sums: TraceSums) -> None:
    start, end = int(span.get("startTimeUnixNano", 0)), int(span.get("endTimeUnixNano", 0))
    found = {a["key"]: next(iter(a["value"].values()), 0) for a in span.get("attributes", ()) if a["key"] in WANTED}
    ids = int(span.get("spanId") or "0", 16), int(span.get("parentSpanId") or "0", 16), span.get("traceId")
    sums.add_span(span.get("name", ""), start, end - start, ids, found)


def _read_protobuf(file: BinaryIO, sums: TraceSums) -> str:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

    try:
        for message in _messages(file):
            for scope in ResourceSpans.FromString(message).scope_spans:
                for span in scope.spans:
                    _add_span(span, sums)
    except (DecodeError, EOFError) as error:
        return f"the file is cut short, or damaged ({error}): what comes after that is not counted"
    return ""


def _messages(file: BinaryIO) -> Iterator[bytes]:
    """Each ``ResourceSpans`` of requests that stand one after another, as they are or each behind its length in four bytes."""
    while tag := file.read(1):
        if tag[0] == _RESOURCE_SPANS:
            yield _exactly(file, _varint(file))
        else:
            (length,) = struct.unpack(">I", tag + _exactly(file, 3))
            yield from _messages(_Part(_exactly(file, length)))  # type: ignore[arg-type]


class _Part:
    """Bytes to be read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, count: int) -> bytes:
        """The next so many, or what there is."""
        self._at += count
        return self._data[self._at - count : self._at]


def _varint(file: BinaryIO) -> int:
    value = shift = 0
    while True:
        byte = _exactly(file, 1)[0]
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:  # noqa: PLR2004 - the last one
            return value
        if shift > 63:  # noqa: PLR2004 - bits
            raise EOFError("a length of more than 64 bits")


def _exactly(file: BinaryIO, count: int) -> bytes:
    if count > 1 << 31:
        raise EOFError(f"a message of {count} bytes")
    data = file.read(count)
    if len(data) < count:
        raise EOFError(f"{count - len(data)} bytes are missing")
    return data


def _add_span(span: Any, sums: TraceSums) -> None:
    attributes = _wanted(span.attributes)
    ids = int.from_bytes(span.span_id, "big"), int.from_bytes(span.parent_span_id, "big"), span.trace_id
    start = span.start_time_unix_nano
    sums.add_span(span.name, start, span.end_time_unix_nano - start, ids, attributes)


def _wanted(attributes: Iterable[Any]) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "int_value") for a in attributes if a.key in WANTED}
