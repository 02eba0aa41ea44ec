"""Reading trace files event by event: what each record means, in whichever format it stands in the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._tree.span_table import STEP_NAME
from otel_torchprof._tree.tree import STEP_PREFIX

from .records import RecordReading, json_attributes, malformed, object_of, objects, protobuf_attributes
from .wanted import AVERAGES, COLLECTIVES, DURATIONS, INSTANCE, RANK, TEXTS, UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping
    from typing import Protocol

    from otel_torchprof._export.byte_stream import ByteStream

_STEPS_TRACK = 2**31 - 1
"""On which this package's profiles draw their steps, beside what they hold."""
LARGEST_NUMBER = 1 << 61
"""Of nanoseconds: sums of two are 64-bit numbers."""
_LONGEST_KEY = 64
"""Characters of what tells tracks and traces apart."""
_WITH_RANK = frozenset(("distributedInfo", "otherData"))
"""Members of a Chrome trace's document that say which rank it is of."""
MERGED_RANKS = "merged_ranks"
"""In the ``otherData`` of a trace that was merged: its processes and their ranks."""
_OF_ENTRY = ("group", "number", "begin", "end")
_LONGEST_LIST = 4096
"""Characters. This package writes 1,279 at most."""


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
    reading = RecordReading(path, Interpreted(events), watch)
    try:
        for _ in reading:
            pass
    except KeyboardInterrupt:
        if not len(events):
            raise
        reading.problems.append(f"{path!r}: interrupted; what was read before that is counted")
        reading.end()
    return reading.problems


