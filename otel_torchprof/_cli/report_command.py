"""``otel-torchprof report``: an HTML page of trace files, for a browser or a mail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._export.file import check_is_no_input
from otel_torchprof.errors import TorchProfError

from .recover import Traces
from .terminal import reading, say

if TYPE_CHECKING:
    import argparse


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "report",
        help="write an HTML page of trace files",
        description="Writes one HTML file that needs no network: the verdict with its evidence, steps over time, calls "
        "as a flame graph, the operators' table, memory over time, and ranks by steps. Reads Chrome JSON (of this package or "
        "torch.profiler), OTLP and black boxes, compressed or not; one file per rank. Exit status: 0 if all files were "
        "read completely, else 1.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="trace file or black box; several are those of ranks")
    parser.add_argument("-o", "--output", metavar="OUT", default="report.html", help="the page (default: report.html)")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Writes the page; returns 1 if a part of a file could not be read, else 0.

    Raises:
        TorchProfError: a file cannot be read, or the page cannot be written.
    """
    from otel_torchprof._profile.report_files import write_report

    check_is_no_input(options.output, options.files)
    with Traces(options.files) as traces, reading(traces.paths, quiet=options.quiet) as watch:
        try:
            problems = write_report(traces.paths, options.output, options.files, watch)
        except TorchProfError as error:
            raise TorchProfError(traces.named(str(error))) from error
    for problem in (*traces.problems, *map(traces.named, problems)):
        say(problem)
    say(f"wrote {options.output}, for a browser")
    return 1 if problems or traces.problems else 0
