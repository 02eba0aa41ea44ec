"""Calls summed by path: the tree whose nodes are the chains of names from a top-level event down, as a flame graph displays it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.arrays import Flags, Integers

DEEPEST = 500
"""Most ancestors of an event; one with more, or in a cycle of a wrong file, counts as top-level."""
FOLDED = -1
"""The key of a node that stands for several siblings and what is below them."""


@dataclass(frozen=True, eq=False)
class CallTree:
    """Nodes, each behind its parent. Immutable."""

    parent: Integers
    """Index of the parent of each node, -1 for none."""
    key: Integers
    """Number of the name of each node; :data:`FOLDED` for a node that stands for others."""
    own: Mapping[str, Integers]
    """Sums of each node without those below it, by name."""
    folded: Integers
    """Number of paths that each node stands for beside its own; 0 for most."""

    def __len__(self) -> int:
        return len(self.parent)

    def totals(self, column: Integers) -> Integers:
        """Sums of each node with those below it."""
        totals = column.copy()
        for rows in reversed(_levels(self.parent)[1:]):
            np.add.at(totals, self.parent[rows], totals[rows])
        return totals

    def renamed(self, number: Integers) -> CallTree:
        """The same with other keys: those at the places of the old ones."""
        return replace(self, key=number[self.key])

    def with_sums(self, own: Mapping[str, Integers]) -> CallTree:
        """The same nodes with other sums."""
        return replace(self, own=own)

    def limited(self, most: int) -> CallTree:
        """The tree with at most about ``most`` nodes, those with the largest share of any sum.

        The others are folded into one node for each parent, so that the sums of the tree and of the nodes that remain are the
        same. A node remains only if its parent does.
        """
        if len(self) <= most:
            return self
        totals = {name: self.totals(np.abs(column)) for name, column in self.own.items()}
        share = np.zeros(len(self))
        for column in totals.values():
            share = np.maximum(share, column / max(int(column[self.parent < 0].sum()), 1))
        is_kept = np.zeros(len(self), np.bool_)
        is_kept[np.argsort(-share, kind="stable")[:most]] = True
        levels = _levels(self.parent)
        for rows in levels[1:]:
            is_kept[rows] &= is_kept[self.parent[rows]]
        return self._folded(is_kept)

    def _folded(self, is_kept: Flags) -> CallTree:
        paths = self.totals((~is_kept).astype(np.int64) + self.folded)
        is_top = ~is_kept & np.where(self.parent < 0, True, is_kept[self.parent])
        parents, place = np.unique(self.parent[is_top], return_inverse=True)
        number = np.append(np.cumsum(is_kept) - 1, -1)  # that of no parent is last
        kept = np.flatnonzero(is_kept)

        def together(of_kept: Integers, of_others: Integers) -> Integers:
            sums = np.zeros(len(parents), np.int64)
            np.add.at(sums, place, of_others[is_top])
            return np.concatenate((of_kept[kept], sums))

        own = {name: together(column, self.totals(column)) for name, column in self.own.items()}
        key = np.concatenate((self.key[kept], np.full(len(parents), FOLDED, np.int64)))
        parent = np.concatenate((number[self.parent[kept]], number[parents]))
        return CallTree(parent, key, own, together(self.folded, paths))


def call_tree(parent: Integers, key: Integers, sums: Mapping[str, Integers]) -> CallTree:
    """Sums events, or the nodes of several trees, by path. Costs some 200 ns per event.

    Args:
        parent: the index of the parent of each, -1 for none.
        key: number of the name of each, from 0.
        sums: columns to add up, int64.
    """
    parents, keys, node = paths_of(parent, key)
    own = {}
    for name, column in sums.items():
        own[name] = np.zeros(len(parents), np.int64)
        np.add.at(own[name], node, column)
    return CallTree(parents, keys, own, np.zeros(len(parents), np.int64))


def paths_of(parent: Integers, key: Integers) -> tuple[Integers, Integers, Integers]:
    """The parent and the key of each path, behind that of its parent, and the path of each event. Arguments as of :func:`call_tree`."""
    depth, node = depths(parent), np.full(len(parent), -1, np.int64)
    bound, parents, keys, first = int(key.max(initial=0)) + 1, [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for rows in _by_value(depth):
        above = np.where((parent[rows] >= 0) & (depth[rows] > 0), node[parent[rows]], -1)
        codes, place = np.unique((above + 1) * bound + key[rows], return_inverse=True)
        node[rows] = place + first
        parents.append(codes // bound - 1)
        keys.append(codes % bound)
        first += len(codes)
    return np.concatenate(parents), np.concatenate(keys), node


def joined_trees(trees: Sequence[CallTree]) -> CallTree:
    """The sums of several trees whose keys are of the same names."""
    if len(trees) == 1:
        return trees[0]
    firsts = np.cumsum([0, *map(len, trees)])
    parent = [np.where(tree.parent < 0, -1, tree.parent + first) for tree, first in zip(trees, firsts, strict=False)]
    names = dict.fromkeys(name for tree in trees for name in tree.own)
    sums = {
        name: np.concatenate([tree.own.get(name, np.zeros(len(tree), np.int64)) for tree in trees]) for name in names
    }
    return call_tree(np.concatenate(parent), np.concatenate([tree.key for tree in trees]), sums)


def depths(parent: npt.NDArray[np.signedinteger]) -> Integers:
    """Number of ancestors of each event, by doubling; 0 if there are more than :data:`DEEPEST`."""
    depth = (parent >= 0).astype(np.int64)
    at = parent.copy()
    for _ in range(DEEPEST.bit_length()):
        rows = np.flatnonzero(at >= 0)
        if not len(rows):
            break
        depth[rows] += depth[at[rows]]
        at[rows] = at[at[rows]]
    depth[(at >= 0) | (depth > DEEPEST)] = 0
    return depth


def _levels(parent: Integers) -> list[Integers]:
    return _by_value(depths(parent))


def _by_value(depth: Integers) -> list[Integers]:
    """The rows of each depth, the smallest first."""
    order = np.argsort(depth.astype(np.uint16), kind="stable")
    return np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(order) else []
