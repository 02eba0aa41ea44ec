"""The tree on columns, rows that nest and averages, of any length; that they are torch's, test_events.py says."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_forests import Event, as_batch, forests

from examples import random_examples
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._model.averages import Average, Averages, RunningAverages
from otel_torchprof._model.inputs import shape_keys
from otel_torchprof._model.tree import (
    HIDDEN_NAMES,
    ChildTime,
    TreeView,
    display_name,
    nested_rows,
    not_nested,
    torch_view,
)


def _described(view: TreeView):
    ids = view.batch["id"][view.rows].tolist()
    return [
        (ids[i], ids[view.parent[i]] if view.parent[i] >= 0 else None, int(view.duration[i]), int(view.self_time[i]))
        for i in range(len(view))
    ]


@random_examples(100)
@given(forests())
def test_children_are_those_that_name_the_parent(events):
    """The count and the list of children agree with the parent column."""
    view = torch_view(as_batch(events))
    for event in range(len(view)):
        assert view.children_of(event) == np.flatnonzero(view.parent == event).tolist()
        assert view.children[event] == len(view.children_of(event))


def _chain(*names: str) -> list[Event]:
    size = len(names)
    return [Event(i + 1, name, 1, i, 2 * size - i, i - 1) for i, name in enumerate(names)]


@pytest.mark.parametrize("hidden", HIDDEN_NAMES)
def test_hidden_operators_disappear_and_their_children_move_up(hidden):
    """Each utility operator is left out, its time goes to its parent, its children too."""
    events = _chain("a", hidden, "b")
    assert _described(torch_view(as_batch(events))) == [(1, None, 6_000, 4_000), (3, 1, 2_000, 2_000)]


def test_time_of_earlier_children_is_that_of_what_is_displayed():
    """Children that came with an earlier batch are subtracted from the nearest displayed event: a merged one has no time of its own."""
    running = RunningAverages()
    earlier = ChildTime(np.arange(4), np.array([500, 1_000, 2_000, 300]))
    running.add(as_batch(_chain("a", "b", "b", HIDDEN_NAMES[-1])), earlier)
    assert running.read() == [Average("a", False, 1, 8_000, 1_500), Average("b", False, 1, 6_000, 2_700)]


def test_name_that_only_contains_a_hidden_one_stays():
    """Names are compared whole: a longer one around a hidden name, or across two neighbours in the table, is no match."""
    events = _chain("my aten::is_leaf", "aten::is_leaf2", "aten::is", "_leaf")
    assert len(torch_view(as_batch(events))) == 4


def test_rows_in_order_are_shared_not_copied():
    """A batch with nothing to change costs no copy of its parents."""
    batch = as_batch(_chain("a", "b", "c"))
    assert torch_view(batch).parent is batch["parent"]


def test_deep_nesting():
    """A recursion of 20,000 operators, all misplaced or merged, is done in passes that halve the way."""
    depth = 20_000
    start = np.arange(depth) * 1000
    columns = {"start": start, "end": start + 10**9, "parent": np.arange(depth) - 1, "thread": np.zeros(depth)}
    misnested = torch_view(Batch.of({**columns, "name": np.ones(depth)}, ["", "a"]))
    assert (misnested.parent == -1).all()
    nested = {**columns, "end": 10**9 - start, "name": np.ones(depth)}
    assert len(torch_view(Batch.of(nested, ["", "a"]))) == 1
    flags = np.where(np.arange(depth) % (depth - 1) == 0, 0, Flag.ASYNC)
    unfit = torch_view(Batch.of({**nested, "flags": flags, "name": np.arange(depth) % 2 + 1}, ["", "a", "b"]))
    assert unfit.parent[-1] == 0
    assert unfit.self_time[1:-1].sum() == 0


def test_more_rows_than_one_block():
    """The blocked passes meet: 200,000 events over two threads come out as torch's definition says, row by row."""
    half = 100_000
    root = np.arange(half) // 4 * 4
    start = np.concatenate([np.arange(half) * 10, np.arange(half) * 10 + 3]) + 1
    first = np.arange(half) % 4 == 0
    end = start + np.tile(np.where(first, 39, 5), 2)
    parent = np.where(first, -1, root)
    parents = np.concatenate([parent, np.where(first, -1, root + half)])
    thread = np.repeat([0, 1], half)
    view = torch_view(
        Batch.of({"start": start, "end": end, "parent": parents, "thread": thread, "name": start % 3}, ["", "a", "b"])
    )
    assert (np.diff(view.batch["start"][view.rows]) >= 0).all()
    rows = view.rows
    above = np.where(view.parent >= 0, rows[view.parent], -1)
    assert (above == parents[rows]).all()
    assert (view.self_time == np.where(parents[rows] < 0, 39 - 15, 5)).all()


# ---- rows that nest in time, against every pair of rows ----


