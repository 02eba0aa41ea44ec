"""Reads the events of trace files, in any of the formats."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import PHASE_NAME, PHASE_PREFIX

from .attribute_keys import JOB, MERGED_RANKS, OTHER, RANK, SELF_DURATION
from .event_columns import WANTED, events_of_trace, process_names
from .records import BASE_TIME, RecordReading, json_attributes, object_of, objects, protobuf_attributes
from .trace_columns import ChromeReading, free_memory
from .trace_events import TraceEventList, joined
from .values import event_name, id_in, key_of, process_of, text_in, values_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

    from .trace_events import TraceEvents

_WITH_RANK = frozenset((JOB, OTHER))
"""Members of a Chrome trace's document that contain its rank."""


def read_events(
    paths: Sequence[str], watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None
) -> TraceEvents:
    """Reads the files of one recording. Costs some microseconds per event of OTLP, and one of Chrome JSON.

    Args:
        paths: paths of the files, in their order.
        watch: gets each file when it is open, to display how much has been read.

    Raises:
        TorchProfError: nothing of a file could be read; names the file, the place and the way out.
    """
    return joined([EventReading(path, partial(watch, path)).read() for path in paths])


class EventReading(RecordReading):
    """Reads a file: its spans one by one, or a Chrome trace as columns. Memory is at most half of what is free.

    Args:
        path: path of the file.
        watch: gets the open file, to display how much has been read.
    """

    def __init__(self, path: str, watch: Callable[[ByteStream], None]) -> None:
        limit = free_memory() // 2
        self._list, self._columns = TraceEventList(limit), ChromeReading(path, limit, WANTED)
        self._events: TraceEvents | None = None
        self._spans = SpanRecords(self._list)
        self.is_chrome = False
        self.members: Mapping[str, Any] = {}
        """Members of the document of a Chrome trace."""
        self.process_names: list[tuple[Hashable, str, str]] = []
        """Process, kind and text of each name or label of a process in a Chrome trace."""
        super().__init__(path, self._spans, watch)

    @property
    def resources(self) -> Mapping[Hashable, dict[str, Any]]:
        """The attributes of OTLP resources, by process."""
        return self._spans.resources

    def read(self) -> TraceEvents:
        """All events. Raises TorchProfError if there are none."""
        try:
            for _ in self:
                pass
        except KeyboardInterrupt:
            if not self.counted():
                raise
            self.problems.append(f"{self._path!r}: interrupted; what was read before that is counted")
        events = self._events = self._list.events() if len(self._list) else self._events_of_columns()
        self.problems += events.problems
        super().end()
        events.problems = self.problems
        return events

    def counted(self) -> int:
        """Number of events so far."""
        return (len(self._list) or self._columns.counted()) if self._events is None else len(self._events)

    def end(self) -> None:
        """Does nothing yet: members of the document come after the events."""

    def _read_chrome(self, stream: ByteStream) -> Iterator[None]:
        self.is_chrome = True
        self._columns.read(stream)
        yield

    def _events_of_columns(self) -> TraceEvents:
        trace = self._columns.columns()
        self.members, self.process_names = trace.members, process_names(trace)
        for name, value in trace.members.items():
            self._add_member(name, value)
        for name, reason in trace.unread.items():
            self._leave_out(name, reason)
        events = events_of_trace(self._path, trace)
        events.ranks = self._list.ranks
        events.problems += trace.problems
        if self.members_left_out:
            names = ", ".join(self.first_left_out)
            events.left_out += Counter({f"members of the document, as {names}": self.members_left_out})
        return events


class SpanRecords:
    """Passes the spans of OTLP on as events, and the ranks that a file has."""

    def __init__(self, events: TraceEventList) -> None:
        self._events = events
        self._process: Hashable = None
        self.resources: dict[Hashable, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._events)

    def add_member(self, name: str, value: Any) -> None:
        """Reads the rank in torch's ``distributedInfo`` or this package's ``otherData``, and the ranks of a merged trace."""
        if name == BASE_TIME:
            whole(value, name)
        member = object_of(value, name) if name in _WITH_RANK else {}
        resource = member.get("resource")
        rank = resource.get(RANK) if isinstance(resource, dict) else member.get("rank")
        if rank is not None:
            self._events.name_rank(None, whole(rank, "rank"))
        for process in objects(member, MERGED_RANKS):
            if process.get("rank") is not None:
                self._events.name_rank(key_of(process.get("pid")), whole(process["rank"], "rank"))

    def add_event(self, event: dict[str, Any]) -> None:
        """Never called: Chrome traces are read as columns."""

    def begin_resource(self, attributes: dict[str, Any]) -> None:
        """Sets the process of the spans that follow, and passes on its rank."""
        rank = attributes.get(RANK)
        self._process = process_of(attributes)
        self.resources[self._process] = attributes
        if rank is not None:
            self._events.name_rank(self._process, whole(rank, RANK))

    def add_span(self, span: Any, _scope: str) -> None:
        """Adds a span of the current process, a JSON object or a message."""
        add = _add_json_span if isinstance(span, dict) else _add_protobuf_span
        add(span, self._events, self._process)


def _add_json_span(span: dict[str, Any], events: TraceEventList, process: Hashable) -> None:
    name = text_in(span.get("name", ""), "name")
    start, end = (whole(span.get(f"{which}TimeUnixNano", 0), f"{which}TimeUnixNano") for which in ("start", "end"))
    ids = id_in(span.get("spanId") or "0", "spanId"), id_in(span.get("parentSpanId") or "0", "parentSpanId")
    values = _values_of(name, json_attributes(span), events)
    name = event_name(name, values)
    events.add_span(name, start, max(0, end - start), (*ids, key_of(span.get("traceId"))), values, process=process)


def _add_protobuf_span(span: Any, events: TraceEventList, process: Hashable) -> None:
    ids = (
        *(int.from_bytes(span_id[-8:], "big") for span_id in (span.span_id, span.parent_span_id)),
        span.trace_id[:16],
    )
    start, end = (whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    values = _values_of(span.name, protobuf_attributes(span), events)
    name = event_name(span.name, values)
    events.add_span(name, start, max(0, end - start), ids, values, process=process)


def _values_of(name: str, attributes: Iterable[tuple[str, Any]], events: TraceEventList) -> Mapping[str, Any]:
    """The used attributes of a span; self times of phases only, since others follow from the children."""
    used = {key: value for key, value in attributes if key in events.used_attributes or key == PHASE_NAME}
    if SELF_DURATION in used and PHASE_NAME not in used and not name.startswith(PHASE_PREFIX):
        del used[SELF_DURATION]
    return values_of(used.items())
