"""Drained batches become spans: traces, parents and links, over any number of drains."""

from __future__ import annotations

import numpy as np
import pytest
from live_batches import MAIN, Event, Service, in_request, label, span_context
from opentelemetry.sdk.resources import Resource

from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.sdk import instrumentation_scope
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._model.live_table import REMEMBERED, CallRules
from otel_torchprof._model.step_spans import Trace


@pytest.fixture
def service() -> Service:
    return Service()


def test_events_hang_under_the_span_of_their_context(service):
    """The outermost event of a context is a child of its span, with its trace, trace state and remoteness; the rest nests."""
    in_request(service, 7, remote=True, state="a=1")
    spans = service.spans(Event("model", 10, 90, context=7), Event("mm", 20, 30, "model", context=7))
    model, mm = spans["model"], spans["mm"]
    assert (model.trace, model.parent, model.remote, model.state) == (7, 7000, True, "a=1")
    assert (mm.trace, mm.parent, mm.remote, mm.state) == (7, model.span_id, False, "a=1")
    assert service.asked == []


def test_there_may_be_billions_of_contexts(service):
    """Contexts are numbered up to 32 bits: those with the highest bit set are found like any other."""
    service.current_spans[2**32 - 2] = (span_context(7), None)
    assert service.spans(Event("op", 10, 90, context=2**32 - 2))["op"].parent == 7000


def test_tasks_that_take_turns_keep_their_own_labels(service):
    """With two tasks' labels open on one thread, each task's operators hang under its own label."""
    in_request(service, 1)
    in_request(service, 2)
    spans = service.spans(
        Event("label one", 0, 100, context=1),
        Event("label two", 10, 90, "label one", context=2),
        Event("op one", 20, 30, "label two", context=1),
        Event("op two", 40, 50, "label two", context=2),
    )
    assert (spans["op one"].trace, spans["op one"].parent) == (1, spans["label one"].span_id)
    assert (spans["op two"].trace, spans["op two"].parent) == (2, spans["label two"].span_id)
    assert (spans["label two"].trace, spans["label two"].parent) == (2, 2000)


def test_a_span_of_the_service_inside_a_label_gets_its_own_events(service):
    """An event inside a label, but in a span that was started inside the label, is a child of that span."""
    in_request(service, 1)
    in_request(service, 2)
    spans = service.spans(Event("label", 0, 100, context=1), Event("op", 20, 30, "label", context=2))
    assert (spans["op"].trace, spans["op"].parent) == (2, 2000)


def test_what_begins_after_its_span_has_ended_links_to_it(service):
    """What began while the span was open is in it to its end; later roots are traces of their own that link to the span."""
    in_request(service, 7)
    service.ends[7] = 50
    spans = service.spans(
        label("during", 10, 90, context=7), label("after", 60, 70, context=7), Event("op", 61, 62, "after", 7)
    )
    assert (spans["during"].trace, spans["during"].parent, spans["during"].links) == (7, 7000, [])
    after = spans["after"]
    assert (after.trace, after.parent, after.links) == (10_001, 0, [(7, 7000)])
    assert (spans["op"].trace, spans["op"].parent, spans["op"].links) == (10_001, after.span_id, [])


def test_late_operators_share_a_root_with_links(service):
    """The shared root of operators links to each of the ended spans once, and to no more than 32."""
    for context in range(1, 41):
        in_request(service, context)
        service.ends[context] = 5
    events = [Event(f"op {c} {n}", 100 * c + n, 100 * c + n + 1, context=c) for c in range(1, 41) for n in (10, 20)]
    spans = service.spans(*events, final=True)
    (root,) = [span for name, span in spans.items() if name.startswith("torch.operators")]
    assert root.links == [(context, 1000 * context) for context in range(1, 33)]
    assert {span.parent for name, span in spans.items() if name.startswith("op")} == {root.span_id}


