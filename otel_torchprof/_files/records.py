"""Reads the records of trace files one by one: events of Chrome JSON, of this package and torch, and OTLP spans.

Files are not trusted: memory is bounded for any content, readable records are passed on, and the rest is reported.
"""

from __future__ import annotations

import json
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._export.byte_stream import UnexpectedError, opened, place
from otel_torchprof._export.json_stream import JsonStream, UnusableError
from otel_torchprof._export.otlp_reading import BYTE_ORDER_MARK, LARGEST_PARSED, SNIFFED, contents, is_json
from otel_torchprof.errors import TorchProfError

from .attribute_keys import INSTANCE, RANK, SERVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Protocol

    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._export.otlp_reading import Content

BASE_TIME = "baseTimeNanoseconds"
"""The member of a Chrome trace's document with its time base."""
MEMBERS = frozenset(("distributedInfo", "otherData", BASE_TIME))
"""Members of it that are used."""
DESCRIPTIONS = frozenset(
    (
        *("schemaVersion", "displayTimeUnit", "deviceProperties", "traceName", "trace_id", "host_name"),
        *("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"),
    )
)
"""Members that describe the recording; they contain no events and are ignored."""
NO_SPAN = "{!r} is a trace without a span; nothing is to be shown"
_decode = json.JSONDecoder(parse_float=Decimal).raw_decode
"""Decodes numbers as Decimal: a double cannot represent microseconds since 1970 to the nanosecond."""
_OF_RESOURCES = frozenset((RANK, INSTANCE, SERVICE))


if TYPE_CHECKING:

    class Records(Protocol):
        """Receives the records of a file one by one; its length is the number of counted ones. Methods may raise MalformedError."""

        def __len__(self) -> int: ...

        def add_member(self, name: str, value: Any, /) -> None:
            """Adds a member of a Chrome trace's document."""

        def add_event(self, event: dict[str, Any], /) -> None:
            """Adds an event of a Chrome trace."""

        def begin_resource(self, attributes: dict[str, Any], /) -> None:
            """Sets the resource of the OTLP spans that follow: rank, instance and service."""

        def add_span(self, span: Any, scope: str, /) -> None:
            """Adds an OTLP span, a JSON object or a protobuf message, and the name of its scope."""


class MalformedError(ValueError):
    """A record is malformed; later records can still be read."""


def check_can_be_read_twice(path: str) -> None:
    """Raises TorchProfError for a pipe or a device."""
    if Path(path).is_fifo() or Path(path).is_char_device():
        raise TorchProfError(
            f"cannot read {path!r}: it is a pipe or a device, and is read twice; write it to a file first"
        )


