"""Encodes spans as Chrome JSON: one document, to which each export appends events.

The document is that of :mod:`.chrome`, with the resource of the first span as its ``otherData``. It is closed after each
export, since viewers need a complete document; Perfetto ignores data after it.

A span is a complete event. Its arguments are ``trace_id``, ``span_id``, ``parent_id``, ``attributes``, ``links`` and, unless they have
their usual values, ``kind``, ``status`` and ``status_description``, ``trace_state``,
``dropped_attributes``, ``dropped_events``, ``dropped_links``. Its events are instants on its track. A link between two
spans of one export is an arrow too, if the linked span began first.
"""

from __future__ import annotations

import base64
import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from opentelemetry.trace import SpanKind, StatusCode

from otel_torchprof._columns.batch import Names
from otel_torchprof._model.span_table import STEP_NAME, STEP_NUMBER, AttributeType, extend_names
from otel_torchprof._model.span_tables import narrowed
from otel_torchprof._model.tree import STEP_PREFIX
from otel_torchprof._native.encoders import EscapedNames, SpanColumns, SpanTexts, encode_spans, link_targets

from .chrome_json import BASE_GRID_NS, compact, metadata_event, process_events, valid
from .chrome_tracks import Outlines, Tracks
from .process_resource import of_this_process
from .spans import CheckedSpans, SpanList

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    from otel_torchprof._model.span_table import AttributeColumn, SpanTable

CLOSING = b"\n]}\n"
"""End of the document."""

# Time 0 is so long before the first span: a job that began weeks ago may end in this file, and viewers drop negative times.
# A double still distinguishes nanoseconds.
_WEEKS_BEFORE = 8


