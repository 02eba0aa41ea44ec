"""Events added up by name, and by whatever splits a name further, on columns: the numbers behind ``key_averages()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.blocks import BLOCK
from otel_torchprof._columns.schema import Scope
from otel_torchprof._tree.frames import distinct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._tree.tree import TreeView

Array = npt.NDArray[Any]

_LARGEST = 2**63 - 1
_FEW_GROUPS = 4096


@dataclass(frozen=True, eq=False)
class Averages:
    """One entry per group, in the order in which the groups first appear in the view. Times are exact sums in ns."""

    first: npt.NDArray[np.int64]
    """Position in the view of the group's first event."""
    count: npt.NDArray[np.int64]
    cpu_time_total: npt.NDArray[np.int64]
    self_cpu_time_total: npt.NDArray[np.int64]
    amounts: Mapping[str, Array]
    """Sums of what else was given to be added up, by the same names."""
    peaks: Mapping[str, Array]
    """Largest values of what was given to be compared, by the same names."""

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def of(
        cls,
        view: TreeView,
        splits: Sequence[Array] = (),
        amounts: Mapping[str, Array] | None = None,
        peaks: Mapping[str, Array] | None = None,
    ) -> Averages:
        """Groups the events of a view; costs 15 ns per event and no memory that grows with them.

        Each of ``splits`` holds a small number per event and splits the groups by it; any split costs 10 ns per event, or sorts, at 85
        ns, where there are many more numbers than events.
        Each of ``amounts`` is a column over the events that is added up too, in its own type; of each of ``peaks``, whose values
        are not negative, the largest is taken.
        As in torch, an operator and a label of the same name are two groups.
        """
        named = _Groups(view)
        groups, bound = _split(view, named, splits) if splits else (named, named.bound)
        # Names that no amount has.
        columns = {"": view.duration, " own": view.self_time, **(amounts or {})}
        sums = grouped(groups, bound, len(view), columns, peaks)
        total, self_time = sums.amounts.pop(""), sums.amounts.pop(" own")
        return cls(sums.first, sums.count, total, self_time, sums.amounts, sums.peaks)


@dataclass(frozen=True, eq=False)
class Grouped:
    """One entry per group that occurs, in the order in which the groups first appear."""

    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    amounts: dict[str, Array]
    peaks: dict[str, Array]


def grouped(
    groups: _Groups | Array,
    bound: int,
    rows: int,
    amounts: Mapping[str, Array],
    peaks: Mapping[str, Array] | None = None,
) -> Grouped:
    """Sums of ``amounts`` and largest values of ``peaks`` over the rows of each group, which is a number below ``bound``."""
    first, count = np.full(bound, -1, dtype=np.int64), np.zeros(bound, dtype=np.int64)
    sums, largest = (
        {name: np.zeros(bound, dtype=column.dtype) for name, column in given.items()}
        for given in (amounts, peaks or {})
    )
    for begin in range(0, rows, BLOCK):
        block = slice(begin, begin + BLOCK)
        group = groups[block]
        new = np.flatnonzero(first[group] < 0)
        if new.size:
            # Written from the last to the first: of several in one group the first stays. (np.unique would sort.)
            first[group[new[::-1]]] = new[::-1] + begin
        count += np.bincount(group, minlength=bound)
        for name, column in amounts.items():
            np.add.at(sums[name], group, column[block])
        for name, column in (peaks or {}).items():
            np.maximum.at(largest[name], group, column[block])
    used = np.flatnonzero(first >= 0)
    used = used[np.argsort(first[used])]
    of_used = ({name: column[used] for name, column in found.items()} for found in (sums, largest))
    return Grouped(first[used], count[used], *of_used)


class _Groups:
    """The group of each event by name and sort, worked out when a block of them is asked for.

    Groups that a process has many more of than the view has events are numbered anew.
    """

    def __init__(self, view: TreeView) -> None:
        self._view = view
        self._has_labels = bool((view.batch["scope"] == Scope.USER_SCOPE).any())
        self._own: Array | None = None
        self.bound = len(view.batch.names) * (2 if self._has_labels else 1)
        if self.bound > _FEW_GROUPS + len(view):
            used, self._own = distinct(self[slice(0, len(view))])
            self.bound = len(used)

    def __getitem__(self, block: slice) -> Array:
        if self._own is not None:
            return self._own[block]
        rows, batch = self._view.rows[block], self._view.batch
        names: Array = self._view.display_name[rows]
        if self._has_labels:
            names = names * np.uint32(2) + (batch["scope"][rows] == Scope.USER_SCOPE)
        return names


def _split(view: TreeView, groups: _Groups, splits: Sequence[Array]) -> tuple[Array, int]:
    """The groups split further: a small number per event, and how many there are."""
    codes, bound = np.empty(len(view), dtype=np.int64), groups.bound
    for begin in range(0, len(view), BLOCK):
        codes[begin : begin + BLOCK] = groups[slice(begin, begin + BLOCK)]
    for split in splits:
        width = int(split.max(initial=0)) + 1
        if bound * width > _LARGEST:
            used, codes = distinct(codes)
            bound = len(used)
        codes = codes * width + split
        bound *= width
    used, codes = distinct(codes)
    return codes, len(used)
