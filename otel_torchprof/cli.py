"""The command ``otel-torchprof``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import _cli_build, _cli_doctor, _cli_run, _cli_send, _cli_show
from .errors import TorchProfError
from .version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {"run": _cli_run, "show": _cli_show, "send": _cli_send, "doctor": _cli_doctor, "build": _cli_build}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="otel-torchprof", description="Profiling PyTorch with OpenTelemetry.")
    parser.add_argument("--version", action="version", version=f"otel-torchprof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS.values():
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, or 1 with a message on stderr, or as the command says."""
    options = _parser().parse_args(arguments)
    try:
        status: int = _COMMANDS[options.command].run(options)
    except TorchProfError as error:
        if getattr(options, "script_runs", False):  # it is the script's, and goes where Python shows it
            raise
        sys.stderr.write(f"otel-torchprof: {error}\n")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
