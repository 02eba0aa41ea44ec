"""What a trace file adds up to: averages by name, and its steps; from columns, so that an event costs some bytes."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from otel_torchprof._averages.named_sums import MAX_NAMES, OTHER_NAMES, Average, NamedSums
from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, UNATTRIBUTED
from otel_torchprof._spans.jobs import JOB_NAME
from otel_torchprof._spans.operator_roots import OPERATORS_NAME
from otel_torchprof._tree.span_table import STEP_NAME
from otel_torchprof._tree.tree import STEP_KEY, STEP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Any

Numbers = npt.NDArray[np.int64]

_Row = tuple[int, int, int, int, int, int]
"""Start, duration, duration without what was collapsed into it, track or -1, id, parent's id."""

COLLAPSED = "(collapsed into others)"
"""The entry of what was too short for a span of its own, and is counted on another."""

AGGREGATED_COUNT, AGGREGATED_DURATION = "torch.aggregated.count", "torch.aggregated.duration"
COLLAPSED_COUNT, COLLAPSED_DURATION = "torch.collapsed.count", "torch.collapsed.duration"
STEP, UNFINISHED = "torch.step", "torch.unfinished"
PHASE_OF = {f"{PHASE_PREFIX}{phase}.duration": phase for phase in (*PHASES, UNATTRIBUTED)}
"""By attribute of a step, the phase whose time it is."""
WANTED = frozenset(
    (AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_COUNT, COLLAPSED_DURATION, STEP, UNFINISHED, *PHASE_OF)
)
"""The attributes that are looked at."""
DURATIONS = frozenset((AGGREGATED_DURATION, COLLAPSED_DURATION, *PHASE_OF))
"""Those of them that are seconds."""
_NS = 1e9

