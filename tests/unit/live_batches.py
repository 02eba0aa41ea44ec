"""Drained batches, written by hand: events by name, as a recorder would give them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from otel_torchprof._columns.batch import Batch, OpenEvents, RecordedThread
from otel_torchprof._columns.phases import Segment
from otel_torchprof._columns.schema import Kind
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._model.live_table import Flows, live_table
from otel_torchprof._model.step_spans import Trace, note_phases
from otel_torchprof._model.steps import Steps

MAIN = RecordedThread(1, 1, 1, "main")
_NEUTRAL = {"sequence_nr": -1, "kind": Kind.OPERATOR}


@dataclass
class Event:
    """One event; ``parent`` is the name of the one around it, which may be open or drained before."""

    name: str
    start: int
    end: int | None = None
    parent: str = ""
    context: int = 0
    more: dict[str, Any] = field(default_factory=dict)


def label(name: str, start: int, end: int | None = None, parent: str = "", context: int = 0) -> Event:
    """What is a trace of its own outside of any span."""
    return Event(name, start, end, parent, context, more={"kind": Kind.LABEL})


class Recorder:
    """Gives events ids by name, and drains them into batches."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.names: list[str] = [""]

    def id_of(self, name: str) -> int:
        return self.ids.setdefault(name, len(self.ids) + 1)

    def name_index(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def drain(self, *events: Event, threads: tuple[RecordedThread, ...] = (MAIN,)) -> Batch:
        """Rows for the events that have an end; the others are open."""
        closed = [event for event in events if event.end is not None]
        opened = [event for event in events if event.end is None]
        rows = {event.name: row for row, event in enumerate(closed)}
        columns: dict[str, list[Any]] = {
            "id": [self.id_of(e.name) for e in closed],
            "name": [self.name_index(e.name) for e in closed],
            "start": [e.start for e in closed],
            "end": [e.end for e in closed],
            "parent": [rows.get(e.parent, -1) for e in closed],
            "context": [e.context for e in closed],
        }
        for key in {key for event in closed for key in event.more}:
            columns[key] = [event.more.get(key, _NEUTRAL.get(key, 0)) for event in closed]
        outer = [(row, self.id_of(e.parent)) for row, e in enumerate(closed) if e.parent and e.parent not in rows]
        opens = OpenEvents(
            np.array([self.id_of(e.name) for e in opened], np.uint64),
            np.array([self.id_of(e.parent) if e.parent else 0 for e in opened], np.uint64),
            np.array([e.start for e in opened], np.int64),
            np.array([e.context for e in opened], np.uint32),
            np.array([self.name_index(e.name) for e in opened], np.uint32),
            *(
                np.array([e.more.get(key, _NEUTRAL.get(key, 0)) for e in opened], dtype)
                for key, dtype in (
                    ("kind", np.uint8),
                    ("thread", np.uint32),
                    ("scope", np.uint8),
                    ("fwd_thread", np.uint32),
                    ("sequence_nr", np.int64),
                )
            ),
        )
        return Batch.of(
            columns,
            list(self.names),
            threads,
            opens=opens,
            outer_rows=np.array([row for row, _ in outer], np.uint64),
            outer_parents=np.array([parent for _, parent in outer], np.uint64),
        )


def span_context(number: int, *, remote: bool = False, state: str = "") -> SpanContext:
    """The span of a service; its trace id is ``number``, its span id a thousand times that."""
    return SpanContext(
        number,
        number * 1000,
        remote,
        TraceFlags(TraceFlags.SAMPLED),
        TraceState.from_header([state]) if state else None,
    )


@dataclass
class Span:
    """A row of a span table, readable."""

    trace: int
    parent: int
    span_id: int
    start: int
    end: int
    links: list[tuple[int, int]]
    remote: bool
    state: str
    step: int


class Service:
    """A live model between a hand-written recorder and readable spans; deals ids out in order, from 1."""

    def __init__(self, *, max_spans: int = 5_000) -> None:
        self.current_spans: dict[int, tuple[SpanContext, int | None]] = {}
        self.ends: dict[int, int] = {}
        self.asked: list[tuple[str, int, tuple[int, int] | None]] = []
        self.answers: dict[str, Trace] = {}
        self._last_id = 0
        self.steps = Steps(self.new_trace, self.new_span_id, self.current_spans.get)
        self.trees = LiveTrees(
            key=12345,
            steps=self.steps,
            new_trace=self.new_trace,
            current_span=self.current_spans.get,
            ended=self.ends.get,
            max_spans=lambda: max_spans,
        )
        self.flows = Flows()
        self.recorder = Recorder()

    def new_span_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def new_trace(self, name: str, step: int, link: tuple[int, int] | None) -> Trace:
        self.asked.append((name, step, link))
        return self.answers.get(name) or Trace(10_000 + len(self.asked), True, True)

    def boundary(self, number: int, now: int, context: int) -> bool:
        """A step ends on the thread of the test."""
        recorded = self.steps.boundary(Segment.STEP, now, context, threading.get_ident())
        assert self.steps.running == number
        return recorded

    def table(self, *events: Event, final: bool = False, watermark: int = 0, **more: Any) -> Any:
        ended = list(self.steps.take_ended())
        placed = self.trees.place(self.recorder.drain(*events, **more))
        if final:
            ended += self.steps.take_ended(everything=True)
        roots = self.trees.ended_roots(watermark, final=final)
        self.trees.forget_roots(roots)
        spans = [*(span for step in ended for span in step.spans.values()), *roots]
        note_phases(spans)
        return live_table(placed, spans, self.flows)

    def spans(self, *events: Event, **more: Any) -> dict[str, Span]:
        """The spans of one drain by name; spans of steps as ``torch.step 3``."""
        return readable(self.table(*events, **more))


def in_request(
    service: Service, number: int, *, remote: bool = False, state: str = "", began: int | None = None
) -> None:
    """Context ``number`` is a span of the service."""
    service.current_spans[number] = (span_context(number, remote=remote, state=state), began)


def readable(table: Any) -> dict[str, Span]:
    """The rows of a table by name."""
    ids = [int.from_bytes(row.tobytes(), "big") for row in table.trace_ids]
    found: dict[str, Span] = {}
    for row in range(len(table)):
        name = table.names[table.name[row]]
        step = int(table.step[row])
        links = table.links[table.links["row"] == row]
        key = name if step < 0 else f"{name} {step}"
        while key in found:
            key += "'"
        found[key] = Span(
            ids[table.trace[row]],
            int(table.parent_span_id[row]),
            int(table.span_id[row]),
            int(table.start[row]),
            int(table.end[row]),
            [(int.from_bytes(link["trace_id"].tobytes(), "big"), int(link["span_id"])) for link in links],
            bool(table.parent_is_remote[row]) if table.parent_is_remote is not None else False,
            table.trace_states[table.trace[row]] if table.trace_states else "",
            step,
        )
    return found
