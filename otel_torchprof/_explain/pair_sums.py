"""Sums by pairs of numbers, of which there may be very many: per group the largest are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .arrays import Integers

_BITS = 24
_MOST_PAIRS = 1 << 19
"""Then each group is cut to the largest."""
_KEPT_MEANWHILE = 32
"""Of a group, while more may come."""


class PairSums:
    """Sums of ns by group and member."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._sums = np.empty(0, np.int64)

    def add(self, groups: Integers, members: Integers, values: Integers) -> None:
        """Adds values, each to its pair; members are below 2^24."""
        keys = np.concatenate((self._keys, groups << _BITS | members))
        found, places = np.unique(keys, return_inverse=True)
        sums = np.zeros(len(found), np.int64)
        np.add.at(sums, places, np.concatenate((self._sums, values)))
        self._keys, self._sums = found, sums
        if len(found) > _MOST_PAIRS:
            self._keep(_KEPT_MEANWHILE)

    def largest(self, count: int) -> tuple[Integers, Integers, Integers]:
        """Groups in order, and of each the members with the largest sums, the largest first."""
        self._keep(count)
        order = np.lexsort((-self._sums, self._keys >> _BITS))
        keys = self._keys[order]
        return keys >> _BITS, keys & ((1 << _BITS) - 1), self._sums[order]

    def _keep(self, count: int) -> None:
        groups = self._keys >> _BITS
        order = np.lexsort((-self._sums, groups))
        ordered = groups[order]
        is_first = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.empty(0, bool)
        begins = np.maximum.accumulate(np.where(is_first, np.arange(len(ordered)), 0))
        kept = np.sort(order[np.arange(len(ordered)) - begins < count])
        self._keys, self._sums = self._keys[kept], self._sums[kept]