def test_late_events_are_not_in_the_steps_of_a_loop(service):
    """A thread that works on after its request has ended does not belong to the step that a loop is in meanwhile."""
    in_request(service, 7)
    service.ends[7] = 50
    service.boundary(1, 40, 0)
    spans = service.spans(label("late", 60, 70, context=7), label("own", 61, 69))
    assert spans["late"].parent == 0
    assert spans["late"].links == [(7, 7000)]
    assert spans["own"].parent != 0


def test_the_place_of_a_tree_is_decided_once(service):
    """A label without any context asks the sampler once, however many drains its tree is spread over."""
    first = service.spans(label("outer", 0), Event("a", 1, 2, "outer"))
    second = service.spans(label("outer", 0), Event("b", 3, 4, "outer"))
    third = service.spans(label("outer", 0, 9))
    assert [name for name, *_ in service.asked] == ["outer"]
    assert first["a"].trace == second["b"].trace == third["outer"].trace == 10_001
    assert first["a"].parent == second["b"].parent == third["outer"].span_id
    assert third["outer"].parent == 0


def test_nothing_hangs_under_what_had_ended_before(service):
    """A task whose label has ended is not in it any more, though another task's label that began inside is still open."""
    in_request(service, 1)
    in_request(service, 2)
    spans = service.spans(
        Event("label one", 0, 50, context=1),
        Event("label two", 10, 90, "label one", context=2),
        Event("op one", 60, 70, "label two", context=1),
    )
    assert (spans["op one"].trace, spans["op one"].parent) == (1, 1000)


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": Kind.LABEL},
        {"kind": Kind.MODULE},
        {"kind": Kind.FRAME},
        {"scope": Scope.USER_SCOPE},
        {"scope": Scope.TORCHSCRIPT_FUNCTION},
    ],
)
def test_what_may_be_a_request_is_a_root_where_it_is_outermost(service, kind):
    """Labels, torch's too, modules and TorchScript outside of any span and step: one trace each, asked about by name."""
    service.trees = LiveTrees(
        key=1,
        steps=service.steps,
        new_trace=service.new_trace,
        current_span=service.current_spans.get,
        calls=CallRules(keeps_bare=True),
    )
    spans = service.spans(
        Event("one", 0, 5, more=kind), Event("in one", 1, 2, "one"), Event("two", 6, 9, more=kind), final=True
    )
    assert service.asked == [("one", -1, None), ("two", -1, None)]
    assert spans["one"].trace != spans["two"].trace
    assert (spans["one"].parent, spans["two"].parent) == (0, 0)
    assert spans["in one"].trace == spans["one"].trace


def test_what_the_sampler_refuses_is_left_out(service):
    """A root that is not sampled has no spans, nor has what is inside; its neighbours do."""
    service.answers["one"] = Trace(1, False, False)
    assert set(service.spans(label("one", 0, 5), Event("in one", 1, 2, "one"), label("two", 6, 9))) == {"two"}


def test_a_samplers_attributes_and_state_are_on_the_root(service):
    """What the sampler adds is on the span that it was asked about, and its trace state on the whole trace."""
    service.answers["one"] = Trace(
        1, True, True, "s=1", {"ratio": 0.5, "why": "all", "n": 3, "yes": True, "list": ["a"]}
    )
    table = service.table(label("one", 0, 5), Event("in one", 1, 2, "one"))
    values = {column.key: (column.values[0], column.rows.tolist()) for column in table.attributes}
    assert {key: table.names[value] if key in {"why", "list"} else value for key, (value, _) in values.items()} == {
        "ratio": 0.5,
        "why": "all",
        "n": 3,
        "yes": 1,
        "list": '["a"]',
    }
    assert {tuple(rows) for _, rows in values.values()} == {(0,)}
    assert table.trace_states[table.trace[1]] == "s=1"


