"""Trace files with steps as they are told, for tests of ``explain``."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

STEP_MS = 10.0
PID, TID = 1, 1
US, NS = 1000.0, 1_000_000


class Trace:
    """A recording of the instrumentation, step by step; times in ms.

    Args:
        rank: of the process.
        skew: by how much its clock is ahead.
    """

    def __init__(self, rank: int | None = None, skew: float = 0.0) -> None:
        self.rank, self.now, self.number = rank, 1000.0 + skew, 0
        self.spans: list[dict[str, Any]] = []

    def span(self, name: str, start: float, duration: float, **attributes: Any) -> None:
        """A span of the loop's thread; two underscores in a name of an attribute are a dot."""
        found = {key.replace("__", "."): value for key, value in attributes.items()}
        self.spans.append({"name": name, "start": start, "duration": duration, "attributes": found})

    def step(self, duration: float = STEP_MS, *, rest: float = 0.0, **more: Any) -> None:
        """A step; phases are shares of it, in ``more`` by their names, and so are other attributes: ``forward=0.3``."""
        phases = {key: value for key, value in more.items() if isinstance(value, float) and "__" not in key}
        others = {key: value for key, value in more.items() if key not in phases}
        phases.setdefault("forward", max(0.0, 1.0 - rest - sum(phases.values())))
        attributes = {f"torch__phase__{phase}__duration": share * duration / 1e3 for phase, share in phases.items()}
        attributes |= {"torch__phase__unattributed__duration": rest * duration / 1e3}
        base = {"torch__step__number": self.number, "torch__step__kind": "training"}
        self.span("torch.step", self.now, duration, **(base | attributes | others))
        self.number += 1
        self.now += duration

    def steps(self, count: int, duration: float = STEP_MS, **more: Any) -> Trace:
        """Several that are alike."""
        for _ in range(count):
            self.step(duration, **more)
        return self

    def pause(self, kind: str, duration: float) -> None:
        """A segment between two steps."""
        self.span(f"torch.{kind}", self.now, duration, torch__step__kind=kind)
        self.now += duration

    def _parent(self, number: int) -> str:
        """The id of the step that a span of an operator or a phase is in: it comes before its step."""
        if self.spans[number]["name"].startswith(("torch.step", "torch.evaluation", "torch.checkpoint")):
            return "0"
        return next(f"{n + 1:x}" for n in range(number, len(self.spans)) if self.spans[n]["name"] == "torch.step")

    def chrome(self, path: Path) -> Path:
        """As a Chrome trace of this package."""
        events = [
            {"ph": "X", "cat": "x", "name": span["name"], "pid": PID, "tid": TID}
            | {"ts": span["start"] * US, "dur": span["duration"] * US}
            | {"args": {"trace_id": "1", "span_id": f"{number + 1:x}", "parent_id": self._parent(number)}}
            for number, span in enumerate(self.spans)
        ]
        for event, span in zip(events, self.spans, strict=True):
            event["args"]["attributes"] = span["attributes"]
        resource = {} if self.rank is None else {"torch.distributed.rank": self.rank}
        path.write_text(json.dumps({"otherData": {"resource": resource}, "traceEvents": events}))
        return path

    def lines(self, path: Path) -> Path:
        """As lines of OTLP."""
        spans = [
            (span["name"], *(round(at * NS) for at in times), number, 0, span["attributes"])
            for number, span in enumerate(self.spans, 1)
            for times in [(span["start"], span["start"] + span["duration"])]
        ]
        path.write_text(otlp_line(spans, {} if self.rank is None else {"torch.distributed.rank": self.rank}))
        return path


def otlp_line(
    spans: Iterable[tuple[str, int, int, int, int, Mapping[str, Any]]],
    resource: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """A request of spans as a line of OTLP: name, begin and end in ns, id, id of the parent (0: none), and attributes."""
    objects = [
        {"name": name, "traceId": "1" * 32, "spanId": f"{span_id:016x}"}
        | ({"parentSpanId": f"{parent_id:016x}"} if parent_id else {})
        | {"startTimeUnixNano": str(start), "endTimeUnixNano": str(end), "attributes": _attributes(attributes)}
        for name, start, end, span_id, parent_id, attributes in spans
    ]
    of_resource = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"spans": objects}]}
    return json.dumps({"resourceSpans": [of_resource]}) + "\n"


def _attributes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in found.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def kineto(path: Path, steps: int, inside: Any = lambda _begin: [], **document: Any) -> Path:
    """A trace as torch's profiler writes it; ``inside`` gives slices of a step by its begin, as ``piece`` makes them."""
    events = []
    for number in range(steps):
        begin = number * STEP_MS
        events += [piece(f"ProfilerStep#{number}", begin, STEP_MS, cat="user_annotation"), *inside(begin)]
    path.write_text(json.dumps({"schemaVersion": 1, **document, "traceEvents": events}))
    return path


def piece(name: str, begin: float, duration: float, **more: Any) -> dict[str, Any]:
    """A slice; times in ms."""
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": PID,
        "tid": TID,
        "ts": begin * US,
        "dur": duration * US,
    } | more


def served(path: Path, count: int) -> Path:
    """A file of a service: a trace per request, in which the model runs; every tenth takes four times as long."""

    def span(number: int, name: str, begin: int, duration: int, parent: int) -> dict[str, Any]:
        args = {"trace_id": f"{number // 10 + 1:x}", "span_id": f"{number + 1:x}", "parent_id": f"{parent:x}"}
        return {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": begin, "dur": duration, "args": args}

    spans: list[dict[str, Any]] = []
    for request in range(count):
        begin, long, number = 10_000 * request, 4000 if request % 10 == 7 else 1000, 10 * request
        spans += [
            span(number, "POST /", begin, long, 0),
            span(number + 1, "torch.phase.inference", begin, long // 2, number + 1),
            span(number + 2, "torch.phase.forward", begin, long // 4, number + 2),
        ]
    job = span(10 * count, "torch.job", 0, 10_000 * count, 0)
    path.write_text(json.dumps({"traceEvents": [*spans, job]}))
    return path
