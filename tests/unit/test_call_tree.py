"""Sums of calls by path: as counted one by one, and the same when small nodes are folded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from otel_torchprof._model.call_tree import DEEPEST, FOLDED, call_tree, joined_trees


def forest(seed, count=300):
    """A random forest: parents, names and values."""
    random = np.random.default_rng(seed)
    parent = np.array([-1, *(int(random.integers(max(-1, row - 6), row)) for row in range(1, count))])
    return parent, random.integers(0, 5, count), random.integers(0, 1000, count)


def path_of(parent, key, row):
    """The names from the top down to a row."""
    names = []
    while row >= 0:
        names.append(int(key[row]))
        row = parent[row]
    return tuple(reversed(names))


def by_path(tree, column):
    """The sums of a tree by path, without folded nodes."""
    return {path_of(tree.parent, tree.key, node): int(tree.own[column][node]) for node in range(len(tree))}


@pytest.mark.parametrize("seed", range(5))
def test_sums_by_path(seed):
    """Each path has the sum of the rows that have it, and no path is there twice."""
    parent, key, value = forest(seed)
    tree, expected = call_tree(parent, key, {"value": value}), Counter()
    for row in range(len(parent)):
        expected[path_of(parent, key, row)] += int(value[row])
    assert by_path(tree, "value") == expected
    assert (tree.parent < np.arange(len(tree))).all()


@pytest.mark.parametrize("most", [1, 7, 40, 10_000])
def test_what_is_folded_keeps_the_sums(most):
    """The sums of all nodes, and of each that remains with what is below it, are those of the whole tree; so are the paths."""
    parent, key, value = forest(9)
    whole = call_tree(parent, key, {"value": value, "calls": np.ones(len(key), np.int64)})
    limited = whole.limited(most)
    kept = limited.key != FOLDED
    totals = dict(zip(by_path(whole, "calls"), whole.totals(whole.own["value"]).tolist(), strict=True))
    for node in np.flatnonzero(kept).tolist():
        assert limited.totals(limited.own["value"])[node] == totals[path_of(limited.parent, limited.key, node)]
    assert {name: int(column.sum()) for name, column in limited.own.items()} == {
        "value": value.sum(),
        "calls": len(key),
    }
    assert int(kept.sum()) == min(most, len(whole))
    assert int(kept.sum() + limited.folded.sum()) == len(whole)
    assert (limited.parent < np.arange(len(limited))).all()


def test_trees_of_several_files():
    """Joined trees have the sums that all rows together have, also of columns that only one has."""
    parent, key, value = forest(1)
    ones = np.ones(len(key), np.int64)
    first, second = call_tree(parent, key, {"value": value}), call_tree(parent, key, {"value": value, "calls": ones})
    joined = joined_trees([first, second])
    assert by_path(joined, "value") == {path: 2 * number for path, number in by_path(first, "value").items()}
    assert by_path(joined, "calls") == by_path(second, "calls")


def test_a_cycle_and_very_deep_calls_lose_nothing():
    """Rows of a wrong file whose parents are a cycle, and calls below the deepest, count as top-level."""
    cycle = call_tree(np.array([1, 0, -1]), np.array([1, 2, 3]), {"value": np.array([5, 7, 11])})
    assert by_path(cycle, "value") == {(1,): 5, (2,): 7, (3,): 11}
    deep = DEEPEST + 50
    tree = call_tree(np.arange(deep) - 1, np.arange(deep) % 7, {"value": np.ones(deep, np.int64)})
    assert int(tree.own["value"].sum()) == deep


def test_no_events():
    """Without rows there are no nodes, and nothing raises."""
    none = np.empty(0, np.int64)
    assert len(call_tree(none, none, {"value": none}).limited(5)) == 0
