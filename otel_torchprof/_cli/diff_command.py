"""``otel-torchprof diff``: what takes more or less time in one recording than in another."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from .explain_command import add_form
from .terminal import reading, say, show

if TYPE_CHECKING:
    from otel_torchprof._answers.diff import Difference

_FAILED = 1


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "diff",
        help="report what became slower between two trace files",
        description="Reports which operators, phases, modules and calls take more or less time per step in AFTER "
        "than in BEFORE, and where in the step; only significant differences are listed. Reads Chrome "
        "JSON (of this package or torch.profiler) and OTLP, compressed or not. Exit status: 0; 1 if the "
        "limit of --fail-over is exceeded or cannot be judged, or if a part of a file could not be read.",
    )
    parser.add_argument("before", metavar="BEFORE", help="trace file before the change")
    parser.add_argument("after", metavar="AFTER", help="trace file after the change")
    parser.add_argument(
        "--fail-over",
        type=_fraction,
        metavar="PERCENT",
        help="exit with status 1 if the listed changes make steps slower by more than this, such as 5%%",
    )
    add_form(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the differences; returns 1 if steps became too slow or a part of a file could not be read, else 0.

    Raises:
        TorchProfError: a file cannot be read, or has too few steps.
    """
    from otel_torchprof._answers.diff import diff

    with reading([options.before, options.after], quiet=options.quiet) as watch:
        difference = diff(options.before, options.after, watch)
    show(_text_of(difference, options))
    for problem in difference.problems:
        say(problem)
    if options.fail_over is not None and difference.is_slower_by(options.fail_over):
        say(f"what is listed adds {difference.slowdown:.1%} to a step, and --fail-over allows {options.fail_over:.1%}")
        return _FAILED
    return _FAILED if difference.problems or (difference.doubts and options.fail_over is not None) else 0


def _text_of(difference: Difference, options: argparse.Namespace) -> str:
    from otel_torchprof._answers.diff import as_markdown, as_text

    if options.json:
        return json.dumps(difference.as_json(), indent=1) + "\n"
    return as_markdown(difference) if options.markdown else as_text(difference)


def _fraction(text: str) -> float:
    try:
        fraction = float(text.removesuffix("%")) / 100
    except ValueError:
        fraction = math.nan
    if not text.endswith("%") or not 0 <= fraction < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage, such as 5%")
    return fraction
