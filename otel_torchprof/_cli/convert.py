"""``otel-torchprof convert``: a trace file in another format."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._export.file import check_is_no_input
from otel_torchprof._export.formats import ENDINGS, FORMATS, format_of
from otel_torchprof.errors import TorchProfError

from .terminal import reading, say

if TYPE_CHECKING:
    import argparse

    from otel_torchprof._profile.loaded import LoadedProfile


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "convert",
        help="write a trace file in another format",
        description="Reads a trace file (Chrome JSON of this package or of torch.profiler, OTLP, a black box), compressed "
        "or not, and writes it as its output's name ends. Prints on stderr what the file has no "
        "events for, and what the format cannot contain. Exit status: 0 if the file was read completely, else 1.",
    )
    parser.add_argument("file", metavar="FILE", help="trace file or black box")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help=f"output file: {', '.join(ENDINGS)}")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")


def run(options: argparse.Namespace) -> int:
    """Writes the file; returns 1 if a part of the input could not be read, else 0.

    Raises:
        TorchProfError: the input cannot be read, the output cannot be written, or its suffix names no format.
    """
    from otel_torchprof._profile.loaded import checked_limit, load_watched

    name = format_of(options.output)
    if name is None:
        raise TorchProfError(f"--output is {options.output!r}; its name must end in {', '.join(ENDINGS)}")
    check_is_no_input(options.output, [options.file])
    with reading([options.file], quiet=options.quiet) as watch:
        prof = load_watched(options.file, checked_limit(None), partial(watch, options.file))
    write_as(prof, options.output, name)
    say(f"wrote {options.output}, for {FORMATS[name].reader}")
    return 1 if prof.is_partial else 0


_OTHERS = "not in the output: links and kinds of spans, and attributes that are not of torch; traces and parents are as in the file"
_SAMPLES = "samples of stacks are only on spans of steps in the output, of long steps fewer"


def write_as(prof: LoadedProfile, path: str, name: str) -> None:
    """Writes a loaded file in a format; prints on stderr what it has no events for, and what the format cannot contain."""
    prof.export_as(path, name, detail="frames")
    for note in (*prof.health.notes, *_lacking(prof, name)):
        say(f"{prof.path!r}: {note}")


def _lacking(prof: LoadedProfile, name: str) -> list[str]:
    """What the profile has and the format does not."""
    if FORMATS[name].lacks:
        return [FORMATS[name].lacks]
    if name == "chrome" and not prof.needs_spans:
        return []
    work = [] if prof.work is None else [f"not in the output: work of devices ({len(prof.work['start']):,})"]
    work += [_OTHERS] if prof.has_requests else []
    if name == "chrome":
        return [*work, *_lacking_in_spans(prof)]
    memory = [] if prof.memory is None else ["allocations are sums per event in the output"]
    samples = [] if prof.samples is None else [_SAMPLES]
    labels = [] if not prof.labels_steps else ["labels of steps are steps in the output, and no events"]
    return [*work, *memory, *samples, *labels]


def _lacking_in_spans(prof: LoadedProfile) -> list[str]:
    """What Chrome JSON of spans does not have, as which a reduced trace is written."""
    kinds, flags = prof.columns["kind"], prof.columns["flags"]
    losses = {
        _SAMPLES: prof.samples is not None,
        "device times are only attributes of spans in the output": prof.devices is not None,
        "calls of Python functions are labels in the output, and no stacks": (kinds == Kind.FRAME).any(),
        "steps are labels in the output, and events": prof.steps and not prof.labels_steps,
        "marks where events were dropped are only attributes of spans in the output": (flags & Flag.LOSS_BEFORE).any(),
    }
    return [loss for loss, is_lost in losses.items() if is_lost]
