"""Reading trace files event by event: Chrome JSON, this package's and torch's; OTLP, as protobuf and as lines of JSON.

Nothing in a file is trusted: whatever it holds, memory is bounded, what can be read is counted, and the rest is reported.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._export.byte_stream import UnexpectedError, opened, place
from otel_torchprof._export.json_stream import JsonStream, UnusableError
from otel_torchprof._export.otlp_reading import BYTE_ORDER_MARK, LARGEST_PARSED, contents
from otel_torchprof._tree.span_table import STEP_NAME
from otel_torchprof._tree.tree import STEP_PREFIX
from otel_torchprof.errors import TorchProfError

from .wanted import AVERAGES, DURATIONS, INSTANCE, RANK, TEXTS, UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
    from typing import Protocol

    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._export.otlp_reading import Content

_STEPS_TRACK = 2**31 - 1
"""On which this package's profiles draw their steps, beside what they hold."""
_LARGEST_NUMBER = 1 << 61
"""Of nanoseconds: sums of two are 64-bit numbers."""
_WITH_RANK = frozenset(("distributedInfo", "otherData"))
"""Members of a Chrome trace's document that say which rank it is of."""
_LONGEST_KEY = 64
"""Characters of what tells tracks and traces apart."""
_LONGEST_AVERAGES = 4096
"""Characters. This package writes 2,047 at most."""


class StepAverage(NamedTuple):
    """What the events of one name took in a step that has no others of it: of the attribute ``torch.averages``."""

    name: str
    calls: int
    self_seconds: float
    in_data: bool
    """Whether the loop waited for data meanwhile."""


if TYPE_CHECKING:

    class Events(Protocol):
        """Takes the events of a file one by one; its length is how many it counted. Times are in ns."""

        wanted: frozenset[str]
        """The attributes that it looks at."""
        skipped: frozenset[str]
        """The categories of slices that it does not look at."""

        def __len__(self) -> int: ...

        def add_span(
            self,
            name: str,
            start: int,
            duration: int,
            ids: tuple[int, int, Hashable],
            attributes: Mapping[str, Any],
            /,
            *,
            process: Hashable,
        ) -> None:
            """A span with its id, that of its parent (0: none), its trace, those attributes that are wanted, its process."""

        def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], category: str, /) -> None:
            """An event whose parent is the one around it on its track: its process and its thread."""

        def add_step(self, name: str, start: int, duration: int, process: Hashable, /) -> None:
            """A step of a profile that is drawn beside what it holds."""

        def name_rank(self, process: Hashable, rank: int, /) -> None:
            """The rank of a process; process None: of all in the file."""


def read_events(path: str, events: Events, watch: Callable[[ByteStream], None] = lambda _stream: None) -> list[str]:
    """Hands over what a file holds; returns what is to be said of it: nothing where all was read.

    Args:
        path: of the file.
        events: takes them.
        watch: gets the file, to see how far it has been read.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """
    reading = _Reading(events)
    problems: list[str] = []
    try:
        with opened(path) as stream:
            watch(stream)
            reading.read(stream)
    except TorchProfError as error:
        if not len(events):
            raise
        problems.append(f"{error}; what comes before that is counted")
    except KeyboardInterrupt:
        if not len(events):
            raise
        problems.append(f"{path!r}: interrupted; what was read before that is counted")
    if reading.unusable:
        problems.append(f"{path!r}: not counted: {reading.unusable:,}; the first: {reading.first}")
    if not len(events):
        raise TorchProfError("; ".join(problems) or f"{path!r} is a trace without a span; nothing is to be shown")
    return problems


class _MalformedError(ValueError):
    """An event that cannot be counted; those after it can."""


class _Reading:
    """A file on its way to what takes its events."""

    def __init__(self, events: Events) -> None:
        self._events = events
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
            spans = _spans(content, self._events)
            unread = True
            while unread:
                try:
                    for span, process in spans:
                        add = _add_json_span if isinstance(span, dict) else _add_protobuf_span
                        add(span, self._events, process)
                    unread = False
                except _MalformedError as error:  # noqa: PERF203 - one that cannot be counted does not stop the others
                    self._note(f"{error}, in message {number}, {place(stream, content.offset)}")

    def _read_chrome(self, text: JsonStream, stream: ByteStream) -> None:
        """What comes after the events is not looked at."""
        if text.peek() == "{":
            for name in text.members():
                if name == "traceEvents":
                    break
                if name in _WITH_RANK:
                    self._read_rank(text)
                else:
                    text.skip()
            else:
                expected = "traceEvents of a Chrome trace, or resourceSpans of OTLP"
                raise UnexpectedError(text.offset, f"expected an object with {expected}, found one with neither")
        for number, _ in enumerate(text.elements(), 1):
            try:
                event = text.value()
                if type(event) is dict and event.get("ph") == "X":
                    _add_slice(event, self._events)
            except (UnusableError, _MalformedError) as error:  # noqa: PERF203 - it does not stop the others
                self._note(f"{error}, event {number}, {place(stream, text.value_offset)}")

    def _read_rank(self, text: JsonStream) -> None:
        """Of torch's ``distributedInfo``, or of the resource in this package's ``otherData``."""
        try:
            found = text.value()
            resource = found.get("resource") if isinstance(found, dict) else None
            rank = resource.get(RANK) if isinstance(resource, dict) else found.get("rank")
            if rank is not None:
                self._events.name_rank(None, _whole(rank, "rank"))
        except (UnusableError, AttributeError) as error:
            self._note(f"a rank that cannot be read ({error})")

    def _note(self, text: str) -> None:
        self.unusable += 1
        self.first = self.first or text


