"""``otel-torchprof show``: the averages, by name or by module, the steps or the sampled lines of a trace file, as a table; or a trace."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof import config
from otel_torchprof._answers.steps import PAUSES
from otel_torchprof._columns.phases import LOADED, PHASE_PREFIX, PHASES, UNATTRIBUTED
from otel_torchprof._encode.table import SORT_KEYS, brief_time, chosen, format_time
from otel_torchprof._files.attribute_keys import AMOUNTS, IS_ASYNC, PHASE_OF, RATES, STEP, UNFINISHED
from otel_torchprof._files.chrome_events import SliceKind
from otel_torchprof._files.reading import read_events
from otel_torchprof._files.trace_events import TraceEventKind, step_number
from otel_torchprof._model.averages import MAX_NAMES, OTHER_NAMES, Average, collapsed_average
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.phases import repeated_phases
from otel_torchprof._model.step_spans import JOB_NAME
from otel_torchprof._model.tree import STEP_KEY, STEP_PREFIX, lifted
from otel_torchprof.errors import TorchProfError

from .recover import Traces
from .terminal import brief, percent, reading, say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from otel_torchprof._columns.arrays import Flags
    from otel_torchprof._columns.batch import Array
    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._files.trace_events import TraceEvents
    from otel_torchprof._profile.events import EventList
    from otel_torchprof._profile.function_event_avg import FunctionEventAvg


# ---- Sums over a trace file: averages by name, and its steps ----

MOST_NAMES = MAX_NAMES
"""The most entries; further names share one."""
_MOST_STEPS = 50_000
_HALF = 32


@dataclass(frozen=True, slots=True)
class DisplayedStep:
    """A step in the file, or what is between steps; times in ns."""

    number: int
    start: int
    duration: int
    spans: int | None = None
    """The number of spans of its trace; None in a file without trace ids."""
    is_unfinished: bool = False
    """It had not ended when the recording did."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase, in the order of :data:`PHASES`; empty in a file without phases."""
    rank: int | None = None
    """None if it is not known, or if the file has only one."""
    amounts: tuple[float | None, ...] = (None,) * len(RATES)
    """Tokens and samples of its batches, floating-point operations, and the share of the peak that they reach; None if it is not known."""
    pause: str = ""
    """``checkpoint`` or ``evaluation``, of what is between steps; empty of a step."""


def read(
    *paths: str, watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None
) -> tuple[TraceSums, list[str]]:
    """The sums over files, and their problems: none if all was read and all sums are exact.

    ``watch`` gets each open file, to display how much has been read.

    Raises:
        TorchProfError: nothing of one could be read; names the file, the place and the way out.
    """
    events = read_events(paths, watch)
    return TraceSums(events), events.problems


class TraceSums:
    """Sums over events, and their steps. The length is the number of events."""

    def __init__(self, events: TraceEvents) -> None:
        self._count = int((events.kind != TraceEventKind.STEP).sum())
        of_devices = int((events.kind == TraceEventKind.WORK).sum())
        counts = events.left_out + Counter({SliceKind.DEVICE.value: of_devices})
        self.left_out = ", ".join(f"{kind} ({count:,})" for kind, count in counts.most_common() if count)
        """Kinds of events that are not in the averages, with their counts, in words."""
        self.pauses = _pauses(events)
        """What is between steps, such as checkpoints."""
        self.steps, self.steps_left_out = _listed_steps(events)
        """The first steps of the file, in its order, and the number of those after them."""
        self.samples = events.samples
        """Samples of Python stacks; None: there are none."""
        self._averages = _averages(events)

    def __len__(self) -> int:
        return self._count

    @property
    def limits(self) -> list[str]:
        """The limits that the file exceeded, in words."""
        limits = [f"not in the averages: {self.left_out}"] if self.left_out else []
        if any(average.name == OTHER_NAMES for average in self._averages):
            limits.append(f"there are more than {MOST_NAMES:,} names; later ones are added up as {OTHER_NAMES!r}")
        if self.steps_left_out:
            limits.append(f"{self.steps_left_out:,} steps after the first {_MOST_STEPS:,} are not listed")
        return limits

    def averages(self) -> list[Average]:
        """Averages by name, in the order in which the names first came.

        Without the job, steps that had not ended and shared operator roots, as those of a profile. An aggregate span counts as
        the spans that it replaces.
        """
        return self._averages


