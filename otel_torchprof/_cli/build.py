"""``otel-torchprof build``: the library that records torch's operators, ahead of time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._native import prebuilt, torch_build, torch_library
from otel_torchprof.errors import TorchProfError

from .terminal import display_progress, duration, show

if TYPE_CHECKING:
    import argparse


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "build",
        help="build the library that records torch's operators, ahead of time",
        description="Builds the library that records operators of the installed torch, unless the package contains it or it was "
        "built before, tests it, and prints its path. For container images: build with --dir, and set "
        f"{config.BUILD_DIR} to the same folder at run time.",
    )
    parser.add_argument(
        "--dir",
        help=f"folder of the library (default: ${config.BUILD_DIR}, else the user's cache folder)",
    )


def run(options: argparse.Namespace) -> int:
    """Builds, loads and names the library.

    Raises:
        TorchProfError: torch is not installed, or the library cannot be built or loaded.
    """
    if options.dir is not None:
        os.environ[config.BUILD_DIR.variable] = options.dir
    torch = torch_library.installed_torch()
    if torch is None:
        raise TorchProfError("torch is not installed in this environment: there is nothing to build against")
    begin = time.monotonic()
    with display_progress(lambda: f"otel-torchprof: building: {duration(time.monotonic() - begin)}"):
        path = prebuilt.find(torch) or torch_build.ensure(torch)
    torch_library.load()
    show(f"{path}\n")
    return 0
