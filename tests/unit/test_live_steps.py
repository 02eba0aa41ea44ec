"""Drained batches become spans: steps, what belongs to which, and the span of the step that runs."""

from __future__ import annotations

import itertools
import threading

import pytest
from live_batches import Event, Service, in_request, label
from opentelemetry.trace import SpanContext, TraceFlags

from otel_torchprof._columns.batch import RecordedThread
from otel_torchprof._columns.phases import Segment, SegmentChange
from otel_torchprof._model.step_spans import Trace
from otel_torchprof._model.steps import Steps
from otel_torchprof._native.recorder import CONTEXT_MUTED


@pytest.fixture
def service() -> Service:
    return Service()


def test_each_step_is_a_trace_that_links_to_the_one_before(service):
    """Two steps outside of any span: two traces, each with its root, the second linked to the first."""
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    first = service.spans(Event("a", 10, 20))
    service.boundary(2, 200, 0)
    second = service.spans(Event("b", 110, 120))
    root, following = first["torch.step 0"], second["torch.step 1"]
    assert (root.start, root.end, root.parent, root.links) == (0, 100, 0, [])
    assert (following.start, following.end, following.links) == (100, 200, [(root.trace, root.span_id)])
    assert (first["a"].trace, first["a"].parent) == (root.trace, root.span_id)
    assert (second["b"].trace, second["b"].parent) == (following.trace, following.span_id)
    assert root.trace != following.trace


def test_events_of_a_running_step_already_know_its_span(service):
    """What is drained in the middle of a step refers to the id that the step's span has at its end."""
    service.steps.begin(0)
    early = service.spans(Event("a", 10, 20))
    service.boundary(1, 100, 0)
    assert early["a"].parent == service.spans()["torch.step 0"].span_id


def test_the_sampler_is_asked_once_per_step(service):
    """However many events and drains a step has, it is asked about once, with its number and its link."""
    service.steps.begin(0)
    service.spans(Event("a", 10, 20))
    service.spans(Event("b", 30, 40))
    service.boundary(1, 100, 0)
    service.spans(Event("c", 110, 120))
    root = 10_001, 1
    assert service.asked == [("torch.step", 0, None), ("torch.step", 1, root)]


def test_a_refused_step_says_so_at_once_and_leaves_nothing(service):
    """A step that the sampler refuses is not recorded from its beginning, has no spans, and nobody links to it."""
    service.steps.begin(0)
    service.answers["torch.step"] = Trace(1, False, False)
    assert service.boundary(1, 100, 0) is False
    del service.answers["torch.step"]
    assert service.boundary(2, 200, 0) is True
    assert set(service.spans()) == set()
    service.boundary(3, 300, 0)
    assert service.spans()["torch.step 2"].links == []


def test_steps_inside_a_span_are_its_children(service):
    """A loop inside one long span: its steps are children of that span, linked, and hold their own events."""
    in_request(service, 5, began=-50)
    service.steps.begin(0)
    service.boundary(1, 100, 5)
    service.boundary(2, 200, 5)
    spans = service.spans(Event("a", 10, 20, context=5), Event("b", 110, 120, context=5))
    first, second = spans["torch.step 0"], spans["torch.step 1"]
    assert (first.trace, first.parent, second.parent) == (5, 5000, 5000)
    assert (spans["a"].parent, spans["b"].parent) == (first.span_id, second.span_id)
    assert second.links == [(5, first.span_id)]
    assert service.asked == []


def test_a_step_does_not_begin_before_the_span_that_it_is_in(service):
    """One span per step: the step's span lies inside it, though its number was due since the step before."""
    in_request(service, 5, began=120)
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    service.boundary(2, 200, 5)
    spans = service.spans(Event("b", 130, 140, context=5))
    assert (spans["torch.step 1"].start, spans["torch.step 1"].end, spans["torch.step 1"].parent) == (120, 200, 5000)
    assert spans["b"].parent == spans["torch.step 1"].span_id


def test_contexts_of_the_loops_thread_belong_to_steps(service):
    """The first events of a new span on the loop's thread are already under its step, before that step has ended."""
    in_request(service, 5, began=110)
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    loop = RecordedThread(1, threading.get_ident(), 1, "main")
    early = service.spans(Event("b", 130, 140, context=5), threads=(loop,))
    service.boundary(2, 200, 5)
    assert early["b"].parent == service.spans()["torch.step 1"].span_id


