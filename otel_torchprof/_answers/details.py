"""The second reading of a file: the operators, phases and device times of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.self_times import SelfTimes, span_times
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.step_spans import JOB_NAME
from otel_torchprof._model.tree import STEP_PREFIX

from .findings import COMPUTING
from .steps import PAUSES, PLACE_OF, TOP_OPERATORS, OperatorTime, is_of_any_thread, is_operator, phase_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from otel_torchprof._columns.arrays import Floats, Integers
    from otel_torchprof._files.values import StepAverage

    from .step_list import ProcessSteps, StepList


# ---- Sums by group and member; of very many pairs, the largest of each group are kept ----

_BITS = 24
_MOST_PAIRS = 1 << 19
"""Most pairs; then each group is reduced to its largest members."""
_KEPT_MEANWHILE = 32
"""Members of a group that such a reduction keeps."""


class PairSums:
    """Sums of nanoseconds by group and member."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._sums = np.empty(0, np.int64)

    def add(self, groups: Integers, members: Integers, values: Integers) -> None:
        """Adds values, each to its pair; members are below 2^24."""
        keys = np.concatenate((self._keys, groups << _BITS | members))
        distinct_keys, places = np.unique(keys, return_inverse=True)
        sums = np.zeros(len(distinct_keys), np.int64)
        np.add.at(sums, places, np.concatenate((self._sums, values)))
        self._keys, self._sums = distinct_keys, sums
        if len(distinct_keys) > _MOST_PAIRS:
            self._keep(_KEPT_MEANWHILE)

    def largest(self, count: int) -> tuple[Integers, Integers, Integers]:
        """Groups in order, and the ``count`` members of each with the largest sums, largest first; and the sums."""
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
        remaining = np.sort(order[np.arange(len(ordered)) - begins < count])
        self._keys, self._sums = self._keys[remaining], self._sums[remaining]


_MOST_NAMES = 10_000
_LONGEST_NAME = 500
OTHER_NAMES = "(other operators)"
_MOST_TRACKS = 10_000
_MOST_WAITING = 20_000
_IN_DATA = 1 << 20
"""Added to the number of a name for operators in the phase in which the loop waits for data."""
_BETWEEN, _OTHER_PHASE = 0, 1
"""Numbers of names: of steps and phases that consist of operators, so that their self time is a gap; and of other phases."""
_OF_OPERATORS = frozenset(f"{PHASE_PREFIX}{phase}" for phase in (*COMPUTING, "optimizer"))
_PROCESS_BITS = 32
_NOT_IN_STEPS = frozenset((JOB_NAME, OPERATORS_NAME, *PAUSES))


class StepsOfProcess:
    """The steps of a process, and times of each."""

    def __init__(self, process: ProcessSteps, first: int) -> None:
        self.first = first
        """Index of its first step among those of all processes of the file."""
        self.start = np.array([step.start for step in process.steps], np.int64)
        self.end = self.start + np.array([step.duration for step in process.steps], np.int64)
        order = np.argsort(np.array(process.data_starts), kind="stable")
        self._data_starts = np.array(process.data_starts, np.int64)[order]
        self._data_ends = np.array(process.data_ends, np.int64)[order]
        self.phases = np.zeros((len(self.start), len(PLACE_OF)))
        self.gap, self.operating = np.zeros(len(self.start)), np.zeros(len(self.start))

    def places(self, starts: Integers) -> tuple[Integers, Any]:
        """For each start, the index of the step that contains it, and whether there is one."""
        steps = np.searchsorted(self.start, starts, side="right") - 1
        return steps, (steps >= 0) & (starts < self.end[steps])

    def in_data(self, starts: Integers) -> Any:
        """For each start, whether the loop waited for data then."""
        if not len(self._data_starts):
            return np.zeros(len(starts), bool)
        intervals = np.searchsorted(self._data_starts, starts, side="right") - 1
        return (intervals >= 0) & (starts < self._data_ends[intervals])


