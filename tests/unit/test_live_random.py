"""Random programs: where their events are placed must not depend on when the recorder was drained."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from live_batches import Event, Service, Span, readable, span_context

from otel_torchprof._columns.batch import RecordedThread
from otel_torchprof._columns.schema import DEVICE_COLUMNS, Kind
from otel_torchprof._instrument.live_recording import add_up
from otel_torchprof._model.averages import RunningAverages
from otel_torchprof._model.live_table import live_table
from otel_torchprof._model.operator_roots import OPERATORS_NAME, SLICE_NS
from otel_torchprof._model.step_spans import Trace
from otel_torchprof._native.recorder import CONTEXT_MUTED

LOOP = threading.get_ident()
THREADS = tuple(RecordedThread(i, LOOP + i, i, f"thread {i}") for i in range(3))
KNOWN, FORGOTTEN = (1, 2), 3
"""Contexts whose spans are known, and one whose span is no more."""
CURRENT = {span_context(number).span_id: number for number in KNOWN}


@dataclass
class Program:
    """Threads that begin and end events, a loop that makes steps, and a recorder that is drained now and then."""

    service: Service = field(default_factory=lambda: Service(max_spans=5))
    now: int = 0
    open: list[list[Event]] = field(default_factory=lambda: [[] for _ in THREADS])
    ended: list[Event] = field(default_factory=list)
    context_of: dict[str, int] = field(default_factory=dict)
    boundaries: int = 0
    spans: dict[str, Span] = field(default_factory=dict)
    averages: RunningAverages = field(default_factory=RunningAverages)

    def __post_init__(self) -> None:
        for number in KNOWN:
            self.service.current_spans[number] = (span_context(number), None)

    def begin(self, thread: int, context: int, kind: Kind = Kind.OPERATOR) -> None:
        name = f"event {len(self.context_of)}"
        self.context_of[name] = context
        stack, more = self.open[thread], {"thread": thread, "kind": kind}
        stack.append(Event(name, self.now, None, stack[-1].name if stack else "", context, more))
        self.service.recorder.id_of(name)
        self.service.recorder.name_index(name)
        # A trace of its own has the same id however often, and whenever, it is asked for.
        self.service.answers[name] = Trace(10**6 + len(self.context_of), True, True)

    def end(self, thread: int, depth: int) -> None:
        stack = self.open[thread]
        if stack:
            event = stack.pop(-1 - min(depth, len(stack) - 1))
            event.end = self.now
            self.ended.append(event)

    def wait(self) -> None:
        """More than half as long as operators share a root."""
        self.now += SLICE_NS * 2 // 3

    def step(self, _: int, context: int) -> None:
        self.boundaries += 1
        self.service.boundary(self.boundaries, self.now, context)

    def drain(self, context: int | None = None, *, final: bool = False) -> None:
        """With a context: a step ends meanwhile."""
        steps = self.service.steps
        taken = steps.take_ended()
        if context is not None:
            self.step(0, context)
        closed = sorted(self.ended, key=lambda event: (event.more["thread"], event.start))
        self.ended = []
        still_open = [event for stack in self.open for event in stack]
        batch = self.service.recorder.drain(*closed, *still_open, threads=THREADS)
        placed = self.service.trees.place(replace(batch, devices=self._pairs(closed)))
        if final:
            taken += steps.take_ended(everything=True)
        of_steps = [span for step in taken for span in step.spans.values()]
        roots = self.service.trees.ended_roots(self.now, final=final)
        self.service.trees.forget_roots(roots)
        add_up(self.averages, placed, ())
        table = live_table(placed, [*of_steps, *roots], self.service.flows)
        for name, span in readable(table).items():
            if name.startswith(OPERATORS_NAME):
                name = f"{OPERATORS_NAME} {span.span_id}"  # noqa: PLW2901 - there are many of that name
            assert name not in self.spans or name.startswith("torch.step"), f"{name} came twice"
            self.spans[name if name not in self.spans else f"{name}, {len(self.spans)}"] = span

    def _pairs(self, events: list[Event]) -> dict[str, Any] | None:
        """Most events have marks, on one of three streams."""
        ids = [self.service.recorder.id_of(event.name) for event in events]
        ids = [number for number in ids if number % 4]
        found = {column.name: np.zeros(len(ids), column.dtype) for column in DEVICE_COLUMNS}
        found |= {
            "event": np.array(ids, np.uint64),
            "duration": np.array([number * 7 % 50 for number in ids], np.int64),
        }
        found |= {"stream": np.array([number // 4 % 3 for number in ids], np.int64)}
        return found if ids else None

    def play(self, actions: list[Any], *, drains: bool = True) -> Program:
        for name, *arguments in actions:
            self.now += 10
            if drains or name != "drain":
                getattr(self, name)(*arguments)
        for thread, stack in enumerate(self.open):
            while stack:
                self.now += 10
                self.end(thread, 0)
        self.drain(final=True)
        return self

    @property
    def places(self) -> dict[str, tuple[int, int, int]]:
        # In which order traces are asked for depends on the drains: a shared root stands for its own.
        trace = {span.trace: span.span_id for name, span in self.spans.items() if name.startswith(OPERATORS_NAME)}
        return {
            name: (trace.get(span.trace, span.trace), span.span_id, span.parent) for name, span in self.spans.items()
        }

    @property
    def times(self) -> dict[str, tuple[int, int]]:
        return {name: (span.start, span.end) for name, span in self.spans.items()}

    @property
    def sums(self) -> dict[str, tuple[int, ...]]:
        return {average.name: average[2:] for average in self.averages.read()}

    def remembers_nothing(self) -> bool:
        trees = self.service.trees
        roots = trees._operators._open or trees._operators._latest
        return not (
            trees._places or len(trees._child_times) or trees._devices._child_times or len(trees._decided.id) or roots
        )


threads = st.integers(0, len(THREADS) - 1)
contexts = st.sampled_from((0, *KNOWN, FORGOTTEN))
kinds = st.sampled_from((Kind.OPERATOR, Kind.OPERATOR, Kind.LABEL))
begins = st.tuples(st.just("begin"), threads, contexts, kinds)
waits = st.tuples(st.just("wait"))
ends = st.tuples(st.just("end"), threads, st.just(0))
misnested_ends = st.tuples(st.just("end"), threads, st.integers(0, 2))
drains = st.tuples(st.just("drain"))
steps = st.tuples(st.just("step"), st.just(0), st.sampled_from((0, *KNOWN, FORGOTTEN, CONTEXT_MUTED)))
drains_while_a_step_ends = st.tuples(st.just("drain"), st.sampled_from((0, 1)))


@given(st.lists(st.one_of(begins, begins, ends, ends, drains, waits), max_size=60))
def test_spans_and_sums_do_not_depend_on_the_drains(actions):
    """Without steps every event, and every root that operators share, has the same ids, times, parent, own time and device times, however often it was drained meanwhile."""
    often, once = Program().play(actions), Program().play(actions, drains=False)
    assert often.places == once.places
    assert often.times == once.times
    assert often.sums == once.sums
    assert often.remembers_nothing()


@given(st.lists(st.one_of(begins, begins, misnested_ends, misnested_ends, drains, waits), max_size=60))
def test_events_that_end_in_any_order_keep_their_places(actions):
    """That holds for events which outlive those around them too, and a parent is always one that had not ended before."""
    often, once = Program().play(actions), Program().play(actions, drains=False)
    assert often.places == once.places
    assert often.remembers_nothing()
    by_id = {span.span_id: span for span in often.spans.values()}
    parents = [(by_id[span.parent], span) for span in often.spans.values() if span.parent in by_id]
    assert all(parent.start <= span.start <= parent.end for parent, span in parents)


@given(
    st.booleans(),
    st.lists(st.one_of(begins, begins, misnested_ends, misnested_ends, drains, waits, drains_while_a_step_ends, steps)),
)
def test_with_steps_no_span_is_lost_or_torn_from_its_parent(known_before, actions):
    """Whenever steps end and wherever: each event is a span once, in its own trace, under a span that there is."""
    program = Program()
    if known_before:
        program.service.steps.begin(0)
    spans = program.play(actions).spans
    by_id = {span.span_id: span for span in spans.values()}
    assert len(by_id) == len(spans)
    assert {name for name in spans if name.startswith("event")} == set(program.context_of)
    assert program.remembers_nothing()
    for span in spans.values():
        assert span.start <= span.end
        if span.parent in CURRENT:
            assert span.trace == CURRENT[span.parent]
        elif span.parent:
            assert (by_id[span.parent].trace, by_id[span.parent].start <= span.start) == (span.trace, True)
    assert all(spans[name].trace == context for name, context in program.context_of.items() if context in KNOWN)