def _averages(events: TraceEvents) -> list[Average]:
    is_counted = _are_counted(events)
    totals, key, names = events.totals(), *_keys(events)
    own = events.self_times(totals, is_counted)
    own[_marked(events, IS_ASYNC)] = 0  # as in torch
    is_phase = np.array([name.startswith(PHASE_PREFIX) for name in names], np.bool_)[key] & is_counted
    calls = np.ones(len(events), np.int64)
    calls[events.reductions.row] = events.reductions.calls
    parent = np.where(is_counted[events.parent], events.parent, -1)
    is_repeated = np.zeros(len(events), np.bool_)
    is_repeated[repeated_phases(key, parent, is_phase)] = True  # torch's own in a trainer's, for example
    key_of_self = np.where(is_repeated, key[lifted(parent, is_repeated)], key)
    rows = np.flatnonzero(is_counted & ~is_repeated)
    sums = (
        _sums(key[rows], calls[rows], len(names)),
        _sums(key[rows], totals[rows], len(names)),
        _sums(key_of_self[is_counted], own[is_counted], len(names)),
    )
    averages = [Average(name, False, *of_name) for name, *of_name in zip(names, *sums, strict=True) if of_name[0]]
    collapsed = collapsed_average(events.reductions.collapsed, events.reductions.collapsed_duration)
    return [*averages, collapsed] if collapsed.calls else averages


def _are_counted(events: TraceEvents) -> Flags:
    """A mask of the events in the averages."""
    is_counted: Flags = (events.kind == TraceEventKind.SPAN) | (events.kind == TraceEventKind.SLICE)
    is_beside = events.named(lambda name: name in {JOB_NAME, OPERATORS_NAME})
    is_counted &= ~(is_beside & (events.kind == TraceEventKind.SPAN))
    unfinished = _marked(events, UNFINISHED)
    is_counted[unfinished[events.step_spans()[unfinished]]] = False
    return is_counted


def _marked(events: TraceEvents, attribute: str) -> Array:
    """The events for which an attribute is true."""
    rows, values = events.attributes.get(attribute, (np.empty(0, np.int64), ()))
    marked: Array = rows[np.array(values, np.bool_)]
    return marked


def _keys(events: TraceEvents) -> tuple[Array, list[str]]:
    """The number of each event's entry, and the names of the entries: steps of a profile have one."""
    names = list(events.names[:MOST_NAMES])
    key = np.minimum(events.name, MOST_NAMES)
    is_step = events.named(lambda name: name.startswith(STEP_PREFIX)) & (events.kind == TraceEventKind.SLICE)
    steps = np.flatnonzero(is_step)
    if len(events.names) > MOST_NAMES:
        names.append(OTHER_NAMES)
    if steps.size:
        key[steps] = len(names)
        names.append(STEP_KEY)
    return key, names


def _sums(keys: Array, values: Array, count: int) -> list[int]:
    """The sum of the values of each key, which no file can make overflow."""
    high, low = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(high, keys, values >> _HALF)
    np.add.at(low, keys, values & ((1 << _HALF) - 1))
    return [(of_high << _HALF) + of_low for of_high, of_low in zip(high.tolist(), low.tolist(), strict=True)]


def _listed_steps(events: TraceEvents) -> tuple[list[DisplayedStep], int]:
    """The first steps, and the number of those after them."""
    rows = np.flatnonzero(events.steps())
    first = rows[:_MOST_STEPS]
    spans = np.bincount(events.trace[events.kind == TraceEventKind.SPAN], minlength=len(events.traces))
    ranks = events.ranks if len(set(events.ranks.values())) > 1 else {}
    steps = []
    for row, attributes in zip(first.tolist(), events.attributes_of(first), strict=True):
        trace = events.trace.item(row)
        number = step_number(events.names[events.name.item(row)])
        steps.append(
            DisplayedStep(
                int(attributes[STEP]) if number is None else number,
                events.start.item(row),
                events.duration.item(row),
                None if events.traces[trace] is None else spans.item(trace),
                bool(attributes.get(UNFINISHED)),
                {phase: attributes[key] for key, phase in PHASE_OF.items() if key in attributes},
                ranks.get(events.tracks[events.track.item(row)][0]),
                tuple(attributes.get(key) for key in RATES),
            )
        )
    return steps, len(rows) - len(first)


