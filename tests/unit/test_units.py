"""Which trace each event belongs to, under which span, with which ids and links."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext, TraceState
from recorded_tables import recorded_table

from otel_torchprof._columns.batch import Batch, Names, RecordedThread
from otel_torchprof._columns.schema import Flag, Scope
from otel_torchprof._model.span_table import AttributeColumn, AttributeType, event_span_ids, extend_names
from otel_torchprof._model.step_spans import RecordedStep

KEY, ROOT = 0xABCDEF0123456789, 1000
THREADS = (RecordedThread(11, 101, 1, "main"), RecordedThread(12, 102, 2, "autograd"))
STEPS = (RecordedStep(7, 100, 200), RecordedStep(8, 300, 400))


def make(batch, **options):
    """The table of a batch, with ids that count: the key first, then roots 1000, 1001, ...; traces 1, 2, ..."""
    spans = itertools.chain([KEY], itertools.count(ROOT))
    traces = itertools.count(1)
    options = {
        "start": 0,
        "end": 1000,
        "new_trace_id": lambda: next(traces),
        "new_span_id": lambda: next(spans),
        **options,
    }
    return recorded_table(batch, **options)


def events(*begin_end_parent, **columns):
    """A batch of events (begin, end, row of the parent)."""
    start, end, parent = zip(*begin_end_parent, strict=True) if begin_end_parent else ((), (), ())
    columns = {"name": [1] * len(start), **columns}
    return Batch.of({"start": start, "end": end, "parent": parent, **columns}, ["", "op"], THREADS)


def trace_of(table, row):
    """The trace id of a span as a number."""
    return int.from_bytes(table.trace_ids[table.trace[row]].tobytes(), "big")


def step_of_events(table):
    """The number of the step under whose root each event of the batch ended up, in the order of the batch."""
    number = {trace_of(table, i): int(table.step[i]) for i in np.flatnonzero(table.row < 0)}
    rows = np.flatnonzero(table.row >= 0)
    return [number[trace_of(table, i)] for i in rows[np.argsort(table.row[rows])]]


def links(table):
    """Every link as (row of the span that has it, row of the span that it points to)."""
    row_of = {(trace_of(table, i), int(table.span_id[i])): i for i in range(len(table))}
    return [
        (int(link["row"]), row_of[int.from_bytes(link["trace_id"].tobytes(), "big"), int(link["span_id"])])
        for link in table.links
    ]


def test_without_steps_everything_is_one_trace_under_one_root():
    """One synthetic root with the given name and interval; outermost events are its children, the others their parents'."""
    table = make(events((10, 30, -1), (12, 20, 0), (40, 50, -1)), name="job", end=60)
    assert [table.names[i] for i in table.name] == ["job", "op", "op", "op"]
    assert table.row.tolist() == [-1, 0, 1, 2]
    assert (table.start[0], table.end[0]) == (0, 60)
    assert table.parent_span_id.tolist() == [0, ROOT, int(table.span_id[1]), ROOT]
    assert {trace_of(table, i) for i in range(4)} == {1}
    assert not len(table.links)


def test_each_step_is_a_trace_linked_to_the_one_before():
    """Steps get a root of one name whatever their number, a trace each, and a link to their predecessor's root."""
    table = make(events((110, 120, -1), (310, 320, -1)), steps=STEPS)
    assert [table.names[i] for i in table.name] == ["torch.step", "torch.step", "op", "op"]
    assert [trace_of(table, i) for i in range(4)] == [1, 2, 1, 2]
    assert table.step.tolist() == [7, 8, -1, -1]
    assert table.parent_span_id.tolist() == [0, 0, ROOT, ROOT + 1]
    assert links(table) == [(1, 0)]


@pytest.mark.parametrize(
    ("began", "step"),
    [(50, 7), (100, 7), (199, 7), (200, 7), (299, 7), (300, 8), (500, 8)],
    ids=["before", "start", "within", "end", "nearer the next", "next start", "after"],
)
def test_an_event_outside_every_step_goes_to_the_one_before(began, step):
    """Before the first to the first, in a gap or after the last to the step before it, however near the next one is."""
    assert step_of_events(make(events((began, began + 1, -1)), steps=STEPS)) == [step]


def test_a_tree_stays_together_where_its_root_began():
    """A child that began in the next step stays in the trace of its outermost ancestor, which widens that step's root."""
    table = make(events((150, 390, -1), (310, 380, 0), (320, 330, 1), (391, 392, -1)), steps=STEPS)
    assert step_of_events(table) == [7, 7, 7, 8]
    assert table.end[0] == 390


