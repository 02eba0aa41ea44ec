"""Reads trace files as columns: every event or span of a file as a row, in one pass of native code, and what the file says of itself.

Files are not trusted. Memory is that of the columns, up to a limit; what is unreadable is reported with its place.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from otel_torchprof._export.byte_stream import UnexpectedError, opened, place
from otel_torchprof._export.otlp_reading import (
    BYTE_ORDER_MARK,
    MOST_EMPTY,
    SNIFFED,
    frames,
    is_json,
    line_cut_off,
    without_spans,
)
from otel_torchprof._native.trace_files import LARGEST, Expected, Fault, Status, TraceReader
from otel_torchprof._process.free_memory import free_memory
from otel_torchprof.errors import TorchProfError

from .records import MalformedError, json_attributes, protobuf_attributes
from .values import check_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from otel_torchprof._columns.batch import Array, Names
    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._export.otlp_reading import Frame
    from otel_torchprof._native.trace_files import Figures

_EXPECTED = {
    Expected.DOCUMENT: "a JSON object or a list of events",
    Expected.MEMBER: "a member of an object, or its end",
    Expected.COLON: "':'",
    Expected.VALUE: "a value",
    Expected.ELEMENT: "an element of an array, or its end",
    Expected.STRING_END: "the end of a string",
    Expected.VALUE_END: "the end of a value",
    Expected.EVENTS: "an object with traceEvents of a Chrome trace, or resourceSpans of OTLP",
}
_FAULTS = {
    Fault.SIZE: f"a value of more than {LARGEST:,} bytes",
    Fault.EVENT: "event is no object",
    Fault.TS: "ts is no number of microseconds",
    Fault.DUR: "dur is no number of microseconds",
    Fault.NAME: "name is no text",
    Fault.ARGS: "args is no object",
    Fault.ID: "the id of a span is not 16 hexadecimal digits",
    Fault.MESSAGE: "bytes that are no OTLP for traces",
    Fault.SPAN: "a span without ids of 16 and 8 bytes: other OTLP than traces?",
    Fault.TIME: "a time is not below 2^61 nanoseconds",
    Fault.PHASE: "ph is no text",
    Fault.NO_ID: "an event of a flow, or an asynchronous event, has no id",
    Fault.JSON: "event is no JSON, or is nested too deeply",
}
_OTLP = b"\0\n"
"""First bytes of files of protobuf: of the size of a request, or the tag of its first field."""
_PACKETS = b"2@Ph"
"""First bytes of packets of Perfetto: the tags of ``clock_snapshot``, ``timestamp``, of the sequence and its flags."""
RESOURCE = "resource "
"""Before the number of a resource, in the name of the process of a track."""
_MOST_MEMBERS = 1000
_MOST_OF_RESOURCES = 8 << 20
"""Bytes of the resources of a file whose attributes are kept."""
_MOST_PROBLEMS = 5
_LONGEST_NUMBER = 30


@dataclass
class TraceColumns:
    """The events of a file, in its order; see ``trace_files.h`` for the columns."""

    rows: dict[str, Array]
    works: Mapping[str, Array]
    """Rows that are work of a device, or launched some."""
    memory: Mapping[str, Array]
    names: Names
    tracks: Array
    """For each track, the names of its process and its thread, which are JSON texts."""
    inputs: Array
    attributes: Array
    """Attributes of spans, if they were asked for: ``otp_trace_attribute``."""
    figures: Figures
    members: dict[str, Any] = field(default_factory=dict)
    """Members of the document, other than its events."""
    resources: list[dict[str, Any]] = field(default_factory=list)
    """Attributes of the resources of spans: the process of a track is ``resource 0``, ``resource 1`` and so on."""
    unread: dict[str, str] = field(default_factory=dict)
    """Members that cannot be read, and why."""
    problems: list[str] = field(default_factory=list)
    """Messages about unreadable parts."""
    nbytes: int = 0
    """Memory of the columns."""
    origin: int = 0
    """Offset of the document in the file."""


def read_columns(
    path: str,
    memory_limit: int | None = None,
    watch: Callable[[ByteStream], None] = lambda _stream: None,
    attributes: Iterable[str] | None = None,
) -> TraceColumns:
    """Reads a Chrome trace, or OTLP as protobuf or lines of JSON.

    Args:
        path: path of the file.
        memory_limit: most bytes of the columns. Default: half of the free memory.
        watch: gets the open file, to display how much has been read.
        attributes: read for sums only, as for :class:`TraceReader`; an interrupt then ends the reading, and what was read
            before it is returned. Members that cannot be read are then no problems.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """
    limit = free_memory() // 2 if memory_limit is None else memory_limit
    reading: _Reading | None = None
    try:
        with opened(path) as stream:
            watch(stream)
            reading = (ChromeReading if begins_chrome(stream) else _SpanReading)(path, limit, attributes)
            reading.read(stream)
    except TorchProfError as error:
        if reading is None or not reading.counted():
            raise
        reading.problems.append(f"{error}; what comes before that is counted")
    except KeyboardInterrupt:
        if attributes is None or reading is None or not reading.counted():
            raise
        reading.problems.append(f"{path!r}: interrupted; what was read before that is counted")
    trace = reading.columns()
    if attributes is None:
        trace.problems[:0] = [f"{name} cannot be read ({reason})" for name, reason in trace.unread.items()]
    return trace


def is_chrome(path: str) -> bool:
    """Whether a file, which is no pipe, may be a Chrome trace. Raises TorchProfError if it cannot be read, or is no trace."""
    with opened(path) as stream:
        return begins_chrome(stream)


def begins_chrome(stream: ByteStream) -> bool:
    """Whether a file is a JSON object or list that is no line of OTLP. Raises UnexpectedError if it is no trace."""
    start = stream.peek(SNIFFED)
    if not is_json(start):
        if start[0] not in _OTLP or _is_of_perfetto(start):
            raise UnexpectedError(0, f"expected a Chrome trace, or OTLP for traces, found {start[:4]!r}")
        return False
    if start.startswith(BYTE_ORDER_MARK):
        stream.skip(len(BYTE_ORDER_MARK))
    return stream.skip_space() and re.match(rb'\[|\{(?!\s*"resource)', stream.peek(SNIFFED)) is not None


def _is_of_perfetto(start: bytes) -> bool:
    """Whether protobuf that begins like OTLP is a trace of Perfetto's: ``ResourceSpans`` has none of these fields."""
    content = start[1:].lstrip(bytes(range(0x80, 0x100)))[1:]  # behind the length
    return start[:1] == b"\n" and bool(content) and content[0] in _PACKETS


