"""The first reading of a file: its steps, what stood between them, and the collectives; what ran in them comes later."""

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
"""Of a file: the first of them."""
MOST_PROCESSES = 1024
"""Of a file."""
_MOST_INTERVALS = 100_000
"""Of a process: waits for data, pauses."""
_MOST_DIGITS = 18
_LAUNCHES = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipModuleLaunch")
NAN = float("nan")


class StepRow(NamedTuple):
    """A step as the file has it; times in ns, phases in seconds."""

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
    """What the first reading finds of a process."""

    rank: int | None = None
    thread: Any = None
    """The loop's, where the file says so."""
    steps: list[StepRow] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    data_starts: array[int] = field(default_factory=lambda: array("q"))
    data_ends: array[int] = field(default_factory=lambda: array("q"))
    """Of the intervals in which the loop waited for data."""
    collectives: CollectiveList = field(default_factory=CollectiveList)
    events: int = 0
    dropped: int = 0

    @property
    def has_phases(self) -> bool:
        """Whether the steps say what their phases took."""
        return any(step.phases is not None for step in self.steps)

    def settle(self) -> int:
        """Puts the steps in order; those without phases are parts of others where others have them.

        Returns:
            How many were left out since they do not last.
        """
        has_phases, found = self.has_phases, len(self.steps)
        self.steps = [step for step in self.steps if step.duration > 0]
        left_out = found - len(self.steps)
        self.steps = sorted(step for step in self.steps if step.phases or not has_phases)
        return left_out


class StepList:
    """Takes the events of a file, of which it keeps the steps."""

    wanted = frozenset(
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
            ),  # so that what cannot be read is found out by the first reading
        )
    )

    def __init__(self) -> None:
        self.processes: dict[Hashable, ProcessSteps] = {}
        self.left_out = 0
        """Steps beyond the first."""
        self.without_duration = 0
        """Steps that end before they begin, or when they begin."""
        self.of_other_processes = 0
        """Events of processes beyond those that are kept."""
        self.device_slices = self.launches = 0
        self._rank: int | None = None
        self._steps = self._events = 0

    def __len__(self) -> int:
        return self._events

    def name_rank(self, process: Hashable, rank: int) -> None:
        """The rank of a process, or of all that have none."""
        if process is None:
            self._rank = rank
        elif (found := self._process(process)) is not None:
            found.rank = rank

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
        """A span: of a step, of what stands between two, of a collective, or another."""
        self._events += 1
        found = self._process(process)
        if found is None:
            return
        found.events += 1
        found.dropped += attributes.get(attribute_keys.DROPPED, 0)
        if name == STEP_NAME and attribute_keys.STEP in attributes:
            found.collectives.add_step(start, attributes)
            if attribute_keys.PART not in attributes:
                self._append(found, step_row(start, duration, attributes))
                found.thread = attributes.get(attribute_keys.THREAD, found.thread)
        elif name in PAUSES:
            if len(found.pauses) < _MOST_INTERVALS:
                found.pauses.append(Pause(PAUSES[name], start, duration))
        elif attribute_keys.COLLECTIVE in attributes:
            found.collectives.add_call(start, duration, attributes)
        elif phase_of(name) == "data":
            _note_wait(found, start, duration)
        else:
            found.collectives.add_work(name, start, duration)

    def add_slice(self, name: str, start: int, duration: int, track: tuple[Any, Any], on_device: bool) -> None:
        """An event of a profile: a step, a wait for data, or another."""
        self._events += 1
        if on_device:
            self.device_slices += 1
            return
        self.launches += name.startswith(_LAUNCHES)
        if name.startswith(STEP_PREFIX):
            self.add_step(name, start, duration, track[0])
            if (found := self._process(track[0])) is not None:
                found.thread = track[1]
        elif (found := self._process(track[0])) is not None:
            found.events += 1
            if phase_of(name) == "data":
                _note_wait(found, start, duration)
            else:
                found.collectives.add_work(name, start, duration)

    def add_step(self, name: str, start: int, duration: int, process: Hashable) -> None:
        """A step of a profile."""
        number = name.removeprefix(STEP_PREFIX)
        found = self._process(process)
        if found is not None and number.isdecimal() and len(number) <= _MOST_DIGITS:
            self._append(found, StepRow(start, int(number), duration, is_training=True))

    def settle(self) -> None:
        """The file has been read: processes without steps are forgotten."""
        for each in self.processes.values():
            self.without_duration += each.settle()
            each.rank = next(
                (rank for rank in (each.rank, each.collectives.rank, self._rank) if rank is not None), None
            )
        self.processes = {key: each for key, each in self.processes.items() if each.steps}

    def _process(self, key: Hashable) -> ProcessSteps | None:
        found = self.processes.get(key)
        if found is None and len(self.processes) >= MOST_PROCESSES:
            self._forget_small_ones()
        if found is None and len(self.processes) < MOST_PROCESSES:
            found = self.processes[key] = ProcessSteps()
        self.of_other_processes += found is None
        return found

    def _forget_small_ones(self) -> None:
        """Makes room: of the processes that have had no step so far, half go, those with the fewest events."""
        others = [key for key, each in self.processes.items() if not each.steps]
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
    """A step by the attributes of its span; times in ns."""
    phases = None
    if any(key in attributes for key in attribute_keys.PHASE_OF):
        found = {phase: attributes[key] for key, phase in attribute_keys.PHASE_OF.items() if key in attributes}
        found.pop(UNATTRIBUTED, None)
        phases = tuple(min(float(found.get(phase, 0.0)), duration / 1e9) for phase in PHASES)
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
