"""Operators outside of any span and step share roots: by thread, by second, by the size of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from live_batches import Event, Service, in_request, label, readable

from otel_torchprof._columns.batch import RecordedThread
from otel_torchprof._columns.schema import Scope
from otel_torchprof._export.root_only import without_left_out
from otel_torchprof._export.span_buffer import Pieces, SpanBuffer
from otel_torchprof._export.span_policy import SelectionRules
from otel_torchprof._model.limits import Budget
from otel_torchprof._model.live_table import live_table
from otel_torchprof._model.operator_roots import OPERATORS_NAME as ROOT
from otel_torchprof._model.operator_roots import SLICE_NS
from otel_torchprof._model.step_spans import Trace

if TYPE_CHECKING:
    from otel_torchprof._model.span_table import SpanTable

SECOND = SLICE_NS
THREADS = (RecordedThread(11, 101, 1, "main"), RecordedThread(12, 102, 2, "worker"))


@pytest.fixture
def service() -> Service:
    return Service()


def on(thread: int, name: str, start: int, end: int | None = None, parent: str = "") -> Event:
    """An operator on one of :data:`THREADS`."""
    return Event(name, start, end, parent, more={"thread": thread})


def test_operators_of_a_thread_and_second_share_a_root(service):
    """Two threads: a root each, in a trace of its own, from its first operator's begin to its last one's end."""
    table = service.table(
        on(0, "a", 10, 20), on(0, "b", 30, 45), on(1, "c", 15, 25), on(1, "d", 26, 27), threads=THREADS, final=True
    )
    spans = readable(table)
    main, worker = spans[ROOT], spans[f"{ROOT}'"]
    assert service.asked == [(ROOT, -1, None)] * 2
    assert [(s.start, s.end, s.parent, s.step, s.links) for s in (main, worker)] == [
        (10, 45, 0, -1, []),
        (15, 27, 0, -1, []),
    ]
    assert [(spans[name].trace, spans[name].parent) for name in "ab"] == [(main.trace, main.span_id)] * 2
    assert [(spans[name].trace, spans[name].parent) for name in "cd"] == [(worker.trace, worker.span_id)] * 2
    assert main.trace != worker.trace
    values = {column.key: column for column in table.attributes}
    assert values["thread.id"].values[:2].tolist() == [101, 102]
    assert [table.names[index] for index in values["thread.name"].values[:2]] == ["main", "worker"]


def test_a_root_lasts_a_second_from_its_first_operator(service):
    """What begins a second after the first operator has the next root; whatever crosses that moment belongs to where it began."""
    spans = service.spans(
        Event("first", 7, 8),
        Event("crossing", 7 + SECOND - 1, 7 + SECOND + 5, ""),
        Event("inside", 7 + SECOND + 1, 7 + SECOND + 2, "crossing"),
        Event("next", 7 + SECOND + 6, 7 + SECOND + 9),
        Event("last", 7 + 2 * SECOND + 5, 7 + 2 * SECOND + 6),
        Event("after", 7 + 2 * SECOND + 6, 7 + 2 * SECOND + 7),
        final=True,
    )
    one, two, three = spans[ROOT], spans[f"{ROOT}'"], spans[f"{ROOT}''"]
    assert (one.start, one.end, two.start, two.end) == (7, 7 + SECOND + 5, 7 + SECOND + 6, 7 + 2 * SECOND + 6)
    assert [spans[name].parent for name in ("first", "crossing")] == [one.span_id] * 2
    assert (spans["inside"].parent, spans["inside"].trace) == (spans["crossing"].span_id, one.trace)
    assert [spans[name].parent for name in ("next", "last")] == [two.span_id] * 2
    assert spans["after"].parent == three.span_id
    assert len({one.trace, two.trace, three.trace}) == 3


@pytest.mark.parametrize(
    "drains",
    [
        [[Event("a", 1, 4), Event("in a", 2, 3, "a"), Event("b", 5, 6), Event("c", 7, 8), Event("d", 9, 10)]],
        [
            [Event("a", 1), Event("in a", 2, 3, "a")],
            [Event("a", 1, 4), Event("b", 5)],
            [Event("b", 5, 6)],
            [Event("c", 7, 8)],
            [Event("d", 9, 10)],
        ],
    ],
)
def test_a_root_ends_at_the_size_limit_of_a_trace(drains):
    """With room for four spans three events are below a root, those inside of operators counted, however they are drained."""
    service = Service(max_spans=4)
    spans = {}
    for number, events in enumerate(drains):
        spans |= {
            f"{name.rstrip(chr(39))} {span.start}": span
            for name, span in service.spans(*events, final=number == len(drains) - 1).items()
        }
    one, two = spans[f"{ROOT} 1"], spans[f"{ROOT} 7"]
    assert [spans[name].parent for name in ("a 1", "b 5", "c 7", "d 9")] == [one.span_id] * 2 + [two.span_id] * 2
    assert (spans["in a 2"].parent, spans["in a 2"].trace) == (spans["a 1"].span_id, one.trace)


def test_labels_between_operators_keep_traces_of_their_own(service):
    """A request that is served under a label is not merged with its neighbours, nor does it end the root that they share."""
    spans = service.spans(
        Event("before", 0, 1), label("request", 2, 9), Event("mm", 3, 4, "request"), Event("after", 10, 11), final=True
    )
    root, request = spans[ROOT], spans["request"]
    assert (request.parent, spans["mm"].parent, spans["mm"].trace) == (0, request.span_id, request.trace)
    assert spans["before"].parent == spans["after"].parent == root.span_id
    assert request.trace != root.trace


def test_operators_with_a_place_need_no_root(service):
    """In a span of the service, or in a step, operators are below that; backward functions outside of both share roots too."""
    in_request(service, 7)
    backward = {"scope": int(Scope.BACKWARD_FUNCTION)}
    spans = service.spans(Event("served", 0, 1, context=7), Event("MulBackward", 2, 3, more=backward), final=True)
    assert (spans["served"].parent, spans["MulBackward"].parent) == (7000, spans[ROOT].span_id)
    service.steps.begin(10)
    assert service.spans(Event("stepping", 11, 12), final=True)["stepping"].parent != spans[ROOT].span_id
    assert service.asked == [(ROOT, -1, None), ("torch.step", 0, None)]


def test_the_samplers_answer_holds_for_all_below_a_root(service):
    """A refused root has no spans below it, in this drain and the next; the root after it is asked about anew."""
    service.answers[ROOT] = Trace(1, False, False)
    assert service.spans(Event("a", 0, 1), Event("open", 2)) == {}
    service.answers[ROOT] = Trace(2, True, True, "s=1", {"why": "sampled"})
    assert service.spans(Event("open", 2, 5), Event("b", 6, 7), watermark=10) == {}
    assert len(service.asked) == 1
    table = service.table(Event("c", SECOND, SECOND + 1), final=True)
    assert [table.names[name] for name in table.name] == [ROOT, "c"]
    assert {column.key: column.rows.tolist() for column in table.attributes}["why"] == [0]
    assert table.trace_states[table.trace[1]] == "s=1"
    assert len(service.asked) == 2


def test_a_root_of_a_silent_thread_ends_when_its_time_is_over(service):
    """A root is sent by the first drain after its second, though nothing has come on its thread; and not before."""
    early = service.spans(Event("a", 5, 6), watermark=10)
    assert ROOT not in early
    assert service.spans(watermark=SECOND + 4) == {}
    late = service.spans(watermark=SECOND + 5)
    assert (late[ROOT].span_id, late[ROOT].start, late[ROOT].end) == (early["a"].parent, 5, 6)
    assert service.spans(final=True) == {}


def test_a_root_waits_for_what_is_open_below_it(service):
    """While an operator runs its root has not ended, whatever the time; what comes of it later is below the same root."""
    first = service.spans(Event("long", 5), Event("in it", 6, 7, "long"), watermark=3 * SECOND)
    assert ROOT not in first
    last = service.spans(Event("long", 5, 3 * SECOND), watermark=4 * SECOND)
    assert (last[ROOT].start, last[ROOT].end) == (5, 3 * SECOND)
    assert (last["long"].parent, last["long"].trace) == (last[ROOT].span_id, first["in it"].trace)


def test_what_ends_after_its_root_is_in_its_trace(service):
    """An asynchronous operator does not hold up the roots of its thread: it is below that in which it began."""
    first = service.spans(Event("async", 5), Event("later", 5 + SECOND, 6 + SECOND), watermark=2 * SECOND)
    late = service.spans(Event("async", 5, 9 * SECOND), watermark=9 * SECOND)
    assert (late["async"].parent, late["async"].trace) == (first[ROOT].span_id, first[ROOT].trace)
    assert first["later"].parent == late[ROOT].span_id != first[ROOT].span_id


def test_roots_come_again_until_they_were_sent(service):
    """A drain that fails does not lose the roots that have ended: the next one has them."""
    trees = service.trees
    trees.place(service.recorder.drain(Event("a", 5, 6)))
    (root,) = trees.ended_roots(2 * SECOND, final=False)
    assert trees.ended_roots(2 * SECOND, final=False) == [root]
    trees.forget_roots([root])
    assert trees.ended_roots(0, final=True) == []


# ---- in the span buffer ----


class Buffered:
    """What a live recording does with drains: it places their events and hands the spans to the span buffer."""

    def __init__(self, rules: SelectionRules) -> None:
        self.service = Service()
        self.buffer = SpanBuffer(rules, lambda: 1, lambda: 2)

    def sent(self, *events: Event, watermark: int) -> list[SpanTable]:
        trees = self.service.trees
        placed = trees.place(self.service.recorder.drain(*events))
        roots = trees.ended_roots(watermark, final=False)
        trees.forget_roots(roots)
        steps = {root.span_id: root for root in (*(found.step for found in placed.trace_groups), *roots)}
        chosen = self.buffer.choose(placed, steps, roots, final=False)
        table = live_table(placed, roots, self.service.flows)
        if chosen.left_out is not None:
            table = without_left_out(table, chosen.left_out)
        trace_group = table.span_id.copy()
        trace_group[table.row >= 0] = placed.root[table.row[table.row >= 0]]
        enclosing = np.zeros(len(table.trace_ids), np.uint64)
        pieces = Pieces(table, trace_group, placed.open_roots, enclosing, enclosing > 0, steps, roots, chosen)
        return self.buffer.decide(pieces)


def names(tables: list[SpanTable]) -> list[str]:
    return [table.names[index] for table in tables for index in table.name]


def test_operators_wait_for_their_root():
    """Operators are held until their root has ended; then all are sent together, and nothing is held."""
    buffered = Buffered(SelectionRules(Budget()))
    assert names(buffered.sent(Event("a", 0, 1), watermark=10)) == []
    assert buffered.buffer.nbytes > 0
    assert names(buffered.sent(Event("b", 11, 12), watermark=20)) == []
    assert sorted(names(buffered.sent(watermark=SECOND))) == ["a", "b", ROOT]
    assert buffered.buffer.nbytes == 0


def test_what_ends_late_is_sent_at_once_however_late(monkeypatch):
    """An operator that outlives its root, by more roots than are remembered, is sent when it ends, and is not held."""
    monkeypatch.setattr("otel_torchprof._export.span_buffer._MOST_PAST", 3)
    buffered = Buffered(SelectionRules(Budget()))
    buffered.sent(Event("async", 0), watermark=1)
    for number in range(1, 10):
        begin = number * SECOND
        found = buffered.sent(Event("async", 0), Event(f"op {number}", begin, begin + 1), watermark=begin + 2)
        assert sum(map(len, found)) == (1 if number == 1 else 2)
    assert "async" in names(buffered.sent(Event("async", 0, 10 * SECOND), watermark=10 * SECOND))
    assert buffered.buffer.nbytes == 0


def test_tail_sampling_goes_by_the_longest_operator():
    """Under a limit for what is slow, a root whose operators are all fast keeps none of them; a slow one among them keeps all."""
    buffered = Buffered(SelectionRules(Budget(), keep_all=False, limit_ns=1_000))
    (fast,) = buffered.sent(Event("a", 0, 10), Event("b", 20, 30), watermark=SECOND)
    assert names([fast]) == [ROOT]
    texts = {column.key: fast.names[column.values[0]] for column in fast.attributes if column.key == "torch.averages"}
    assert '"name":"a","count":1' in texts["torch.averages"]
    begin = 2 * SECOND
    slow = buffered.sent(Event("c", begin, begin + 10), Event("d", begin + 20, begin + 1_020), watermark=4 * SECOND)
    assert sorted(names(slow)) == ["c", "d", ROOT]
    assert buffered.buffer.figures == {"sampled": 1, "root_only": 1, "detail_dropped": 2}
