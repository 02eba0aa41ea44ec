"""Self times and numbers of events by step and path; a path is the names from the step down to an event.

Steps without details have sums by name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.arrays import blocks, distinct_values
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.trace_events import LONGEST_NAME, TraceEventKind
from otel_torchprof._model.call_tree import depths
from otel_torchprof._model.tree import STEP_PREFIX

from .details import StepsOfProcess, are_in_steps
from .steps import after_warm_up

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Floats, Integers
    from otel_torchprof._files.trace_events import TraceEvents

    from .step_list import StepList

MOST_STEPS = 500
"""Most examined steps; of more, as many at equal distances."""
MOST_PATHS = 2000
"""Most paths; events on further ones count as self time of the nearest ancestor with a path."""
_MOST_NAMES = 4000
OTHER_NAMES = "(other names)"
_TOP = 0
"""The path of the step itself."""
_SAME_AS_PARENT = 0
"""The name of events that are no part of a path."""
_NAME_BITS = 24


class Paths:
    """Numbers of paths; a path is that of its parent and a name."""

    def __init__(self) -> None:
        self.parent, self.name = [-1], [_SAME_AS_PARENT]
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def of_events(self, names: Integers, parents: Integers) -> Integers:
        """The path of each event, from its name and the index of its parent, or -1."""
        depth = depths(parents)
        order = np.argsort(depth, kind="stable")
        paths = np.full(len(names), _TOP, np.int64)
        for rows in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):
            has_parent = (parents[rows] >= 0) & (depth[rows] > 0)
            enclosing = np.where(has_parent, paths[parents[rows]], _TOP)
            keys, places = np.unique(enclosing << _NAME_BITS | names[rows], return_inverse=True)
            paths[rows] = np.array([self._number(key) for key in keys.tolist()], np.int64)[places]
        return paths

    def _number(self, key: int) -> int:
        parent, name = key >> _NAME_BITS, key & ((1 << _NAME_BITS) - 1)
        if name == _SAME_AS_PARENT:
            return parent
        number = self._numbers.get(key)
        if number is None:
            if len(self) >= MOST_PATHS:
                return parent
            number = self._numbers[key] = len(self)
            self.parent.append(parent)
            self.name.append(name)
        return number


class _Table:
    """Sums by row and step; grows with the rows."""

    def __init__(self, steps: int) -> None:
        self.times = np.zeros((64, steps), np.float32)
        self.counts = np.zeros((64, steps), np.int32)
        self.is_sum = np.zeros(64, bool)

    def add(self, rows: Integers, steps: Integers, seconds: Floats, counts: Integers) -> None:
        """Adds each to its row and step."""
        more = int(rows.max(initial=0)) + 1 - len(self.times)
        if more > 0:
            more = max(more, len(self.times) // 4)
            self.times = np.pad(self.times, ((0, more), (0, 0)))
            self.counts = np.pad(self.counts, ((0, more), (0, 0)))
            self.is_sum = np.pad(self.is_sum, (0, more))
        np.add.at(self.times, (rows, steps), seconds)
        np.add.at(self.counts, (rows, steps), counts)


class TreeTimes:
    """Times of the chosen steps of all processes of a recording.

    If only some steps have details, it chooses those with or those without details, whichever are more.
    """

    def __init__(self, events: TraceEvents, step_list: StepList, warm_up_steps: int) -> None:
        self._steps = [StepsOfProcess(process, 0) for process in step_list.processes.values()]
        self._columns, self._seconds, self._runnable = _chosen(step_list, warm_up_steps)
        self._of_track = step_list.number_of_track
        self._names: dict[str, int] = {"": _SAME_AS_PARENT}
        self._paths = Paths()
        self._of_paths, self._of_names = _Table(len(self._seconds)), _Table(len(self._seconds))
        self._has_averages = np.zeros(len(self._seconds), bool)
        self._add_self_times(events)
        self._add_averages(events)

    @property
    def by_name(self) -> bool:
        """Whether there are only sums by name, since steps are without details."""
        return 2 * int(self._has_averages.sum()) > len(self._seconds)

    @property
    def seconds(self) -> Floats:
        """Durations of the chosen steps."""
        chosen: Floats = self._seconds[self._has_averages == self.by_name]
        return chosen

    @property
    def runnable(self) -> Floats:
        """Seconds of these steps in which the loop's thread was ready to run without a processor; NaN if unknown."""
        chosen: Floats = self._runnable[self._has_averages == self.by_name]
        return chosen

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The names of each path from the top down, or its only name; empty for the step itself."""
        names = list(self._names)
        if self.by_name:
            return [(), *((name,) for name in names[1:])]
        paths: list[tuple[str, ...]] = [()] * len(self._paths)
        for number in range(1, len(self._paths)):
            paths[number] = (*paths[self._paths.parent[number]], names[self._paths.name[number]])
        return paths

    def times(self, rows: list[int]) -> Floats:
        """Total self time of some paths by step, in seconds."""
        return self._together(self._table.times, rows)

    def calls(self, rows: list[int]) -> float:
        """Median number of events per step; NaN for aggregate spans."""
        if self._table.is_sum[[row for row in rows if row < len(self._table.is_sum)]].any():
            return float("nan")
        return float(np.median(self._together(self._table.counts, rows)))

    @property
    def _table(self) -> _Table:
        return self._of_names if self.by_name else self._of_paths

    def _together(self, table: np.ndarray, rows: list[int]) -> Floats:
        chosen = table[[row for row in rows if row < len(table)]]
        sums: Floats = chosen.sum(axis=0, dtype=np.float64)[self._has_averages == self.by_name]
        return sums

    def _add_self_times(self, events: TraceEvents) -> None:
        is_counted = are_in_steps(events)
        if len(self._steps) == 1:  # processes of devices do not refer to those of programs
            is_counted |= events.kind == TraceEventKind.WORK
        is_counted &= (self._of_track[events.track] >= 0) | (events.kind == TraceEventKind.WORK)
        own = events.self_times(events.totals(), is_counted)
        is_prefixed = events.named(lambda name: name.startswith(STEP_PREFIX))
        is_step = events.step_spans() | (is_prefixed & (events.kind != TraceEventKind.SPAN))
        numbers = events.of_names(self._number_of, np.int64)
        rows = np.flatnonzero(is_counted)
        place = np.full(len(events) + 1, -1, np.int64)
        place[rows] = np.arange(len(rows))
        names = np.where(is_step[rows], _SAME_AS_PARENT, numbers[events.name[rows]])
        paths = self._paths.of_events(names, place[events.parent[rows]])
        is_sum = events.has(attribute_keys.AGGREGATED_COUNT) | events.has(attribute_keys.COLLAPSED_COUNT)
        for number in range(len(self._steps)):
            mine = np.maximum(self._of_track[events.track[rows]], 0) == number
            self._add(number, rows[mine], paths[mine], events, own)
        of_sums = distinct_values(paths[is_sum[rows]])
        self._of_paths.is_sum[of_sums[of_sums < len(self._of_paths.is_sum)]] = True

    def _add(self, number: int, rows: Integers, paths: Integers, events: TraceEvents, own: Integers) -> None:
        for block in blocks(len(rows)):
            chosen = rows[block]
            places, inside = self._steps[number].places(events.start[chosen])
            at = np.where(inside, self._columns[number][places], -1)
            is_in = at >= 0
            seconds = own[chosen[is_in]] / 1e9
            self._of_paths.add(paths[block][is_in], at[is_in], seconds, np.ones(len(seconds), np.int64))

    def _number_of(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            name = name if len(self._names) < _MOST_NAMES else OTHER_NAMES
            number = self._names.setdefault(name, len(self._names))
        return number

    def _add_averages(self, events: TraceEvents) -> None:
        """Adds the averages of steps without details."""
        rows, values = events.attributes.get(attribute_keys.AVERAGES, (np.empty(0, np.int64), ()))
        for row, averages in zip(rows.tolist(), values, strict=True):
            process = self._of_track.item(events.track[row])
            if process < 0 or not averages:
                continue
            places, inside = self._steps[process].places(events.start[row : row + 1])
            column = int(self._columns[process][places[0]]) if inside[0] else -1
            if column < 0:
                continue
            self._has_averages[column] = True
            names = np.array([self._number_of(average.name[:LONGEST_NAME]) for average in averages], np.int64)
            seconds, calls = (
                np.array([getattr(average, field) for average in averages]) for field in ("self_seconds", "calls")
            )
            self._of_names.add(names, np.full(len(names), column), seconds, calls)


def _chosen(step_list: StepList, warm_up_steps: int) -> tuple[list[Integers], Floats, Floats]:
    """For each process, the column of each step, or -1; and the durations and waits for a processor of the chosen steps."""
    columns, seconds, runnable = [], [], []
    for process in step_list.processes.values():
        is_training = np.array([step.is_training for step in process.steps])
        number = np.array([step.number for step in process.steps], np.int64)
        columns.append(np.where(after_warm_up(is_training, number, warm_up_steps), 0, -1))
        seconds.append(np.array([step.duration for step in process.steps]) / 1e9)
        runnable.append(np.array([step.runnable for step in process.steps]))
    first = np.concatenate(columns)
    rows = np.flatnonzero(first == 0)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_STEPS)).astype(np.int64)]
    first[:] = -1
    first[rows] = np.arange(len(rows))
    ends = np.cumsum([len(column) for column in columns])
    return np.split(first, ends[:-1]), np.concatenate(seconds)[rows], np.concatenate(runnable)[rows]
