"""``otel-torchprof diff``: what takes more or less time in one recording, or one command, than in another."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._export.file import check_is_no_input
from otel_torchprof.errors import TorchProfError

from .explain_command import add_form
from .interleaved import FEWEST_ROUNDS, CommandError, InterleavedRuns
from .terminal import reading, say, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._answers.difference import Difference

_SLOWER, _UNKNOWN = 1, 3
_DESCRIPTION = """\
Reports which operators, phases, modules and calls take more or less time per step in AFTER than in BEFORE, and where in the
step; only significant differences are listed. Reads Chrome JSON (of this package or torch.profiler) and OTLP, compressed or not.
With --interleave, runs two commands by turns, records each run, and compares the pairs: that finds smaller differences, also on
a busy machine. Exit status: 0; 1 if steps became slower; 3 if that cannot be judged, or a part of a file cannot be read; that of
a command that fails.

examples:
  otel-torchprof diff before.json.gz after.json.gz
  otel-torchprof diff --interleave 10 -- train.py --fused 0 -- train.py --fused 1
  otel-torchprof diff --interleave 20 --fail-over 3% -- python old/train.py -- python new/train.py"""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "diff",
        help="report what became slower between two trace files or two commands",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="otel-torchprof diff [options] (BEFORE AFTER | --interleave N -- COMMAND -- COMMAND)",
    )
    parser.add_argument("before", metavar="BEFORE", help="trace file before the change; with --interleave a command")
    parser.add_argument("after", metavar="AFTER", help="trace file after the change; with --interleave a command")
    parser.add_argument(
        "--fail-over",
        type=_fraction,
        metavar="PERCENT",
        help="exit with status 1 only if steps became slower by more than this, such as 5%%",
    )
    parser.add_argument(
        "--interleave",
        type=_rounds,
        metavar="N",
        help=f"run two commands N times each by turns, at least {FEWEST_ROUNDS}: script, -m module or python script, with "
        "arguments",
    )
    parser.add_argument(
        "--detail",
        choices=[detail for detail in config.DETAILS if detail not in {"off", "metrics"}],
        default="ops",
        help="level of detail of --interleave (default: ops)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder for the traces and output of --interleave (default: deleted); rounds that are complete there are not run again",
    )
    parser.add_argument("--html", metavar="PATH", help="write an HTML page of the differences too; of two files only")
    add_form(parser)


def with_commands(words: Sequence[str]) -> list[str]:
    """The arguments of the program, with each command of ``--interleave`` as one quoted argument."""
    is_of_commands = words[:1] == ["diff"] and any(word.startswith("--interleave") for word in words)
    if not is_of_commands or "--" not in words:
        return list(words)
    at = words.index("--")
    commands: list[list[str]] = []
    for word in words[at:]:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return [*words[:at], "--", *map(shlex.join, commands)]


def run(options: argparse.Namespace) -> int:
    """Prints the differences; returns 0, 1 if steps became slower, 3 if that cannot be judged, or the status of a failed command."""
    try:
        difference = _compared(options)
    except CommandError as error:
        say(str(error))
        return error.status
    except (TorchProfError, OSError) as error:
        say(str(error))
        return _UNKNOWN
    show(_text_of(difference, options))
    for problem in difference.problems:
        say(problem)
    limit = options.fail_over or 0.0
    if difference.is_slower_by(limit):
        if options.fail_over is not None:
            say(f"what is listed adds {difference.slowdown:.1%} to a step, and --fail-over allows {limit:.1%}")
        return _SLOWER
    return 0 if difference.can_judge(limit) and not difference.problems else _UNKNOWN


def _compared(options: argparse.Namespace) -> Difference:
    if options.interleave is not None:
        if options.html:
            raise TorchProfError(
                "--html is a page of two files: use it without --interleave, or with -o DIR, of its files"
            )
        return InterleavedRuns((options.before, options.after), options).difference()
    from otel_torchprof._answers.diff import diff

    if options.html:
        check_is_no_input(options.html, [options.before, options.after])
    with reading([options.before, options.after], quiet=options.quiet, times=2 if options.html else 1) as watch:
        if not options.html:
            return diff(options.before, options.after, watch)
        from otel_torchprof._profile.report_files import write_diff_report

        return write_diff_report(options.before, options.after, options.html, watch)


def _text_of(difference: Difference, options: argparse.Namespace) -> str:
    from otel_torchprof._answers.difference import as_markdown, as_text

    if options.json:
        return json.dumps(difference.as_json(), indent=1) + "\n"
    return as_markdown(difference) if options.markdown else as_text(difference)


def _rounds(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) >= FEWEST_ROUNDS:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no number of rounds: a whole number from {FEWEST_ROUNDS}, since with fewer any difference may be chance"
    )


def _fraction(text: str) -> float:
    try:
        fraction = float(text.removesuffix("%")) / 100
    except ValueError:
        fraction = math.nan
    if not text.endswith("%") or not 0 <= fraction < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage, such as 5%")
    return fraction
