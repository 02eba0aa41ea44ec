"""What the phases of a training loop took: on the spans of steps, whatever is inside what, and however it was drained."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_batches import Event, Service, in_request
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded_tables import recorded_table
from trace_group_tables import attributes_of

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED, Part, Segment
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.averages import RunningAverages
from otel_torchprof._model.live_table import Flows, live_table
from otel_torchprof._model.phases import PhaseTimes, exclusive_times
from otel_torchprof._model.step_spans import RecordedStep, StepSpan, Trace, note_phases

LOOP = RecordedThread(1, threading.get_ident(), 1, "loop")
OTHER = RecordedThread(2, LOOP.ident + 1, 2, "loader")
ADDRESS = 0x7F00_1234_5670


def phase(name: str, part: Part, start: int, end: int | None = None, parent: str = "", **more: Any) -> Event:
    """An event of a phase; its name is its own, so that others can name it as their parent."""
    about = {"kind": Kind.PHASE, "scope": Scope.USER_SCOPE, "fwd_thread": part, "sequence_nr": ADDRESS}
    return Event(name, start, end, parent, more.pop("context", 0), about | more)


def shown(table: Any) -> dict[str, dict[str, Any]]:
    """Attributes by the name of the span, in their order; of steps all but what says which thread it was."""
    found: dict[str, dict[str, Any]] = {}
    for row in range(len(table)):
        key = table.names[table.name[row]]
        while key in found:
            key += "'"
        found[key] = attributes_of(table, row)
    return found


@pytest.fixture
def service() -> Service:
    service = Service()
    service.steps.begin(0)
    return service


def attributes_of_step(service: Service, *events: Event, **more: Any) -> dict[str, Any]:
    step = shown(service.table(*events, threads=(LOOP, OTHER), **more))["torch.step"]
    return {key: value for key, value in step.items() if not key.startswith("thread.")}


def test_a_step_says_what_its_phases_took(service):
    """Each phase has what was not in another one inside of it, through labels and operators; the rest is unattributed."""
    service.steps.boundary(Segment.STEP, 1000, 0, LOOP.ident)
    found = attributes_of_step(
        service,
        phase("next", Part.NEXT, 0, 100),
        phase("forward", Part.FORWARD, 100, 400),
        Event("label", 110, 390, "forward", more={"kind": Kind.LABEL}),
        Event("aten::item", 200, 260, "label"),
        phase("wait", Part.DEVICE_WAIT, 210, 250, "aten::item"),
        phase("backward", Part.BACKWARD, 400, 800),
        phase("again", Part.RECOMPUTATION, 500, 600, "backward"),
        phase("pause", Part.COLLECTION, 510, 530, "again"),
        phase("scaler", Part.SCALER_STEP, 800, 900),
        phase("step", Part.STEP, 810, 890, "scaler"),
        phase("ahead", Part.NEXT, 300, 700, thread=1),
    )
    assert found == {
        "torch.step.kind": "training",
        "torch.phase.data.duration": 100e-9,
        "torch.phase.forward.duration": 260e-9,
        "torch.phase.backward.duration": 380e-9,
        "torch.phase.optimizer.duration": 100e-9,
        "torch.phase.gc.duration": 20e-9,
        "torch.phase.device_wait.duration": 40e-9,
        "torch.phase.unattributed.duration": 100e-9,
        "torch.phase.data.overlap": 400e-9,
        "torch.recomputed_duration": 100e-9,
    }


def test_what_is_not_in_a_phase_is_said_though_there_is_none(service):
    """A step without any phase is unattributed as a whole."""
    service.steps.boundary(Segment.STEP, 1000, 0, LOOP.ident)
    assert attributes_of_step(service, Event("mm", 10, 20)) == {
        "torch.step.kind": "training",
        "torch.phase.unattributed.duration": 1e-6,
    }


def test_phases_inside_a_span_of_the_application_count_for_the_step(service):
    """A span around a part of the loop splits the step; the step's own span has the phases of all, each nanosecond once."""
    in_request(service, 5, began=100)
    service.steps.boundary(Segment.STEP, 1000, 0, LOOP.ident)
    found = shown(
        service.table(
            phase("forward", Part.FORWARD, 100, 400),
            phase("wait", Part.DEVICE_WAIT, 200, 300, "forward", context=5),
            threads=(LOOP,),
        )
    )
    whole, share = found["torch.step"], found["torch.step'"]
    assert whole["torch.phase.forward.duration"] == 200e-9
    assert whole["torch.phase.device_wait.duration"] == 100e-9
    assert share == {"torch.step.kind": "training"}


