"""``otel-torchprof recover``: a trace from the black box of a process that has died, or still runs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.batch import Names
from otel_torchprof._columns.schema import Kind
from otel_torchprof._export.formats import TRACE_ENDINGS, TRACES, format_of
from otel_torchprof._files.box_file import SUFFIX, is_of_the_living
from otel_torchprof._files.box_reading import is_box, problems_of, read_box
from otel_torchprof.errors import TorchProfError, printable

from .terminal import say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from otel_torchprof._columns.batch import Array, Batch
    from otel_torchprof._files.rank_state import LastMoment
    from otel_torchprof._native.blackbox import Contents

_DEEPEST_SHOWN = 12
_REDACTED = "(redacted)"


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "recover",
        help="write a trace from the black box of a dead process",
        description="Reads the black box of a process that is dead or still running, writes its events as a trace, "
        "and prints what each thread did last. Spans that were open at the end have the attribute "
        "torch.unfinished. Exit status: 0 if the box was read completely, else 1: the readable part is "
        "written, and the missing parts are printed.",
    )
    parser.add_argument("file", metavar="FILE", help=f"black box ({SUFFIX})")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"output file: {', '.join(TRACE_ENDINGS)}; 'none' writes nothing (default: FILE with .otlp instead of {SUFFIX})",
    )
    parser.add_argument(
        "--redact", action="store_true", help="omit labels, stacks, and the names of the process and its threads"
    )


def run(options: argparse.Namespace) -> int:
    """Writes the trace and prints what each thread did last; returns 1 if a part of the box could not be read, else 0.

    Raises:
        TorchProfError: the file is no black box, or the suffix of the output names no format.
    """
    output = options.output or f"{options.file.removesuffix(SUFFIX)}.otlp"
    if output != "none":
        _checked_format(output)
    contents = read_box(options.file)
    if options.redact:
        contents = redacted(contents)
    is_alive = not contents.is_closed and is_of_the_living(Path(options.file))
    show(text_of(contents._replace(last_ns=time.time_ns()) if is_alive else contents, is_alive=is_alive))
    if output != "none":
        has_spans = write(contents, output)
        say(f"wrote {output}" if has_spans else f"{options.file!r} has no events: nothing was written")
    problems = problems_of(contents)
    for problem in problems:
        say(f"{options.file!r}: {problem}")
    return 1 if problems else 0


class Traces:
    """Trace files to read. Inside the context, a temporary trace replaces each black box in :attr:`paths`.

    Args:
        paths: trace files and black boxes.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self.problems: list[str] = []
        """Messages about unreadable parts of the boxes."""
        self._boxes: dict[str, str] = {}
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Writes the traces.

        Raises:
            TorchProfError: a box cannot be read, or has no events.
        """
        with contextlib.ExitStack() as exits:
            self.paths = [self._trace_of(path, exits) if is_box(path) else path for path in self.paths]
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _trace_of(self, path: str, exits: contextlib.ExitStack) -> str:
        contents = read_box(path)
        self.problems += (f"{path!r}: {problem}" for problem in problems_of(contents))
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="otel-torchprof-"))
        trace = str(Path(folder) / f"{Path(path).name}.otlp")
        if not write(contents, trace):
            raise TorchProfError(f"{path!r} has no events")
        self._boxes[trace] = path
        return trace

    def named(self, text: str) -> str:
        """A text in which boxes have their own names, not those of their temporary traces."""
        for trace, path in self._boxes.items():
            text = text.replace(trace, path)
        return text


def write(contents: Contents, output: str) -> bool:
    """Writes the spans of a box; returns False, and writes no file, if there are none.

    Raises:
        TorchProfError: the suffix of the output names no format, or the file cannot be written.
    """
    from opentelemetry.sdk.trace.export import SpanExportResult

    from otel_torchprof._instrument.recovered import recovered_spans

    exporter: Any = TRACES[_checked_format(output)].exporter.load()(output)  # type: ignore[union-attr]  # a trace has one
    has_spans = False
    try:
        for spans in recovered_spans(contents):
            has_spans = True
            if exporter.export(spans) is not SpanExportResult.SUCCESS:
                raise TorchProfError(f"not all of the trace could be written to {output!r}")
    finally:
        exporter.shutdown()
    return has_spans


def _checked_format(output: str) -> str:
    name = format_of(output, TRACES)
    if name is None:
        raise TorchProfError(f"--output is {output!r}; its name must end in {', '.join(TRACE_ENDINGS)}, or be none")
    return name


def redacted(contents: Contents) -> Contents:
    """The contents without labels, stacks, host, and names of the process and its threads."""
    info = {key: value for key, value in contents.info.items() if key not in {"host", "program", "run_id", "role"}}
    events = contents.events
    return contents._replace(events=lambda size: map(_redacted, events(size)), info=info, stacks="")


def _redacted(batch: Batch) -> Batch:
    names = batch.names.followed_by(Names.of([_REDACTED]))

    def hidden(kind: Array, name: Array) -> Array:
        return np.where(kind == Kind.LABEL, len(names) - 1, name).astype(name.dtype)

    columns = {**batch.columns, "name": hidden(batch["kind"], batch["name"])}
    opens = replace(batch.opens, name=hidden(batch.opens.kind, batch.opens.name))
    threads = [thread._replace(name=_REDACTED) for thread in batch.threads]
    return replace(batch, names=names, threads=threads, columns=columns, opens=opens)


def text_of(contents: Contents, *, is_alive: bool = False) -> str:
    """The text that is printed: the process, the last moments of each thread, and Python's stacks if a thread hung."""
    from otel_torchprof._files.rank_state import last_moments

    info = contents.info
    rank = f"rank {info['rank']}, " if isinstance(info.get("rank"), int) else ""
    named = (("of", info.get("program")), ("on", info.get("host")))
    where = "".join(f" {word} {printable(str(value))}" for word, value in named if value)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(contents.last_ns / 1e9))
    ended = "ended its box" if contents.is_closed else "was running" if is_alive else "was last seen"
    moments, count = last_moments(contents)
    lines = [
        f"{rank}process {contents.pid}{where} {ended} at {at}.{contents.last_ns % 10**9 // 10**6:03}",
        f"{count:,} events of {len(moments)} thread{'' if len(moments) == 1 else 's'}",
    ]
    return "\n".join((*lines, *(line for moment in moments for line in _lines(moment)), *_stacks(contents), ""))


def _stacks(contents: Contents) -> Iterator[str]:
    from otel_torchprof._files.rank_state import stacks_of_program

    if contents.stacks:
        since = time.strftime("%H:%M:%S", time.localtime(contents.hang_since_ns / 1e9))
        yield f"Python's stacks, written because a thread has done nothing since {since}:"
        yield from (f"    {printable(line)}" for line in stacks_of_program(contents.stacks))


def _lines(moment: LastMoment) -> Iterator[str]:
    thread, ended = f"thread {printable(moment.name)} ({moment.os_tid})", printable(moment.last_ended)
    if not moment.open:
        yield f"{thread}: nothing open; the last was {ended}, {moment.idle_seconds:.3f} s before"
        return
    last = f"; the last to end was {ended}" if ended else ""
    yield f"{thread}: in {printable(moment.open[-1].name)} for {moment.open[-1].seconds:.3f} s{last}"
    for event in moment.open[:-1][-_DEEPEST_SHOWN:]:
        yield f"    {event.seconds:10.3f} s  {printable(event.name)}"