class Interpreted:
    """Takes records, and hands over the events that they are."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._process: Hashable = None

    def __len__(self) -> int:
        return len(self._events)

    def add_member(self, name: str, value: Any) -> None:
        """The rank of torch's ``distributedInfo``, or of the resource in this package's ``otherData``; those of merged ranks."""
        found = object_of(value, name) if name in _WITH_RANK else {}
        resource = found.get("resource")
        rank = resource.get(RANK) if isinstance(resource, dict) else found.get("rank")
        if rank is not None:
            self._events.name_rank(None, whole(rank, "rank"))
        for each in objects(found, MERGED_RANKS):
            if each.get("rank") is not None:
                self._events.name_rank(key_of(each.get("pid")), whole(each["rank"], "rank"))

    def add_event(self, event: dict[str, Any]) -> None:
        """A slice; other events are not looked at."""
        if event.get("ph") == "X":
            _add_slice(event, self._events)

    def begin_resource(self, attributes: dict[str, Any]) -> None:
        """The process of the spans that follow; its rank is made known."""
        rank = attributes.get(RANK)
        self._process = process_of(attributes)
        if rank is not None:
            self._events.name_rank(self._process, whole(rank, RANK))

    def add_span(self, span: Any, _scope: str) -> None:
        """A span of that process."""
        add = _add_json_span if isinstance(span, dict) else _add_protobuf_span
        add(span, self._events, self._process)


def process_of(attributes: dict[str, Any]) -> Hashable:
    """What tells the process of a resource apart."""
    return key_of(attributes.get(INSTANCE)), key_of(attributes.get(RANK))


def _add_slice(event: dict[str, Any], events: Events) -> None:
    name, category = _text(event.get("name", ""), "name"), event.get("cat")
    category = category if isinstance(category, str) else ""
    if category in events.skipped:
        return
    start, duration = _rounded(event.get("ts", 0), 1000, "ts"), max(0, _rounded(event.get("dur", 0), 1000, "dur"))
    args = object_of(event.get("args") or {}, "args")
    span_id = args.get("span_id")
    track = key_of(event.get("pid")), key_of(event.get("tid"))
    if isinstance(span_id, str):
        ids = _id(span_id, "span_id"), _id(args.get("parent_id") or "0", "parent_id"), key_of(args.get("trace_id"))
        attributes = object_of(args.get("attributes") or {}, "attributes")
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


def _add_json_span(span: dict[str, Any], events: Events, process: Hashable) -> None:
    name = _text(span.get("name", ""), "name")
    start, end = (whole(span.get(f"{which}TimeUnixNano", 0), f"{which}TimeUnixNano") for which in ("start", "end"))
    ids = _id(span.get("spanId") or "0", "spanId"), _id(span.get("parentSpanId") or "0", "parentSpanId")
    values = _values((key, value) for key, value in json_attributes(span) if key in events.wanted)
    events.add_span(name, start, max(0, end - start), (*ids, key_of(span.get("traceId"))), values, process=process)


def _add_protobuf_span(span: Any, events: Events, process: Hashable) -> None:
    ids = (*(int.from_bytes(each[-8:], "big") for each in (span.span_id, span.parent_span_id)), span.trace_id[:16])
    start, end = (whole(at, "time") for at in (span.start_time_unix_nano, span.end_time_unix_nano))
    values = _values((key, value) for key, value in protobuf_attributes(span) if key in events.wanted)
    events.add_span(span.name, start, max(0, end - start), ids, values, process=process)


# ---- what values may be ----


def _values(attributes: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    """The attributes that are looked at, as numbers that can be added up, as short texts, and as lists of what is in them."""
    return {key: _reader_of(key)(value, key) for key, value in attributes}


def _reader_of(key: str) -> Callable[[Any, str], Any]:
    if key in DURATIONS:
        return _seconds
    return _short_text if key in TEXTS else _READERS.get(key, whole)


def _short_text(value: Any, what: str) -> str:
    return _text(value, what)[:_LONGEST_KEY]


def _flag(value: Any, _what: str) -> bool:
    return bool(value)


def _averages(value: Any, what: str) -> list[StepAverage]:
    return [
        StepAverage(
            _text(entry.get("name"), "name"),
            whole(entry.get("count"), "count"),
            _seconds(entry.get("self"), "self"),
            entry.get("phase") == "data",
        )
        for entry in (object_of(each, what) for each in _list(value, what))
    ]


def _collectives(value: Any, what: str) -> list[tuple[str, int, int, int]]:
    """Group, number, begin and end; the last two in ns."""
    found = []
    for entry in _list(value, what):
        if not isinstance(entry, list) or len(entry) != len(_OF_ENTRY):
            raise malformed(entry, what, f"lists of {', '.join(_OF_ENTRY)}")
        group, number, *times = entry
        begin, end = (_rounded(time, 1e3, what) for time in times)
        found.append((_text(group, what)[:_LONGEST_KEY], whole(number, what), begin, end))
    return found


def _list(value: Any, what: str) -> list[Any]:
    """Of a text in JSON."""
    text = _text(value, what)
    try:
        found = json.loads(text) if len(text) <= _LONGEST_LIST else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise malformed(text, what, f"a JSON list of at most {_LONGEST_LIST:,} characters")
    return found


def _seconds(value: Any, what: str) -> float:
    return max(0, _rounded(value, 1e9, what)) / 1e9


def _rounded(value: Any, scale: float, what: str) -> int:
    try:
        found = round(float(value) * scale)
    except (TypeError, ValueError, OverflowError):
        raise malformed(value, what, "a number") from None
    if abs(found) > LARGEST_NUMBER:
        raise malformed(value, what, f"at most {LARGEST_NUMBER / scale:.0f}")
    return found


def whole(value: Any, what: str) -> int:
    """A number from 0 on; protobuf writes those of 64 bits as texts into JSON."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        raise malformed(value, what, "a whole number") from None
    if not 0 <= found <= LARGEST_NUMBER:
        raise malformed(value, what, f"a number from 0 to {LARGEST_NUMBER}")
    return found


def _id(value: Any, what: str) -> int:
    try:
        found = int(value, 16)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found < 1 << 64:
        raise malformed(value, what, "16 hexadecimal digits")
    return found


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise malformed(value, what, "a text")
    return value


def key_of(value: Any) -> Any:
    """What may tell tracks, or traces, apart."""
    if isinstance(value, str):
        return value[:_LONGEST_KEY]
    return value if isinstance(value, int | float | None) else None


_READERS: dict[str, Callable[[Any, str], Any]] = {
    UNFINISHED: _flag,
    AVERAGES: _averages,
    COLLECTIVES: _collectives,
}
"""Of attributes that are neither durations, nor texts, nor whole numbers."""