def test_the_step_that_a_recording_ends_in(service):
    """It says its phases too, those of the thread that was in phases longest; of several spans the longest one does."""
    in_request(service, 5)
    service.steps.note_contexts([5])
    found = shown(
        service.table(
            phase("ahead", Part.NEXT, 100, 150),
            phase("forward", Part.FORWARD, 100, 400, thread=1),
            phase("backward", Part.BACKWARD, 410, 500, context=5, thread=1),
            threads=(LOOP, OTHER),
            final=True,
        )
    )
    about = {"torch.step.kind": "training"}
    assert found["torch.step"] == {**about, "torch.unfinished": True}
    assert found["torch.step'"] == {
        **about,
        "torch.phase.forward.duration": 300e-9,
        "torch.phase.backward.duration": 90e-9,
        "torch.phase.unattributed.duration": 110e-9,
        "torch.phase.data.overlap": 50e-9,
        "torch.unfinished": True,
    }


def test_segments_say_what_they_are(service):
    """What is no step has a kind and phases, and no number."""
    times = PhaseTimes()
    batch = Batch.of({"start": [0], "end": [7], "kind": [Kind.PHASE], "fwd_thread": [Part.EVALUATION]}, [""], (LOOP,))
    times.add(exclusive_times(batch, np.array([-1]), np.array([0]), 1), 0)
    span = StepSpan(-1, Trace(1, True, True), 2, 0, 10, None, None, name="torch.evaluation")
    span.segment, span.phases, span.is_whole = Segment.EVALUATION, times, True
    note_phases([span])
    empty = service.trees.place(service.recorder.drain())
    assert shown(live_table(empty, [span], Flows())) == {
        "torch.evaluation": {
            "torch.step.kind": "evaluation",
            "torch.phase.evaluation.duration": 7e-9,
            "torch.phase.unattributed.duration": 3e-9,
        }
    }


def test_steps_of_a_profile_are_as_they_were():
    """A profile records no phases, and its steps say nothing of them."""
    ids = itertools.count(1)
    batch = Batch.of({"start": [0], "end": [5]}, [""])
    table = recorded_table(
        batch, start=0, end=9, steps=[RecordedStep(0, 0, 9)], new_trace_id=ids.__next__, new_span_id=ids.__next__
    )
    assert shown(table)["torch.step"] == {}


def test_a_phase_that_is_longer_than_its_step(service):
    """Nothing is below 0 where phases take more than the step has."""
    service.steps.boundary(Segment.STEP, 100, 0, LOOP.ident)
    placed = service.trees.place(
        service.recorder.drain(phase("forward", Part.FORWARD, 0, 500), phase("next", Part.NEXT, 10, 700))
    )
    (span,) = {found.step for found in placed.trace_groups}
    assert span.phases.on_thread(1, 100)[UNATTRIBUTED] == 0


def test_a_phase_that_outlives_the_one_around_it(service):
    """Only what lies within the outer one is taken off it: together they have the time that passed."""
    service.steps.boundary(Segment.STEP, 100, 0, LOOP.ident)
    found = attributes_of_step(
        service, phase("backward", Part.BACKWARD, 0, 50), phase("wait", Part.DEVICE_WAIT, 40, 70, "backward")
    )
    assert found["torch.phase.backward.duration"] == 40e-9
    assert found["torch.phase.unattributed.duration"] == 30e-9


