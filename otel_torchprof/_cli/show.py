"""``otel-torchprof show``: what is in a trace file, as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, UNATTRIBUTED
from otel_torchprof._encode.table import SORT_KEYS, format_time
from otel_torchprof._files import self_times
from otel_torchprof._files.attribute_keys import (
    AGGREGATED_COUNT,
    AGGREGATED_DURATION,
    COLLAPSED_COUNT,
    COLLAPSED_DURATION,
    PHASE_OF,
    STEP,
    UNFINISHED,
)
from otel_torchprof._files.chrome_events import SliceKind
from otel_torchprof._files.reading import read_events
from otel_torchprof._model.averages import MAX_NAMES, OTHER_NAMES, Average, NamedSums
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.phases import repeated_phases
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.step_spans import JOB_NAME
from otel_torchprof._model.tree import STEP_KEY, STEP_PREFIX, lifted
from otel_torchprof.errors import TorchProfError

from .recover import Traces
from .terminal import reading, say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._files.reading import Reading
    from otel_torchprof._files.self_times import Numbers, Row


# ---- What a trace file adds up to: averages by name, and its steps ----
# From columns, so that an event costs some bytes.

COLLAPSED = "(collapsed into others)"
"""The entry of what was too short for a span of its own, and is counted on another."""

WANTED = frozenset(
    (AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_COUNT, COLLAPSED_DURATION, STEP, UNFINISHED, *PHASE_OF)
)
"""The attributes that are looked at."""
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
class DisplayedStep:
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
    process: Hashable = None
    """That it is of, as the file tells processes apart."""


def read(path: str, watch: Callable[[ByteStream], None] = lambda _stream: None) -> tuple[TraceSums, list[str]]:
    """What a file adds up to, and what is to be said of it: nothing where all was read, and all is exact.

    ``watch`` gets the file, to see how far it has been read.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """
    sums = TraceSums()
    reading = read_events(path, sums, watch)
    sums.note_left_out(reading)
    return sums, reading.problems


class TraceSums:
    """Takes the events of a file one by one; memory does not grow with the file. For one thread."""

    wanted = WANTED

    def __init__(self) -> None:
        self._sums = NamedSums(OTHER_NAMES, lambda _name, _amounts: len(self._sums) < MOST_NAMES)
        self._tracks: dict[Hashable, int] = {}
        self._rows = self_times.SelfTimes(self._add_self_times, self._keys_displayed, self._leave_out_phases)
        self._phases: set[int] = set()
        self._collapsed_count = self._collapsed_time = 0
        self._spans: Counter[Hashable] = Counter()
        self._ranks: dict[Hashable, int] = {}
        self._added = self._of_devices = 0
        self.left_out = ""
        """What the file has besides, in words."""
        self.steps: list[DisplayedStep] = []
        """Unsorted, the first of them."""
        self.steps_left_out = 0
        """Those after them."""

    def __len__(self) -> int:
        return self._added + self._of_devices

    def note_left_out(self, reading: Reading) -> None:
        """The file has been read: what the averages do not have of it."""
        counts = reading.left_out + Counter({SliceKind.DEVICE.value: self._of_devices})
        found = [f"{what} ({count:,})" for what, count in counts.most_common() if count]
        self.left_out = ", ".join(found)

    @property
    def limits(self) -> list[str]:
        """Which limits the file exceeded, in words."""
        found = [f"not in the averages: {self.left_out}"] if self.left_out else []
        self._rows.settle()
        if self._rows.is_incomplete:
            found.append(f"self times do not see children that are more than {self_times.MOST_ROWS // 2:,} events away")
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
        *,
        process: Hashable = None,
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
            self._list(DisplayedStep(int(attributes[STEP]), start, duration, trace, is_unfinished, phases, process))
            if is_unfinished:
                return
        duration, own = self_times.span_times(duration, attributes)
        self._collapsed_count += int(attributes.get(COLLAPSED_COUNT, 0))
        self._collapsed_time += duration - own
        if name == OPERATORS_NAME:
            return
        count = int(attributes.get(AGGREGATED_COUNT, 1))
        self._append(name, count, (start, duration, own, -1, span_id, parent_id))

    def add_slice(
        self,
        name: str,
        start: int,
        duration: int,
        track: tuple[Any, Any],
        on_device: bool = False,
    ) -> None:
        """An event whose parent is the one around it on its track; times in ns. Those of devices are counted only."""
        if on_device:
            self._of_devices += 1
            return
        if name.startswith(STEP_PREFIX):
            self.add_step(name, start, duration, track[0])
            name = STEP_KEY
        number = self._tracks.get(track, -1)
        if number < 0 and len(self._tracks) < _MOST_TRACKS:
            number = self._tracks[track] = len(self._tracks)
        self._append(name, 1, (start, duration, duration, number, 0, 0))

    def add_step(self, name: str, start: int, duration: int, process: Hashable = None) -> None:
        """A step of a profile, for the list of steps only."""
        number = name.removeprefix(STEP_PREFIX)
        if number.isdecimal() and len(number) <= _MOST_DIGITS:
            self._list(DisplayedStep(int(number), start, duration, None, process=process))

    def name_rank(self, process: Hashable, rank: int) -> None:
        """The rank of a process; averages are of the whole file."""
        if len(self._ranks) < _MOST_TRACKS:
            self._ranks[process] = rank

    def ranks_of(self, steps: Sequence[DisplayedStep]) -> list[int | None]:
        """The rank that each step is of, in a file of several; None else, and where it is not known."""
        ranks = self._ranks if len(set(self._ranks.values())) > 1 else {}
        return [ranks.get(step.process) for step in steps]

    def spans_of(self, step: DisplayedStep) -> int | None:
        """How many spans its trace has; None where that is not known."""
        return None if step.trace is None else self._spans.get(step.trace)

    def averages(self) -> list[Average]:
        """Sums by name, as the names first came. Of an aggregate span, the spans that it stands for."""
        self._rows.settle()
        found = [Average(name, False, *sums) for name, sums in self._sums]
        if self._collapsed_count:
            found.append(Average(COLLAPSED, False, self._collapsed_count, self._collapsed_time, self._collapsed_time))
        return found

    def _list(self, step: DisplayedStep) -> None:
        if len(self.steps) < _MOST_STEPS:
            self.steps.append(step)
        else:
            self.steps_left_out += 1

    def _append(self, name: str, count: int, row: Row) -> None:
        self._added += 1
        key = self._sums.add(name[:_LONGEST_NAME], (count, row[1]))
        if name.startswith(PHASE_PREFIX) and name in self._sums:
            self._phases.add(key)
        self._rows.append(key, row)

    def _add_self_times(self, keys: Numbers, _starts: Numbers, own: Numbers) -> None:
        for index, time in zip(keys.tolist(), own.tolist(), strict=True):
            self._sums.sums[index][2] += time

    def _keys_displayed(self, keys: Numbers, parents: Numbers) -> Numbers:
        """The self time of a phase that is left out is that of what it is directly in."""
        is_left_out = np.zeros(len(keys), dtype=np.bool_)
        is_left_out[repeated_phases(keys, parents, self._are_phases(keys))] = True
        found: Numbers = np.where(is_left_out, keys[lifted(parents, is_left_out)], keys)
        return found

    def _leave_out_phases(self, keys: Numbers, parents: Numbers, durations: Numbers, rows: Numbers) -> None:
        """A phase in one of its name is a part of that: a trainer's around torch's own."""
        for at in repeated_phases(keys, parents, self._are_phases(keys), rows).tolist():
            sums = self._sums.sums[int(keys[at])]
            sums[0] -= 1
            sums[1] -= int(durations[at])

    def _are_phases(self, keys: Numbers) -> npt.NDArray[np.bool_]:
        return np.isin(keys, list(self._phases))


_KEYS = tuple(key for key in SORT_KEYS if "memory" not in key and "device" not in key)


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "show",
        help="print averages from a trace file",
        description="Prints the table of key_averages() from a trace file: Chrome JSON (of this package or "
        "torch.profiler) or OTLP (protobuf or JSON lines), compressed or not. An aggregate span counts "
        "as all the spans that it replaces. What the table leaves out (work of devices, arrows, counters) is "
        "counted on stderr. Exit status: 0 if the file was read completely, else 1: the "
        "readable part is printed, and the reason for the end.",
    )
    parser.add_argument("file", metavar="FILE", help="trace file")
    parser.add_argument(
        "--sort", default="self_cpu_time_total", choices=_KEYS, metavar="KEY", help="sort key: " + ", ".join(_KEYS)
    )
    parser.add_argument("--rows", type=int, default=50, metavar="N", help="rows of the table, -1 for all (default: 50)")
    parser.add_argument(
        "--steps",
        action="store_true",
        help="print the steps in order, with durations and phases, instead of averages",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Prints it; returns 1 where a part of the file could not be read.

    Raises:
        TorchProfError: nothing of it can be read, or it has no steps.
    """
    with Traces([options.file]) as traces, reading(traces.paths, quiet=options.quiet, times=1) as watch:
        sums, problems = read(traces.paths[0], partial(watch, traces.paths[0]))
    problems = [*traces.problems, *map(traces.named, problems)]
    notes = [f"{options.file!r}: {limit}" for limit in sums.limits]
    try:
        if options.steps:
            text = _steps(sums, options)
        else:
            from otel_torchprof._profile.events import averages_list, printable_table

            text = printable_table(averages_list(sums.averages()), options.sort, options.rows)
        show(text)
    finally:
        for line in (*problems, *notes):
            say(line)
    return 1 if problems else 0