def _finite(text: str) -> float:
    """The number in a text. Raises ValueError for others than JSON has."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_LONGEST_NUMBER]} is no number of JSON")
    return number


_decode = json.JSONDecoder(parse_float=Decimal).raw_decode


class _Reading:
    """Reads one file.

    Args:
        path: path of the file, for messages.
        memory_limit: most bytes of the columns.
        attributes: as for :class:`TraceReader`.
        reader: reads the file instead of a new one.
    """

    def __init__(
        self,
        path: str,
        memory_limit: int,
        attributes: Iterable[str] | None = None,
        reader: TraceReader | None = None,
    ) -> None:
        self._path, self._limit = path, memory_limit
        self.reader = reader or TraceReader(memory_limit, attributes)
        self._fault = ""
        """What is wrong with the first unusable event, if it was looked at."""
        self.problems: list[str] = []
        self._members: dict[str, Any] = {}
        self._resources: list[dict[str, Any]] = []
        self._of_resources = 0
        """Bytes of the resources so far."""
        self._unread: dict[str, str] = {}
        self._origin = 0
        """Offset in the file from which the reader counts."""

    def read(self, stream: ByteStream) -> None:
        """Reads the whole file. Raises UnexpectedError, TorchProfError or OSError."""
        raise NotImplementedError

    def _over_limit(self, stream: ByteStream, offset: int) -> TorchProfError:
        limit = f"{self._limit / 2**20:.0f} MiB"
        where = place(stream, offset)
        return TorchProfError(f"{self._path!r}: {where}: the columns would need more than the limit of {limit}")

    def figures(self) -> Figures:
        """Sums over what was read; the message about unusable events is then among the problems. Call it once."""
        figures = self.reader.figures()
        if figures.unusable:
            fault = f"{self._fault or _FAULTS[figures.first_fault]}, event {figures.first_event}"
            at = f"at byte {self._origin + figures.first_offset}"
            self.problems.append(f"{self._path!r}: not counted: {figures.unusable:,}; the first: {fault}, {at}")
        return figures

    def columns(self) -> TraceColumns:
        """Everything that was read."""
        figures = self.figures()
        rows, works, memory = self.reader.take()
        tables = self.reader.names(), self.reader.tracks(), self.reader.inputs(), self.reader.attributes()
        size = self.reader.nbytes + tables[0].nbytes + tables[2].nbytes + tables[3].nbytes
        said = self._members, self._resources, self._unread, self.problems
        return TraceColumns(rows, works, memory, *tables, figures, *said, size, self._origin)

    def counted(self) -> int:
        """Number of events so far that can be used."""
        figures = self.reader.figures()
        return figures.events - figures.unusable


class _SpanReading(_Reading):
    """Reads OTLP."""

    def read(self, stream: ByteStream) -> None:
        last_with_spans = 0
        for number, frame in enumerate(frames(stream)):
            before = self.reader.events
            self._read_frame(frame, stream)
            last_with_spans = number if self.reader.events > before else last_with_spans
            if number - last_with_spans > MOST_EMPTY:
                raise without_spans(frame.offset)

    def _read_frame(self, frame: Frame, stream: ByteStream) -> None:
        if frame.is_json and not frame.body.rstrip().endswith(b"}") and not frame.body.endswith(b"\n"):
            raise line_cut_off(stream, frame)
        status, at = Status.FULL, 0
        while status is not Status.END:
            status = self.reader.read_request(frame.body, at, frame.offset, is_json=frame.is_json)
            step = self.reader.step
            at = step.consumed
            if status is Status.MEMBER:
                text = frame.body[step.value : step.value + step.value_size]
                self._add_resource(text, place(stream, frame.offset + step.value), is_json=frame.is_json)
            elif status is Status.NO_MEMORY or (status is Status.FULL and self.reader.nbytes > self._limit):
                raise self._over_limit(stream, frame.offset + at)

    def _add_resource(self, text: bytes, where: str, *, is_json: bool) -> None:
        self._of_resources += len(text)
        attributes: dict[str, Any] = {}
        try:
            if self._of_resources > _MOST_OF_RESOURCES:
                raise MalformedError(f"the file has more than {_MOST_OF_RESOURCES:,} bytes of them")
            attributes = dict(_json_resource(text) if is_json else _protobuf_resource(text))
        except (ValueError, RecursionError) as error:
            if len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(f"{self._path!r}: a resource cannot be read ({error}), {where}")
        self._resources.append(attributes)


def _json_resource(text: bytes) -> Iterator[tuple[str, Any]]:
    resource = json.loads(text or b"{}")
    return json_attributes(resource if isinstance(resource, dict) else {})


def _protobuf_resource(message: bytes) -> Iterator[tuple[str, Any]]:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    try:
        return protobuf_attributes(Resource.FromString(message))
    except DecodeError as error:
        raise ValueError(f"{len(message):,} bytes that are no resource") from error


class ChromeReading(_Reading):
    """Reads a Chrome trace."""

    _check = staticmethod(check_event)
    """Raises MalformedError for an event with a value that makes it unusable."""
    _offset = 0
    """Offset in the file of the bytes that the reader gets next."""

    def read(self, stream: ByteStream) -> None:
        for _ in self.steps(stream):
            pass

    def steps(self, stream: ByteStream) -> Iterator[None]:
        """Reads the whole file, a piece per iteration. Raises what :meth:`read` raises."""
        self._origin = self._offset = stream.offset
        rest, status = b"", Status.MORE
        while status is Status.MORE:
            piece = stream.some()
            data = rest + piece if rest else piece
            status, consumed = self._read_piece(data, is_last=not piece)
            rest = data[consumed:]
            yield
        if status is Status.UNEXPECTED:
            raise self._unexpected(stream, rest)
        if status is Status.NO_MEMORY:
            raise self._over_limit(stream, self._offset)
        stream.check_end()
        if rest.strip(b" \t\r\n") or stream.skip_space():
            where = place(stream, self._offset)
            self.problems.append(f"{self._path!r}: more follows the end of the document, {where}: that is not counted")

    def _read_piece(self, data: bytes, *, is_last: bool) -> tuple[Status, int]:
        """Reads on until more bytes are needed, or nothing more can be read; returns how many bytes were consumed."""
        at, status = 0, Status.FULL
        while status in {Status.FULL, Status.MEMBER}:
            status = self.reader.read(data, at, is_last=is_last)
            if status is Status.MEMBER:
                self._add_member(data, at)
            elif status is Status.FULL and self.reader.nbytes > self._limit:
                status = Status.NO_MEMORY
            if not self._fault and self.reader.unusable:
                self._note_fault(data, at)
            self._offset += self.reader.step.consumed
            at += self.reader.step.consumed
        return status, at

    def _add_member(self, data: bytes, at: int) -> None:
        step = self.reader.step
        name = data[at + step.place : at + step.place + step.name_size].decode("utf-8", "replace")
        if not step.value_size:
            self._unread[name] = _FAULTS[Fault.SIZE]
            return
        try:
            text = data[at + step.value : at + step.value + step.value_size]
            value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            self._unread[name] = str(error)
            return
        if len(self._members) < _MOST_MEMBERS:
            self._members[name] = value

    def _note_fault(self, data: bytes, at: int) -> None:
        """Notes what is wrong with the first unusable event; ``at``: what of the data was given to the reader."""
        figures = self.reader.figures()
        self._fault = _FAULTS[figures.first_fault]
        begin = at + self._origin + figures.first_offset - self._offset
        try:
            event, _ = _decode(data[begin : begin + LARGEST].decode("utf-8", "surrogateescape"))
            self._check(event)
        except MalformedError as error:
            self._fault = str(error)
        except (ValueError, ArithmeticError, RecursionError):  # JSON that only the native reader takes
            pass

    def _unexpected(self, stream: ByteStream, rest: bytes) -> UnexpectedError | OSError:
        step = self.reader.step
        if step.is_cut_off:
            return stream.cut_off(self._offset, "a value that does not end")
        at = step.place - step.consumed
        content = rest[at : at + 20].decode("utf-8", "surrogateescape")
        return UnexpectedError(self._offset + at, f"expected {_EXPECTED[Expected(step.expected)]}, found {content!r}")
