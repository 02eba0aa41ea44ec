"""``otel-torchprof show``: what is in a trace file, as a table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED
from otel_torchprof._encode.table import SORT_KEYS, format_time
from otel_torchprof.errors import TorchProfError

from .progress import reading
from .recover import Traces
from .terminal import say, show
from .trace_sums import read

if TYPE_CHECKING:
    import argparse

    from .trace_sums import TraceSums

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
            from otel_torchprof._events.averages_list import averages_list, printable_table

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
