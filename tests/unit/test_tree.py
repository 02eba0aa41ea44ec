"""The tree, against torch's own: same events, same parents, same times."""

import numpy as np
import pytest
from hypothesis import given, settings
from torch_forests import Event, as_batch, forests

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Flag
from otel_torchprof._model.tree import HIDDEN_NAMES, TreeView, torch_view


def _described(view: TreeView):
    ids = view.batch["id"][view.rows].tolist()
    return [
        (ids[i], ids[view.parent[i]] if view.parent[i] >= 0 else None, int(view.duration[i]), int(view.self_time[i]))
        for i in range(len(view))
    ]


@settings(max_examples=100, deadline=None)
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
    view = torch_view(as_batch(_chain("a", "b", "b", HIDDEN_NAMES[-1])))
    assert _described(view) == [(1, None, 8_000, 2_000), (2, 1, 6_000, 6_000)]
    less = view.without_child_time(np.array([500, 1_000, 2_000, 300]))
    assert _described(less) == [(1, None, 8_000, 1_500), (2, 1, 6_000, 2_700)]
    assert view.self_time.tolist() == [2_000, 6_000]


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