def _steps(sums: TraceSums, options: argparse.Namespace) -> str:
    steps, limit = sorted(sums.steps, key=lambda step: (step.start, step.number)), options.rows
    if not steps:
        raise TorchProfError(f"{options.file!r} has no steps; without --steps its averages are shown")
    phases = [phase for phase in (*PHASES, UNATTRIBUTED) if any(phase in step.phases for step in steps)]
    heads = "".join(f"  {phase:>{_width(phase)}}" for phase in phases)
    ranks = sums.ranks_of(steps)
    has_ranks = any(rank is not None for rank in ranks)
    first = f"{'Rank':>6}  " if has_ranks else ""
    lines = [f"{first}{'Step':>8}  {'Started':>14}  {'Duration':>12}{heads}  {'Spans':>10}"]
    for step, rank in list(zip(steps, ranks, strict=True))[: None if limit < 0 else limit]:
        spans = sums.spans_of(step)
        started = format_time((step.start - steps[0].start) / 1000)
        displayed = "" if spans is None else f"{spans:,}"
        mark = "  unfinished" if step.is_unfinished else ""
        took = format_time(step.duration / 1000)
        times = ((phase, step.phases.get(phase)) for phase in phases)
        columns = "".join(
            f"  {'' if time is None else format_time(time * 1e6):>{_width(phase)}}" for phase, time in times
        )
        first = f"{'' if rank is None else rank:>6}  " if has_ranks else ""
        lines.append(f"{first}{step.number:>8}  {started:>14}  {took:>12}{columns}  {displayed:>10}{mark}".rstrip())
    if 0 <= limit < len(steps):
        lines.append(f"and {len(steps) - limit:,} more: --rows -1")
    durations = sorted(step.duration / 1000 for step in steps if not step.is_unfinished)
    if durations:
        middle, longest = format_time(durations[len(durations) // 2]), format_time(durations[-1])
        lines.append(f"Steps: {len(durations):,}, median {middle}, longest {longest}")
    return "\n".join((*lines, ""))


def _width(phase: str) -> int:
    """Of its column."""
    return max(len(phase), 9)
