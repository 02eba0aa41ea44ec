"""Ranks from spans of a trace file or of a profile, or from the last steps of this process."""

from __future__ import annotations

import math
import re
import struct
from collections import deque
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import Segment
from otel_torchprof._files import attribute_keys
from otel_torchprof._files.event_columns import events_of_spans
from otel_torchprof._files.reading import read_events
from otel_torchprof._files.records import check_given_once
from otel_torchprof._process.give_way import with_pauses
from otel_torchprof.errors import TorchProfError

from .causes import with_lines_read
from .details import Details, StepsOfProcess
from .lines import Lines
from .step_list import MOST_PROCESSES, MOST_STEPS, NAN, ProcessSteps, StepList, step_row
from .steps import COUNTERS, PAUSES, PLACE_OF, Pause, Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_torchprof._encode.spans import SpanList
    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._files.trace_events import TraceEvents
    from otel_torchprof._model.step_spans import StepSpan

    from .line_reading import TakenSamples
    from .steps import OperatorTime

_PART = re.compile(r"\.\d{6}(?=\.)")
"""Matches the number in the name of a file that is one of a series."""


def read_ranks(
    paths: Sequence[str], watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None
) -> tuple[list[Rank], list[str]]:
    """The ranks in the files, in order, and problems of the files.

    Raises:
        TorchProfError: a file cannot be read, or has no steps.
    """
    check_given_once(paths)
    ranks: list[tuple[int | None, Rank]] = []
    problems: list[str] = []
    for parts in _recordings(paths):
        events = read_events(parts, watch)
        listed = steps_of(parts[0], events)
        ranks += _ranks_of(Path(parts[0]).name, events, listed)
        problems += events.problems
    return _named(ranks), problems


def rank_of_spans(name: str, spans: SpanList) -> tuple[Rank, list[str]]:
    """The rank of spans, as from a file with these spans, and what was left out.

    Raises:
        TorchProfError: there are no steps.
    """
    events = events_of_spans(spans)
    listed = steps_of(name, events)
    return _named(_ranks_of(name, events, listed))[0], events.problems


def _named(ranks: list[tuple[int | None, Rank]]) -> list[Rank]:
    """Names and sorts ranks, by their numbers if all have different ones."""
    numbers = [number for number, _ in ranks]
    if None not in numbers and len(set(numbers)) == len(numbers):
        ranks.sort(key=lambda item: item[0] or 0)
        for number, rank in ranks:
            rank.name = f"rank {number}"
    elif len({rank.name for _, rank in ranks}) < len(ranks):
        for place, (_, rank) in enumerate(ranks):
            rank.name += f" ({place})"
    return [rank for _, rank in ranks]


def _recordings(paths: Sequence[str]) -> list[list[str]]:
    """Groups files of one series, whose names differ only in their number."""
    files_by_name: dict[str, list[str]] = {}
    for path in paths:
        files_by_name.setdefault(_PART.sub("", path), []).append(path)
    return [sorted(parts) for parts in files_by_name.values()]


def steps_of(path: str, events: TraceEvents) -> StepList:
    """The steps of a recording; adds those that are left out to its problems.

    Raises:
        TorchProfError: there are no steps.
    """
    listed = StepList(events)
    events.problems += _left_out(path, listed)
    if not listed.processes:
        raise TorchProfError(
            f"{path!r} has {len(listed):,} events and no step: steps are known of loops with a backward pass; any other loop says where "
            "each ends, by TorchInstrumentor().step(), prof.step(), or a schedule of torch.profiler"
            + "".join(f"; {problem}" for problem in events.problems)
        )
    return listed


def _left_out(path: str, listed: StepList) -> list[str]:
    problems = []
    if listed.left_out:
        problems.append(f"{path!r}: {listed.left_out:,} steps after the first {MOST_STEPS:,} are left out")
    if listed.without_duration:
        problems.append(f"{path!r}: {listed.without_duration:,} steps that do not last are left out")
    if listed.of_other_processes:
        count = listed.of_other_processes
        problems.append(f"{path!r}: {count:,} events of processes beyond {MOST_PROCESSES:,} are left out")
    return problems


def _ranks_of(name: str, events: TraceEvents, listed: StepList) -> list[tuple[int | None, Rank]]:
    """The ranks of all processes with steps, each with its number."""
    details = Details(events, listed)
    operators = details.longest_operators()
    ranks = []
    for place, process in enumerate(listed.processes.values()):
        steps = details.steps(place)
        of_steps = operators[steps.first : steps.first + len(process.steps)]
        rank = rank_of_process(name, process, steps, of_steps, knows_gaps=details.knows_gaps(place))
        if len(listed.processes) == 1:
            rank.lacks_device_times = bool(listed.launches) and not listed.device_slices
            if listed.device_slices:
                rank.device = np.minimum(details.device_times(len(process.steps)), rank.seconds)
        rank.lines = details.lines(place)
        ranks.append((process.rank, with_lines_read(rank)))
    ranks[0][1].left_out = listed.left_out
    return ranks


