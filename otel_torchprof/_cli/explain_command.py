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
    from collections.abc import Callable, Sequence

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
    """Adds the options for the form of the answer and for progress."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the complete result and the rules as JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for example for a pull request")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Prints the explanation; returns 1 if a part of a file could not be read, else 0.

    Raises:
        TorchProfError: a file cannot be read, or has no steps.
    """
    explanation, problems, named = explained(options.files, quiet=options.quiet)
    show(named(text_of(explanation, options)))
    for problem in problems:
        say(problem)
    return 1 if problems else 0


def explained(files: Sequence[str], *, quiet: bool) -> tuple[Explanation, list[str], Callable[[str], str]]:
    """The explanation of trace files and black boxes, problems of them, and what gives boxes their names in a text.

    Raises:
        TorchProfError: a file cannot be read, or has no steps.
    """
    from otel_torchprof._answers.verdicts import explain

    with Traces(files) as traces, reading(traces.paths, quiet=quiet) as watch:
        try:
            explanation = explain(*traces.paths, watch=watch)
        except TorchProfError as error:
            raise TorchProfError(traces.named(str(error))) from error
    return explanation, [*traces.problems, *map(traces.named, explanation.problems)], traces.named


def text_of(explanation: Explanation, options: argparse.Namespace) -> str:
    """The explanation as JSON, Markdown or text, as the options say."""
    from otel_torchprof._answers.explanation import as_markdown, as_text

    if options.json:
        return json.dumps(explanation.as_json(), indent=1) + "\n"
    if options.markdown:
        return as_markdown(explanation)
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    return as_text(explanation, is_plain=not encoding.startswith("utf"))