def test_recomputation_inside_recomputation_counts_once(service):
    """Nested checkpoints: what is computed again inside of that is in the time of that, also where it is still open at a drain."""
    inner = phase("inner", Part.RECOMPUTATION, 20, 50, "forward")
    service.table(
        inner,
        phase("forward", Part.FORWARD, 15, None, "outer"),
        phase("outer", Part.RECOMPUTATION, 10),
        threads=(LOOP,),
    )
    service.steps.boundary(Segment.STEP, 200, 0, LOOP.ident)
    last = phase("forward", Part.FORWARD, 15, 60, "outer"), phase("outer", Part.RECOMPUTATION, 10, 100)
    found = attributes_of_step(service, *last)
    assert found["torch.recomputed_duration"] == 90e-9
    assert found["torch.phase.backward.duration"] == 75e-9
    assert found["torch.phase.forward.duration"] == 15e-9


def test_a_backward_pass_inside_recomputation_is_none_of_it(service):
    """Re-entrant checkpoints: only the forward pass that runs again is recomputed, wherever drains cut; nested ones too."""
    inner = phase("inner", Part.RECOMPUTATION, 30, 50, "nested")
    service.table(
        phase("backward", Part.BACKWARD, 0),
        phase("outer", Part.RECOMPUTATION, 10, None, "backward"),
        phase("nested", Part.BACKWARD, 20, None, "outer"),
        inner,
        threads=(LOOP,),
    )
    service.table(
        phase("backward", Part.BACKWARD, 0),
        phase("outer", Part.RECOMPUTATION, 10, None, "backward"),
        phase("nested", Part.BACKWARD, 20, 60, "outer"),
        threads=(LOOP,),
    )
    service.steps.boundary(Segment.STEP, 200, 0, LOOP.ident)
    last = phase("backward", Part.BACKWARD, 0, 100), phase("outer", Part.RECOMPUTATION, 10, 70, "backward")
    found = attributes_of_step(service, *last)
    assert found["torch.recomputed_duration"] == 40e-9
    assert found["torch.phase.backward.duration"] == 100e-9


@st.composite
def programs(draw: Any) -> tuple[list[Event], list[int]]:
    """Events of two threads as a program would make them, and times at which they are drained."""
    events: list[Event] = []
    now = 0
    for thread in (0, 1):
        now, stack = 0, []
        for _ in range(draw(st.integers(0, 12))):
            now += draw(st.integers(0, 5))
            if stack and draw(st.booleans()):
                stack.pop().end = now
                continue
            kind = draw(st.sampled_from([Kind.PHASE, Kind.LABEL, Kind.OPERATOR]))
            part = draw(st.sampled_from(Part)) if kind == Kind.PHASE else 0
            more = {"kind": kind, "fwd_thread": part, "thread": thread}
            context = draw(st.sampled_from([0, 0, 5]))
            stack.append(Event(f"{len(events)}", now, None, stack[-1].name if stack else "", context, more))
            events.append(stack[-1])
        for event in stack:
            event.end = now
    return events, sorted(draw(st.lists(st.integers(0, now), max_size=3)))


def by_walk(events: list[Event], thread: int) -> dict[str, int]:
    """Of each moment the innermost phase on a thread."""
    found: dict[str, int] = {}
    for moment in range(max((event.end or 0 for event in events), default=0)):
        inside = [e for e in events if e.more["thread"] == thread and e.start <= moment < (e.end or 0)]
        if phases := [e for e in inside if e.more["kind"] == Kind.PHASE]:
            name = Part(phases[-1].more["fwd_thread"]).phase
            found[name] = found.get(name, 0) + 1
    return found


def recomputed_by_walk(events: list[Event]) -> int:
    """Moments of both threads at which the innermost backward pass or recomputation is the latter."""
    found = 0
    for thread, moment in itertools.product((0, 1), range(max((event.end or 0 for event in events), default=0))):
        inside = [e for e in events if e.more["thread"] == thread and e.start <= moment < (e.end or 0)]
        parts = [Part(e.more["fwd_thread"]) for e in inside if e.more["kind"] == Kind.PHASE]
        either = [part for part in parts if part in (Part.BACKWARD, Part.RECOMPUTATION)]
        found += either[-1:] == [Part.RECOMPUTATION]
    return found


