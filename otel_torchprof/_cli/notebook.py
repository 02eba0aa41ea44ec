"""``%%torchprof``: profiles a cell of a notebook, after ``%load_ext otel_torchprof``."""

from __future__ import annotations

import argparse
import contextlib
import keyword
import shlex
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._encode.table import SORT_KEYS
from otel_torchprof._export.formats import ENDINGS, endings_help, format_of
from otel_torchprof._export.otlp_file import OTLPFileExporter
from otel_torchprof._instrument.streaming import stream
from otel_torchprof._profile.profile import profile
from otel_torchprof.errors import TorchProfError

from .terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from otel_torchprof._profile.events import EventList

_NAME = "torchprof"


def load_ipython_extension(shell: Any) -> None:
    """Adds the cell magic ``%%torchprof`` to an IPython shell; ``%load_ext otel_torchprof`` calls it."""
    parser = _parser()

    def torchprof(words: str, cell: str) -> None:
        _profile_cell(shell, _parsed(parser, words), cell)

    torchprof.__doc__ = parser.format_help()
    shell.register_magic_function(torchprof, magic_kind="cell", magic_name=_NAME)


class _MagicParser(argparse.ArgumentParser):
    """Reports errors as IPython's own magics do."""

    def error(self, message: str) -> NoReturn:
        raise _usage_error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _MagicParser(prog=f"%%{_NAME}", description="Profiles the cell and displays its averages.", add_help=False)
    add = parser.add_argument
    add("--shapes", action="store_true", help="record the input shapes of operators, and group the averages by them")
    add("--stacks", action="store_true", help="record Python calls")
    add("--memory", action="store_true", help="record memory allocations of operators")
    add("--flops", action="store_true", help="estimate floating-point operations")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help=f"write a trace file: {endings_help()}",
    )
    add("-p", "--profile", metavar="NAME", help="assign the profile to the variable of this name")
    add(
        "--sort",
        default="self_cpu_time_total",
        choices=SORT_KEYS,
        metavar="KEY",
        help="sort key of the table: " + ", ".join(SORT_KEYS),
    )
    add("--rows", type=int, default=20, metavar="N", help="rows of the table, -1 for all (default: 20)")
    return parser


def _parsed(parser: argparse.ArgumentParser, words: str) -> argparse.Namespace:
    try:
        options = parser.parse_args(shlex.split(words))
    except ValueError as error:  # a quotation that does not end
        raise _usage_error(str(error)) from error
    name, output = options.profile, options.output
    if output is not None and format_of(output) is None:
        raise _usage_error(f"--output is {output!r}; its name must end in {', '.join(ENDINGS)}")
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise _usage_error(f"--profile is {name!r}; it must be a name for a variable")
    return options


def _profile_cell(shell: Any, options: argparse.Namespace, cell: str) -> None:
    """Runs the cell and displays its averages; the shell displays errors of the cell."""
    prof = _checked(
        lambda: profile(
            record_shapes=options.shapes,
            with_stack=options.stacks,
            profile_memory=options.memory,
            with_flops=options.flops,
        )
    )
    with contextlib.ExitStack() as recordings:
        if options.profile is not None:
            shell.user_ns[options.profile] = prof  # the cell may call its step()
            _checked(lambda: recordings.enter_context(_learning(prof)))
        _checked(prof.start)
        recordings.callback(prof.stop)
        result = shell.run_cell(cell)
    _show(prof.key_averages(group_by_input_shape=options.shapes), options)
    if lost := sum(prof.health.dropped.values()):
        say(f"{lost:,} events were dropped, and are not in the table: {prof.health}")
    if options.output is not None:
        _checked(lambda: prof.export_as(options.output, format_of(options.output) or ""))
    if not result.success:
        raise _usage_error("the cell failed, as is shown above; the table is of what ran before that")


def _learning(prof: profile) -> stream:
    """A stream that finds the steps of a training loop, for the profile's ``explain()``."""
    folder = tempfile.TemporaryDirectory(prefix="otel_torchprof-")
    weakref.finalize(prof, folder.cleanup)
    prof._learned_steps = str(Path(folder.name) / "steps.otlp")  # noqa: SLF001 - only here has a profile a second recording
    return stream(OTLPFileExporter(prof._learned_steps), detail="steps")  # noqa: SLF001


def _show(averages: EventList, options: argparse.Namespace) -> None:
    from IPython.display import display

    forms = {
        "text/html": averages.to_html(options.sort, options.rows),
        "text/plain": averages.table(options.sort, options.rows) or "nothing was recorded",
    }
    display(forms, raw=True)


def _checked(call: Callable[[], Any]) -> Any:
    """Returns the result of a call; an error of this package is raised without its traceback."""
    try:
        return call()
    except TorchProfError as error:
        raise _usage_error(str(error)) from error


def _usage_error(message: str) -> Exception:
    from IPython.core.error import UsageError

    error: Exception = UsageError(f"%%{_NAME}: {message}")
    return error
