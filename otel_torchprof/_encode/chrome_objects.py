"""Chrome JSON of spans that are objects: what the native encoder writes of a table, and what only objects have."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from opentelemetry.trace import SpanKind, StatusCode

from otel_torchprof._tree.span_table import STEP_NAME
from otel_torchprof._tree.tree import STEP_PREFIX

from .chrome_json import compact, microseconds, valid
from .chrome_tracks import Outlines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

OPERATOR, ANNOTATION = "cpu_op", "user_annotation"
"""Torch's categories."""

_OWN_SCOPE = "otel_torchprof"
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


class Writer:
    """Writes spans and arrows of one process as lines of JSON, each after a comma."""

    def __init__(self, pid: int, base: int) -> None:
        self._pid = pid
        self._base = base

    def span(self, span: ReadableSpan, tid: int) -> Iterator[str]:
        """The span, and its events."""
        attributes = span.attributes or {}
        title = {"cat": valid(category_of(span.instrumentation_scope, attributes.get("torch.op.scope")))}
        start = _start(span)
        yield self._line(
            {"ph": "X", **title, "name": valid(slice_name(span.name, attributes.get(STEP_NAME)))},
            tid,
            start,
            f'"dur":{microseconds(max(_end(span) - start, 0))},"args":{compact(_arguments(span))}',
        )
        for event in span.events:
            args = _ids(span.context) | {"attributes": json_value(event.attributes or {})}
            yield self._line(
                {"ph": "i", "s": "t", **title, "name": valid(event.name)},
                tid,
                event.timestamp,
                f'"args":{compact(_without_empty(args))}',
            )

    def arrow(self, number: int, start: tuple[ReadableSpan, int], finish: tuple[ReadableSpan, int]) -> Iterator[str]:
        """An arrow between two spans on their tracks; its ends lie where the spans begin."""
        title = {"id": number, "cat": "link", "name": "link"}
        yield self._line({"ph": "s", **title}, start[1], _start(start[0]))
        yield self._line({"ph": "f", **title}, finish[1], _start(finish[0]), '"bp":"e"')

    def _line(self, head: dict[str, Any], tid: int, time: int, rest: str = "") -> str:
        head |= {"pid": self._pid, "tid": tid}
        return f',\n{compact(head)[:-1]},"ts":{microseconds(time - self._base)}{"," if rest else ""}{rest}}}'


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