MOST_ROWS = 200_000
"""Events whose parents are looked for among one another; then half of them are added up, those that ended first."""
MOST_NAMES = MAX_NAMES
"""Different names; the rest share one entry. Their first 500 characters are compared and kept."""
_LONGEST_NAME = 500
_MOST_TRACKS = 10_000
"""Later ones have no parents."""
_MOST_TRACES = 50_000
"""Whose spans are counted one by one."""
_MOST_STEPS = 50_000
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step in the file; times in ns."""

    number: int
    start: int
    duration: int
    trace: Hashable
    """What its events have in common; None where nothing tells which they are."""
    is_unfinished: bool = False
    """It had not ended when the recording did."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """What it spent in each phase, in seconds, in the order in which phases are listed; empty where the file does not tell."""


class TraceSums:
    """Takes the events of a file one by one; memory does not grow with the file. For one thread."""

    def __init__(self) -> None:
        self._sums = NamedSums(OTHER_NAMES, lambda _name, _amounts: len(self._sums) < MOST_NAMES)
        self._tracks: dict[Hashable, int] = {}
        self._rows = _Rows()
        self._collapsed_count = self._collapsed_time = 0
        self._spans: Counter[Hashable] = Counter()
        self._added = 0
        self.steps: list[StepRow] = []
        """Unsorted, the first of them."""
        self.steps_left_out = 0
        """Those after them."""

    def __len__(self) -> int:
        return self._added

    @property
    def limits(self) -> list[str]:
        """Which limits the file exceeded, in words."""
        found = []
        if self._added > MOST_ROWS:
            found.append(f"self times do not see children that are more than {MOST_ROWS // 2:,} events away")
        if OTHER_NAMES in self._sums:
            found.append(f"there are more than {MOST_NAMES:,} names; later ones are added up as {OTHER_NAMES!r}")
        if self.steps_left_out:
            found.append(f"{self.steps_left_out:,} steps after the first {_MOST_STEPS:,} are not listed")
        return found

    def add_span(
        self,
        name: str,
        start: int,
        duration: int,
        ids: tuple[int, int, Hashable],
        attributes: Mapping[str, Any],
    ) -> None:
        """A span: times in ns, its id, that of its parent (0: none), its trace; those of its attributes that are :data:`WANTED`.

        The span of the job, that of a step which did not end, and roots that operators share are in no average, as in those of the
        recording itself.
        """
        span_id, parent_id, trace = ids
        if trace in self._spans or len(self._spans) < _MOST_TRACES:
            self._spans[trace] += 1
        if name == JOB_NAME:
            return
        if name == STEP_NAME and STEP in attributes:
            is_unfinished = bool(attributes.get(UNFINISHED))
            phases = {phase: attributes[key] for key, phase in PHASE_OF.items() if key in attributes}
            self._list(StepRow(int(attributes[STEP]), start, duration, trace, is_unfinished, phases))
            if is_unfinished:
                return
        if AGGREGATED_COUNT in attributes:
            duration = round(float(attributes.get(AGGREGATED_DURATION, duration / _NS)) * _NS)
        collapsed = round(float(attributes.get(COLLAPSED_DURATION, 0)) * _NS)
        self._collapsed_count += int(attributes.get(COLLAPSED_COUNT, 0))
        self._collapsed_time += collapsed
        if name == OPERATORS_NAME:
            return
        count = int(attributes.get(AGGREGATED_COUNT, 1))
        self._append(name, count, (start, duration, duration - collapsed, -1, span_id, parent_id))

    def add_slice(self, name: str, start: int, duration: int, track: Hashable) -> None:
        """An event whose parent is the one around it on its track; times in ns."""
        if name.startswith(STEP_PREFIX):
            self.add_step(name, start, duration)
            name = STEP_KEY
        number = self._tracks.get(track, -1)
        if number < 0 and len(self._tracks) < _MOST_TRACKS:
            number = self._tracks[track] = len(self._tracks)
        self._append(name, 1, (start, duration, duration, number, 0, 0))

    def add_step(self, name: str, start: int, duration: int) -> None:
        """A step of a profile, for the list of steps only."""
        number = name.removeprefix(STEP_PREFIX)
        if number.isdecimal() and len(number) <= _MOST_DIGITS:
            self._list(StepRow(int(number), start, duration, None))

    def spans_of(self, step: StepRow) -> int | None:
        """How many spans its trace has; None where that is not known."""
        return None if step.trace is None else self._spans.get(step.trace)

    def averages(self) -> list[Average]:
        """Sums by name, as the names first came. Of an aggregate span, the spans that it stands for."""
        self._rows.settle(self._sums.sums, 0)
        found = [Average(name, False, *sums) for name, sums in self._sums]
        if self._collapsed_count:
            found.append(Average(COLLAPSED, False, self._collapsed_count, self._collapsed_time, self._collapsed_time))
        return found

    def _list(self, step: StepRow) -> None:
        if len(self.steps) < _MOST_STEPS:
            self.steps.append(step)
        else:
            self.steps_left_out += 1

    def _append(self, name: str, count: int, row: _Row) -> None:
        self._added += 1
        self._rows.append(self._sums.add(name[:_LONGEST_NAME], (count, row[1])), row)
        if len(self._rows) >= MOST_ROWS:
            self._rows.settle(self._sums.sums, MOST_ROWS // 2)


class _Rows:
    """Events whose self time is not known before their children are."""

    def __init__(self) -> None:
        self._name, self._track = array("i"), array("i")
        self._start, self._duration = array("q"), array("q")
        self._own = array("d")  # exact up to 104 days, and no sum of many is too large for it
        self._id, self._parent = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._name)

    def append(self, name: int, row: _Row) -> None:
        """One event."""
        start, duration, own, track, span_id, parent_id = row
        self._name.append(name)
        self._start.append(start)
        self._duration.append(duration)
        self._own.append(own)
        self._track.append(track)
        self._id.append(span_id)
        self._parent.append(parent_id)

    def settle(self, sums: list[list[int]], keep: int) -> None:
        """Adds the self time of all but those ``keep`` that end last, of which more children may come."""
        if not len(self):
            return
        name, track, start, duration, own, ids, parents = (np.array(column) for column in self._columns())
        of_ids = _parents_by_id(ids, parents)
        parent = np.where(of_ids >= 0, of_ids, _parents_by_time(track, start, duration))
        # Of those that end together, what is inside goes first: it began later, or came later.
        order = np.lexsort((-np.arange(len(name)), -start, start + duration))
        gone = np.zeros(len(name), dtype=bool)
        gone[order[: len(name) - keep]] = True
        child = np.flatnonzero(parent >= 0)
        child = child[gone[child] | gone[parent[child]]]
        np.subtract.at(own, parent[child], duration[child])
        parents[child] = 0
        for index, time in zip(name[gone].tolist(), np.maximum(own[gone], 0).tolist(), strict=True):
            sums[index][2] += int(time)
        columns = (name, track, start, duration, own, ids, parents)
        for column, values in zip(self._columns(), columns, strict=True):
            column[:] = array(column.typecode, values[~gone].tobytes())

    def _columns(self) -> tuple[array[Any], ...]:
        return self._name, self._track, self._start, self._duration, self._own, self._id, self._parent


def _parents_by_id(ids: npt.NDArray[np.uint64], parents: npt.NDArray[np.uint64]) -> Numbers:
    order = np.argsort(ids, kind="stable")
    found = order[np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)]
    return np.where((parents != 0) & (ids[found] == parents), found, -1)


def _parents_by_time(track: npt.NDArray[np.int32], start: Numbers, duration: Numbers) -> Numbers:
    """Of what is on tracks: the nearest that was begun before, or with it, and lasts at least as long."""
    end = start + duration
    rows = np.flatnonzero(track >= 0)
    rows = rows[np.lexsort((-end[rows], start[rows], track[rows]))]
    parent = np.full(len(track), -1, dtype=np.int64)
    enclosing: list[tuple[int, int]] = []
    on = -1
    for row, where, begun, over in zip(
        rows.tolist(), track[rows].tolist(), start[rows].tolist(), end[rows].tolist(), strict=True
    ):
        if where != on:
            enclosing, on = [], where
        while enclosing and enclosing[-1][1] <= begun:
            enclosing.pop()
        while enclosing and enclosing[-1][1] < over:  # crosses: it is not inside
            enclosing.pop()
        if enclosing:
            parent[row] = enclosing[-1][0]
        enclosing.append((row, over))
    return parent
