"""The command ``otel-torchprof``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from . import config
from ._native import torch_build, torch_library
from .errors import TorchProfError
from .version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence


def _build(folder: str | None) -> int:
    if folder is not None:
        os.environ[config.OTEL_TORCHPROF_BUILD_DIR] = folder
    torch = torch_library.installed_torch()
    if torch is None:
        raise TorchProfError("torch is not installed in this environment: there is nothing to build against")
    path = torch_build.ensure(torch)
    torch_library.load()
    sys.stdout.write(f"{path}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="otel-torchprof", description="Profiling PyTorch with OpenTelemetry.")
    parser.add_argument("--version", action="version", version=f"otel-torchprof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser(
        "build",
        help="build the library that records torch's operators, ahead of time",
        description="Builds the library that records operators of the installed torch, if it is not there yet, proves that it "
        "works, and prints its path. For container images: build with --dir, and set "
        f"{config.OTEL_TORCHPROF_BUILD_DIR} to the same folder where the image runs.",
    )
    build.add_argument(
        "--dir",
        help=f"folder to keep it in (default: ${config.OTEL_TORCHPROF_BUILD_DIR}, else the user's cache folder)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, or 1 with a message on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return _build(options.dir)
    except TorchProfError as error:
        sys.stderr.write(f"otel-torchprof: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
