"""Self times and numbers of events by step and path; a path is the names from the step down to an event.

Steps without details have sums by name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._files import attribute_keys
from otel_torchprof._files.self_times import SelfTimes, span_times
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.step_spans import JOB_NAME
from otel_torchprof._model.tree import STEP_PREFIX

from .details import StepsOfProcess
from .steps import PAUSES

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from otel_torchprof._columns.arrays import Floats, Integers
    from otel_torchprof._files.values import StepAverage

    from .step_list import StepList

MOST_STEPS = 500
"""Most examined steps; of more, as many at equal distances."""
MOST_PATHS = 2000
"""Most paths; events on further ones count as self time of the nearest ancestor with a path."""
_MOST_NAMES = 4000
_LONGEST_NAME = 500
OTHER_NAMES = "(other names)"
_DEEPEST = 500
"""Most ancestors of an event; one with more, or in a cycle of a wrong file, counts as top-level."""
_MOST_TRACKS = 10_000
_TOP = 0
"""The path of the step itself."""
_SAME_AS_PARENT = 0
"""The name of events that are no part of a path."""
_IS_SUM = 1 << 30
"""Added to the number of a name for aggregate spans, whose numbers of events are not compared."""
_PROCESS_BITS = 32
_NAME_BITS = 24
_NOT_IN_STEPS = frozenset((JOB_NAME, OPERATORS_NAME, *PAUSES))


class Paths:
    """Numbers of paths; a path is that of its parent and a name."""

    def __init__(self) -> None:
        self.parent, self.name = [-1], [_SAME_AS_PARENT]
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def of_events(self, names: Integers, parents: Integers) -> Integers:
        """The path of each event, from its name and the index of its parent, or -1."""
        depth = _depths(parents)
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


def _depths(parents: Integers) -> Integers:
    """Number of ancestors of each event, by doubling; 0 if there are more than :data:`_DEEPEST`."""
    depth = (parents >= 0).astype(np.int64)
    at = parents.copy()
    for _ in range(_DEEPEST.bit_length()):
        rows = np.flatnonzero(at >= 0)
        if not len(rows):
            break
        depth[rows] += depth[at[rows]]
        at[rows] = at[at[rows]]
    depth[(at >= 0) | (depth > _DEEPEST)] = 0
    return depth


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
    """Receives the events of a file whose steps are known; after :meth:`settle` it has times of the chosen steps of all processes.

    If only some steps have details, it chooses those with or those without details, whichever are more.
    """

    used_attributes = frozenset(
        (
            *(
                attribute_keys.AGGREGATED_COUNT,
                attribute_keys.AGGREGATED_DURATION,
                attribute_keys.COLLAPSED_COUNT,
                attribute_keys.COLLAPSED_DURATION,
            ),
            *(attribute_keys.AVERAGES, attribute_keys.STEP),
        )
    )

    def __init__(self, step_list: StepList, warm_up_steps: int) -> None:
        self._numbers = {key: number for number, key in enumerate(step_list.processes)}
        self._steps = [StepsOfProcess(process, 0) for process in step_list.processes.values()]
        self._columns, self._seconds = _chosen(step_list, warm_up_steps)
        self._names: dict[str, int] = {"": _SAME_AS_PARENT}
        self._paths = Paths()
        self._of_paths, self._of_names = _Table(len(self._seconds)), _Table(len(self._seconds))
        self._has_averages = np.zeros(len(self._seconds), bool)
        self._tracks: dict[Hashable, int] = {}
        self._rows = SelfTimes(self._add, self._keys)
        self._events = 0

    def __len__(self) -> int:
        return self._events

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

    def name_rank(self, process: Hashable, rank: int) -> None:
        """No effect: steps of all ranks are examined together."""

    def add_span(
        self,
        name: str,
        start: int,
        duration: int,
        ids: tuple[int, int, Hashable],
        attributes: Mapping[str, Any],
        *,
        process: Hashable,
    ) -> None:
        """Adds a span; its parent is known by id."""
        self._events += 1
        number = self._numbers.get(process)
        if number is None or name in _NOT_IN_STEPS:
            return
        if attribute_keys.AVERAGES in attributes:
            self._add_averages(number, start, attributes[attribute_keys.AVERAGES])
        is_sum = (
            _IS_SUM
            if attribute_keys.AGGREGATED_COUNT in attributes or attribute_keys.COLLAPSED_COUNT in attributes
            else 0
        )
        duration, own = span_times(duration, attributes)
        key = self._key(number, "" if name == STEP_NAME and attribute_keys.STEP in attributes else name) | is_sum
        self._rows.append(key, (start, duration, own, -1, *ids[:2]))

    def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], on_device: bool) -> None:
        """Adds an event whose parent encloses it on its track; device events only if the file has one process."""
        self._events += 1
        number = 0 if on_device and len(self._steps) == 1 else self._numbers.get(track[0])
        if number is None:
            return
        key = self._key(number, "" if name.startswith(STEP_PREFIX) else name)
        self._rows.append(key, (start, duration, duration, self._track(track), 0, 0))

    def add_step(self, name: str, start: int, duration: int, process: Hashable) -> None:
        """No effect: steps are known."""

    def settle(self) -> None:
        """Adds up buffered events, at the end of the file."""
        self._rows.settle()

    def _key(self, process: int, name: str) -> int:
        return process << _PROCESS_BITS | self._number_of(name)

    def _number_of(self, name: str) -> int:
        name = name[:_LONGEST_NAME]
        number = self._names.get(name)
        if number is None:
            name = name if len(self._names) < _MOST_NAMES else OTHER_NAMES
            number = self._names.setdefault(name, len(self._names))
        return number

    def _add_averages(self, process: int, start: int, averages: Sequence[StepAverage]) -> None:
        """Adds the averages of a step without details."""
        places, inside = self._steps[process].places(np.array([start]))
        column = int(self._columns[process][places[0]]) if inside[0] else -1
        if column < 0 or not averages:
            return
        self._has_averages[column] = True
        names = np.array([self._number_of(average.name) for average in averages], np.int64)
        seconds, calls = (
            np.array([getattr(average, field) for average in averages]) for field in ("self_seconds", "calls")
        )
        self._of_names.add(names, np.full(len(names), column), seconds, calls)

    def _track(self, track: Hashable) -> int:
        number = self._tracks.get(track, -1)
        if number < 0 and len(self._tracks) < _MOST_TRACKS:
            number = self._tracks[track] = len(self._tracks)
        return number

    def _keys(self, keys: Integers, parents: Integers) -> Integers:
        """Replaces names by paths in the keys."""
        low = (1 << _PROCESS_BITS) - 1
        paths = self._paths.of_events(keys & low & ~_IS_SUM, parents)
        return keys & (~low | _IS_SUM) | paths

    def _add(self, keys: Integers, starts: Integers, own: Integers) -> None:
        paths = keys & (_IS_SUM - 1)
        table = self._of_paths
        for number, (steps, columns) in enumerate(zip(self._steps, self._columns, strict=True)):
            mine = np.flatnonzero(keys >> _PROCESS_BITS == number)
            places, inside = steps.places(starts[mine])
            at = np.where(inside, columns[places], -1)
            mine, at = mine[at >= 0], at[at >= 0]
            table.add(paths[mine], at, own[mine] / 1e9, np.ones(len(mine), np.int64))
        sums = paths[keys & _IS_SUM != 0]
        table.is_sum[sums[sums < len(table.is_sum)]] = True


def _chosen(step_list: StepList, warm_up_steps: int) -> tuple[list[Integers], Floats]:
    """For each process, the column of each step, or -1; and the durations of the chosen steps."""
    columns, seconds = [], []
    for process in step_list.processes.values():
        is_training = np.array([step.is_training for step in process.steps])
        columns.append(np.where(is_training & (np.cumsum(is_training) > warm_up_steps), 0, -1))
        seconds.append(np.array([step.duration for step in process.steps]) / 1e9)
    first = np.concatenate(columns)
    rows = np.flatnonzero(first == 0)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_STEPS)).astype(np.int64)]
    first[:] = -1
    first[rows] = np.arange(len(rows))
    ends = np.cumsum([len(column) for column in columns])
    return np.split(first, ends[:-1]), np.concatenate(seconds)[rows]
