"""Times of the phases of a training loop: exclusive times as columns, and their sums over the drains of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import is_any_of
from otel_torchprof._columns.phases import DURATIONS, PHASE_PREFIX, PHASES, UNATTRIBUTED, Part
from otel_torchprof._columns.schema import Kind
from otel_torchprof._native.python_sources import untracked

from .forest import at_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]

_RECOMPUTED = len(PHASES)
"""Index of the recomputed time in a row of times; the phases come before it in their order."""
PHASE_OF = np.zeros(max(Part) + 1, dtype=np.int64)
"""By :class:`~otel_torchprof._columns.phases.Part`, the index of its phase in ``PHASES``."""
for _part in Part:
    PHASE_OF[_part] = PHASES.index(_part.phase)


_NO_TIMES = np.zeros((0, len(PHASES) + 1), dtype=np.int64)


class ExclusiveTimes(NamedTuple):
    """Times that one drain adds to the phases of each group of events, ns."""

    threads: tuple[int, ...]
    """``threading.get_ident()`` of each thread that had phases."""
    times: npt.NDArray[np.int64]
    """By group, thread and phase; negative if a phase that is still open has others inside."""
    groups: frozenset[int]
    """The groups that have any."""


def exclusive_times(
    batch: Batch, enclosing: npt.NDArray[np.int64], group: npt.NDArray[np.int64], groups: int
) -> ExclusiveTimes | None:
    """Adds the time of each ended phase, and subtracts it from the nearest enclosing phase; returns None if none has ended.

    The time of an open phase may become negative until the drain in which it ends; sums over drains are right. ``enclosing``: the
    enclosing node of each row and open event; ``group``: the group of each. Costs one comparison of a column, else some microseconds per
    drain and a few hundred ns per phase; nothing per operator.
    """
    rows = batch.of_kind(Kind.PHASE)
    if not rows.size:
        return None
    part, start, end = (batch[name][rows] for name in ("fwd_thread", "start", "end"))
    threads, thread = np.unique(batch["thread"][rows], return_inverse=True)
    times = np.zeros((groups, len(threads), len(PHASES) + 1), dtype=np.int64)
    np.add.at(times, (group[rows], thread, PHASE_OF[part]), end - start)

    above = _nearest(enclosing, rows, lambda nodes: at_nodes(batch, "kind", nodes) == Kind.PHASE)
    inner = np.flatnonzero(above >= 0)
    if inner.size:
        above = above[inner]
        within = np.minimum(end[inner], at_nodes(batch, "end", above)) - start[inner]
        np.subtract.at(times, (group[above], thread[inner], PHASE_OF[at_nodes(batch, "fwd_thread", above)]), within)
    if inner.size or (part == Part.RECOMPUTATION).any():
        # A recomputation in a recomputation is part of its time; a backward pass in one is not, but recomputation in that is.
        both = np.flatnonzero((part == Part.RECOMPUTATION) | (part == Part.BACKWARD))
        around = _nearest(enclosing, rows[both], lambda nodes: _is_either(batch, nodes))
        is_inside = np.zeros(len(both), dtype=np.bool_)
        is_inside[around >= 0] = at_nodes(batch, "fwd_thread", around[around >= 0]) == Part.RECOMPUTATION
        sign = (part[both] == Part.RECOMPUTATION).astype(np.int64) - is_inside  # 0: nested recomputation
        np.add.at(times[:, :, _RECOMPUTED], (group[rows[both]], thread[both]), sign * (end - start)[both])
    groups_with_any = frozenset(np.flatnonzero(times.any(axis=(1, 2))).tolist())
    idents = tuple(batch.threads[number].ident for number in threads.tolist())
    return ExclusiveTimes(idents, times, groups_with_any)


def _is_either(batch: Batch, nodes: Array) -> npt.NDArray[np.bool_]:
    """Returns a mask of the nodes that are backward passes or recomputations of the forward pass."""
    is_either: npt.NDArray[np.bool_] = at_nodes(batch, "kind", nodes) == Kind.PHASE
    is_either[is_either] = is_any_of(
        at_nodes(batch, "fwd_thread", nodes[is_either]), (int(Part.BACKWARD), int(Part.RECOMPUTATION))
    )
    return is_either


def _nearest(enclosing: Array, nodes: Array, chosen: Callable[[Array], Array]) -> npt.NDArray[np.int64]:
    """Returns for each node the nearest ancestor that ``chosen`` selects; -1 for none."""
    ancestor = enclosing[nodes].astype(np.int64)
    moving = np.flatnonzero(ancestor >= 0)
    while moving.size:
        moving = moving[~chosen(ancestor[moving])]
        ancestor[moving] = enclosing[ancestor[moving]]
        moving = moving[ancestor[moving] >= 0]
    return ancestor


def repeated_phases(
    name: Array, parent: Array, is_phase: npt.NDArray[np.bool_], rows: Array | None = None
) -> npt.NDArray[np.int64]:
    """Rows of the phases whose nearest enclosing phase has the same name, regardless of labels between them.

    ``rows``: the rows to examine; default: all. Costs nothing per row that is no phase.
    """
    phases = np.flatnonzero(is_phase) if rows is None else rows[is_phase[rows]]
    above = _nearest(parent, phases, lambda nodes: is_phase[nodes])
    repeated: npt.NDArray[np.int64] = phases[(above >= 0) & (name[above] == name[phases])]
    return repeated


@untracked
@dataclass(eq=False)
class PhaseTimes:
    """The exclusive times of phases in one step so far, ns, by thread. Not thread-safe."""

    threads: tuple[int, ...] = ()
    """``threading.get_ident()`` of each."""
    times: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_TIMES)
    """A row per thread."""

    def add(self, exclusive: ExclusiveTimes, group: int) -> None:
        """Adds the times of one group."""
        if group not in exclusive.groups:
            return
        added = exclusive.times[group]
        if len(added) == 1 and not self.threads:  # nearly all steps
            self.threads, self.times = exclusive.threads, added
            return
        for at in np.flatnonzero(added.any(axis=1)).tolist():
            thread = exclusive.threads[at]
            if thread not in self.threads:
                self.threads, self.times = (*self.threads, thread), np.vstack((self.times, added[at]))
            else:
                self.times[self.threads.index(thread)] += added[at]

    def on_thread(self, thread: int | None, duration: int) -> dict[str, int]:
        """Time of each phase on the loop's thread, and the unattributed time of the step, ns.

        ``thread``: None if unknown; the thread with the most time in phases is used then.
        """
        own = self._loop_and_others(thread)[0]
        times = {name: time for name, time in zip(PHASES, own, strict=False) if time > 0}
        return {**times, UNATTRIBUTED: _rest(own, duration)}

    def attributes(self, thread: int | None, duration: int) -> tuple[dict[str, float], int]:
        """Attributes of the step's span, in seconds, and its unattributed time, ns. Arguments: as for :meth:`on_thread`."""
        own, others = self._loop_and_others(thread)
        times = {key: time for key, time in zip(_DURATIONS, own, strict=False) if time > 0}
        rest = max(duration - sum(times.values()), 0)
        attributes = {key: time / 1e9 for key, time in times.items()}
        attributes[_UNATTRIBUTED] = rest / 1e9
        recomputed = own[_RECOMPUTED]
        if others:
            overlap = [sum(column) for column in zip(*others, strict=True)]
            attributes |= _seconds(_OVERLAPS, overlap)
            recomputed += overlap[_RECOMPUTED]
        if recomputed > 0:
            attributes["torch.recomputed_duration"] = recomputed / 1e9
        return attributes, rest

    def _loop_and_others(self, thread: int | None) -> tuple[Sequence[int], list[list[int]]]:
        """Returns the times on the loop's thread, and those on each other thread."""
        rows = self.times.tolist()
        if thread is None and rows:
            thread = self.threads[max(range(len(rows)), key=lambda at: sum(rows[at][:_RECOMPUTED]))]
        own: Sequence[int] = _NOTHING
        if thread in self.threads:
            own = rows.pop(self.threads.index(thread))
        return own, rows


_NOTHING = (0,) * (_RECOMPUTED + 1)
*_DURATIONS, _UNATTRIBUTED = DURATIONS.values()
_OVERLAPS = [f"{PHASE_PREFIX}{name}.overlap" for name in PHASES]
"""Keys of attributes, in the order of the phases."""


def _seconds(keys: Iterable[str], times: Iterable[int]) -> dict[str, float]:
    """Times of phases above 0 in seconds, by the key that each phase has."""
    return {key: time / 1e9 for key, time in zip(keys, times, strict=False) if time > 0}


def _rest(times: Sequence[int], duration: int) -> int:
    """The part of a duration that is in no phase."""
    return max(duration - sum([time for time in times[:_RECOMPUTED] if time > 0]), 0)
