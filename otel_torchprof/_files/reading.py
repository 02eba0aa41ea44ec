"""Reads the events of trace files one by one, in any of the formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_NAME
from otel_torchprof._model.span_table import AttributeType

from .attribute_keys import INSTANCE, RANK
from .chrome_events import ChromeEvents
from .records import RecordReading, json_attributes, object_of, objects, protobuf_attributes
from .values import event_name, id_in, key_of, text_in, values_of, whole

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Hashable, Mapping

    from otel_torchprof._encode.spans import SpanList
    from otel_torchprof._export.byte_stream import ByteStream

    from .chrome_events import Events

_WITH_RANK = frozenset(("distributedInfo", "otherData"))
"""Members of a Chrome trace's document that contain its rank."""
MERGED_RANKS = "merged_ranks"
"""Key in ``otherData`` of a merged trace, with its processes and their ranks."""


class Reading(NamedTuple):
    """Result of reading a file."""

    problems: list[str]
    """Messages about unreadable parts; empty if there are none."""
    left_out: Counter[str]
    """Number of records that are no events, by kind."""


def read_events(path: str, events: Events, watch: Callable[[ByteStream], None] = lambda _stream: None) -> Reading:
    """Passes the events of a file to ``events``.

    Args:
        path: path of the file.
        events: receives the events.
        watch: gets the open file, to display how much has been read.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """
    records = Interpreted(events)
    reading = RecordReading(path, records, watch)
    try:
        for _ in reading:
            pass
    except KeyboardInterrupt:
        if not len(records):
            raise
        reading.problems.append(f"{path!r}: interrupted; what was read before that is counted")
        reading.end()
    records.chrome.settle()
    left_out = records.chrome.left_out
    if reading.members_left_out:
        left_out[f"members of the document, as {', '.join(reading.first_left_out)}"] = reading.members_left_out
    return Reading(reading.problems, left_out)


def hand_over(spans: SpanList, events: Events) -> None:
    """Passes spans to ``events`` as :func:`read_events` does for a file with these spans. Costs some microseconds each."""
    records, table = Interpreted(events), spans.table
    records.begin_resource(dict(spans.resource.attributes))
    attributes: list[dict[str, Any]] = [{} for _ in range(len(table))]
    for column in table.attributes:
        if column.key in events.used_attributes or column.key == PHASE_NAME:
            rows = np.arange(len(table)) if column.rows is None else column.rows
            values = column.values.tolist()
            if column.type == AttributeType.NAME:
                values = [table.names[value] for value in values]
            for row, value in zip(rows.tolist(), values, strict=True):
                attributes[row][column.key] = value
    traces = [trace_id.tobytes() for trace_id in table.trace_ids]
    columns = (table.name, table.start, table.end, table.span_id, table.parent_span_id, table.trace)
    for (name, start, end, *ids, trace), given in zip(
        zip(*(column.tolist() for column in columns), strict=True), attributes, strict=True
    ):
        of_span = (*ids, traces[trace])
        records.add_own_span(table.names[name], start, end, of_span, values_of(given.items()))


class Interpreted:
    """Interprets records and passes them on as events."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._process: Hashable = None
        self.chrome = ChromeEvents(events)
        """Interprets events of a Chrome trace."""

    def __len__(self) -> int:
        return len(self._events) + len(self.chrome)

    def add_member(self, name: str, value: Any) -> None:
        """Reads the rank in torch's ``distributedInfo`` or this package's ``otherData``, and the ranks of a merged trace."""
        member = object_of(value, name) if name in _WITH_RANK else {}
        resource = member.get("resource")
        rank = resource.get(RANK) if isinstance(resource, dict) else member.get("rank")
        if rank is not None:
            self._events.name_rank(None, whole(rank, "rank"))
        for process in objects(member, MERGED_RANKS):
            if process.get("rank") is not None:
                self._events.name_rank(key_of(process.get("pid")), whole(process["rank"], "rank"))

    def add_event(self, event: dict[str, Any]) -> None:
        """Adds an event of a Chrome trace."""
        self.chrome.add(event)

    def begin_resource(self, attributes: dict[str, Any]) -> None:
        """Sets the process of the spans that follow, and passes on its rank."""
        rank = attributes.get(RANK)
        self._process = process_of(attributes)
        if rank is not None:
            self._events.name_rank(self._process, whole(rank, RANK))

    def add_own_span(
        self, name: str, start: int, end: int, ids: tuple[int, int, Hashable], values: Mapping[str, Any]
    ) -> None:
        """Adds a span of the current process from its fields."""
        name = event_name(name, values)
        self._events.add_span(name, start, max(0, end - start), ids, values, process=self._process)

    def add_span(self, span: Any, _scope: str) -> None:
        """Adds a span of the current process, a JSON object or a message."""
        add = _add_json_span if isinstance(span, dict) else _add_protobuf_span
        add(span, self._events, self._process)


def process_of(attributes: dict[str, Any]) -> Hashable:
    """The key of a process, from the attributes of its resource."""
    return key_of(attributes.get(INSTANCE)), key_of(attributes.get(RANK))


def _add_json_span(span: dict[str, Any], events: Events, process: Hashable) -> None:
    name = text_in(span.get("name", ""), "name")
    start, end = (whole(span.get(f"{which}TimeUnixNano", 0), f"{which}TimeUnixNano") for which in ("start", "end"))
    ids = id_in(span.get("spanId") or "0", "spanId"), id_in(span.get("parentSpanId") or "0", "parentSpanId")
    values = values_of(
        (key, value) for key, value in json_attributes(span) if key in events.used_attributes or key == PHASE_NAME
    )
    name = event_name(name, values)
    events.add_span(name, start, max(0, end - start), (*ids, key_of(span.get("traceId"))), values, process=process)


def _add_protobuf_span(span: Any, events: Events, process: Hashable) -> None:
    ids = (
        *(int.from_bytes(span_id[-8:], "big") for span_id in (span.span_id, span.parent_span_id)),
        span.trace_id[:16],
    )
    start, end = (whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    values = values_of(
        (key, value) for key, value in protobuf_attributes(span) if key in events.used_attributes or key == PHASE_NAME
    )
    name = event_name(span.name, values)
    events.add_span(name, start, max(0, end - start), ids, values, process=process)