THREADS = (RecordedThread(1, 11, 11, "main"), RecordedThread(2, 12, 12, "autograd"))


def batch_of(rows):
    """Of (thread, thread of the end, start, duration, kind, is asynchronous)."""
    columns = {
        "thread": [row[0] for row in rows],
        "end_thread": [row[1] for row in rows],
        "start": [row[2] for row in rows],
        "end": [row[2] + row[3] for row in rows],
        "kind": [row[4] for row in rows],
        "flags": [Flag.ASYNC * row[5] for row in rows],
        "parent": [-1] * len(rows),
    }
    return Batch.of(columns, [""], THREADS)


ROWS = st.lists(
    st.tuples(
        st.sampled_from((0, 1)),
        st.sampled_from((0, 0, 0, 1)),
        st.integers(0, 20),
        st.integers(1, 10),
        st.sampled_from((Kind.OPERATOR, Kind.FRAME)),
        st.sampled_from((0, 0, 0, 1)),
    ),
    max_size=12,
)


@given(ROWS)
def test_rows_nest(rows):
    """Of any two rows of a thread one is within the other or they do not overlap; all others are said not to nest."""
    batch = batch_of(rows)
    found = dict(nested_rows(batch))
    for tid, chosen in found.items():
        assert all(THREADS[batch["thread"][row]].os_tid == tid for row in chosen)
        times = [(batch["start"][row], -batch["end"][row]) for row in chosen]
        assert times == sorted(times)
        for first, second in itertools.combinations(chosen, 2):
            assert batch["start"][second] >= batch["end"][first] or batch["end"][second] <= batch["end"][first]
    missing = not_nested(batch)
    assert sorted(row for chosen in found.values() for row in chosen) == [
        row for row in range(len(rows)) if not missing[row]
    ]


def test_a_call_gives_way_to_a_label():
    """A label that is begun by one call and ended by the next is drawn, and the call that it outlives is not."""
    batch = batch_of([(0, 0, 0, 5, Kind.FRAME, 0), (0, 0, 2, 6, Kind.LABEL, 0), (0, 0, 20, 1, Kind.FRAME, 0)])
    batch["parent"][1] = 0
    assert not_nested(batch).tolist() == [True, False, False]


# ---- averages on columns of any length ----


@random_examples(100)
@given(forests())
def test_running_sums_are_those_of_the_view(events):
    """Sums by name that are made without a view are those of the view, in its order."""
    batch = as_batch(events)
    view, running = torch_view(batch, modules=True), RunningAverages()
    running.add(batch)
    sums = Averages.of(view)
    columns = (sums.count, sums.cpu_time_total, sums.self_cpu_time_total)
    names = [display_name(batch.names[index]) for index in batch["name"][view.rows[sums.first]]]
    expected = list(zip(names, *(column.tolist() for column in columns), strict=True))
    assert [(average.name, *average[2:5]) for average in running.read()] == expected


def test_sums_are_exact():
    """Sums over many blocks are sums of integers: no unit in the last place is lost where float64 would lose it."""
    rows = 200_000
    batch = Batch.of({"start": np.zeros(rows), "end": np.full(rows, 2**40 + 1), "name": np.ones(rows)}, ["", "a"])
    assert Averages.of(torch_view(batch)).cpu_time_total.tolist() == [rows * (2**40 + 1)]


def test_first_appearance_in_a_later_block():
    """A name first seen after the first 65,536 events gets the position of its first event."""
    names = np.ones(150_000, dtype=int)
    names[140_000:] = 2
    batch = Batch.of({"start": np.arange(150_000), "end": np.arange(150_000) + 1, "name": names}, ["", "a", "b"])
    assert Averages.of(torch_view(batch)).first.tolist() == [0, 140_000]


def test_shape_keys_over_many_blocks():
    """The blocked hash gives equal inputs equal keys wherever in the batch they stand."""
    rows = 150_000
    words = np.stack([np.ones(rows), np.full(rows, 1 | 1 << 32), np.arange(rows) % 7], axis=1).astype(np.int64).ravel()
    batch = Batch.of({"start": np.zeros(rows), "end": np.ones(rows), "inputs": np.arange(rows) * 3}, [""], inputs=words)
    keys, texts = shape_keys(batch)
    assert len(texts) == 8
    assert [texts[key] for key in keys[-7:]] == [f"[[{(rows - 7 + i) % 7}]]" for i in range(7)]


def test_many_splits_at_once():
    """Splits whose product does not fit into 64 bits are numbered anew in between."""
    batch = Batch.of({"start": np.arange(4), "end": np.arange(4) + 1, "name": np.ones(4)}, ["", "a"])
    huge = np.array([0, 2**40, 2**40, 0])
    sums = Averages.of(torch_view(batch), [huge, huge, np.array([0, 0, 1, 0])])
    assert sums.count.tolist() == [2, 1, 1]
