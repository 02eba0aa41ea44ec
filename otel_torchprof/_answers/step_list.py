"""The steps of a recording, the pauses between them, and collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.collectives import WORKS, CollectiveList, host_of_kernels
from otel_torchprof._files.repeating import EventTimes, may_repeat, repeating_steps
from otel_torchprof._files.trace_events import TraceEventKind, step_number

from .steps import PAUSES, TRAINING, Pause, phase_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from otel_torchprof._columns.arrays import Flags, Integers
    from otel_torchprof._files.repeating import RepeatingSteps
    from otel_torchprof._files.trace_events import TraceEvents

MOST_STEPS = 50_000
"""Most steps of a file; later ones are left out."""
MOST_PROCESSES = 1024
"""Most processes of a file."""
_MOST_INTERVALS = 100_000
"""Most waits for data, and most pauses, of a process."""
_LAUNCHES = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipModuleLaunch")
NAN = float("nan")


class StepRow(NamedTuple):
    """A step in the file; times in ns, phases in seconds."""

    start: int
    number: int
    duration: int
    is_training: bool
    revision: int = 0
    runnable: float = NAN
    blocked: float = NAN
    other_threads: float = NAN
    drained: float = NAN
    counters: tuple[float, ...] = (NAN,) * len(attribute_keys.COUNTERS)
    phases: tuple[float, ...] | None = None
    memory: tuple[float, ...] = (NAN,) * len(attribute_keys.MEMORY)
    amounts: tuple[float, ...] = (NAN,) * len(attribute_keys.RATES)


@dataclass
class ProcessSteps:
    """A process in the file."""

    rank: int | None = None
    thread: Any = None
    """Thread of the loop, if the file has it."""
    steps: list[StepRow] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    data_starts: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    data_ends: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    """Starts and ends of the intervals in which the loop waited for data, by start."""
    collectives: CollectiveList = field(default_factory=CollectiveList)
    events: int = 0
    dropped: int = 0
    step_rule: str = ""
    """Where steps begin and end, if the file marks none."""

    @property
    def has_phases(self) -> bool:
        """Whether the steps have times of phases."""
        return any(step.phases is not None for step in self.steps)

    def settle(self) -> int:
        """Sorts the steps, and removes those without phases if others have phases, since they are parts of these.

        Returns:
            Number of removed steps without a duration.
        """
        has_phases, count = self.has_phases, len(self.steps)
        self.steps = [step for step in self.steps if step.duration > 0]
        left_out = count - len(self.steps)
        self.steps = sorted(step for step in self.steps if step.phases or not has_phases)
        return left_out


class StepList:
    """The steps of all processes of a recording. Its length is the number of events."""

    def __init__(self, events: TraceEvents) -> None:
        self._events = events
        self._count = int((events.kind != TraceEventKind.STEP).sum())
        self.device_slices = int((events.kind == TraceEventKind.WORK).sum())
        is_launch = events.named(lambda name: name.startswith(_LAUNCHES)) & (events.kind == TraceEventKind.SLICE)
        self.launches = int(is_launch.sum())
        self.left_out = 0
        """Number of steps beyond :data:`MOST_STEPS`."""
        self.of_other_processes = 0
        """Number of events of processes with steps beyond the :data:`MOST_PROCESSES` with the most events."""
        self.processes: dict[Hashable, ProcessSteps] = {}
        is_step = events.steps()
        known: dict[Hashable, int] = {}
        of_tracks = np.array([known.setdefault(process, len(known)) for process, _ in events.tracks], np.int64)
        number, keys = of_tracks[events.track], list(known)
        found = {} if is_step.any() else self._repeating(number)
        self._find_processes(number, keys, np.append(number[is_step], list(found)).astype(np.int64))
        self._add_steps(np.flatnonzero(is_step))
        for of_process, repeating in found.items():
            self._add_repeating(self.processes.get(keys[of_process]), repeating)
        self._add_others(is_step)
        self.without_duration = sum(process.settle() for process in self.processes.values())
        """Number of steps that do not end after their begin."""
        self.processes = {key: process for key, process in self.processes.items() if process.steps}
        for process in self.processes.values():
            ranks = process.rank, process.collectives.rank, events.ranks.get(None)
            process.rank = next((rank for rank in ranks if rank is not None), None)
        numbers = {key: number for number, key in enumerate(self.processes)}
        self.number_of_track = np.array([numbers.get(process, -1) for process, _ in events.tracks], np.int64)
        """The number of the process of each track, in the order of :attr:`processes`; -1 for one without steps."""

    def __len__(self) -> int:
        return self._count

    def _repeating(self, process: Integers) -> dict[int, RepeatingSteps]:
        """Steps of the processes of a recording that marks none, by their numbers, from what repeats."""
        events, found = self._events, {}
        is_host = (events.kind == TraceEventKind.SPAN) | (events.kind == TraceEventKind.SLICE)
        marks = np.flatnonzero(is_host & events.named(may_repeat))
        columns = EventTimes(events.name, events.start, events.start + events.duration, events.track)
        for number in distinct_values(process[marks]).tolist():
            steps = repeating_steps(events.names, columns, marks[process[marks] == number])
            if steps is not None:
                found[number] = steps
        return found

    def _add_repeating(self, process: ProcessSteps | None, repeating: RepeatingSteps) -> None:
        if process is not None:
            _, process.thread = self._events.tracks[repeating.thread]
            process.step_rule = repeating.rule
            times = zip(repeating.start[:MOST_STEPS].tolist(), repeating.end[:MOST_STEPS].tolist(), strict=True)
            process.steps = [
                StepRow(start, number, end - start, is_training=True) for number, (start, end) in enumerate(times)
            ]
            self.left_out += max(len(repeating.start) - MOST_STEPS, 0)

    def _find_processes(self, process: Integers, keys: Sequence[Hashable], with_steps: Integers) -> None:
        """Finds the processes with steps, in the order of their first events. ``process``: number of that of each event."""
        events = self._events
        is_counted = (events.kind == TraceEventKind.SPAN) | (events.kind == TraceEventKind.SLICE)
        counts = np.bincount(process[is_counted], minlength=len(keys))
        first = np.full(len(keys), len(events))
        first[process[::-1]] = np.arange(len(events))[::-1]
        with_steps = distinct_values(with_steps)
        with_steps = with_steps[np.argsort(-counts[with_steps], kind="stable")]
        self.of_other_processes = int(counts[with_steps[MOST_PROCESSES:]].sum())
        for number in sorted(with_steps[:MOST_PROCESSES].tolist(), key=first.item):
            self.processes[keys[number]] = ProcessSteps(events.ranks.get(keys[number]), events=int(counts[number]))

    def _process_of(self, row: int) -> ProcessSteps | None:
        return self.processes.get(self._events.tracks[self._events.track.item(row)][0])

    def _add_steps(self, rows: Integers) -> None:
        events, left = self._events, MOST_STEPS
        for row, attributes in zip(rows.tolist(), events.attributes_of(rows), strict=True):
            process, thread = self._process_of(row), events.tracks[events.track.item(row)][1]
            start, duration, kind = events.start.item(row), events.duration.item(row), events.kind.item(row)
            if process is None:
                continue
            if kind == TraceEventKind.SPAN:
                process.collectives.add_step(start, attributes)
                if attribute_keys.PART in attributes:
                    continue
                step = step_row(start, duration, attributes)
            else:
                number = step_number(events.names[events.name.item(row)]) or 0
                step = StepRow(start, number, duration, is_training=True)
                process.collectives.add_torch_step(number, start, duration)
            if kind != TraceEventKind.STEP and thread is not None:
                process.thread = thread
            if left:
                process.steps.append(step)
            left, self.left_out = max(left - 1, 0), self.left_out + (left == 0)

    def _add_others(self, is_step: Flags) -> None:
        """Adds pauses, waits for data, collectives, and the numbers of dropped events."""
        events = self._events
        is_host = ((events.kind == TraceEventKind.SPAN) | (events.kind == TraceEventKind.SLICE)) & ~is_step
        kinds = events.of_names(_other_kind, np.uint8)[events.name]
        is_pause = (kinds == _PAUSE) & (events.kind == TraceEventKind.SPAN) & is_host
        is_call = events.has(attribute_keys.COLLECTIVE) & is_host & ~is_pause
        is_torch, host = events.has(attribute_keys.TORCH_NAME), self.processes.get(host_of_kernels(events))
        is_other = is_pause | is_call | (is_host & (kinds == _WORK)) | events.has(attribute_keys.DROPPED)
        rows = np.flatnonzero(is_other | is_torch)
        for row, attributes in zip(rows.tolist(), events.attributes_of(rows), strict=True):
            is_kernel, name = events.kind.item(row) == TraceEventKind.WORK, events.names[events.name.item(row)]
            process = host if is_kernel else self._process_of(row)
            start, duration = events.start.item(row), events.duration.item(row)
            if process is None:
                continue
            process.dropped += attributes.get(attribute_keys.DROPPED, 0)
            if is_pause[row] and len(process.pauses) < _MOST_INTERVALS:
                process.pauses.append(Pause(PAUSES[name], start, duration))
            elif is_call[row]:
                process.collectives.add_call(start, duration, attributes)
            elif is_torch[row]:
                process.collectives.add_torch_call(start, duration, attributes, is_kernel=is_kernel)
            elif is_host[row]:
                process.collectives.add_work(name, start, duration)
        waits = np.flatnonzero(is_host & (kinds == _WAIT) & ~is_call)
        waits = waits[np.argsort(events.start[waits], kind="stable")]
        for key, process in self.processes.items():
            is_of_process = np.array([of_track == key for of_track, _ in events.tracks], np.bool_)
            rows = waits[is_of_process[events.track[waits]]][:_MOST_INTERVALS]
            process.data_starts, process.data_ends = events.start[rows], events.start[rows] + events.duration[rows]


_PAUSE, _WAIT, _WORK = 1, 2, 3


def _other_kind(name: str) -> int:
    """Whether events of a name are pauses, waits for data or work of a backend of collectives."""
    if name in PAUSES:
        return _PAUSE
    return _WAIT if phase_of(name) == "data" else _WORK if name.startswith(WORKS) else 0


def step_row(start: int, duration: int, attributes: Mapping[str, Any]) -> StepRow:
    """A step from the attributes of its span; times in ns."""
    phases = None
    if any(key in attributes for key in attribute_keys.PHASE_OF):
        durations = {phase: attributes[key] for key, phase in attribute_keys.PHASE_OF.items() if key in attributes}
        durations.pop(UNATTRIBUTED, None)
        phases = tuple(min(float(durations.get(phase, 0.0)), duration / 1e9) for phase in PHASES)
    return StepRow(
        start,
        attributes[attribute_keys.STEP],
        duration,
        attributes.get(attribute_keys.KIND, TRAINING) == TRAINING and not attributes.get(attribute_keys.UNFINISHED),
        attributes.get(attribute_keys.REVISION, 0),
        attributes.get(attribute_keys.RUNNABLE, NAN),
        attributes.get(attribute_keys.BLOCKED, NAN),
        attributes.get(attribute_keys.OTHER_THREADS, NAN),
        attributes.get(attribute_keys.DRAINED, NAN),
        tuple(attributes.get(key, NAN) for key in attribute_keys.COUNTERS),
        phases,
        tuple(attributes.get(key, NAN) for key in attribute_keys.MEMORY),
        tuple(attributes.get(key, NAN) for key in attribute_keys.RATES),
    )