def _pauses(events: TraceEvents) -> list[DisplayedStep]:
    """The first checkpoints and evaluations between steps."""
    is_pause = events.named(lambda name: name in PAUSES) & (events.kind == TraceEventKind.SPAN)
    rows = np.flatnonzero(is_pause)[:_MOST_STEPS]
    ranks = events.ranks if len(set(events.ranks.values())) > 1 else {}
    return [
        DisplayedStep(
            -1,
            events.start.item(row),
            events.duration.item(row),
            phases={phase: attributes[key] for key, phase in PHASE_OF.items() if key in attributes},
            rank=ranks.get(events.tracks[events.track.item(row)][0]),
            pause=PAUSES[events.names[events.name.item(row)]],
        )
        for row, attributes in zip(rows.tolist(), events.attributes_of(rows), strict=True)
    ]


DEFAULT_SORT = "self_cpu_time_total"
_KEYS = tuple(key for key in SORT_KEYS if "memory" not in key and "device" not in key)
_MODULE_KEYS = (*SORT_KEYS, "flops")
"""Sort keys of averages by module or shape."""
_FIELDS = ("key", *(key for key in _MODULE_KEYS if not key.endswith("_time")))
"""Members of an average in JSON."""
_GROUPS = {
    "module": ({"group_by_module": True}, (*_FIELDS, "module", "module_class", "is_backward", "self_flops")),
    "shape": ({"group_by_input_shape": True}, (*_FIELDS, "input_shapes")),
}
"""Arguments of ``key_averages`` for a value of ``--by``, and the members of such an average in JSON."""


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
    parser.add_argument("files", metavar="FILE", nargs="+", help="trace file; several are those of one recording")
    parser.add_argument(
        "--by",
        default="name",
        choices=("name", *_GROUPS),
        metavar="name|module|shape",
        help="what averages are of: names (default), nn.Modules, or names with input shapes; the latter two with memory and FLOPs",
    )
    parser.add_argument(
        "--sort",
        default=DEFAULT_SORT,
        choices=_MODULE_KEYS,
        metavar="KEY",
        help=f"sort key: {', '.join(_KEYS)}; by module or shape also {', '.join(k for k in _MODULE_KEYS if k not in _KEYS)}",
    )
    parser.add_argument(
        "--peak-flops",
        type=_peak,
        metavar="N",
        help="the device's peak in FLOP/s, of a rank, such as 312e12: --steps then has the share that matrix products, convolutions "
        "and attention reached (MFU), where operators were recorded with shapes (default: as OTEL_TORCHPROF_DEVICE=peak_flops=N says, else as in the file)",
    )
    parser.add_argument("--rows", type=int, default=50, metavar="N", help="rows of the table, -1 for all (default: 50)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--steps",
        action="store_true",
        help="print the steps in order, with durations and phases, instead of averages",
    )
    what.add_argument(
        "--lines",
        action="store_true",
        help="print the lines in which sampled Python threads were, by time, and the program's lines that called them",
    )
    what.add_argument(
        "--trace",
        metavar="ID|slowest",
        help="print the spans of a trace as a tree: of an id, or its first digits, or of the slowest request or step",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print averages, times in microseconds, steps, times in nanoseconds, or lines as JSON",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def _peak(text: str) -> float:
    import argparse

    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number of FLOP/s, such as 312e12")


def run(options: argparse.Namespace) -> int:
    """Prints the table; returns 1 if a part of a file could not be read, else 0.

    Raises:
        TorchProfError: nothing of a file can be read, or it has not the steps, samples or modules that are asked for.
    """
    found = answer_of(options)
    try:
        show(found.text(options))
    finally:
        for line in (*found.problems, *found.notes):
            say(line)
    return int(found.is_partial)


class FileSums(NamedTuple):
    """What was read for ``show``."""

    text: Callable[[argparse.Namespace], str]
    """Returns it as the options say: as a table, or as JSON. Raises TorchProfError if the file has none of what is asked for."""
    problems: list[str]
    notes: list[str]
    is_partial: bool
    """Whether a part of a file could not be read."""


def answer_of(options: argparse.Namespace) -> FileSums:
    """Reads the files.

    Raises:
        TorchProfError: nothing of a file can be read, or options exclude each other.
    """
    name = ", ".join(map(repr, options.files))
    if options.peak_flops is not None and not options.steps:
        raise TorchProfError("--peak-flops is for the column MFU: use it with --steps")
    if options.by in _GROUPS:
        return _grouped(options)
    if options.sort not in _KEYS:
        raise TorchProfError(f"--sort {options.sort} needs --by module or shape; without it: {', '.join(_KEYS)}")
    if options.trace is not None:
        return _one_trace(options, name)
    with Traces(options.files) as traces, reading(traces.paths, quiet=options.quiet) as watch:
        sums, problems = read(*traces.paths, watch=watch)
    problems = [*traces.problems, *map(traces.named, problems)]
    notes = [] if options.lines else [f"{name}: {limit}" for limit in sums.limits]
    return FileSums(partial(_text, sums, name), problems, notes, bool(problems))


def _one_trace(options: argparse.Namespace, name: str) -> FileSums:
    """The spans of a trace."""
    from . import show_trace

    if options.json:
        raise TorchProfError("--trace prints no JSON: `otel-torchprof sql --json` has the events of a trace")
    with Traces(options.files) as traces, reading(traces.paths, quiet=options.quiet) as watch:
        events = read_events(traces.paths, watch, show_trace.WANTED)
    problems = [*traces.problems, *map(traces.named, events.problems)]
    text = partial(show_trace.text_of, events, name, options.trace)
    return FileSums(lambda given: text(given.rows), problems, [], bool(problems))


def _grouped(options: argparse.Namespace) -> FileSums:
    """The averages by module or shape of the file as a profile."""
    from otel_torchprof._profile.loaded import checked_limit, load_watched

    if options.steps or options.lines or options.trace is not None:
        raise TorchProfError("--steps, --lines and --trace print no averages, which --by is about: use one of them")
    file, *more = options.files
    if more:
        raise TorchProfError(f"--by {options.by} reads one file, and {len(more) + 1} are given: use it for each")
    with Traces([file]) as traces, reading(traces.paths, quiet=options.quiet) as watch:
        prof = load_watched(traces.paths[0], checked_limit(None), partial(watch, traces.paths[0]))
    arguments, fields = _GROUPS[options.by]
    try:
        averages = prof.key_averages(**arguments)
    except TorchProfError as error:
        raise TorchProfError(f"{file!r}: {error}") from error
    if options.by == "shape" and not any(average.input_shapes for average in averages):
        raise TorchProfError(
            f"{file!r}: no input shapes were recorded: use profile(record_shapes=True) or run --shapes"
        )
    notes = [f"{file!r}: {note}" for note in prof.health.notes]
    is_partial = bool(traces.problems) or prof.is_partial
    return FileSums(partial(_averages_text, averages, fields), traces.problems, notes, is_partial)


def _averages_text(averages: EventList[FunctionEventAvg], fields: Sequence[str], options: argparse.Namespace) -> str:
    """The averages as a table, or as JSON with these fields."""
    from otel_torchprof._profile.events import printable_table

    if not options.json:
        return printable_table(averages, options.sort, options.rows)
    ordered = chosen(averages, options.sort, top_level_only=False)
    found = [{field: getattr(average, field) for field in fields} for average in ordered]
    for average in found:
        if "input_shapes" in average:
            average["input_shapes"] = str(
                average["input_shapes"]
            )  # as torch prints them: lists of tensors are lists too
    return json.dumps(found, indent=1) + "\n"


def _text(sums: TraceSums, name: str, options: argparse.Namespace) -> str:
    if options.lines:
        from . import show_lines

        return show_lines.text_of(sums.samples, name, options.rows, as_json=options.json)
    if options.steps:
        return _steps(sums, name, options)
    from otel_torchprof._profile.events import averages_list

    return _averages_text(averages_list(sums.averages()), _FIELDS, options)


def _steps(sums: TraceSums, name: str, options: argparse.Namespace) -> str:
    limit, steps = options.rows, sorted((*sums.steps, *sums.pauses), key=lambda step: (step.start, step.number))
    if not sums.steps:
        raise TorchProfError(f"{name} has no steps; without --steps its averages are shown")
    if options.json:
        return json.dumps([_json(step) for step in steps], indent=1) + "\n"
    phases = [phase for phase in (*PHASES, UNATTRIBUTED) if any(phase in step.phases for step in steps)]
    peak = options.peak_flops or config.PEAK_FLOPS.read()
    rates = [at for at in range(len(_RATES)) if _rate(steps, at, peak)]
    heads = "".join(f"  {name:>{_width(name)}}" for name in (*phases, *(_RATES[at] for at in rates)))
    has_ranks = any(step.rank is not None for step in steps)
    first = f"{'Rank':>6}  " if has_ranks else ""
    width = max(8, *(len(step.pause) for step in steps))
    lines = [f"{first}{'Step':>{width}}  {'Started':>14}  {'Duration':>12}{heads}  {'Spans':>10}"]
    for step in steps[: None if limit < 0 else limit]:
        started = format_time((step.start - steps[0].start) / 1000)
        displayed = "" if step.spans is None else f"{step.spans:,}"
        mark = "  unfinished" if step.is_unfinished else ""
        took = brief_time(step.duration / 1000)
        times = ((phase, step.phases.get(phase)) for phase in phases)
        columns = "".join(
            f"  {'' if time is None else brief_time(time * 1e6):>{_width(phase)}}" for phase, time in times
        )
        columns += "".join(f"  {_rate([step], at, peak):>9}" for at in rates)
        first = f"{'' if step.rank is None else step.rank:>6}  " if has_ranks else ""
        label = step.pause or step.number
        lines.append(f"{first}{label:>{width}}  {started:>14}  {took:>12}{columns}  {displayed:>10}{mark}".rstrip())
    if 0 <= limit < len(steps):
        lines.append(f"and {len(steps) - limit:,} more: --rows -1")
    durations = sorted(step.duration / 1000 for step in sums.steps if not step.is_unfinished)
    if durations:
        middle, longest = brief_time(durations[len(durations) // 2]), brief_time(durations[-1])
        whole = [step for step in sums.steps if not step.is_unfinished]
        speeds = "".join(f", {_rate(whole, at, peak)} {_RATES[at]}" for at in rates)
        lines.append(f"Steps: {len(durations):,}, median {middle}, longest {longest}{speeds}")
    return "\n".join((*lines, ""))


def _json(step: DisplayedStep) -> dict[str, Any]:
    """A step as JSON values; times in ns, phases in seconds."""
    members = asdict(step)
    amounts = zip(("tokens", "samples", "flops", "mfu"), members.pop("amounts"), strict=True)
    return {**members, **dict(amounts)}


_RATES = ("tokens/s", "samples/s", "FLOP/s", "MFU")


def _rate(steps: Sequence[DisplayedStep], at: int, peak: float | None) -> str:
    """An entry of :data:`_RATES` for those steps of which it is known; of several ranks, all together. Empty without any."""
    amounts = ((_amount(step, at, peak), step.duration) for step in steps if step.duration)
    known = [(amount, duration) for amount, duration in amounts if amount is not None]
    if not known:
        return ""
    rate = sum(amount for amount, _ in known) / (sum(duration for _, duration in known) / 1e9)
    if at == len(AMOUNTS):
        return percent(rate)
    rate *= len({step.rank for step in steps})
    if at < len(LOADED):
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"  # noqa: PLR2004 - three digits
    return brief(rate)


def _amount(step: DisplayedStep, at: int, peak: float | None) -> float | None:
    """What the rate is of; for MFU, the seconds in which the peak would do what the step did."""
    if at < len(AMOUNTS):
        return step.amounts[at]
    *_, flops, share = step.amounts
    if peak is not None:
        return None if flops is None else flops / peak
    return None if share is None else share * step.duration / 1e9


def _width(phase: str) -> int:
    """The width of a phase's column."""
    return max(len(phase), 9)