def test_samplers_may_add_anything_to_any_number_of_roots(service):
    """Each root has what the sampler gave it, not its children; numbers that no span can hold, and odd keys, become text."""
    service.answers = {
        "root 1": Trace(1, True, True, "", {"n": 1, 5: None}),
        "root 2": Trace(2, True, True, "", {"n": 1 << 63}),
    }
    table = service.table(label("root 1", 0, 5), Event("child", 1, 2, "root 1"), label("root 2", 6, 9))
    spans = SpanList(table, resource=Resource({}), scope=instrumentation_scope())
    assert [span.attributes for span in spans] == [{"n": 1, "5": "null"}, {}, {"n": str(1 << 63)}]


# ---- links, own times, memory ----


def forward(name: str, number: int, start: int) -> Event:
    return Event(name, start, start + 1, more={"sequence_nr": number})


def backward(name: str, number: int, start: int) -> Event:
    more = {"sequence_nr": number, "scope": int(Scope.BACKWARD_FUNCTION), "fwd_thread": 1}
    return Event(name, start, start + 1, more=more)


@pytest.mark.parametrize("drains", [1, 2, 3])
def test_backward_functions_link_to_forward_operators_of_any_drain(service, drains):
    """A backward function links to its forward operator, drained with it, one drain before, or two."""
    service.steps.begin(0)
    spans = {}
    groups = {1: [[forward("mul", 4, 10), backward("MulBackward", 4, 50)]]}
    groups[2] = [[forward("mul", 4, 10)], [backward("MulBackward", 4, 50)]]
    groups[3] = [[forward("mul", 4, 10)], [forward("add", 5, 20)], [backward("MulBackward", 4, 50)]]
    for events in groups[drains]:
        spans |= service.spans(*events)
    assert spans["MulBackward"].links == [(spans["mul"].trace, spans["mul"].span_id)]
    assert spans["mul"].links == []


def test_remembered_forward_operators_are_bounded(service):
    """However many forward operators have no backward function, a fixed number of them is remembered."""
    rows = 2 * REMEMBERED + 500
    batch = service.recorder.drain(forward("mul", 4, 10))
    many = {name: np.repeat(column, rows) for name, column in batch.columns.items()}
    many["id"], many["sequence_nr"] = np.arange(1, rows + 1, dtype=np.uint64), np.arange(rows)
    many["start"] = many["end"] = np.arange(rows)
    service.steps.begin(0)
    placed = service.trees.place(type(batch)(many, batch.names, batch.threads))
    requested = np.ones(rows, dtype=bool)
    service.flows.links(placed, requested, requested, np.zeros((len(placed.trace_groups), 16), np.uint8), final=False)
    ((remembered, *_),) = service.flows._remembered
    assert (len(remembered.row), remembered.number.min()) == (REMEMBERED, REMEMBERED + 500)


def test_operators_that_make_no_node_are_remembered_as_one(service):
    """Of operators with one number a backward function belongs to the last, so the others are forgotten with their drain."""
    service.steps.begin(0)
    spans = service.spans(*(forward(name, 4, start) for name, start in (("neg", 10), ("relu", 20), ("mul", 30))))
    assert [len(remembered.row) for remembered, *_ in service.flows._remembered] == [1]
    spans |= service.spans(backward("MulBackward", 4, 50))
    assert spans["MulBackward"].links == [(spans["mul"].trace, spans["mul"].span_id)]


def test_own_time_counts_children_of_all_drains(service):
    """An event's own time is its duration without its direct children, also those that were drained before it."""
    service.steps.begin(0)
    service.trees.place(
        service.recorder.drain(Event("outer", 0), Event("a", 10, 30, "outer"), Event("in a", 12, 17, "a"))
    )
    service.trees.place(service.recorder.drain(Event("outer", 0), Event("b", 40, 50, "outer")))
    placed = service.trees.place(service.recorder.drain(Event("outer", 0, 100), Event("c", 60, 65, "outer")))
    assert placed.self_times().tolist() == [100 - 20 - 10 - 5, 5]


def test_threads_without_any_event_are_fine(service):
    """A drain in which nothing happened gives an empty table."""
    assert len(service.table(threads=(MAIN,))) == 0