@given(programs())
def test_against_a_walk(given_program):
    """Whatever is inside what, in whichever context, and wherever drains cut: each moment counts for the innermost phase of its thread."""
    events, cuts = given_program
    service = Service()
    in_request(service, 5)
    service.steps.begin(0)
    service.steps.note_contexts([5])
    times, before = set(), -1
    for cut in [*cuts, 10**6]:
        ended = [event for event in events if before < (event.end or 0) <= cut]
        opened = [event for event in events if event.start <= cut < (event.end or 0)]
        drained = [*ended, *(Event(e.name, e.start, None, e.parent, e.context, e.more) for e in opened)]
        # As the recorder does: by thread, and in the order in which they began.
        drained.sort(key=lambda event: (event.more["thread"], int(event.name)))
        placed = service.trees.place(service.recorder.drain(*drained, threads=(LOOP, OTHER)))
        times |= {group.step.phases for group in placed.trace_groups if group.step is not None}
        before = cut
    assert len(times) <= 1
    for number, thread in enumerate((LOOP, OTHER)):
        found = times.copy().pop().on_thread(thread.ident, 0) if times else {UNATTRIBUTED: 0}
        assert found == {**by_walk(events, number), UNATTRIBUTED: 0}
    attributes = times.copy().pop().attributes(None, 0)[0] if times else {}
    assert round(attributes.get("torch.recomputed_duration", 0) * 1e9) == recomputed_by_walk(events)


def test_a_phase_is_a_span_with_a_name_and_nothing_of_operators(service):
    """Its object and its part are in columns of operators; no attribute of these, and no link, comes from them."""
    forward = Event("aten::mm", 20, 30, more={"sequence_nr": ADDRESS, "thread": 0})
    step = phase("torch.phase.optimizer", Part.ZEROING, 40, 50)
    backward = Event("MmBackward0", 60, 70, more={"sequence_nr": ADDRESS, "fwd_thread": 1, "scope": 1})
    placed = service.trees.place(service.recorder.drain(forward, step, backward, threads=(LOOP,)))
    table = add_attributes(live_table(placed, [], service.flows), placed.batch)
    assert shown(table)["torch.phase.optimizer"] == {
        "torch.phase.name": "optimizer",
        "torch.self_duration": 10e-9,
        "thread.id": LOOP.ident,
        "thread.name": "loop",
    }
    assert table.links["span_id"].tolist() == [placed.span_id[0]]
    assert "torch.phase.name" not in shown(table)["aten::mm"]


def test_averages_have_a_row_per_phase(service):
    """As any event, a phase is in averages by its name, with its self time."""
    batch = service.recorder.drain(
        phase("torch.phase.forward", Part.FORWARD, 0, 50),
        phase("torch.phase.device_wait", Part.DEVICE_WAIT, 10, 20, "torch.phase.forward"),
        Event("aten::mm", 30, 40, "torch.phase.forward"),
    )
    averages = RunningAverages()
    averages.add(batch)
    found = {row.name: (row.calls, row.total, row.self_time) for row in averages.read()}
    assert found == {
        "torch.phase.forward": (1, 50, 30),
        "torch.phase.device_wait": (1, 10, 10),
        "aten::mm": (1, 10, 10),
    }


def test_averages_have_what_is_in_no_phase():
    """One row has what steps spent outside of phases: all of it where there are none."""
    with otp.stream(InMemorySpanExporter(), detail="modules") as streamed:
        for _ in range(2):
            with otp.record_function("work"):
                pass
            streamed.step()
    rows = {row.key: row for row in streamed.key_averages()}
    outside, steps = rows["torch.phase.unattributed"], rows["torch.step"]
    assert (outside.count, outside.cpu_time_total) == (2, steps.cpu_time_total)
    assert steps.self_cpu_time_total == 0  # the same time would be there twice
    assert outside.self_cpu_time_total + rows["work"].self_cpu_time_total == pytest.approx(steps.cpu_time_total)


def test_every_part_has_its_phase_as_attribute(service):
    """All parts of phases are told by the name of their phase."""
    events = [phase(f"{part.name}", part, 10 * part, 10 * part + 5) for part in Part]
    placed = service.trees.place(service.recorder.drain(*events, threads=(LOOP,)))
    found = shown(add_attributes(live_table(placed, [], Flows()), placed.batch))
    assert {name: span["torch.phase.name"] for name, span in found.items()} == {part.name: part.phase for part in Part}
    assert {part.phase for part in Part} == set(PHASES)