def test_what_is_open_on_the_loops_thread_shows_its_context_too(service):
    """An event that is still open when its span is first seen is under the step, and so is what runs in it."""
    in_request(service, 5, began=110)
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    loop = RecordedThread(1, threading.get_ident(), 1, "main")
    service.spans(Event("outer", 120, context=5), threads=(loop,))
    later = service.spans(Event("inner", 130, 140, "outer", 5), Event("outer", 120, 150, context=5), threads=(loop,))
    service.boundary(2, 200, 5)
    ended = service.spans()
    assert later["outer"].parent == ended["torch.step 1"].span_id
    assert ended["torch.step 1"].parent == 5000


def test_a_request_that_is_served_beside_a_loop_is_none_of_its_steps(service):
    """An event in a request's span, on another thread than the loop's, is a child of that span."""
    in_request(service, 9)
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    other = RecordedThread(2, threading.get_ident() + 1, 2, "server")
    spans = service.spans(Event("op", 110, 120, context=9), threads=(other,))
    assert (spans["op"].trace, spans["op"].parent) == (9, 9000)


def test_a_step_inside_an_unsampled_span_has_no_span(service):
    """A step that ends where nothing is recorded leaves none, and asks no sampler: the span above has decided."""
    service.steps.begin(0)
    assert service.boundary(1, 100, CONTEXT_MUTED) is True
    assert service.spans() == {}
    assert service.asked == []


def test_the_first_step_begins_with_what_came_first(service):
    """Only the end of the first step is told of: it began with its events, and its share of a span is no longer than these."""
    in_request(service, 5, began=10)
    service.boundary(1, 100, 0)
    assert not service.steps.begun
    service.steps.begin(12)
    assert service.steps.begun
    loop = RecordedThread(1, threading.get_ident(), 1, "main")
    spans = service.spans(Event("a", 12, 20, context=5), threads=(loop,))
    whole, share = spans["torch.step 0"], spans["torch.step 0'"]
    assert (whole.start, whole.end, whole.parent) == (12, 100, 0)
    assert (share.start, share.end, share.parent) == (12, 20, 5000)
    assert spans["a"].parent == share.span_id


def test_ends_of_steps_that_are_told_out_of_order(service):
    """Of two threads that end steps at once, one may read the clock first and tell last: no step ends before it begins."""
    service.boundary(1, 100, 0)
    service.boundary(2, 90, 0)
    service.boundary(3, 200, 0)
    spans = service.spans(Event("a", 10, 20), Event("b", 110, 120))
    assert [(spans[f"torch.step {n}"].start, spans[f"torch.step {n}"].end) for n in (1, 2)] == [(100, 100), (100, 200)]
    assert spans["b"].parent == spans["torch.step 2"].span_id


def test_a_step_holds_its_events(service):
    """A step's span is widened to hold an event that began before anybody knew of the step."""
    service.boundary(1, 100, 0)
    spans = service.spans(Event("a", 10, 20))
    assert (spans["torch.step 0"].start, spans["torch.step 0"].end) == (10, 100)


def test_the_last_step_comes_with_the_end(service):
    """What came after the last boundary is under a step of its own, which the final drain closes with its last event."""
    service.boundary(1, 100, 0)
    service.spans()
    spans = service.spans(Event("a", 110, 120), final=False)
    last = service.spans(final=True)
    assert spans["a"].parent == last["torch.step 1"].span_id
    assert (last["torch.step 1"].start, last["torch.step 1"].end) == (100, 120)


def test_a_step_in_which_nothing_happened_does_not_come_with_the_end(service):
    """A loop that ends with a boundary has no empty step behind it."""
    service.boundary(1, 100, 0)
    assert set(service.spans(final=True)) == {"torch.step 0"}