class Details:
    """Receives the events of a file whose steps are known, and adds them up by step."""

    used_attributes = frozenset(
        (
            *(
                attribute_keys.AGGREGATED_COUNT,
                attribute_keys.AGGREGATED_DURATION,
                attribute_keys.COLLAPSED_COUNT,
                attribute_keys.COLLAPSED_DURATION,
            ),
            *(attribute_keys.AVERAGES, attribute_keys.SELF_DURATION, attribute_keys.THREAD, attribute_keys.STEP),
        )
    )

    def __init__(self, step_list: StepList) -> None:
        self._processes = step_list.processes
        self._numbers = {key: number for number, key in enumerate(self._processes)}
        first = np.cumsum([0, *(len(process.steps) for process in self._processes.values())]).tolist()
        self._steps = [
            StepsOfProcess(process, begin) for process, begin in zip(self._processes.values(), first, strict=False)
        ]
        self._names = {"(between)": _BETWEEN, "(phase)": _OTHER_PHASE}
        self._is_operator = [False, False]
        self._tracks: dict[Hashable, int] = {}
        self._operators, self._device = PairSums(), PairSums()
        self._self_times = SelfTimes(self._add_self_times)
        self._phase_times = SelfTimes(self._add_phase_times)
        self._device_work = SelfTimes(self._add_device_times)
        self._lacks_phases = [not process.has_phases for process in self._processes.values()]
        self._threads = [process.thread for process in self._processes.values()]
        self._averages: list[tuple[int, int, int, int]] = []
        """Buffered averages: process, start of the step, name, self time in ns."""
        self._events = 0
        self._operator_threads: list[set[bool]] = [set() for _ in self._steps]

    def __len__(self) -> int:
        return self._events

    def name_rank(self, process: Hashable, rank: int) -> None:
        """No effect: ranks are known."""

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
        duration, own = span_times(duration, attributes)
        is_step = name == STEP_NAME and attribute_keys.STEP in attributes
        thread = attributes.get(attribute_keys.THREAD)
        span_id, parent_id = ids[:2]
        if name.startswith(PHASE_PREFIX) and attribute_keys.SELF_DURATION in attributes:
            # In a step without details, the children of a phase are not in the file; with id 0 it gets none.
            own, span_id = round(attributes[attribute_keys.SELF_DURATION] * 1e9), 0
        self._self_times.append(
            self._key(number, name, is_step, thread), (start, duration, own, -1, span_id, parent_id)
        )
        for average in attributes.get(attribute_keys.AVERAGES, ()):
            self._add_average(number, start, average)
        self._add_phase(number, name, start, duration, thread)

    def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], on_device: bool) -> None:
        """Adds an event whose parent encloses it on its track."""
        self._events += 1
        if on_device:
            self._add_device_work(start, duration, track)
            return
        number = self._numbers.get(track[0])
        if number is None:
            return
        key = self._key(number, name, name.startswith(STEP_PREFIX), track[1])
        self._self_times.append(key, (start, duration, duration, self._track(track), 0, 0))
        self._add_phase(number, name, start, duration, track[1])

    def add_step(self, name: str, start: int, duration: int, process: Hashable) -> None:
        """No effect: steps are known."""

    # ---- at the end ----

    def settle(self) -> None:
        """Adds up buffered events, at the end of the file."""
        self._add_averages()
        self._self_times.settle()
        self._phase_times.settle()
        self._device_work.settle()

    def steps(self, number: int) -> StepsOfProcess:
        """The steps of a process."""
        return self._steps[number]

    def knows_gaps(self, number: int) -> bool:
        """Whether all operators of a process ran on the loop's thread; otherwise a gap may be a wait for other threads."""
        return self._operator_threads[number] == {True}

    def longest_operators(self) -> list[list[OperatorTime]]:
        """The operators with the most self time of each step, over all processes in order."""
        operators: list[list[OperatorTime]] = [[] for steps in self._steps for _ in range(len(steps.start))]
        names = list(self._names)
        for step, member, time in zip(
            *(column.tolist() for column in self._operators.largest(TOP_OPERATORS)), strict=True
        ):
            operators[step].append(OperatorTime(names[member & ~_IN_DATA], time / 1e9, bool(member & _IN_DATA)))
        return operators

    def device_times(self, count: int) -> Floats:
        """Seconds of work of the busiest stream, by step."""
        seconds = np.zeros(count)
        steps, _, times = self._device.largest(1)
        seconds[steps] = times / 1e9
        return seconds

    # ---- while reading ----

    def _key(self, process: int, name: str, is_step: bool, thread: Any) -> int:
        name = name[:_LONGEST_NAME]
        if is_step or name in _OF_OPERATORS:
            return process << _PROCESS_BITS | _BETWEEN
        if name.startswith(PHASE_PREFIX):
            return process << _PROCESS_BITS | _OTHER_PHASE
        if is_operator(name):
            self._operator_threads[process].add(thread in {None, self._threads[process]})
        return process << _PROCESS_BITS | self._number_of(name)

    def _number_of(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            name = name if len(self._names) < _MOST_NAMES else OTHER_NAMES
            number = self._names.setdefault(name, len(self._names))
            if number == len(self._is_operator):
                self._is_operator.append(is_operator(name))
        return number

    def _track(self, track: Hashable) -> int:
        number = self._tracks.get(track, -1)
        if number < 0 and len(self._tracks) < _MOST_TRACKS:
            number = self._tracks[track] = len(self._tracks)
        return number

    def _add_phase(self, number: int, name: str, start: int, duration: int, thread: Any) -> None:
        """Adds a slice of a phase, for steps without attributes for their phases."""
        phase = phase_of(name) if self._lacks_phases[number] else None
        if phase is None:
            return
        of_loop = self._threads[number]
        if of_loop is None or thread == of_loop or is_of_any_thread(phase):
            row = (start, duration, duration, self._track((number, thread)), 0, 0)
            self._phase_times.append(number << _PROCESS_BITS | PLACE_OF[phase], row)

    def _add_device_work(self, start: int, duration: int, track: Hashable) -> None:
        """Adds work of a device, if the file has only one process: processes of devices do not refer to those of programs."""
        if len(self._steps) == 1:
            self._device_work.append(max(0, self._track(track)), (start, duration, duration, -1, 0, 0))

    def _add_average(self, process: int, start: int, average: StepAverage) -> None:
        """Adds an average of a step without details."""
        member = self._number_of(average.name[:_LONGEST_NAME]) | (_IN_DATA if average.in_data else 0)
        self._averages.append((process, start, member, round(average.self_seconds * 1e9)))
        if len(self._averages) >= _MOST_WAITING:
            self._add_averages()

    def _add_averages(self) -> None:
        rows = np.array(self._averages, np.int64).reshape(-1, 4)
        self._averages.clear()
        for number, steps in enumerate(self._steps):
            _, starts, members, own = rows[rows[:, 0] == number].T
            places, inside = steps.places(starts)
            self._add_operators(steps, places[inside], members[inside], own[inside])

    def _add_operators(self, steps: StepsOfProcess, places: Integers, members: Integers, own: Integers) -> None:
        """Adds self times by name and, for operators outside of data waits, in total."""
        self._operators.add(places + steps.first, members, own)
        is_counted = np.array(self._is_operator)[members & ~_IN_DATA] & (members & _IN_DATA == 0)
        np.add.at(steps.operating, places[is_counted], own[is_counted] / 1e9)

    def _add_self_times(self, keys: Integers, starts: Integers, own: Integers) -> None:
        processes, names = keys >> _PROCESS_BITS, keys & ((1 << _PROCESS_BITS) - 1)
        for number, steps in enumerate(self._steps):
            mine = np.flatnonzero(processes == number)
            places, inside = steps.places(starts[mine])
            mine, places = mine[inside], places[inside]
            is_between = names[mine] == _BETWEEN
            np.add.at(steps.gap, places[is_between], own[mine[is_between]] / 1e9)
            is_named = names[mine] > _OTHER_PHASE
            mine, places = mine[is_named], places[is_named]
            members = names[mine] | np.where(steps.in_data(starts[mine]), _IN_DATA, 0)
            self._add_operators(steps, places, members, own[mine])

    def _add_phase_times(self, keys: Integers, starts: Integers, own: Integers) -> None:
        processes, phases = keys >> _PROCESS_BITS, keys & ((1 << _PROCESS_BITS) - 1)
        for number, steps in enumerate(self._steps):
            mine = np.flatnonzero(processes == number)
            places, inside = steps.places(starts[mine])
            np.add.at(steps.phases, (places[inside], phases[mine[inside]]), own[mine[inside]] / 1e9)

    def _add_device_times(self, streams: Integers, starts: Integers, own: Integers) -> None:
        places, inside = self._steps[0].places(starts)
        self._device.add(places[inside], streams[inside], own[inside])
