"""Python's calls in a live recording: which belong to a request or a step, and that no tree is torn."""

from __future__ import annotations

import pytest
from live_batches import Event, Service, in_request

from otel_torchprof._columns.schema import Kind
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._model.live_table import CallRules


@pytest.fixture
def service() -> Service:
    service = Service()
    service.steps.begin(0)
    return service


@pytest.fixture
def stepless() -> Service:
    return Service()


def call(name: str, start: int, end: int | None = None, parent: str = "", context: int = 0) -> Event:
    return Event(name, start, end, parent, context, {"kind": Kind.FRAME})


def test_calls_in_a_request_are_its_spans(stepless):
    """A call that begins in a span of the service hangs under it, and what it calls hangs under the call."""
    in_request(stepless, 7)
    spans = stepless.spans(
        call("main", 0),
        call("handler", 5, 95, "main"),
        call("predict", 10, 90, "handler", 7),
        Event("mm", 20, 30, "predict", 7),
    )
    assert set(spans) == {"predict", "mm"}
    assert (spans["predict"].trace, spans["predict"].parent) == (7, 7000)
    assert spans["mm"].parent == spans["predict"].span_id


def test_calls_outside_of_everything_are_no_spans(stepless):
    """Without a request and steps, a call is a span inside of a module, label or operator only, which is the root of a trace."""
    spans = stepless.spans(
        call("main", 0),
        call("infer", 5, 95, "main"),
        Event("model", 10, 90, "infer", more={"kind": Kind.MODULE}),
        call("forward", 20, 80, "model"),
    )
    assert stepless.asked == [("model", -1, None)]
    assert (set(spans), spans["model"].parent) == ({"model", "forward"}, 0)
    assert spans["forward"].parent == spans["model"].span_id
    assert stepless.spans(call("main", 0), call("other", 100, 110, "main"), Event("op", 102, 104, "other")).keys() == {
        "op"
    }


def test_a_label_of_another_task_holds_no_calls(stepless):
    """A call outside of any span is none inside of a label that another task, which is in a span, has open around it."""
    in_request(stepless, 7)
    assert stepless.spans(Event("label", 0, 100, context=7), call("other task", 10, 20, "label")).keys() == {"label"}


def test_calls_in_steps_are_in_the_step_in_which_they_began(service):
    """A call is in the step in which it began, also when it goes on behind the boundary, and holds what it called."""
    service.boundary(1, 100, 0)
    service.boundary(2, 200, 0)
    spans = service.spans(
        call("train", 1),
        call("one", 10, 103, "train"),
        call("step", 90, 102, "one"),
        Event("a", 20, 30, "one"),
        call("two", 110, 203, "train"),
        Event("b", 120, 130, "two"),
    )
    zero, one = spans["torch.step 0"], spans["torch.step 1"]
    assert (spans["one"].parent, spans["two"].parent) == (zero.span_id, one.span_id)
    assert spans["a"].parent == spans["step"].parent == spans["one"].span_id
    assert spans["b"].parent == spans["two"].span_id
    assert "train" not in spans


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_loop_itself_is_no_span(service, steps):
    """A call around the loop holds no step's events, however many steps are drained at a time, and never becomes a span."""
    service.spans(call("train", 1), Event("first", 2, 3, "train"))
    found = {}
    for number in range(10):
        service.boundary(number + 1, 100 * number + 100, 0)
        if number % steps == steps - 1:
            events = [
                Event(f"op {n}", 100 * n + 50, 100 * n + 60, "train") for n in range(number - steps + 1, number + 1)
            ]
            found |= service.spans(call("train", 1), *events)
    found |= service.spans(call("train", 1, 1010), final=True)
    assert "train" not in found
    assert all(found[f"op {n}"].parent == found[f"torch.step {n}"].span_id for n in range(10))


def test_a_call_that_was_said_to_be_a_parent_is_sent(service):
    """A call of a later step that is open when it is drained, and then lasts for steps, comes when it ends: others name it."""
    service.boundary(1, 100, 0)
    early = service.spans(call("epoch", 110), Event("a", 120, 130, "epoch"))
    for number in (2, 3, 4):
        service.boundary(number, 100 * number, 0)
    late = service.spans(call("epoch", 110, 450), Event("b", 310, 320, "epoch"))
    assert early["a"].parent == late["epoch"].span_id
    assert late["b"].parent == late["torch.step 3"].span_id


def test_calls_of_modules_are_the_hooks(stepless):
    """A call of a module gives way to what the hooks tell of it, open or not; what it calls hangs under what is around it."""
    in_request(stepless, 7)
    early = stepless.spans(
        call("handler", 1, None, "", 7),
        call("nn.Module: Net_0", 2, None, "handler", 7),
        call("hook", 3, 4, "nn.Module: Net_0", 7),
        Event("Net", 5, None, "nn.Module: Net_0", 7, {"kind": Kind.MODULE}),
        call("forward", 6, 7, "Net", 7),
    )
    late = stepless.spans(
        call("handler", 1, 20, "", 7),
        call("nn.Module: Net_0", 2, 19, "handler", 7),
        Event("Net", 5, 18, "nn.Module: Net_0", 7, {"kind": Kind.MODULE}),
    )
    assert set(early | late) == {"handler", "hook", "Net", "forward"}
    assert early["hook"].parent == late["Net"].parent == late["handler"].span_id
    assert early["forward"].parent == late["Net"].span_id


def test_short_calls_are_left_out_unless_others_name_them(stepless):
    """With a shortest duration calls below it are no spans, save for one whose children were drained before it ended."""
    in_request(stepless, 7)
    stepless.trees = LiveTrees(
        key=1,
        steps=stepless.steps,
        new_trace=stepless.new_trace,
        current_span=stepless.current_spans.get,
        calls=CallRules(50),
    )
    early = stepless.spans(
        call("long", 0, 60, "", 7),
        call("short", 1, 2, "long", 7),
        call("open", 70, None, "", 7),
        Event("a", 71, 72, "open", 7),
    )
    late = stepless.spans(call("open", 70, 75, "", 7))
    assert set(early) == {"long", "a"}
    assert early["a"].parent == late["open"].span_id


def test_what_outlives_a_call_that_is_left_out_keeps_its_place(stepless):
    """An event that is open where the call around it has ended, and is left out, hangs under what is around that."""
    in_request(stepless, 7)
    early = stepless.spans(
        Event("label", 0, None, "", 7),
        call("nn.Module: A_0", 1, 5, "label", 7),
        Event("slow", 2, None, "nn.Module: A_0", 7),
    )
    middle = stepless.spans(
        Event("label", 0, None, "", 7), Event("slow", 2, None, "nn.Module: A_0", 7), Event("late", 8, 9, "slow", 7)
    )
    late = stepless.spans(Event("label", 0, 30, "", 7), Event("slow", 2, 20, "nn.Module: A_0", 7))
    assert early == {}
    assert late["slow"].parent == late["label"].span_id
    assert middle["late"].parent == late["slow"].span_id
