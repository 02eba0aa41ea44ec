"""What a trace file adds up to: averages by name, and its steps; from columns, so that an event costs some bytes."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ._model.jobs import JOB_NAME
from ._model.running import Average
from ._model.tree import STEP_KEY, STEP_PREFIX
from ._model.units import STEP_NAME

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Any

Numbers = npt.NDArray[np.int64]

FOLDED = "(folded into others)"
"""The entry of what was too short for a span of its own, and is counted on another."""

COMPOSITE_COUNT, COMPOSITE_DURATION = "torch.composite.count", "torch.composite.duration"
FOLDED_COUNT, FOLDED_DURATION = "torch.folded.count", "torch.folded.duration"
STEP, UNFINISHED = "torch.step", "torch.unfinished"
WANTED = frozenset((COMPOSITE_COUNT, COMPOSITE_DURATION, FOLDED_COUNT, FOLDED_DURATION, STEP, UNFINISHED))
"""The attributes that are looked at."""
_NS = 1e9


@dataclass(frozen=True)
class StepRow:
    """A step that the file tells of; times in ns."""

    number: int
    start: int
    duration: int
    trace: Hashable
    """What its events have in common; None where nothing tells which they are."""
    is_unfinished: bool = False
    """It had not ended when the recording did."""


class TraceSums:
    """Takes the events of a file one by one; some 50 bytes each are kept. For one thread."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._tracks: dict[Hashable, int] = {}
        self._name, self._track = array("q"), array("q")
        self._start, self._duration, self._count = array("q"), array("q"), array("q")
        self._folded = array("q")
        self._id, self._parent = array("Q"), array("Q")
        self._folded_count = 0
        self._spans: Counter[Hashable] = Counter()
        self.steps: list[StepRow] = []
        """Unsorted."""

    def __len__(self) -> int:
        return len(self._name)

    def add_span(
        self,
        name: str,
        start: int,
        duration: int,
        ids: tuple[int, int, Hashable],
        attributes: Mapping[str, Any],
    ) -> None:
        """A span: times in ns, its id, that of its parent (0: none), its trace; those of its attributes that are :data:`WANTED`.

        The span of the job, and that of a step which did not end, are in no average, as in those of the recording itself.
        """
        span_id, parent_id, trace = ids
        self._spans[trace] += 1
        if name == JOB_NAME:
            return
        if name == STEP_NAME and STEP in attributes:
            is_unfinished = bool(attributes.get(UNFINISHED))
            self.steps.append(StepRow(int(attributes[STEP]), start, duration, trace, is_unfinished))
            if is_unfinished:
                return
        if COMPOSITE_COUNT in attributes:
            duration = round(float(attributes.get(COMPOSITE_DURATION, duration / _NS)) * _NS)
        self._folded_count += int(attributes.get(FOLDED_COUNT, 0))
        self._folded.append(round(float(attributes.get(FOLDED_DURATION, 0)) * _NS))
        self._append(name, start, duration, int(attributes.get(COMPOSITE_COUNT, 1)), -1)
        self._id.append(span_id)
        self._parent.append(parent_id)

    def add_slice(self, name: str, start: int, duration: int, track: Hashable) -> None:
        """An event whose parent is the one around it on its track; times in ns."""
        if name.startswith(STEP_PREFIX):
            self.add_step(name, start, duration)
            name = STEP_KEY
        self._append(name, start, duration, 1, self._tracks.setdefault(track, len(self._tracks)))
        self._folded.append(0)
        self._id.append(0)
        self._parent.append(0)

    def add_step(self, name: str, start: int, duration: int) -> None:
        """A step of a profile, for the list of steps only."""
        number = name.removeprefix(STEP_PREFIX)
        if number.isdecimal():
            self.steps.append(StepRow(int(number), start, duration, None))

    def spans_of(self, step: StepRow) -> int | None:
        """How many spans its trace has; None where that is not known."""
        return None if step.trace is None else self._spans[step.trace]

    def averages(self) -> list[Average]:
        """Sums by name, as the names first came. Of a composite, the spans that it stands for."""
        if not len(self):
            return []
        name, duration, count = (np.array(each, dtype=np.int64) for each in (self._name, self._duration, self._count))
        folded = np.array(self._folded, dtype=np.int64)
        own = duration - folded
        of_ids, of_time = self._parents_by_id(), self._parents_by_time(duration)
        parent = np.where(of_ids >= 0, of_ids, of_time)
        child = np.flatnonzero(parent >= 0)
        np.subtract.at(own, parent[child], duration[child])
        np.maximum(own, 0, out=own)
        sums = np.zeros((3, len(self._names)), dtype=np.int64)
        for row, values in enumerate((count, duration, own)):
            np.add.at(sums[row], name, values)
        found = [Average(text, False, *sums[:, index].tolist()) for text, index in self._names.items()]
        if self._folded_count:
            total = int(folded.sum())
            found.append(Average(FOLDED, False, self._folded_count, total, total))
        return found

    def _append(self, name: str, start: int, duration: int, count: int, track: int) -> None:
        self._name.append(self._names.setdefault(name, len(self._names)))
        self._start.append(start)
        self._duration.append(duration)
        self._count.append(count)
        self._track.append(track)

    def _parents_by_id(self) -> Numbers:
        ids, parents = np.array(self._id, dtype=np.uint64), np.array(self._parent, dtype=np.uint64)
        order = np.argsort(ids, kind="stable")
        found = order[np.minimum(np.searchsorted(ids, parents, sorter=order), len(ids) - 1)]
        return np.where((parents != 0) & (ids[found] == parents), found, -1)

    def _parents_by_time(self, duration: Numbers) -> Numbers:
        """Of what is on tracks: the nearest that was begun before, or with it, and lasts at least as long."""
        track, start = np.array(self._track, dtype=np.int64), np.array(self._start, dtype=np.int64)
        end = start + duration
        rows = np.flatnonzero(track >= 0)
        rows = rows[np.lexsort((-end[rows], start[rows], track[rows]))]
        parent = np.full(len(track), -1, dtype=np.int64)
        around: list[tuple[int, int]] = []
        on = -1
        for row, where, begun, over in zip(
            rows.tolist(), track[rows].tolist(), start[rows].tolist(), end[rows].tolist(), strict=True
        ):
            if where != on:
                around, on = [], where
            while around and around[-1][1] <= begun:
                around.pop()
            while around and around[-1][1] < over:  # crosses: it is not inside
                around.pop()
            if around:
                parent[row] = around[-1][0]
            around.append((row, over))
        return parent
