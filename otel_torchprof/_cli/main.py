"""The command ``otel-torchprof``."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import TorchProfError, printable_lines
from otel_torchprof.parsers import nearest
from otel_torchprof.version import __version__

from . import diff_command
from .terminal import say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_COMMANDS = {
    "run": "run",
    "top": "top",
    "record": "record_command",
    "dump": "dump",
    "show": "show",
    "explain": "explain_command",
    "diff": "diff_command",
    "report": "report_command",
    "sql": "sql",
    "mcp": "mcp_server",
    "merge": "merge_command",
    "convert": "convert",
    "send": "send",
    "recover": "recover",
    "autopsy": "autopsy",
    "doctor": "doctor",
    "build": "build",
}
"""The module of each command, which is imported if the command is used, or all are listed."""


_INTERRUPTED = 130
_LONGEST_USAGE_ERROR = 1000


class _Parser(argparse.ArgumentParser):
    """Quotes unprintable characters of arguments in its errors. Subparsers are of this class too."""

    def error(self, message: str) -> NoReturn:
        super().error(printable_lines(message)[:_LONGEST_USAGE_ERROR])


def _parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one."""
    parser = _Parser(
        prog="otel-torchprof",
        description="Profiles PyTorch programs with OpenTelemetry.",
        epilog=f"Documentation: {_documentation()}",
    )
    parser.add_argument("--version", action="version", version=f"otel-torchprof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in [command] if command in _COMMANDS else _COMMANDS:
        _module_of(name).add_parser(commands)
    return parser


def _module_of(command: str) -> Any:
    return importlib.import_module(f".{_COMMANDS[command]}", __package__)


def _documentation() -> Path:
    """The home page of the documentation: inside the package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    page = package / "docs" / "index.md"
    return page if page.exists() else package.parent / "docs" / "index.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, 1 with a message on stderr, 130 after Ctrl-C, or as the command says."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(next(iter(words), None))
    if meant := _meant(words):
        parser.error(f"{words[0]!r} is no command; did you mean otel-torchprof {meant}?")
    options = parser.parse_args(diff_command.with_commands(words))
    try:
        status: int = _module_of(options.command).run(options)
    except (TorchProfError, OSError, KeyboardInterrupt) as error:
        if getattr(options, "script_runs", False):  # an error of the script: Python prints it
            raise
        if isinstance(error, KeyboardInterrupt):
            return _INTERRUPTED
        if isinstance(error, OSError):
            _abandon_stdout()
        if not isinstance(error, BrokenPipeError):  # a reader such as head has closed the pipe
            say(f"cannot write the result: {error.strerror}" if isinstance(error, OSError) else str(error))
        return 1
    return status


def _meant(words: Sequence[str]) -> str:
    """What the command line may have been meant to be, where it begins with no command: empty if it does, or nothing is near."""
    if not words or words[0] in _COMMANDS:
        return ""
    if words[0] == "-m" or words[0].endswith(".py"):
        return shlex.join(["run", *words])
    if Path(words[0]).is_file():
        return shlex.join(["show", *words])
    command = nearest(words[0], _COMMANDS)
    return shlex.join([command, *words[1:]]) if command else ""


def _abandon_stdout() -> None:
    """Sends stdout to the null device, so that flushing it at exit does not raise again."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        return
