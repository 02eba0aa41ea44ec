"""``otel-torchprof show``: the averages or the steps of a trace file, as a table."""

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


# ---- Sums over a trace file: averages by name, and its steps ----
# Events are in columns, so that one costs only some bytes.

COLLAPSED = "(collapsed into others)"
"""The entry of spans that were collapsed into their parents."""

USED_ATTRIBUTES = frozenset(
    (AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_COUNT, COLLAPSED_DURATION, STEP, UNFINISHED, *PHASE_OF)
)
"""The attributes that the sums use."""
MOST_NAMES = MAX_NAMES
"""The most entries; further names share one. Names are cut after :data:`_LONGEST_NAME` characters."""
_LONGEST_NAME = 500
_MOST_TRACKS = 10_000
"""Events of further tracks have no parents."""
_MOST_TRACES = 50_000
"""The most traces whose spans are counted."""
_MOST_STEPS = 50_000
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class DisplayedStep:
    """A step in the file; times in ns."""

    number: int
    start: int
    duration: int
    trace: Hashable
    """The id of its trace; None in a file without trace ids."""
    is_unfinished: bool = False
    """It had not ended when the recording did."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase, in the order of :data:`PHASES`; empty in a file without phases."""
    process: Hashable = None
    """The key of its process in the file."""


def read(path: str, watch: Callable[[ByteStream], None] = lambda _stream: None) -> tuple[TraceSums, list[str]]:
    """The sums over a file, and its problems: none if all was read and all sums are exact.

    ``watch`` gets the open file, to display how much has been read.

    Raises:
        TorchProfError: nothing of it could be read; names the file, the place and the way out.
    """
    sums = TraceSums()
    reading = read_events(path, sums, watch)
    sums.note_left_out(reading)
    return sums, reading.problems


class TraceSums:
    """Adds up the events of a file one by one; memory does not grow with the file. For one thread."""

    used_attributes = USED_ATTRIBUTES

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
        """Kinds of events that are not in the averages, with their counts, in words."""
        self.steps: list[DisplayedStep] = []
        """The first steps of the file, unsorted."""
        self.steps_left_out = 0
        """Number of steps after these."""

    def __len__(self) -> int:
        return self._added + self._of_devices

    def note_left_out(self, reading: Reading) -> None:
        """Notes which events of the file the averages do not include; call it once the file has been read."""
        counts = reading.left_out + Counter({SliceKind.DEVICE.value: self._of_devices})
        self.left_out = ", ".join(f"{kind} ({count:,})" for kind, count in counts.most_common() if count)

    @property
    def limits(self) -> list[str]:
        """The limits that the file exceeded, in words."""
        limits = [f"not in the averages: {self.left_out}"] if self.left_out else []
        self._rows.settle()
        if self._rows.is_incomplete:
            limits.append(
                f"self times do not see children that are more than {self_times.MOST_ROWS // 2:,} events away"
            )
        if OTHER_NAMES in self._sums:
            limits.append(f"there are more than {MOST_NAMES:,} names; later ones are added up as {OTHER_NAMES!r}")
        if self.steps_left_out:
            limits.append(f"{self.steps_left_out:,} steps after the first {_MOST_STEPS:,} are not listed")
        return limits

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
        """Adds a span. The averages leave out the job span, unfinished steps and shared operator roots, as those of a profile do.

        Args:
            name: its name.
            start: ns.
            duration: ns.
            ids: its id, that of its parent (0: none), and its trace.
            attributes: the :data:`USED_ATTRIBUTES` that it has.
            process: the key of its process.
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
        """Adds an event whose parent is the event that encloses it on its track; times in ns. Device events are only counted."""
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
        """Adds a step of a profile to the list of steps only; times in ns."""
        number = name.removeprefix(STEP_PREFIX)
        if number.isdecimal() and len(number) <= _MOST_DIGITS:
            self._list(DisplayedStep(int(number), start, duration, None, process=process))

    def name_rank(self, process: Hashable, rank: int) -> None:
        """Sets the rank of a process, for the list of steps; averages are over the whole file."""
        if len(self._ranks) < _MOST_TRACKS:
            self._ranks[process] = rank

    def ranks_of(self, steps: Sequence[DisplayedStep]) -> list[int | None]:
        """The rank of each step; None if it is not known, or if the file has only one rank."""
        ranks = self._ranks if len(set(self._ranks.values())) > 1 else {}
        return [ranks.get(step.process) for step in steps]

    def spans_of(self, step: DisplayedStep) -> int | None:
        """The number of spans of a step's trace; None if not known."""
        return None if step.trace is None else self._spans.get(step.trace)

    def averages(self) -> list[Average]:
        """Averages by name, in the order in which the names first came. An aggregate span counts as the spans that it replaces."""
        self._rows.settle()
        averages = [Average(name, False, *sums) for name, sums in self._sums]
        if self._collapsed_count:
            averages.append(
                Average(COLLAPSED, False, self._collapsed_count, self._collapsed_time, self._collapsed_time)
            )
        return averages

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

    def _add_self_times(self, keys: Numbers, _starts: Numbers, self_times_of_rows: Numbers) -> None:
        for index, time in zip(keys.tolist(), self_times_of_rows.tolist(), strict=True):
            self._sums.sums[index][2] += time

    def _keys_displayed(self, keys: Numbers, parents: Numbers) -> Numbers:
        """For each event, the name that its self time counts for: its own, or that of the parent for a repeated phase."""
        is_left_out = np.zeros(len(keys), dtype=np.bool_)
        is_left_out[repeated_phases(keys, parents, self._are_phases(keys))] = True
        displayed: Numbers = np.where(is_left_out, keys[lifted(parents, is_left_out)], keys)
        return displayed

    def _leave_out_phases(self, keys: Numbers, parents: Numbers, durations: Numbers, rows: Numbers) -> None:
        """Subtracts phases that are inside one of the same name, such as torch's own inside a trainer's."""
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
    """Prints the table; returns 1 if a part of the file could not be read, else 0.

    Raises:
        TorchProfError: nothing of the file can be read, or ``--steps`` is given and it has no steps.
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
    """The width of a phase's column."""
    return max(len(phase), 9)