class ChromeSpans:
    """Encodes one export after another for one trace file. Not thread-safe.

    The track of a span depends on earlier exports, and names of tracks are written once. Memory grows with the threads and
    the spans that overlap in time, not with the number of spans. ``metadata``: further members of the document, as JSON.
    """

    def __init__(self, pid: int | None = None, metadata: Mapping[str, str] | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._metadata = metadata or {}
        self._tracks = Tracks(self.pid)
        self._resources: list[Resource] = []
        self._resources_reported = 1
        self._base: int | None = None
        self._arrows = 0

    def encode(self, spans: Sequence[ReadableSpan], *, begin: bool) -> Iterator[bytes]:
        """Encodes the events of spans, in pieces of about 1 MiB; with ``begin`` after the start of a document, without its end.

        A SpanList is encoded from its columns, natively and without the GIL. For other spans, arguments are encoded in Python first, at
        some 20 µs per span.
        Raises ValueError for a table that does not fit together, MemoryError.
        """
        if len(spans) == 0:
            return
        if begin:
            self.report_again()
        for resource in [spans.resource] if isinstance(spans, SpanList) else [span.resource for span in spans]:
            self._note_resource(resource)
        rows = Columns(spans) if isinstance(spans, SpanList) else Objects(spans)
        order, tids = self._tracks.place(rows.outlines)
        arrows = rows.lay_out(order, tids)
        base = self._settled_base(int(rows.outlines.start.min()))
        yield self._news(begin).encode()
        self._arrows += arrows
        yield from rows.pieces(self.pid, base, self._arrows - arrows)

    def report_again(self) -> None:
        """Writes names of tracks etc. again with the next export. Call it when the last export's bytes were lost."""
        self._tracks.report_again()
        self._resources_reported = 1

    def copied(self) -> ChromeSpans:
        """Returns a copy with the same state, to try whether spans fit."""
        other = copy.copy(self)
        other._tracks, other._resources = copy.deepcopy(self._tracks), list(self._resources)  # noqa: SLF001 - same class
        return other

    def _settled_base(self, first_start: int) -> int:
        """Returns the time from which "ts" counts, Unix ns, as set by the first export."""
        if self._base is None:
            self._base = (first_start // BASE_GRID_NS - _WEEKS_BEFORE) * BASE_GRID_NS
        return self._base

    def _note_resource(self, resource: Resource) -> None:
        resource = of_this_process(resource)
        if not any(resource is known or resource == known for known in self._resources):
            self._resources.append(resource)

    def _news(self, begin: bool) -> str:
        """Returns the metadata events that the file does not contain yet."""
        labels = [self._label(resource) for resource in self._resources[self._resources_reported :]]
        self._resources_reported = max(1, len(self._resources))
        news = "".join(f",\n{event}" for event in (*labels, *self._tracks.news()))
        return self._opening() + news if begin else news

    def _opening(self) -> str:
        """Returns the start of the document, with the process and its name as first events; all others follow after a comma."""
        resource = json_value(self._resources[0].attributes)
        fields = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._base,
            "otherData": {"resource": resource},
        }
        process = ",\n".join(process_events(self.pid, _service(resource), self.pid))
        members = "".join(f",\n{compact(key)}:{text}" for key, text in self._metadata.items() if key not in fields)
        return f'{compact(fields)[:-1]}{members},\n"traceEvents":[\n{process}'

    def _label(self, resource: Resource) -> str:
        """Returns a label with a further resource, that of another provider; the process is named after the first one."""
        attributes = json_value(resource.attributes)
        return metadata_event("process_labels", self.pid, 0, labels=_service(attributes), resource=attributes)


def _service(resource: Mapping[str, Any]) -> str:
    return str(resource.get("service.name", "python"))


def service_name(resource: Resource) -> str:
    """The name of the process that a resource describes, for viewers."""
    return valid(_service(of_this_process(resource).attributes))


# --- Spans as columns, encoded by numpy and native code ---


Array = npt.NDArray[Any]


class Columns:
    """The spans of a SpanList for a file of tracks, and their lines of Chrome JSON. Not thread-safe; must live while its pieces are made.

    Raises ValueError for a table that does not fit together.
    """

    def __init__(self, spans: SpanList) -> None:
        self.table, rows = _with_numbered_steps(narrowed(spans.table)), spans.rows
        self._spans = spans
        self._rows = np.arange(rows.start, rows.stop, rows.step)
        self.checked = CheckedSpans(self.table, range(int(self._rows.min()), int(self._rows.max()) + 1))
        # Nearly always consecutive rows: a slice copies nothing.
        self._picked: slice | Array = slice(rows.start, rows.stop) if rows.step == 1 else self._rows
        self.outlines = self._outlines()
        self.layout: dict[str, Array] = {}
        """Columns of ``otp_chrome_layout``."""

    def lay_out(self, order: npt.NDArray[np.int64], tids: npt.NDArray[np.int64]) -> int:
        """Sets the order of the spans and their tracks; returns the number of arrows between them."""
        self.layout = {
            "rows": self._rows[order].astype(np.uint64),
            "tid": tids[order],
            "category": self._categories()[order],
        }
        self.layout |= self._arrows()
        return len(self.layout["arrow_from"])

    def pieces(self, pid: int, base: int, first_arrow: int) -> Iterator[bytes]:
        """The lines of JSON."""
        names = EscapedNames(self.checked.all_names)
        keys = Names.of([f"{compact(column.key)}:" for column in self.table.attributes])
        texts = SpanTexts(names, EscapedNames(Names.of(self.category_names())), keys=keys)
        return encode_spans(self.checked.spans, self.layout, texts, first_arrow=first_arrow, base_ns=base, pid=pid)

    def _outlines(self) -> Outlines:
        table, picked = self.table, self._picked
        start, end = table.start[picked], table.end[picked]
        thread, threads = self._threads()
        return Outlines(
            start, np.maximum(start, end), table.span_id[picked], table.parent_span_id[picked], thread, threads
        )

    def _threads(self) -> tuple[npt.NDArray[np.int64], Sequence[tuple[int, str]]]:
        """Returns the thread on which each span began and ended, as an index into the threads' ids and names.

        Spans of a thread are in runs, mostly long ones; only runs are handled one by one.
        """
        number, on_thread = self._attribute("thread.id", AttributeType.INT64)
        moved, is_moved = self._attribute("torch.async", AttributeType.BOOL)
        name, named = self._attribute("thread.name", AttributeType.NAME)
        on_thread &= ~(is_moved & (moved != 0))
        number, name = np.where(on_thread, number, 0), np.where(on_thread & named, name, 0)
        changes = (number[1:] != number[:-1]) | (name[1:] != name[:-1]) | (on_thread[1:] != on_thread[:-1])
        first = np.concatenate(([0], np.flatnonzero(changes) + 1))
        threads: dict[int, tuple[int, str]] = {}
        index = []
        runs = zip(number[first].tolist(), name[first].tolist(), on_thread[first].tolist(), strict=True)
        for run_number, run_name, known in runs:
            if not known:
                index.append(-1)
                continue
            place, text = threads.get(run_number, (len(threads), ""))
            threads[run_number] = (place, text or self.table.names[run_name])
            index.append(place)
        lengths = np.diff(np.append(first, len(number)))
        return np.repeat(np.array(index, dtype=np.int64), lengths), [(n, text) for n, (_, text) in threads.items()]

    def _attribute(self, key: str, kind: AttributeType) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Returns the values of an attribute, and a mask of the spans that have it."""
        column = self._column(key, kind)
        if column is None:
            return np.zeros(len(self._rows), dtype=kind.dtype), np.zeros(len(self._rows), dtype=bool)
        values, present = column.spread(len(self.table))
        return values[self._picked], present[self._picked]

    def _column(self, key: str, kind: AttributeType) -> AttributeColumn | None:
        return next((c for c in self.table.attributes if c.key == key and c.type == kind), None)

    def category_names(self) -> list[str]:
        """The categories, to which ``layout`` points."""
        return list(dict.fromkeys((valid(category_of(self._spans.scope)), OPERATOR, ANNOTATION)))

    def _categories(self) -> npt.NDArray[np.uint32]:
        """Returns per span an index into the names of categories, as by :func:`category_of`."""
        names = self.category_names()
        values, present = self._attribute("torch.op.scope", AttributeType.NAME)
        used = np.flatnonzero(np.bincount(values)).tolist()
        of_name = np.zeros(used[-1] + 1, dtype=np.uint32)
        for index in used:
            of_name[index] = names.index(valid(category_of(self._spans.scope, self.table.names[index])))
        categories: npt.NDArray[np.uint32] = of_name[values] * present
        return categories

    def _arrows(self) -> dict[str, Array]:
        """Returns links between two of the spans, as positions in the order of writing, by the linking span."""
        rows, links = self.layout["rows"], self.table.links
        if not len(links):
            return {"arrow_from": np.empty(0, dtype=np.uint64), "arrow_to": np.empty(0, dtype=np.uint64)}
        target = link_targets(self.checked.spans, rows, len(links))
        place = np.full(len(self.table), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        source = place[links["row"]]
        linked = np.zeros(len(rows), dtype=np.uint8)
        linked[source[source >= 0]] = 1
        start = self.table.start[rows]
        drawn = (target >= 0) & (source >= 0) & (target != source) & (start[target] <= start[source])
        source, target = source[drawn], target[drawn]
        order = np.argsort(source, kind="stable")
        arrows = {"arrow_from": target[order].astype(np.uint64), "arrow_to": source[order].astype(np.uint64)}
        return arrows | {"linked": linked}


def _with_numbered_steps(table: SpanTable) -> SpanTable:
    """Returns the spans with steps renamed by :func:`slice_name`."""
    rows = np.flatnonzero(table.step >= 0).tolist()
    names = [slice_name(table.names[table.name[row]], int(table.step[row])) for row in rows]
    if not rows:
        return table
    name = table.name.copy()
    name[rows] = np.arange(len(table.names), len(table.names) + len(rows))
    return replace(table, name=name, names=extend_names(table.names, names))


# --- Spans as objects: arguments are encoded here, all else natively ---


OPERATOR, ANNOTATION = "cpu_op", "user_annotation"
"""Torch's categories."""

_OWN_SCOPE = "otel_torchprof"
_LATEST = 2**63 - 1
"""Latest accepted time, Unix ns; an event of a span may have any number."""
_MOST_BITS = 10_000  # Python refuses to write longer integers in decimal


def json_value(value: Any) -> Any:
    """Converts an attribute's value, or attributes, to a value for JSON.

    NaN and infinities become text, as in protobuf's JSON; so do integers beyond 64 bits, which viewers garble.
    Bytes become base64; objects of types that attributes cannot have become their ``str()``.
    """
    if value is None or isinstance(value, bool | str):
        return valid(value) if isinstance(value, str) else value
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {valid(str(key)): json_value(item) for key, item in value.items()}
    return [json_value(item) for item in value] if isinstance(value, Sequence) else valid(str(value))


def _number(value: float) -> float | str:
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return int(value)
        return str(int(value)) if value.bit_length() < _MOST_BITS else hex(value)
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def category_of(scope: InstrumentationScope | None, op_scope: object = None) -> str:
    """Returns torch's category for a span of this package, else the name of the instrumentation scope."""
    name = scope.name if scope else ""
    if name != _OWN_SCOPE:
        return name or "span"
    return OPERATOR if isinstance(op_scope, str) and op_scope != "user_scope" else ANNOTATION


def outlines_of(spans: Sequence[ReadableSpan]) -> Outlines:
    """Returns ids, times and threads of the spans, to place them on tracks."""
    starts = [_start(span) for span in spans]
    ends = [max(start, _end(span)) for start, span in zip(starts, spans, strict=True)]
    threads: dict[int, tuple[int, str]] = {}
    index: list[int] = []
    for span in spans:
        number = _thread_of(span)
        if number is None:
            index.append(-1)
            continue
        place, name = threads.get(number, (len(threads), ""))
        threads[number] = (place, name or _thread_name(span))
        index.append(place)
    return Outlines(
        start=np.array(starts, dtype=np.int64),
        end=np.array(ends, dtype=np.int64),
        span_id=np.array([span.context.span_id if span.context else 0 for span in spans], dtype=np.uint64),
        parent_id=np.array([span.parent.span_id if span.parent else 0 for span in spans], dtype=np.uint64),
        thread=np.array(index, dtype=np.int64),
        threads=[(number, name) for number, (_, name) in threads.items()],
    )


def _start(span: ReadableSpan) -> int:
    time = span.start_time if span.start_time is not None else span.end_time
    return time or 0


def _end(span: ReadableSpan) -> int:
    return span.end_time if span.end_time is not None else _start(span)


def _thread_of(span: ReadableSpan) -> int | None:
    """Returns the id of the thread on which the span began and ended; None if there is none."""
    attributes = span.attributes or {}
    number = attributes.get("thread.id")
    if type(number) is not int or not -(2**63) <= number < 2**63 or attributes.get("torch.async") is True:
        return None
    return number


def _thread_name(span: ReadableSpan) -> str:
    name = (span.attributes or {}).get("thread.name")
    return name if isinstance(name, str) else ""


def arrows_of(spans: Sequence[ReadableSpan], order: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the links between two of these spans as pairs (row of the linked span, row of the linking span), in ``order``."""
    rows: dict[tuple[int, int], int] = {}
    for row in order:
        if context := spans[row].context:
            rows.setdefault((context.trace_id, context.span_id), row)
    arrows = []
    for row in order:
        for link in spans[row].links:
            target = rows.get((link.context.trace_id, link.context.span_id))
            if target is not None and target != row and _start(spans[target]) <= _start(spans[row]):
                arrows.append((target, row))
    return arrows


def slice_name(name: str, step: object) -> str:
    """Returns the name of a span in a trace file. A step is called ``ProfilerStep#7`` as in torch, since tools search for it."""
    return f"{STEP_PREFIX}{step}" if name == STEP_NAME and isinstance(step, int) else name


class _Line(NamedTuple):
    """A span, or an event of one."""

    name: str
    category: str
    track: int
    start: int
    end: int
    is_instant: bool
    arguments: str
    """JSON text."""


class Objects:
    """Encodes spans that are objects; otherwise as :class:`~.chrome_spans.Columns`."""

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        self._spans = spans
        self.outlines = outlines_of(spans)
        self._lines: list[_Line] = []
        self._arrows: list[tuple[int, int]] = []

    def lay_out(self, order: npt.NDArray[np.int64], tids: npt.NDArray[np.int64]) -> int:
        """Sets the order of the spans and their tracks; returns the number of arrows between them."""
        place: dict[int, int] = {}
        for row, tid in zip(order.tolist(), tids[order].tolist(), strict=True):
            place[row] = len(self._lines)
            self._lines += _lines(self._spans[row], tid)
        self._arrows = [(place[start], place[end]) for start, end in arrows_of(self._spans, order.tolist())]
        return len(self._arrows)

    def pieces(self, pid: int, base: int, first_arrow: int) -> Iterator[bytes]:
        """The lines of JSON."""
        name, category, tid, start, end, is_instant, arguments = zip(*self._lines, strict=True)
        names, categories = list(dict.fromkeys(name)), list(dict.fromkeys(category))
        columns: dict[str, npt.NDArray[Any]] = {
            "name": _places(names, name),
            "start": np.array(start, dtype=np.int64),
            "end": np.array(end, dtype=np.int64),
        }
        arrows = np.array(self._arrows, dtype=np.uint64).reshape(-1, 2)
        layout: dict[str, npt.NDArray[Any]] = {
            "rows": np.arange(len(name), dtype=np.uint64),
            "tid": np.array(tid, dtype=np.int64),
            "category": _places(categories, category),
            "instant": np.array(is_instant, dtype=np.uint8),
            "arrow_from": np.ascontiguousarray(arrows[:, 0]),
            "arrow_to": np.ascontiguousarray(arrows[:, 1]),
        }
        texts = SpanTexts(
            EscapedNames(Names.of(names)), EscapedNames(Names.of(categories)), arguments=Names.of(list(arguments))
        )
        spans = SpanColumns(len(name), columns, (), 0, Names.of(names))
        return encode_spans(spans, layout, texts, first_arrow=first_arrow, base_ns=base, pid=pid)


def _places(distinct: list[str], texts: Sequence[str]) -> npt.NDArray[np.uint32]:
    place = {text: number for number, text in enumerate(distinct)}
    return np.array([place[text] for text in texts], dtype=np.uint32)


def _lines(span: ReadableSpan, track: int) -> Iterator[_Line]:
    """Yields the lines of a span and of its events."""
    attributes = span.attributes or {}
    category = valid(category_of(span.instrumentation_scope, attributes.get("torch.op.scope")))
    name = valid(slice_name(span.name, attributes.get(STEP_NUMBER)))
    yield _Line(name, category, track, _start(span), _end(span), False, compact(_arguments(span)))
    for event in span.events:
        args = _without_empty(_ids(span.context) | {"attributes": json_value(event.attributes or {})})
        time = min(max(event.timestamp, 0), _LATEST)
        yield _Line(valid(event.name), category, track, time, time, True, compact(args))


def _arguments(span: ReadableSpan) -> dict[str, Any]:
    status = span.status
    return _without_empty(
        _ids(span.context)
        | {
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
            "trace_state": valid(span.context.trace_state.to_header()) if span.context else "",
            "kind": "" if span.kind is SpanKind.INTERNAL else span.kind.name,
            "status": "" if status.status_code is StatusCode.UNSET else status.status_code.name,
            "status_description": valid(status.description or ""),
            "dropped_attributes": span.dropped_attributes,
            "dropped_events": span.dropped_events,
            "dropped_links": span.dropped_links,
            "attributes": json_value(span.attributes or {}),
            "links": [
                _without_empty(_ids(link.context) | {"attributes": json_value(link.attributes or {})})
                for link in span.links
            ],
        }
    )


def _ids(context: SpanContext | None) -> dict[str, Any]:
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"} if context else {}


def _without_empty(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if value}
