"""Writes the spans of OTLP files as events of the merged trace: on the tracks of their threads, with the arguments of this package's traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from otel_torchprof._encode.chrome_spans import Objects
from otel_torchprof._encode.chrome_tracks import Lanes, Tracks
from otel_torchprof._encode.otlp_json import request_of
from otel_torchprof._export.byte_stream import opened, place
from otel_torchprof._export.otlp_reading import LARGEST_PARSED, contents
from otel_torchprof._native.trace_files import IDS
from otel_torchprof.errors import TorchProfError

from .attribute_keys import THREAD
from .merged_events import PIECE
from .records import NO_SPAN, MalformedError, json_attributes, object_of, objects, protobuf_attributes
from .values import process_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._export.otlp_reading import Content

    from .merged_events import MergeTarget

_MOST_PARTS = 10_000
"""Most attributes, events and links of a span: each is an object of some hundred bytes."""
_MOST_WAITING = 1 << 19
"""Bytes of spans that are buffered and placed on tracks together."""
_MOST_THREADS = 4096
"""Most threads of all ranks, since the state of each track is stored."""
_MOST_SLICES = 200_000
"""Most slices of all ranks that are stored for tracks without a thread."""
_MOST_NESTED = 50
_LONGEST_REASON = 500
_RESOURCE = Resource({})
_CODES = frozenset(code.value for code in StatusCode)
_KINDS = {kind.value + 1: kind for kind in SpanKind}
"""Kinds by their number in OTLP, where 0 is unspecified."""


class MergedSpans:
    """Converts the spans of all ranks to lines of JSON, in blocks.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._most_slices = max(_MOST_SLICES // ranks, 100)
        self._ranks: dict[int, _SpansOfRank] = {}
        self._threads: set[tuple[int, int]] = set()
        self._waiting = 0

    def lines(self, span: Any, scope: str, target: MergeTarget) -> Iterator[str]:
        """Adds a span, a JSON object or a message; yields the lines of buffered spans once there are enough. Raises MalformedError."""
        message = _message(span) if isinstance(span, dict) else span
        readable_span = _readable(message, scope, target)
        self._note_thread(target, (readable_span.attributes or {}).get(THREAD))
        of_rank = self._ranks.get(target.place)
        if of_rank is None:
            of_rank = self._ranks[target.place] = _SpansOfRank(target, self._most_slices)
        of_rank.waiting.append(readable_span)
        self._waiting += message.ByteSize()
        if self._waiting >= _MOST_WAITING:
            yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yields the lines of buffered spans."""
        self._waiting = 0
        for spans in self._ranks.values():
            yield from spans.taken()

    def _note_thread(self, target: MergeTarget, thread: Any) -> None:
        if type(thread) is int and (target.place, thread) not in self._threads:
            if len(self._threads) == _MOST_THREADS:
                raise MalformedError(f"a span of one more than {_MOST_THREADS:,} threads")
            self._threads.add((target.place, thread))


class _SpansOfRank:
    """Buffers spans of one rank to place them on tracks together."""

    def __init__(self, target: MergeTarget, most_slices: int) -> None:
        self.waiting: list[ReadableSpan] = []
        self._target = target
        self._tracks = Tracks(target.pid, Lanes(most_slices=most_slices))
        self._arrows = target.place * IDS

    def taken(self) -> Iterator[str]:
        """Yields the lines of the buffered spans and clears the buffer."""
        spans, self.waiting = self.waiting, []
        if not spans:
            return
        rows = Objects(spans)
        order, tids = self._tracks.place(rows.outlines)
        arrows = rows.lay_out(order, tids)
        for line in self._tracks.news():
            yield f",\n{line}"
        for piece in rows.pieces(self._target.pid, self._target.base, self._arrows):
            yield piece.decode()
        self._arrows += arrows


def _message(span: dict[str, Any]) -> Any:
    try:
        request = request_of({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    except ValueError as error:
        raise MalformedError(str(error)[:_LONGEST_REASON]) from error
    return request.resource_spans[0].scope_spans[0].spans[0]


def _readable(span: Any, scope: str, target: MergeTarget) -> ReadableSpan:
    """A span with its times on the reference's clock."""
    if len(span.attributes) + len(span.events) + len(span.links) > _MOST_PARTS:
        raise MalformedError(f"a span with more than {_MOST_PARTS:,} attributes, events and links")
    start, end = (whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    events = [
        Event(event.name, _attributes(event), _unix(whole(event.time_unix_nano, "time"), target))
        for event in span.events
    ]
    is_error = span.status.code == StatusCode.ERROR.value
    code = StatusCode(span.status.code) if span.status.code in _CODES else StatusCode.UNSET
    return ReadableSpan(
        span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_span_id) if any(span.parent_span_id) else None,
        resource=_RESOURCE,
        attributes=_attributes(span),
        events=events,
        links=[Link(_context(link.trace_id, link.span_id), _attributes(link)) for link in span.links],
        kind=_KINDS.get(span.kind, SpanKind.INTERNAL),
        status=Status(code, span.status.message or None if is_error else None),
        start_time=_unix(start, target),
        end_time=_unix(max(start, end), target),
        instrumentation_scope=InstrumentationScope(scope),
    )


def _unix(time: int, target: MergeTarget) -> int:
    return target.time(time) + target.base


def _context(trace_id: bytes, span_id: bytes) -> SpanContext:
    return SpanContext(int.from_bytes(trace_id[:16], "big"), int.from_bytes(span_id[-8:], "big"), is_remote=False)


def _attributes(parent: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in parent.attributes}


def _value(value: Any, depth: int = 0) -> Any:
    which = value.WhichOneof("value")
    if depth > _MOST_NESTED:
        raise MalformedError("an attribute that is nested too deeply")
    if which == "array_value":
        return [_value(item, depth + 1) for item in value.array_value.values]
    if which == "kvlist_value":
        return {entry.key: _value(entry.value, depth + 1) for entry in value.kvlist_value.values}
    return getattr(value, which) if which else None


class SpanReading:
    """Writes the spans of one file.

    Args:
        path: path of the file.
        targets: the ranks in it, by process.
        spans: converts the spans of all files.
    """

    def __init__(self, path: str, targets: Mapping[Hashable, MergeTarget], spans: MergedSpans) -> None:
        self._path, self._targets, self._spans = path, targets, spans
        self._count = self._unusable = 0
        self._first = ""
        self.problems: list[str] = []
        """Messages about unreadable parts."""

    def pieces(self, watch: Callable[[ByteStream], None]) -> Iterator[bytes]:
        """Yields the events as bytes, each after a comma; then the problems are complete. Raises TorchProfError if there is none."""
        lines: list[str] = []
        size = 0
        for line in self._lines(watch):
            lines.append(line)
            size += len(line)
            if size >= PIECE:
                yield "".join(lines).encode()
                lines, size = [], 0
        yield "".join((*lines, *self._spans.rest())).encode()

    def _lines(self, watch: Callable[[ByteStream], None]) -> Iterator[str]:
        try:
            with opened(self._path) as stream:
                watch(stream)
                for number, content in enumerate(contents(stream), 1):
                    yield from self._lines_of(content, f"message {number}, {place(stream, content.offset)}")
        except TorchProfError as error:
            if not self._count:
                raise
            self.problems.append(f"{error}; what comes before that is counted")
        if self._unusable:
            self.problems.append(f"{self._path!r}: not counted: {self._unusable:,}; the first: {self._first}")
        if not self._count:
            raise TorchProfError("; ".join(self.problems) or NO_SPAN.format(self._path))

    def _lines_of(self, content: Content, where: str) -> Iterator[str]:
        spans = self._spans_of(content)
        is_read = False
        while not is_read:
            try:
                for span, scope, target in spans:
                    yield from self._spans.lines(span, scope, target)
                    self._count += 1
                is_read = True
            except MalformedError as error:  # noqa: PERF203 - one that cannot be counted does not stop the others
                self._unusable += 1
                self._first = self._first or f"{error}, in {where}"

    def _spans_of(self, content: Content) -> Iterator[tuple[Any, str, MergeTarget]]:
        """Yields the spans of ranks, JSON objects or protobuf messages, each with the name of its scope, and its rank."""
        request = content.request
        if isinstance(request, dict):
            yield from self._spans_of_line(request)
        elif len(request) > LARGEST_PARSED:
            raise MalformedError(f"spans with {len(request):,} bytes of one span, or of their resource")
        else:
            yield from self._spans_of_message(request)

    def _spans_of_line(self, request: dict[str, Any]) -> Iterator[tuple[Any, str, MergeTarget]]:
        for resource in objects(request, "resourceSpans"):
            target = self._target(json_attributes(object_of(resource.get("resource") or {}, "resource")))
            if target is None:
                continue
            for scope in objects(resource, "scopeSpans"):
                name = object_of(scope.get("scope") or {}, "scope").get("name")
                for span in objects(scope, "spans"):
                    yield span, name if isinstance(name, str) else "", target

    def _spans_of_message(self, request: bytes) -> Iterator[tuple[Any, str, MergeTarget]]:
        for resource_spans in _parsed(request).resource_spans:
            target = self._target(protobuf_attributes(resource_spans.resource))
            if target is None:
                continue
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    yield span, scope_spans.scope.name, target

    def _target(self, attributes: Iterable[tuple[str, Any]]) -> MergeTarget | None:
        return self._targets.get(process_of(dict(attributes)))


def _parsed(request: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        return ExportTraceServiceRequest.FromString(request)
    except DecodeError as error:
        raise MalformedError(f"{len(request):,} bytes that are no OTLP message") from error
