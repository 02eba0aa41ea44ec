"""Spans of OTLP as events of a merged Chrome trace: on the track of their thread, with the arguments of this package's own traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from otel_torchprof._encode.chrome_lanes import Lanes
from otel_torchprof._encode.chrome_objects import Objects
from otel_torchprof._encode.chrome_tracks import Tracks
from otel_torchprof._encode.otlp_json import request_of

from .merged_events import LARGEST_ID
from .records import MalformedError
from .values import whole
from .wanted import THREAD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .merged_events import Target

_MOST_PARTS = 10_000
"""Attributes, events and links of a span: each is an object of some hundred bytes."""
_MOST_WAITING = 1 << 19
"""Bytes of spans that are placed together."""
_MOST_THREADS = 4096
"""Of all ranks: of each is remembered what is on its track."""
_MOST_SLICES = 200_000
"""Of all ranks, that are remembered on tracks which are no thread's."""
_MOST_NESTED = 50
_LONGEST_REASON = 500
_RESOURCE = Resource({})
_CODES = frozenset(each.value for each in StatusCode)
_KINDS = {each.value + 1: each for each in SpanKind}
"""OTLP has a kind more, the unknown one, and begins with it."""


class MergedSpans:
    """Turns the spans of all ranks into lines, some at a time.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._most_slices = max(_MOST_SLICES // ranks, 100)
        self._ranks: dict[int, _SpansOfRank] = {}
        self._threads: set[tuple[int, int]] = set()
        self._waiting = 0

    def lines(self, span: Any, scope: str, target: Target) -> Iterator[str]:
        """Takes a span, an object of JSON or a message; the lines of those that wait, once they are enough. Raises MalformedError."""
        message = _message(span) if isinstance(span, dict) else span
        found = _readable(message, scope, target)
        self._note_thread(target, (found.attributes or {}).get(THREAD))
        of_rank = self._ranks.get(target.place)
        if of_rank is None:
            of_rank = self._ranks[target.place] = _SpansOfRank(target, self._most_slices)
        of_rank.waiting.append(found)
        self._waiting += message.ByteSize()
        if self._waiting >= _MOST_WAITING:
            yield from self.rest()

    def rest(self) -> Iterator[str]:
        """The lines of what waits."""
        self._waiting = 0
        for each in self._ranks.values():
            yield from each.taken()

    def _note_thread(self, target: Target, thread: Any) -> None:
        if type(thread) is int and (target.place, thread) not in self._threads:
            if len(self._threads) == _MOST_THREADS:
                raise MalformedError(f"a span of one more than {_MOST_THREADS:,} threads")
            self._threads.add((target.place, thread))


class _SpansOfRank:
    """Spans of one rank that wait until they are placed together."""

    def __init__(self, target: Target, most_slices: int) -> None:
        self.waiting: list[ReadableSpan] = []
        self._target = target
        self._tracks = Tracks(target.pid, Lanes(most_slices=most_slices))
        self._arrows = target.place * LARGEST_ID

    def taken(self) -> Iterator[str]:
        """Their lines; none waits any more."""
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


def _readable(span: Any, scope: str, target: Target) -> ReadableSpan:
    """The span, its times on the reference's clock."""
    if len(span.attributes) + len(span.events) + len(span.links) > _MOST_PARTS:
        raise MalformedError(f"a span with more than {_MOST_PARTS:,} attributes, events and links")
    start, end = (whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    events = [
        Event(each.name, _attributes(each), _unix(whole(each.time_unix_nano, "time"), target)) for each in span.events
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
        links=[Link(_context(each.trace_id, each.span_id), _attributes(each)) for each in span.links],
        kind=_KINDS.get(span.kind, SpanKind.INTERNAL),
        status=Status(code, span.status.message or None if is_error else None),
        start_time=_unix(start, target),
        end_time=_unix(max(start, end), target),
        instrumentation_scope=InstrumentationScope(scope),
    )


def _unix(time: int, target: Target) -> int:
    return target.time(time) + target.base


def _context(trace_id: bytes, span_id: bytes) -> SpanContext:
    return SpanContext(int.from_bytes(trace_id[:16], "big"), int.from_bytes(span_id[-8:], "big"), is_remote=False)


def _attributes(parent: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in parent.attributes}


def _value(value: Any, depth: int = 0) -> Any:
    which = value.WhichOneof("value")
    if depth > _MOST_NESTED:
        raise MalformedError("an attribute that is nested too deeply")
    if which == "array_value":
        return [_value(each, depth + 1) for each in value.array_value.values]
    if which == "kvlist_value":
        return {each.key: _value(each.value, depth + 1) for each in value.kvlist_value.values}
    return getattr(value, which) if which else None
