"""The first reading of a file: its steps, the pauses between them, and collectives."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.collectives import OF_COLLECTIVES, CollectiveList
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.tree import STEP_PREFIX

from .steps import PAUSES, TRAINING, Pause, phase_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

MOST_STEPS = 50_000
"""Most steps of a file; later ones are left out."""
MOST_PROCESSES = 1024
"""Most processes of a file."""
_MOST_INTERVALS = 100_000
"""Most waits for data, and most pauses, of a process."""
_MOST_DIGITS = 18
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


@dataclass
class ProcessSteps:
    """A process in the file."""

    rank: int | None = None
    thread: Any = None
    """Thread of the loop, if the file has it."""
    steps: list[StepRow] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    data_starts: array[int] = field(default_factory=lambda: array("q"))
    data_ends: array[int] = field(default_factory=lambda: array("q"))
    """Starts and ends of the intervals in which the loop waited for data."""
    collectives: CollectiveList = field(default_factory=CollectiveList)
    events: int = 0
    dropped: int = 0

    @property
    def has_phases(self) -> bool:
        """Whether the steps have times of phases."""
        return any(step.phases is not None for step in self.steps)

    def settle(self) -> int:
        """Sorts the steps, and removes those without phases if others have phases: they are parts of these.

        Returns:
            Number of removed steps without a duration.
        """
        has_phases, count = self.has_phases, len(self.steps)
        self.steps = [step for step in self.steps if step.duration > 0]
        left_out = count - len(self.steps)
        self.steps = sorted(step for step in self.steps if step.phases or not has_phases)
        return left_out


class StepList:
    """Receives the events of a file, and collects its steps."""

    used_attributes = frozenset(
        (
            *(
                attribute_keys.STEP,
                attribute_keys.UNFINISHED,
                attribute_keys.KIND,
                attribute_keys.REVISION,
                attribute_keys.PART,
                attribute_keys.RUNNABLE,
                attribute_keys.BLOCKED,
                attribute_keys.OTHER_THREADS,
                attribute_keys.DRAINED,
                attribute_keys.DROPPED,
                attribute_keys.THREAD,
            ),
            *OF_COLLECTIVES,
            *attribute_keys.COUNTERS,
            *attribute_keys.PHASE_OF,
            *(
                attribute_keys.AVERAGES,
                attribute_keys.SELF_DURATION,
            ),  # only so that the first reading already reports malformed ones
        )
    )

    def __init__(self) -> None:
        self.processes: dict[Hashable, ProcessSteps] = {}
        self.left_out = 0
        """Number of steps beyond :data:`MOST_STEPS`."""
        self.without_duration = 0
        """Number of steps that do not end after their begin."""
        self.of_other_processes = 0
        """Number of events of processes beyond :data:`MOST_PROCESSES`."""
        self.device_slices = self.launches = 0
        self._rank: int | None = None
        self._steps = self._events = 0

    def __len__(self) -> int:
        return self._events

    def name_rank(self, process: Hashable, rank: int) -> None:
        """Sets the rank of a process; process None: of all without a rank."""
        if process is None:
            self._rank = rank
        elif (process_steps := self._process(process)) is not None:
            process_steps.rank = rank

    def add_span(
        self,
        name: str,
        start: int,
        duration: int,
        _ids: tuple[int, int, Hashable],
        attributes: Mapping[str, Any],
        *,
        process: Hashable,
    ) -> None:
        """Adds a span of a step, a pause, a collective or another event."""
        self._events += 1
        process_steps = self._process(process)
        if process_steps is None:
            return
        process_steps.events += 1
        process_steps.dropped += attributes.get(attribute_keys.DROPPED, 0)
        if name == STEP_NAME and attribute_keys.STEP in attributes:
            process_steps.collectives.add_step(start, attributes)
            if attribute_keys.PART not in attributes:
                self._append(process_steps, step_row(start, duration, attributes))
                process_steps.thread = attributes.get(attribute_keys.THREAD, process_steps.thread)
        elif name in PAUSES:
            if len(process_steps.pauses) < _MOST_INTERVALS:
                process_steps.pauses.append(Pause(PAUSES[name], start, duration))
        elif attribute_keys.COLLECTIVE in attributes:
            process_steps.collectives.add_call(start, duration, attributes)
        elif phase_of(name) == "data":
            _note_wait(process_steps, start, duration)
        else:
            process_steps.collectives.add_work(name, start, duration)

    def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], on_device: bool) -> None:
        """Adds an event of a profile: a step, a wait for data, or another."""
        self._events += 1
        if on_device:
            self.device_slices += 1
            return
        self.launches += name.startswith(_LAUNCHES)
        if name.startswith(STEP_PREFIX):
            self.add_step(name, start, duration, track[0])
            if (process_steps := self._process(track[0])) is not None:
                process_steps.thread = track[1]
        elif (process_steps := self._process(track[0])) is not None:
            process_steps.events += 1
            if phase_of(name) == "data":
                _note_wait(process_steps, start, duration)
            else:
                process_steps.collectives.add_work(name, start, duration)

    def add_step(self, name: str, start: int, duration: int, process: Hashable) -> None:
        """Adds a step of a profile."""
        number = name.removeprefix(STEP_PREFIX)
        process_steps = self._process(process)
        if process_steps is not None and number.isdecimal() and len(number) <= _MOST_DIGITS:
            self._append(process_steps, StepRow(start, int(number), duration, is_training=True))

    def settle(self) -> None:
        """Removes processes without steps, at the end of the file."""
        for process in self.processes.values():
            self.without_duration += process.settle()
            process.rank = next(
                (rank for rank in (process.rank, process.collectives.rank, self._rank) if rank is not None), None
            )
        self.processes = {key: process for key, process in self.processes.items() if process.steps}

    def _process(self, key: Hashable) -> ProcessSteps | None:
        process_steps = self.processes.get(key)
        if process_steps is None and len(self.processes) >= MOST_PROCESSES:
            self._forget_small_ones()
        if process_steps is None and len(self.processes) < MOST_PROCESSES:
            process_steps = self.processes[key] = ProcessSteps()
        self.of_other_processes += process_steps is None
        return process_steps

    def _forget_small_ones(self) -> None:
        """Removes half of the processes without steps so far, those with the fewest events."""
        others = [key for key, process in self.processes.items() if not process.steps]
        others.sort(key=lambda key: self.processes[key].events)
        for key in others[: (len(others) + 1) // 2]:
            self.of_other_processes += self.processes.pop(key).events

    def _append(self, process: ProcessSteps, row: StepRow) -> None:
        if self._steps < MOST_STEPS:
            self._steps += 1
            process.steps.append(row)
        else:
            self.left_out += 1


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
    )


def _note_wait(process: ProcessSteps, start: int, duration: int) -> None:
    if len(process.data_starts) < _MOST_INTERVALS:
        process.data_starts.append(start)
        process.data_ends.append(start + duration)
