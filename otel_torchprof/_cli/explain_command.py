"""``otel-torchprof explain``: why training is slow, from trace files."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .progress import Progress, size
from .terminal import say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from otel_torchprof._explain.explanation import Explanation
    from otel_torchprof._export.byte_stream import ByteStream

_BAR = 20


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "explain",
        help="say why training is slow, from trace files",
        description="Says what the steps in trace files are bound by, with the evidence, what to do next, and what would show "
        "that it is wrong; or why there is no verdict. Reads Chrome JSON (of this package, or of torch.profiler) and OTLP, "
        "compressed or not; several files are several ranks. Exit status: 0 when all of the files was read, else 1.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all that is known, and the rules, as JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Prints it; returns 1 where a part of a file could not be read.

    Raises:
        TorchProfError: a file cannot be read, or has no steps.
    """
    from otel_torchprof._explain.verdicts import explain

    with reading_with_progress(options.files, quiet=options.quiet) as watch:
        found = explain(*options.files, watch=watch)
    show(text_of(found, options))
    for problem in found.problems:
        say(problem)
    return 1 if found.problems else 0


def text_of(found: Explanation, options: argparse.Namespace) -> str:
    """In the form that is asked for."""
    from otel_torchprof._explain.explanation import as_markdown, as_text

    if options.json:
        return json.dumps(found.as_json(), indent=1) + "\n"
    if options.markdown:
        return as_markdown(found)
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    return as_text(found, is_plain=not encoding.startswith("utf"))


@contextlib.contextmanager
def reading_with_progress(paths: list[str], *, quiet: bool) -> Iterator[Callable[[str, ByteStream], None]]:
    """Shows how far files have been read, each twice: gives what is to be called when one is opened."""
    reading = _Reading(paths)
    progress = Progress(reading.line)
    if not quiet:
        progress.start()
    try:
        yield reading.watch
    finally:
        progress.stop()


class _Reading:
    """How far the files have been read: each is read twice."""

    def __init__(self, paths: list[str]) -> None:
        self._sizes = {path: Path(path).stat().st_size if Path(path).is_file() else 0 for path in paths}
        self._whole = 2 * sum(self._sizes.values())
        self._before = 0
        self._stream: ByteStream | None = None
        self._path = ""

    def watch(self, path: str, stream: ByteStream) -> None:
        """A file is read from its begin."""
        self._before += self._sizes.get(self._path, 0)
        self._path, self._stream = path, stream

    def line(self) -> str:
        """For the progress."""
        read = self._before + (self._stream.read_bytes if self._stream else 0)
        share = min(read / self._whole, 1.0) if self._whole else 0.0
        bar = "#" * round(share * _BAR)
        return f"otel-torchprof: reading [{bar:<{_BAR}}] {share:.0%} of {size(self._whole // 2)}"