def rank_of_process(
    name: str, process: ProcessSteps, steps: StepsOfProcess, operators: list[list[OperatorTime]], *, knows_gaps: bool
) -> Rank:
    """The steps of a process as columns."""
    rows = process.steps
    seconds = np.array([row.duration for row in rows]) / 1e9
    phases = np.array([row.phases for row in rows]) if process.has_phases else steps.phases
    numbers = [row.number for row in rows]
    unknown = np.full(len(rows), NAN)
    drained = np.minimum([row.drained for row in rows], seconds)
    return Rank(
        name=name,
        number=np.array(numbers, np.int64),
        start=steps.start,
        seconds=seconds,
        is_training=np.array([row.is_training for row in rows]),
        phases=_within(phases, seconds),
        is_derived=not process.has_phases,
        revision=np.array([row.revision for row in rows], np.int64),
        runnable=np.array([row.runnable for row in rows]),
        blocked=np.array([row.blocked for row in rows]),
        other_threads=np.array([row.other_threads for row in rows]),
        counters=np.array([row.counters for row in rows], np.float64).reshape(len(rows), len(COUNTERS)),
        memory=np.array([row.memory for row in rows], np.float64).reshape(len(rows), len(attribute_keys.MEMORY)),
        amounts=np.array([row.amounts for row in rows], np.float64).reshape(len(rows), len(attribute_keys.RATES)),
        gap=np.minimum(steps.gap, seconds) if knows_gaps else unknown,
        operating=np.minimum(steps.operating, seconds) if knows_gaps else unknown,
        device=seconds - drained,
        drained=drained,
        operators=operators,
        operations=steps.operations,
        pauses=sorted(process.pauses, key=lambda pause: pause.start),
        collectives=process.collectives.settled(),
        communicates=process.collectives.count > 0,
        events=process.events,
        dropped=process.dropped,
        step_rule=process.step_rule,
        has_twin_steps=len(set(numbers)) < len(numbers),
    )


def _within(phases: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Scales phases down to the duration of their step, which those of several threads, or a wrong file, may exceed."""
    total = phases.sum(axis=1)
    scale = np.where(total > seconds, seconds / np.maximum(total, 1e-12), 1.0)
    return phases * scale[:, None]


_MOST = 1_000
_SEGMENTS = tuple(Segment)
_OF_SPAN = (
    attribute_keys.REVISION,
    attribute_keys.RUNNABLE,
    *attribute_keys.COUNTERS,
    attribute_keys.BLOCKED,
    attribute_keys.OTHER_THREADS,
    attribute_keys.DRAINED,
    *attribute_keys.MEMORY,
    *attribute_keys.PHASE_OF,
)
"""The attributes of a step that are stored."""
_ROW = struct.Struct(f"<Bqqqq{len(_OF_SPAN)}f")
"""Segment, number, thread (-1 if unknown), begin (Unix ns), duration (ns), and attributes, NaN if unknown."""
_MOST_SAMPLES = 1 << 16


class LiveSteps:
    """The last 1,000 steps and segments between steps, 180 bytes each, and 65,536 samples of Python stacks, 29 bytes each.

    One thread may add, any thread read.
    """

    def __init__(self) -> None:
        self._rows: deque[bytes] = deque(maxlen=_MOST)
        self._samples: TakenSamples | None = None

    def add(self, spans: Iterable[StepSpan], samples: TakenSamples | None = None) -> None:
        """Adds spans of ended steps and of segments between steps, and samples."""
        if samples is not None:
            rows = [samples.rows] if self._samples is None else [self._samples.rows, samples.rows]
            self._samples = samples._replace(rows=np.concatenate(rows)[-_MOST_SAMPLES:])
        for span in with_pauses(deque((span for span in spans if span.segment is not None), maxlen=_MOST)):
            duration = span.end - span.start
            values = map(span.attributes.get, _OF_SPAN, repeat(NAN))
            kind = _SEGMENTS.index(span.segment)
            thread = -1 if span.thread is None else span.thread
            self._rows.append(_ROW.pack(kind, span.number, thread, span.start, duration, *values))

    def rank(self, *, events: int, dropped: int) -> Rank | None:
        """The rank of this process, with phases, lines and counters of the operating system; None without a step.

        Without operators: sums over the life of a process include events outside of steps.

        Args:
            events: number of recorded events.
            dropped: number of dropped events.
        """
        process = ProcessSteps(events=events, dropped=dropped)
        for row in tuple(self._rows):
            kind, number, thread, start, duration, *values = _ROW.unpack(row)
            segment = _SEGMENTS[kind]
            attributes = {key: value for key, value in zip(_OF_SPAN, values, strict=True) if not math.isnan(value)}
            if segment is Segment.STEP and duration > 0:
                process.thread = thread
                process.steps.append(step_row(start, duration, {attribute_keys.STEP: number, **attributes}))
            elif segment.span_name in PAUSES:
                process.pauses.append(Pause(segment.value, start, duration))
        if not process.steps:
            return None
        operators: list[list[OperatorTime]] = [[] for _ in process.steps]
        steps, samples = StepsOfProcess(process, 0), self._samples
        rank = rank_of_process("this process", process, steps, operators, knows_gaps=False)
        rank.communicates = bool(rank.phases[:, PLACE_OF["collective"]].any())
        if samples is not None:
            rank.lines = _lines(samples, process.thread, steps)
        return with_lines_read(rank)


def _lines(samples: TakenSamples, thread: int, steps: StepsOfProcess) -> tuple[Lines, ...]:
    """The lines that the loop's thread was in; -1: not known which one it is."""
    rows = samples.rows if thread < 0 else samples.rows[samples.rows["thread"] == thread]
    if not len(rows):
        return ()
    phase, stack = rows["phase"].astype(np.int64), rows["stack"].astype(np.int64)
    unknown, step = np.full(len(rows), -1, np.int64), steps.at(rows["time"])
    names = ("",)
    return (
        Lines(
            rows["time"],
            rows["duration"] / 1e9,
            step,
            phase,
            unknown,
            stack,
            samples.stacks,
            names,
            has_operators=False,
        ),
    )