def test_what_lasts_for_more_than_a_step_holds_only_what_began_in_its_own():
    """A label around a whole loop is in the trace of the first step; what it ran in later steps is in theirs, under their roots."""
    steps = (*STEPS, RecordedStep(9, 400, 500))
    batch = events((110, 490, -1), (120, 130, 0), (310, 320, 0), (312, 318, 2), (410, 420, 0))
    table = make(batch, steps=steps)
    assert step_of_events(table) == [7, 7, 8, 8, 9]
    assert table.parent_span_id[3:].tolist() == [ROOT, table.span_id[3], ROOT + 1, table.span_id[5], ROOT + 2]
    assert table.end[:3].tolist() == [490, 400, 500]


def test_what_began_after_its_parent_had_ended_hangs_under_the_next_one_outwards():
    """A parent that had ended, as a label that ends on another thread may, does not hold what its thread did afterwards."""
    table = make(events((10, 90, -1), (20, 30, 0), (40, 50, 1)))
    assert table.parent_span_id.tolist() == [0, ROOT, table.span_id[1], table.span_id[1]]


def test_a_step_begins_where_the_one_before_it_left_the_thread_of_the_loop():
    """What the loop's thread began in a step and ended in the next one moves the begin of that one; other threads move nothing."""
    steps = (RecordedStep(0, 0, 100, 101), RecordedStep(1, 100, 200, 101), RecordedStep(2, 200, 300, 101))
    batch = events((90, 110, -1), (120, 130, -1), (190, 220, -1), (230, 240, -1), thread=[0, 0, 1, 0])
    assert make(batch, steps=steps).start[:3].tolist() == [0, 110, 200]


def test_steps_name_the_thread_of_their_loop():
    """The spans of steps say on which thread these were ended, by its id and its name."""
    steps = [step._replace(thread=101) for step in STEPS]
    table = make(events((110, 120, -1)), steps=steps)
    ids, names = table.attributes
    assert (ids.key, ids.values.tolist(), ids.rows.tolist()) == ("thread.id", [101, 101], [0, 1])
    assert (names.key, [table.names[i] for i in names.values]) == ("thread.name", ["main", "main"])