# ---- Chrome JSON ----


def _add_slice(event: dict[str, Any], events: Events) -> None:
    name, category = _text(event.get("name", ""), "name"), event.get("cat")
    category = category if isinstance(category, str) else ""
    if category in events.skipped:
        return
    start, duration = _rounded(event.get("ts", 0), 1000, "ts"), max(0, _rounded(event.get("dur", 0), 1000, "dur"))
    args = _object(event.get("args") or {}, "args")
    span_id = args.get("span_id")
    track = _key(event.get("pid")), _key(event.get("tid"))
    if isinstance(span_id, str):
        ids = _id(span_id, "span_id"), _id(args.get("parent_id") or "0", "parent_id"), _key(args.get("trace_id"))
        attributes = _object(args.get("attributes") or {}, "attributes")
        events.add_span(
            STEP_NAME if name.startswith(STEP_PREFIX) else name,
            start,
            duration,
            ids,
            _values((key, attributes[key]) for key in events.wanted & attributes.keys()),
            process=track[0],
        )
    elif track[1] == _STEPS_TRACK:
        events.add_step(name, start, duration, track[0])
    else:
        events.add_slice(name, start, duration, track, category)


# ---- OTLP ----


def _spans(content: Content, events: Events) -> Iterator[tuple[Any, Hashable]]:
    """Of JSON the objects, of protobuf the messages; each with its process."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = content.request
    if isinstance(request, dict):
        for resource in _objects(request, "resourceSpans"):
            process = _process(_json_attributes(_object(resource.get("resource") or {}, "resource")), events)
            for scope in _objects(resource, "scopeSpans"):
                for span in _objects(scope, "spans"):
                    yield span, process
        return
    if len(request) > LARGEST_PARSED:
        raise _MalformedError(f"spans with {len(request):,} bytes of one span, or of their resource")
    for resource_spans in _parsed(ExportTraceServiceRequest, request).resource_spans:
        process = _process(_protobuf_attributes(resource_spans.resource), events)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield span, process


def _process(attributes: Iterable[tuple[str, Any]], events: Events) -> Hashable:
    """What tells the process of a resource apart; its rank is made known."""
    found = {key: value for key, value in attributes if key in {RANK, INSTANCE}}
    rank = found.get(RANK)
    process = _key(found.get(INSTANCE)), _key(rank)
    if rank is not None:
        events.name_rank(process, _whole(rank, RANK))
    return process


def _parsed(kind: Any, message: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise _MalformedError(f"{len(message):,} bytes that are no OTLP message") from error


def _add_json_span(span: dict[str, Any], events: Events, process: Hashable) -> None:
    name = _text(span.get("name", ""), "name")
    start, end = (_whole(span.get(f"{which}TimeUnixNano", 0), f"{which}TimeUnixNano") for which in ("start", "end"))
    ids = _id(span.get("spanId") or "0", "spanId"), _id(span.get("parentSpanId") or "0", "parentSpanId")
    values = _values((key, value) for key, value in _json_attributes(span) if key in events.wanted)
    events.add_span(name, start, max(0, end - start), (*ids, _key(span.get("traceId"))), values, process=process)


def _add_protobuf_span(span: Any, events: Events, process: Hashable) -> None:
    ids = (*(int.from_bytes(each[-8:], "big") for each in (span.span_id, span.parent_span_id)), span.trace_id[:16])
    start, end = (_whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    values = _values((key, value) for key, value in _protobuf_attributes(span) if key in events.wanted)
    events.add_span(span.name, start, max(0, end - start), ids, values, process=process)


def _json_attributes(parent: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for each in _objects(parent, "attributes"):
        key = each.get("key")
        if isinstance(key, str):
            yield key, next(iter(_object(each.get("value"), key).values()), 0)


def _protobuf_attributes(parent: Any) -> Iterator[tuple[str, Any]]:
    for each in parent.attributes:
        yield each.key, getattr(each.value, each.value.WhichOneof("value") or "int_value")


# ---- what values may be ----


def _values(attributes: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """The attributes that are looked at, as numbers that can be added up, as short texts, and as :class:`StepAverage`."""
    return {
        key: bool(value)
        if key == UNFINISHED
        else _averages(value)
        if key == AVERAGES
        else _seconds(value, key)
        if key in DURATIONS
        else _text(value, key)[:_LONGEST_KEY]
        if key in TEXTS
        else _whole(value, key)
        for key, value in attributes
    }


def _averages(value: Any) -> list[StepAverage]:
    text = _text(value, AVERAGES)
    try:
        found = json.loads(text) if len(text) <= _LONGEST_AVERAGES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise _malformed(text, AVERAGES, f"a JSON list of at most {_LONGEST_AVERAGES:,} characters")
    return [
        StepAverage(
            _text(entry.get("name"), "name"),
            _whole(entry.get("count"), "count"),
            _seconds(entry.get("self"), "self"),
            entry.get("phase") == "data",
        )
        for entry in (_object(each, AVERAGES) for each in found)
    ]


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
