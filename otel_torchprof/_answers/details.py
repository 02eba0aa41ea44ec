"""The operators, phases and device times of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.arrays import blocks, distinct_values
from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.trace_events import LONGEST_NAME, TraceEventKind, nested_in
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.step_spans import JOB_NAME
from otel_torchprof._model.tree import STEP_PREFIX

from .findings import COMPUTING
from .line_reading import calls_in, is_call_of, lines_of, nearest
from .steps import PAUSES, PLACE_OF, TOP_OPERATORS, OperatorTime, is_of_any_thread, is_operator, phase_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.arrays import Flags, Floats, Integers
    from otel_torchprof._columns.batch import Array
    from otel_torchprof._files.trace_events import TraceEvents

    from .lines import Lines
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
OTHER_NAMES = "(other operators)"
_MOST_STREAMS = 10_000
_BLOCK = 1 << 19
"""Rows that are added at a time: adding costs a sort of all sums so far."""
_IN_DATA = 1 << 20
"""Added to the number of a name for operators in the phase in which the loop waits for data."""
_NAMED, _BETWEEN, _OTHER_PHASE = 0, 1, 2
"""Kinds of names: of operators, labels and calls; of steps and phases that consist of operators, so that their self time is a gap;
and of other phases."""
_OF_OPERATORS = frozenset(f"{PHASE_PREFIX}{phase}" for phase in (*COMPUTING, "optimizer"))
_NOT_IN_STEPS = frozenset((JOB_NAME, OPERATORS_NAME, *PAUSES))


def are_in_steps(events: TraceEvents) -> Flags:
    """A mask of the events of programs that may be in a step."""
    is_beside = events.named(lambda name: name in _NOT_IN_STEPS)
    are_in: Flags = ((events.kind == TraceEventKind.SPAN) & ~is_beside) | (events.kind == TraceEventKind.SLICE)
    return are_in


class StepsOfProcess:
    """The steps of a process, and times of each."""

    def __init__(self, process: ProcessSteps, first: int) -> None:
        self.first = first
        """Index of its first step among those of all processes of the file."""
        self.start = np.array([step.start for step in process.steps], np.int64)
        self.end = self.start + np.array([step.duration for step in process.steps], np.int64)
        self._data_starts, self._data_ends = process.data_starts, process.data_ends
        self.phases = np.zeros((len(self.start), len(PLACE_OF)))
        self.gap, self.operating, self.operations = (np.zeros(len(self.start)) for _ in range(3))

    def places(self, starts: Integers) -> tuple[Integers, Any]:
        """For each start, the index of the step that contains it, and whether there is one."""
        steps = np.searchsorted(self.start, starts, side="right") - 1
        return steps, (steps >= 0) & (starts < self.end[steps])

    def at(self, times: Integers) -> Integers:
        """The index of the step at each time; -1 for none."""
        steps, inside = self.places(times)
        return np.where(inside, steps, -1)

    def in_data(self, starts: Integers) -> Any:
        """For each start, whether the loop waited for data then."""
        if not len(self._data_starts):
            return np.zeros(len(starts), bool)
        intervals = np.searchsorted(self._data_starts, starts, side="right") - 1
        return (intervals >= 0) & (starts < self._data_ends[intervals])


class Details:
    """Sums over the events of a recording whose steps are known, by step."""

    def __init__(self, events: TraceEvents, step_list: StepList) -> None:
        self._events, self._processes = events, list(step_list.processes.values())
        first = np.cumsum([0, *(len(process.steps) for process in self._processes)]).tolist()
        self._steps = [StepsOfProcess(process, begin) for process, begin in zip(self._processes, first, strict=False)]
        self._number_of_track = step_list.number_of_track
        self._names: Sequence[str] = events.names
        self._is_operator = events.of_names(is_operator, np.bool_)
        self._operators, self._device = PairSums(), PairSums()
        is_counted = are_in_steps(events)
        own = self._own = self._self_times(is_counted)
        for number, process in enumerate(self._processes):
            rows = np.flatnonzero(is_counted & (self._number_of_track == number)[events.track])
            self._add_self_times(number, rows, own)
            if process.step_rule:
                self._add_gaps(number, rows)
            if not process.has_phases:
                self._add_phases(number, rows)
        self._add_averages()
        if len(self._steps) == 1:  # processes of devices do not refer to those of programs
            self._add_device_work()

    def steps(self, number: int) -> StepsOfProcess:
        """The steps of a process."""
        return self._steps[number]

    def knows_gaps(self, number: int) -> bool:
        """Whether all operators of a process ran on the loop's thread; otherwise a gap may be a wait for other threads."""
        events = self._events
        is_of_process = (self._number_of_track == number)[events.track] & are_in_steps(events)
        tracks = distinct_values(events.track[is_of_process & self._is_operator[events.name]])
        threads = {events.tracks[track][1] for track in tracks.tolist()}
        return bool(threads) and threads <= {None, self._processes[number].thread}

    def lines(self, number: int) -> tuple[Lines, ...]:
        """The lines that the loop's thread of a process was in; empty without samples and recorded calls."""
        events, thread = self._events, self._processes[number].thread
        is_of_loop = np.array([thread is None or of_track == thread for _, of_track in events.tracks], np.bool_)
        return lines_of(events, is_of_loop & (self._number_of_track == number), self._steps[number].at, self._own)

    def longest_operators(self) -> list[list[OperatorTime]]:
        """The operators with the most self time of each step, over all processes in order."""
        operators: list[list[OperatorTime]] = [[] for steps in self._steps for _ in range(len(steps.start))]
        for step, member, time in zip(
            *(column.tolist() for column in self._operators.largest(TOP_OPERATORS)), strict=True
        ):
            number = member & ~_IN_DATA
            name = self._names[number] if number < _MOST_NAMES else OTHER_NAMES
            operators[step].append(OperatorTime(name, time / 1e9, bool(member & _IN_DATA)))
        return operators

    def device_times(self, count: int) -> Floats:
        """Seconds of work of the busiest stream, by step."""
        seconds = np.zeros(count)
        steps, _, times = self._device.largest(1)
        seconds[steps] = times / 1e9
        return seconds

    def _self_times(self, is_counted: Flags) -> Integers:
        events = self._events
        own = events.self_times(events.totals(), is_counted)
        # In a step without details, the children of a phase are not in the file; its span has its self time.
        rows, seconds = events.attributes.get(attribute_keys.SELF_DURATION, (np.empty(0, np.int64), ()))
        own[rows] = [round(value * 1e9) for value in seconds]
        return own

    def _add_self_times(self, number: int, rows: Integers, own: Integers) -> None:
        events, steps = self._events, self._steps[number]
        kinds, is_step, callers = events.of_names(_kind_of, np.uint8), events.step_spans(), calls_in(events)
        for block in blocks(len(rows), _BLOCK):
            chosen = rows[block]
            places, inside = steps.places(events.start[chosen])
            chosen, places = chosen[inside], places[inside]
            kind = np.where(is_step[chosen], _BETWEEN, kinds[events.name[chosen]])
            is_named, outer = kind == _NAMED, callers[chosen]
            of_outer = np.where(is_step[outer], _BETWEEN, kinds[events.name[outer]])
            is_between = (kind == _BETWEEN) | ((outer >= 0) & (of_outer == _BETWEEN))
            np.add.at(steps.gap, places[is_between], own[chosen[is_between]] / 1e9)
            chosen = chosen[is_named]
            in_data = steps.in_data(events.start[chosen])
            self._add_operators(steps, places[is_named], events.name[chosen], in_data, own[chosen])

    def _add_gaps(self, number: int, rows: Integers) -> None:
        """Adds the time of the loop's thread outside of all events that began in the step, for steps that are no events themselves."""
        events, steps, of_loop = self._events, self._steps[number], self._processes[number].thread
        is_of_loop = np.array([thread == of_loop for _, thread in events.tracks], np.bool_)
        calls = is_call_of(events)[events.name]
        rows = rows[is_of_loop[events.track[rows]] & ~calls[rows]]
        places, inside = steps.places(events.start[rows])
        rows, places = rows[inside], places[inside]
        parent = (nearest(events.parent, ~calls) if calls.any() else events.parent)[rows]
        is_outermost = (parent < 0) | (events.start[parent] < steps.start[places])
        busy = np.bincount(places[is_outermost], events.duration[rows[is_outermost]], len(steps.start))
        steps.gap += np.maximum(steps.end - steps.start - busy, 0) / 1e9

    def _add_operators(
        self, steps: StepsOfProcess, places: Integers, names: Array, in_data: Flags, own: Integers
    ) -> None:
        """Adds self times by name and, for operators outside of data waits, in total."""
        members = np.minimum(names, _MOST_NAMES).astype(np.int64) | np.where(in_data, _IN_DATA, 0)
        self._operators.add(places + steps.first, members, own)
        is_counted = self._is_operator[names] & ~in_data
        np.add.at(steps.operating, places[is_counted], own[is_counted] / 1e9)
        np.add.at(steps.operations, places[is_counted], 1)

    def _add_averages(self) -> None:
        """Adds the averages of steps without details."""
        events = self._events
        rows, values = events.attributes.get(attribute_keys.AVERAGES, (np.empty(0, np.int64), ()))
        entries = [(row, average) for row, averages in zip(rows.tolist(), values, strict=True) for average in averages]
        known = {name: number for number, name in enumerate(events.names)}
        names = np.array([known.setdefault(entry.name[:LONGEST_NAME], len(known)) for _, entry in entries], np.int64)
        self._names = list(known)
        self._is_operator = np.array([is_operator(name) for name in known], np.bool_)
        own = np.array([round(entry.self_seconds * 1e9) for _, entry in entries], np.int64)
        in_data = np.array([entry.in_data for _, entry in entries], np.bool_)
        of_entries = np.array([row for row, _ in entries], np.int64)
        for number, steps in enumerate(self._steps):
            places, inside = steps.places(events.start[of_entries])
            inside &= self._number_of_track[events.track[of_entries]] == number
            self._add_operators(steps, places[inside], names[inside], in_data[inside], own[inside])

    def _add_phases(self, number: int, rows: Integers) -> None:
        """Adds events that are phases by their names, for steps without attributes for their phases."""
        events, steps, of_loop = self._events, self._steps[number], self._processes[number].thread
        place_of = events.of_names(lambda name: PLACE_OF.get(phase_of(name) or "", -1) + 1, np.int64)
        of_any_thread = np.array([is_of_any_thread(name) for name in PLACE_OF], np.bool_)
        is_of_loop = np.array([of_loop is None or thread == of_loop for _, thread in events.tracks], np.bool_)
        rows = rows[place_of[events.name[rows]] > 0]
        phase = place_of[events.name[rows]] - 1
        is_phase = of_any_thread[phase] | is_of_loop[events.track[rows]]
        rows, phase = rows[is_phase], phase[is_phase]
        duration = events.duration[rows]
        parent, own = nested_in(np.arange(len(rows)), events.track[rows], events.start[rows], duration), duration.copy()
        child = np.flatnonzero(parent >= 0)
        np.subtract.at(own, parent[child], duration[child])
        places, inside = steps.places(events.start[rows])
        np.add.at(steps.phases, (places[inside], phase[inside]), np.maximum(own[inside], 0) / 1e9)

    def _add_device_work(self) -> None:
        events, steps = self._events, self._steps[0]
        rows = np.flatnonzero(events.kind == TraceEventKind.WORK)
        places, inside = steps.places(events.start[rows])
        streams = np.minimum(events.track[rows[inside]], _MOST_STREAMS).astype(np.int64)
        self._device.add(places[inside], streams, events.duration[rows[inside]])


def _kind_of(name: str) -> int:
    if name in _OF_OPERATORS or name.startswith(STEP_PREFIX):
        return _BETWEEN
    return _OTHER_PHASE if name.startswith(PHASE_PREFIX) else _NAMED
