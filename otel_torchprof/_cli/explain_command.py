"""``otel-torchprof explain``: why training is slow, from trace files."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import TorchProfError

from .recover import Traces
from .terminal import reading, say, show

if TYPE_CHECKING:
    import argparse

    from otel_torchprof._answers.explanation import Explanation


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "explain",
        help="report why training is slow, from trace files",
        description="Reports what limits the speed of the steps in trace files, with the evidence, the next action "
        "and a check of the verdict; or why there is no verdict. Reads Chrome JSON (of this package or "
        "torch.profiler) and OTLP, compressed or not; one file per rank. Exit status: 0 if all files "
        "were read completely, else 1.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="trace file of a rank")
    add_form(parser)


def add_form(parser: argparse.ArgumentParser) -> None:
    """In which form the answer is printed, and whether progress is shown."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the complete result and the rules as JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for example for a pull request")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Prints it; returns 1 where a part of a file could not be read.

    Raises:
        TorchProfError: a file cannot be read, or has no steps.
    """
    from otel_torchprof._answers.verdicts import explain

    with Traces(options.files) as traces, reading(traces.paths, quiet=options.quiet) as watch:
        try:
            found = explain(*traces.paths, watch=watch)
        except TorchProfError as error:
            raise TorchProfError(traces.named(str(error))) from error
    show(traces.named(text_of(found, options)))
    problems = [*traces.problems, *map(traces.named, found.problems)]
    for problem in problems:
        say(problem)
    return 1 if problems else 0


def text_of(found: Explanation, options: argparse.Namespace) -> str:
    """In the form that is asked for."""
    from otel_torchprof._answers.explanation import as_markdown, as_text

    if options.json:
        return json.dumps(found.as_json(), indent=1) + "\n"
    if options.markdown:
        return as_markdown(found)
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    return as_text(found, is_plain=not encoding.startswith("utf"))
