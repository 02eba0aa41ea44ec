"""``otel-torchprof merge``: the trace files of several ranks as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .terminal import reading, say

if TYPE_CHECKING:
    import argparse


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "merge",
        help="merge the trace files of several ranks into one Chrome trace on one clock",
        description="Writes one Chrome trace of several ranks, for Perfetto. Aligns their clocks by the ends of "
        "collectives that no rank leaves before all ranks have arrived, and prints the accuracy on "
        "stderr. Reads Chrome JSON and OTLP, compressed or not, each file twice. Exit status: 0 if all "
        "files were read completely, else 1.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="trace file of a rank")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="file to write; a name that ends in .gz is compressed"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Merges the files; returns 1 if a part of a file could not be read, else 0.

    Raises:
        TorchProfError: a file cannot be read or written, or ranks cannot be aligned.
    """
    from otel_torchprof._files.merge import merge

    with reading(options.files, quiet=options.quiet, times=2) as watch:
        merged = merge(options.files, options.output, watch)
    for line in (*merged.ranks, *merged.problems):
        say(line)
    return 1 if merged.problems else 0
