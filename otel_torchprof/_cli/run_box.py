"""The black box of ``otel-torchprof run``: in memory that a watcher has open too, or in the folder that the environment names."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._blackbox.box_file import SUFFIX, BoxFile, memory_file
from otel_torchprof._distributed.rank_environment import identity_in
from otel_torchprof._export.own_path import own_path
from otel_torchprof.errors import TorchProfError
from otel_torchprof.parsers import BlackBoxOptions

from .run_outputs import file_names, name_of_rank
from .terminal import say
from .watcher import start_watcher

if TYPE_CHECKING:
    import argparse

    from otel_torchprof._blackbox.box import BlackBox

    from .run_program import Program

_ABOVE_STANDARD = 3


class _WatchedMemory(BoxFile):
    """Memory that the watcher has open. Here its descriptor closes once it is mapped: later the number may be the script's."""

    __slots__ = ()

    def close(self) -> None:
        """Without effect."""


class RunBox:
    """The box of a script, if one is requested. What goes wrong with it is said once, and the script runs without.

    Construct it before most of the package is imported, and before there are threads: the watcher is forked here.
    """

    def __init__(self, options: argparse.Namespace, program: Program) -> None:
        self._box: BlackBox | None = None
        self._memory: BoxFile | None = None
        requested = options_of(options)
        if requested is None:
            return
        try:
            if not requested.directory:
                self._memory = _watched_memory(requested.size, box_name(options, program.stem))
        except (TorchProfError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            way_out = f"name a folder for it: {config.BLACK_BOX.variable}={requested.detail},/a/folder"
            say(f"no black box is kept: {reason}; {way_out}")
            return
        from otel_torchprof._blackbox.box import BlackBox  # imports more than the watcher should have to copy

        name = "-c" if program.kind == "code" else Path(program.name).name  # sys.argv is not yet the script's
        identity = {**identity_in(os.environ), "program": name}
        self._box = BlackBox(requested, identity, self._memory)

    def start(self) -> None:
        """Records from now on."""
        if self._box is not None:
            self._box.start()
        if self._memory is not None:
            os.close(self._memory.descriptor)
            self._memory = None

    def stop(self) -> None:
        """Ends the box; the watcher ends with the process then, and saves nothing. Again without effect."""
        if self._box is not None:
            self._box.stop()


def options_of(options: argparse.Namespace) -> BlackBoxOptions | None:
    """What the box records and where it lies, by ``--blackbox`` and by the environment; None where neither requests one."""
    found: BlackBoxOptions | None = config.BLACK_BOX.read()
    if not config.ENABLED.read() or not (options.blackbox or found):
        return None
    if not options.blackbox:
        return found
    records_operators = options.stacks or options.detail in {None, "ops", "frames"}
    requested = BlackBoxOptions("ops" if records_operators else "steps")
    return requested if found is None else found._replace(detail=requested.detail)


def box_name(options: argparse.Namespace, stem: str) -> str:
    """Where the box of a script that dies is saved: beside the first file that is written, else in the working directory."""
    names = file_names(options, stem)
    folder = Path(own_path(names[0])).parent if names else Path()
    return str(folder / name_of_rank(f"{stem}{SUFFIX}", os.environ))


def _watched_memory(size: int | None, path: str) -> BoxFile:
    made = memory_file(size)
    # The process may have been started without standard streams, whose numbers it would get.
    descriptor = fcntl.fcntl(made.descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD)
    made.close()
    start_watcher(descriptor, path)
    return _WatchedMemory(descriptor, made.size, None)
