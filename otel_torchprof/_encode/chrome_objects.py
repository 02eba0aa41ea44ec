"""Chrome JSON of spans that are objects: their arguments are made here, all else is written natively, as of columns."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from opentelemetry.trace import SpanKind, StatusCode

from otel_torchprof._columns.batch import Names
from otel_torchprof._native.chrome_encoders import EscapedNames, SpanTexts, encode_spans
from otel_torchprof._native.span_columns import SpanColumns
from otel_torchprof._tree.span_table import STEP_NAME
from otel_torchprof._tree.tree import STEP_PREFIX

from .chrome_json import compact, valid
from .chrome_tracks import Outlines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

OPERATOR, ANNOTATION = "cpu_op", "user_annotation"
"""Torch's categories."""

_OWN_SCOPE = "otel_torchprof"
_LATEST = 2**63 - 1
"""Unix ns; an event of a span may say any number."""
_MOST_BITS = 10_000  # Python refuses to write longer integers in decimal


def json_value(value: Any) -> Any:
    """An attribute's value, or attributes, as JSON can have it.

    What JSON has no number for becomes the text that protobuf's JSON has for it; so do integers beyond 64 bits, which
    viewers garble. Bytes become base64, and what is no value of an attribute its ``str()``.
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
    """Torch's own categories for this package's spans, the instrumentation scope's name for all others."""
    name = scope.name if scope else ""
    if name != _OWN_SCOPE:
        return name or "span"
    return OPERATOR if isinstance(op_scope, str) and op_scope != "user_scope" else ANNOTATION


def outlines_of(spans: Sequence[ReadableSpan]) -> Outlines:
    """What the tracks must know of them."""
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
    found = span.start_time if span.start_time is not None else span.end_time
    return found or 0


def _end(span: ReadableSpan) -> int:
    return span.end_time if span.end_time is not None else _start(span)


def _thread_of(span: ReadableSpan) -> int | None:
    """The thread it ran on, from begin to end."""
    attributes = span.attributes or {}
    number = attributes.get("thread.id")
    if type(number) is not int or not -(2**63) <= number < 2**63 or attributes.get("torch.async") is True:
        return None
    return number


def _thread_name(span: ReadableSpan) -> str:
    name = (span.attributes or {}).get("thread.name")
    return name if isinstance(name, str) else ""


def arrows_of(spans: Sequence[ReadableSpan], order: Sequence[int]) -> list[tuple[int, int]]:
    """The links between two of these spans, each from the span that it points to; as the spans stand in ``order``."""
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
    """What a span is called in a trace file: that of a step as torch names it, ``ProfilerStep#7``, by which its readers find steps."""
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
    """As JSON."""


class Objects:
    """Spans that are objects on their way into a trace file; otherwise as :class:`~.chrome_columns.Columns`."""

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        self._spans = spans
        self.outlines = outlines_of(spans)
        self._lines: list[_Line] = []
        self._arrows: list[tuple[int, int]] = []

    def lay_out(self, order: npt.NDArray[np.int64], tids: npt.NDArray[np.int64]) -> int:
        """Settles the order of the spans and their tracks; returns the number of arrows between them."""
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
    """The span, and its events."""
    attributes = span.attributes or {}
    category = valid(category_of(span.instrumentation_scope, attributes.get("torch.op.scope")))
    name = valid(slice_name(span.name, attributes.get(STEP_NAME)))
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