def test_a_label_around_the_loop_does_not_hold_its_steps(service):
    """A label that lasts for many steps keeps what happened in its first; later steps have their own events."""
    service.steps.begin(0)
    spans = service.spans(Event("epoch", 5), Event("a", 10, 20, "epoch"))
    for number in (1, 2, 3):
        service.boundary(number, 100 * number, 0)
    spans |= service.spans(Event("epoch", 5), Event("b", 210, 220, "epoch"), Event("in b", 211, 212, "b"))
    assert spans["a"].trace == spans["torch.step 0"].trace
    assert (spans["b"].trace, spans["b"].parent) == (spans["torch.step 2"].trace, spans["torch.step 2"].span_id)
    assert spans["in b"].parent == spans["b"].span_id


def test_a_label_around_the_loop_holds_no_later_step_however_often_it_is_drained(service):
    """Also where every step is drained by itself, so that nobody remembers the step in which the label began."""
    service.steps.begin(0)
    early = service.spans(Event("epoch", 5), Event("early 0", 10, 20))["early 0"]
    for number in range(4):
        service.boundary(number + 1, 100 * number + 100, 0)
        spans = service.spans(
            Event("epoch", 5),
            Event(f"late {number}", 100 * number + 60, 100 * number + 70, "epoch"),
            Event(f"early {number + 1}", 100 * number + 110, 100 * number + 120, "epoch"),
        )
        late = spans[f"late {number}"]
        assert late.trace == spans[f"torch.step {number}"].trace == early.trace
        early = spans[f"early {number + 1}"]


def test_a_label_around_the_end_of_a_step_stays_whole(service):
    """What a label holds that began in one step and ended in the next is in the step in which it began."""
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    service.boundary(2, 200, 0)
    loop = RecordedThread(1, threading.get_ident(), 1, "main")
    events = Event("optimizer", 90, 120), Event("zero_grad", 110, 115, "optimizer"), Event("a", 130, 140)
    spans = service.spans(*events, threads=(loop,))
    assert spans["zero_grad"].parent == spans["optimizer"].span_id
    assert spans["optimizer"].parent == spans["torch.step 0"].span_id
    assert spans["a"].parent == spans["torch.step 1"].span_id
    assert (spans["torch.step 0"].end, spans["torch.step 1"].start) == (120, 120)


@pytest.mark.parametrize(
    ("thread", "end"), [(1, 120), (0, 250)], ids=["another thread is at work", "a label lasts for steps"]
)
def test_a_step_begins_at_the_boundary_whatever_else_goes_on(service, thread, end):
    """Only what the loop finishes right behind a boundary belongs to the step before: waiting for data is the next step's."""
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    service.boundary(2, 200, 0)
    threads = (RecordedThread(1, threading.get_ident(), 1, "main"), RecordedThread(2, 2, 2, "loader"))
    events = Event("load", 90, end, more={"thread": thread}), Event("a", 130, 140)
    spans = service.spans(*events, threads=threads)
    assert (spans["torch.step 1"].start, spans["torch.step 1"].end) == (100, 200)


def test_a_step_holds_what_is_still_open(service):
    """A label that was open when the first step was drained, and had begun before anybody knew of steps, is inside its span."""
    service.boundary(1, 100, 0)
    step = service.spans(Event("epoch", 5))["torch.step 0"]
    epoch = service.spans(Event("epoch", 5, 110))["epoch"]
    assert (epoch.parent, step.start) == (step.span_id, 5)


def test_steps_between_two_drains_are_all_told_apart(service):
    """A thousand steps may end between two drains: each has its own events."""
    service.steps.begin(0)
    for number in range(1, 1001):
        service.boundary(number, 100 * number, 0)
    spans = service.spans(*(Event(f"op {number}", 100 * number + 1, 100 * number + 2) for number in range(1000)))
    assert all(spans[f"op {n}"].parent == spans[f"torch.step {n}"].span_id for n in range(1000))
    service.spans()
    assert len(service.steps.known()) == 1


def test_a_steps_span_tells_its_thread(service):
    """The span of a step has the id and the name of the thread of the loop, so that a viewer draws it above its events."""
    service.boundary(1, 100, 0)
    table = service.table(Event("a", 10, 20))
    displayed = {c.key: (c.values.tolist(), c.rows.tolist()) for c in table.attributes}
    assert displayed["thread.id"] == ([threading.get_ident()], [0])