def test_events_stand_behind_the_roots_in_the_order_of_the_batch():
    """The roots of steps come first, in order, then the events of all threads as they are in the batch."""
    batch = events((110, 120, -1), (310, 320, -1), (130, 140, -1), (330, 340, -1), thread=[0, 0, 1, 1])
    assert make(batch, steps=STEPS).row.tolist() == [-1, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("steps", [(), STEPS])
@pytest.mark.parametrize("remote", [False, True])
def test_with_a_current_span_everything_joins_its_trace(steps, remote):
    """Roots become children of the current span, in its trace with its state; no trace id is drawn."""
    parent = SpanContext(0xFEED, 0xBEEF, is_remote=remote, trace_state=TraceState([("vendor", "1")]))
    table = make(events((110, 120, -1), (310, 320, -1)), steps=steps, parent=parent, new_trace_id=pytest.fail)
    roots = table.row < 0
    assert {trace_of(table, i) for i in range(len(table))} == {0xFEED}
    assert set(table.parent_span_id[roots].tolist()) == {0xBEEF}
    assert set(table.trace_states) == {"vendor=1"}
    assert (table.parent_is_remote is not None) == remote
    assert not remote or (table.parent_is_remote == roots).all()
    assert len(table.links) == max(len(steps) - 1, 0)


def test_an_error_shows_in_the_status():
    """An event with an error type, or flagged so, has status ERROR; no other has."""
    batch = events((1, 2, -1), (3, 4, -1), (5, 6, -1), error_type=[0, 1, 0], flags=[0, 0, Flag.ERROR])
    assert make(batch).error.tolist() == [0, 0, 1, 1]


def test_a_backward_function_links_into_the_step_of_its_forward():
    """The link carries the trace id of the forward operator when that ran in another step."""
    batch = events(
        (110, 120, -1),
        (310, 320, -1),
        sequence_nr=[5, 5],
        fwd_thread=[0, 1],
        scope=[0, Scope.BACKWARD_FUNCTION],
    )
    assert links(make(batch, steps=STEPS)) == [(1, 0), (3, 2)]


def test_links_stand_in_the_order_of_their_rows():
    """Links come by rising row, as the encoder needs them, whichever event began first."""
    batch = events(
        (150, 160, -1), (110, 120, -1), (130, 140, -1), sequence_nr=[5, 5, 5], fwd_thread=[1, 0, 1], scope=[1, 0, 1]
    )
    assert links(make(batch, steps=STEPS)) == [(1, 0), (2, 3), (4, 3)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1]),
            st.sampled_from([0, 1, 2, 2**62, 2**63 - 1]),
            st.sampled_from([0, 1, 2, 3]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_links_agree_with_a_plain_search(rows):
    """The vectorised matching finds what looking through all earlier events finds, for numbers of any size."""
    rows.sort(key=lambda row: row[0])
    thread, sequence, forward_thread, backward = zip(*rows, strict=True) if rows else ((), (), (), ())
    batch = events(
        *((i, i + 1, -1) for i in range(len(rows))),
        thread=thread,
        sequence_nr=sequence,
        fwd_thread=forward_thread,
        scope=[Scope.BACKWARD_FUNCTION if b else Scope.FUNCTION for b in backward],
    )
    expected = []
    for i, (_, number, tid, is_backward) in enumerate(rows):
        before = enumerate(rows[:i])
        same = [j for j, (t, n, _, b) in before if not b and n == number and THREADS[t].torch_tid == tid != 0]
        if is_backward and same:
            expected.append((i + 1, same[-1] + 1))
    assert links(make(batch)) == expected


@given(st.sets(st.integers(1, 2**64 - 1)), st.integers(0, 2**64 - 1))
def test_ids_of_events_are_distinct_and_valid(ids, key):
    """Distinct events get distinct ids that are not 0, whatever the key."""
    found = set(event_span_ids(np.array(sorted(ids), dtype=np.uint64), key).tolist())
    assert len(found) == len(ids)
    assert 0 not in found


@st.composite
def batches(draw):
    """Events of two threads with any parents that come before them on their thread, and steps in order."""
    count = draw(st.integers(0, 20))
    split = draw(st.integers(0, count))
    parent = [
        draw(st.integers(-1, i - 1) if i < split else st.sampled_from([-1, *range(split, i)])) for i in range(count)
    ]
    start = [draw(st.integers(0, 100)) for _ in range(count)]
    end = [s + draw(st.integers(0, 100)) for s in start]
    edges = sorted(draw(st.lists(st.integers(0, 100), max_size=8)))
    steps = [RecordedStep(i, *pair) for i, pair in enumerate(zip(edges[::2], edges[1::2], strict=False))]
    thread = [int(i >= split) for i in range(count)]
    return events(*zip(start, end, parent, strict=True), thread=thread), steps


@given(batches())
def test_every_tree_is_whole_and_inside_its_root(drawn):
    """Ids are unique, every parent is around its child and in its trace, roots hold their events, nothing is lost."""
    batch, steps = drawn
    table = make(batch, steps=steps)
    assert sorted(table.row[table.row >= 0].tolist()) == list(range(len(batch)))
    row_of = {int(span_id): i for i, span_id in enumerate(table.span_id)}
    assert len(row_of) == len(table)
    root_of = {}
    for i in range(len(table)):
        if table.row[i] < 0:
            root_of[trace_of(table, i)] = i
            assert table.parent_span_id[i] == 0
            continue
        parent, root = row_of[int(table.parent_span_id[i])], root_of[trace_of(table, i)]
        assert trace_of(table, parent) == trace_of(table, root)
        assert table.start[root] <= table.start[i] <= table.end[i] <= table.end[root]
        above = batch["parent"][table.row[i]]
        while above != table.row[parent]:
            assert above >= 0
            above = batch["parent"][above]


@given(batches())
def test_ids_of_events_do_not_depend_on_the_steps(drawn):
    """The same events have the same span ids with steps and without."""
    batch, steps = drawn
    tables = [make(batch, steps=some) for some in (steps, ())]
    ids = [dict(zip(table.row.tolist(), table.span_id.tolist(), strict=True)) for table in tables]
    for row in range(len(batch)):
        assert ids[0][row] == ids[1][row]


def test_extended_names_keep_their_indices():
    """Names keep their places and the extra ones follow, also behind a table without any."""
    assert list(extend_names(Names.of(["", "a"]), ["b", "ä"])) == ["", "a", "b", "ä"]
    assert list(extend_names(Names.of([]), ["b"])) == ["b"]


def test_the_size_of_a_table_is_that_of_its_arrays():
    """Every array counts, those of names, attributes and limits among them."""
    table = make(events((1, 2, -1), (3, 4, -1)))
    per_span = 4 + 8 + 8 + 4 + 8 + 8 + 1 + 8 + 8
    # The trace stands there twice: for the root and for what is below it.
    plain = 3 * per_span + 2 * 16 + sum(array.nbytes for array in (table.names.flat().data, table.names.flat().ends))
    assert table.nbytes == plain
    column = AttributeColumn("k", AttributeType.DOUBLE, np.zeros(2), np.arange(2))
    full = replace(table, attributes=(column,), parent_is_remote=np.zeros(3, np.uint8))
    assert full.nbytes == plain + 2 * (8 + 4) + 3