def check_given_once(paths: Sequence[str]) -> None:
    """Raises TorchProfError if two paths are the same file."""
    files = [os.path.realpath(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if files.count(file) > 1:
            raise TorchProfError(f"{path!r} is given twice: give each file once")


class RecordReading:
    """Reads a file and passes on its records, one per iteration.

    Iterating raises TorchProfError if nothing of the file can be read; it names the file, the place and the way out.

    Args:
        path: path of the file.
        records: receives the records.
        watch: gets the open file, to display how much has been read.
    """

    def __init__(self, path: str, records: Records, watch: Callable[[ByteStream], None] = lambda _stream: None) -> None:
        self._path, self._records, self._watch = path, records, watch
        self._unusable = 0
        self._first = ""
        self.problems: list[str] = []
        """Errors of unreadable records; complete after the iteration."""

    def __iter__(self) -> Iterator[None]:
        try:
            with opened(self._path) as stream:
                self._watch(stream)
                yield from self._read(stream)
        except TorchProfError as error:
            if not self.counted():
                raise
            self.problems.append(f"{error}; what comes before that is counted")
        self.end()

    def counted(self) -> int:
        """Number of records so far."""
        return len(self._records)

    def end(self) -> None:
        """Ends the reading. Raises TorchProfError if nothing was counted."""
        if self._unusable:
            self.problems.append(f"{self._path!r}: not counted: {self._unusable:,}; the first: {self._first}")
        if not self.counted():
            raise TorchProfError("; ".join(self.problems) or NO_SPAN.format(self._path))

    def _read(self, stream: ByteStream) -> Iterator[None]:
        """Reads the whole file. Raises UnexpectedError, or OSError, if no more can be read."""
        if is_json(stream.peek(SNIFFED)):
            if stream.peek(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK:
                stream.skip(len(BYTE_ORDER_MARK))
            stream.skip_space()
            if re.match(rb'\[|\{(?!\s*"resource)', stream.peek(256)):
                yield from self._read_chrome(stream)
                return
        yield from self._read_otlp(stream)

    def _read_otlp(self, stream: ByteStream) -> Iterator[None]:
        for number, content in enumerate(contents(stream), 1):
            spans = _spans(content, self._records)
            unread = True
            while unread:
                try:
                    for span, scope in spans:
                        self._records.add_span(span, scope)
                        yield
                    unread = False
                except MalformedError as error:  # noqa: PERF203 - one that cannot be counted does not stop the others
                    self._note(f"{error}, in message {number}, {place(stream, content.offset)}")

    def _read_chrome(self, stream: ByteStream) -> Iterator[None]:
        """Reads a Chrome trace. Members may follow the events: Kineto wrote the time base there until 2025."""
        text = JsonStream(stream.some, stream.offset, _decode)
        if text.peek() == "{":
            has_events = False
            for name in text.members():
                if name == "traceEvents" and not has_events:
                    has_events = True
                    yield from self._read_chrome_events(text, stream)
                elif name in MEMBERS:
                    self._read_member(name, text)
                else:
                    text.skip()
            if not has_events:
                expected = "traceEvents of a Chrome trace, or resourceSpans of OTLP"
                raise UnexpectedError(text.offset, f"expected an object with {expected}, found one with neither")
        else:
            yield from self._read_chrome_events(text, stream, may_be_open=True)
            stream.check_end()
        if text.peek():
            where = place(stream, text.offset)
            self.problems.append(f"{self._path!r}: more follows the end of the document, {where}: that is not counted")

    def _read_chrome_events(self, text: JsonStream, stream: ByteStream, *, may_be_open: bool = False) -> Iterator[None]:
        for number, _ in enumerate(text.elements(may_be_open=may_be_open), 1):
            try:
                event = text.value()
                if type(event) is not dict:
                    raise malformed(event, "event", "an object")
                self._records.add_event(event)
            except (UnusableError, MalformedError) as error:
                self._note(f"{error}, event {number}, {place(stream, text.value_offset)}")
            yield

    def _read_member(self, name: str, text: JsonStream) -> None:
        try:
            self._records.add_member(name, text.value())
        except (UnusableError, MalformedError) as error:
            self._note(f"{name} cannot be read ({error})")

    def _note(self, text: str) -> None:
        self._unusable += 1
        self._first = self._first or text


def _spans(content: Content, records: Records) -> Iterator[tuple[Any, str]]:
    """Yields the spans of a request, JSON objects or protobuf messages, each with the name of its scope."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = content.request
    if isinstance(request, dict):
        for resource in objects(request, "resourceSpans"):
            records.begin_resource(_of_resource(json_attributes(object_of(resource.get("resource") or {}, "resource"))))
            for scope in objects(resource, "scopeSpans"):
                name = object_of(scope.get("scope") or {}, "scope").get("name")
                for span in objects(scope, "spans"):
                    yield span, name if isinstance(name, str) else ""
        return
    if len(request) > LARGEST_PARSED:
        raise MalformedError(f"spans with {len(request):,} bytes of one span, or of their resource")
    for resource_spans in _parsed(ExportTraceServiceRequest, request).resource_spans:
        records.begin_resource(_of_resource(protobuf_attributes(resource_spans.resource)))
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield span, scope_spans.scope.name


def _of_resource(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in attributes if key in _OF_RESOURCES}


def _parsed(kind: Any, message: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise MalformedError(f"{len(message):,} bytes that are no OTLP message") from error


def json_attributes(parent: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the attributes of an OTLP/JSON object."""
    for attribute in objects(parent, "attributes"):
        key = attribute.get("key")
        if isinstance(key, str):
            yield key, next(iter(object_of(attribute.get("value"), key).values()), 0)


def protobuf_attributes(parent: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the attributes of a message."""
    for attribute in parent.attributes:
        yield attribute.key, getattr(attribute.value, attribute.value.WhichOneof("value") or "int_value")


def object_of(value: Any, what: str) -> dict[str, Any]:
    """Returns the value; raises MalformedError if it is no object."""
    if not isinstance(value, dict):
        raise malformed(value, what, "an object")
    return value


def objects(parent: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a member that is a list. Raises MalformedError."""
    items = parent.get(name) or []
    if not isinstance(items, list):
        raise malformed(items, name, "a list")
    for item in items:
        yield object_of(item, name)


def malformed(value: Any, what: str, expected: str) -> MalformedError:
    """The error for an unexpected value."""
    displayed = (
        repr(value[:30])
        if isinstance(value, str)
        else str(value)[:30]
        if isinstance(value, float | bool | Decimal)
        else ""
    )
    return MalformedError(f"{what} is {displayed or 'of type ' + type(value).__name__}, expected {expected}")