def test_a_step_whose_ids_are_decided_already(service):
    """Where several ranks share a trace, the step has the span id, the parent and the links that its trace comes with.

    The id is for one span: what else of the step has none of its own parent gets another.
    """
    elsewhere = SpanContext(77, 8, is_remote=True)
    service.steps.begin(0)
    service.boundary(1, 100, 0)
    service.answers["torch.step"] = Trace(77, True, True, span_id=5, parent=elsewhere, links=((9, 9),))
    service.boundary(2, 200, 0)
    service.spans()
    del service.answers["torch.step"]
    service.boundary(3, 300, 0)
    found = service.spans(Event("a", 210, 220))
    step = found["torch.step 2"]
    before = service.steps.known()[0].link
    assert (step.trace, step.span_id, step.parent) == (77, 5, 8)
    assert step.links == [before, (9, 9)]
    assert (found["a"].trace, found["a"].parent) == (77, 5)
    step_two = service.steps.known()[0]
    assert service.steps.span(step_two, 3).span_id != 5
    in_request(service, 4)
    assert not service.steps.span(step_two, 0).is_enclosed
    assert service.steps.span(step_two, 4).is_enclosed


@pytest.mark.parametrize("drains", [False, True], ids=["at-once", "between"])
def test_what_is_between_two_loops_is_in_no_step(service, drains):
    """Whether the first loop's steps have been sent or not: neither its last step nor the first of the next loop reaches over it."""
    ident = threading.get_ident()
    service.steps.begin(0)
    service.steps.end(100, 0, ident)
    found = {}
    if drains:
        found |= service.spans(Event("a", 10, 20))
        found |= service.spans()
    service.steps.change(SegmentChange(ends_step=False), 200, 0, ident)
    events = [] if drains else [Event("a", 10, 20)]
    service.steps.end(300, 0, ident)
    found |= service.spans(*events, label("between", 120, 180), Event("b", 210, 220))
    first, second = found["torch.step 0"], found["torch.step 1"]
    assert [(step.start, step.end) for step in (first, second)] == [(0, 100), (200, 300)]
    assert (found["a"].trace, found["b"].trace) == (first.trace, second.trace)
    assert found["between"].trace not in {first.trace, second.trace}


STEP = SegmentChange(Segment.STEP, False, False, {})
APPLICATION = SpanContext(99, 77, is_remote=False, trace_flags=TraceFlags(1))


def new_steps() -> Steps:
    """A first step has ended, outside of any span, and the next one runs."""
    ids = itertools.count(1)
    made = Steps(lambda *_: Trace(next(ids), True, True), lambda: next(ids) + 1000, lambda _: (APPLICATION, None))
    made.begin(0)
    made.boundary(Segment.STEP, 10, 0, 1)
    return made


def sent(steps: Steps) -> list:
    """What would be sent, without ids."""
    ended = steps.take_ended(everything=True)
    return [
        (step.segment, step.number, [(each, span.name, span.start, span.end) for each, span in step.spans.items()])
        for step in ended
    ]


def replaced_by_nothing(steps: Steps) -> None:
    steps.change(SegmentChange(None, False, True, {}), 12, 0, 1)
    steps.change(STEP, 20, 0, 1)
    steps.boundary(Segment.STEP, 30, 0, 1)


def replaced_by_a_checkpoint(steps: Steps) -> None:
    steps.change(SegmentChange(Segment.CHECKPOINT, False, True, {}), 12, 0, 1)
    steps.boundary(Segment.STEP, 30, 0, 1)


def in_another_context(steps: Steps) -> None:
    steps.boundary(Segment.STEP, 30, 5, 1)


@pytest.mark.parametrize("then", [replaced_by_nothing, replaced_by_a_checkpoint, in_another_context])
def test_asking_changes_nothing(then):
    """The same spans are sent, with the same numbers, whether somebody asked for that of the running step or not."""
    steps, asked = new_steps(), new_steps()
    asked.running_span()
    then(steps)
    then(asked)
    assert sent(asked) == sent(steps)


def test_the_span_is_the_one_that_is_sent():
    """What was asked for has the ids of the span that is sent when the step has ended, and is the same when asked for again."""
    steps = new_steps()
    running = steps.running_span()
    assert steps.running_span() is running
    steps.boundary(Segment.STEP, 30, 0, 1)
    spans = [span for step in steps.take_ended(everything=True) for span in step.spans.values()]
    assert running in spans
