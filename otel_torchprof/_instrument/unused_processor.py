"""A TorchSpanProcessor in a program that uses torch and never instruments it: nothing is recorded, and nothing else would say so."""

from __future__ import annotations

import os
import sys

from otel_torchprof import config
from otel_torchprof._export.sdk import is_disabled
from otel_torchprof._process import process_changes
from otel_torchprof._process.workers import starts_loader_worker
from otel_torchprof.errors import warn_once

_STARTS_ANEW = (
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_spawn_win32",
    "multiprocessing.popen_forkserver",
)
"""Imported with the first process that is started so: it runs the program's own code, and may be the one that instruments torch."""


def left_out_by() -> str:
    """The value of the variable by which ``opentelemetry-instrument`` leaves torch out; empty where it does not."""
    disabled = os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "")
    return disabled if {"torch", "*"} & {name.strip() for name in disabled.split(",")} else ""


class UnusedProcessors:
    """What a process has done towards recording: whether it made a processor, and whether it ever asked for a recording.

    Judged at the exit: until then the program may still instrument torch. Any thread.
    """

    def __init__(self) -> None:
        self._has_processor = self._has_recording = False

    def note_processor(self) -> None:
        """A processor was made that does nothing where torch is not instrumented."""
        self._has_processor = True

    def note_recording(self) -> None:
        """The program has asked for a recording, which gives its events to a processor at once or later."""
        self._has_recording = True

    def after_fork_in_parent(self) -> None:
        """The child may be the one that records, with the processors of its parent; a worker of a DataLoader does not."""
        if self._has_processor and not starts_loader_worker():
            self._has_processor = False

    def after_fork_in_child(self) -> None:
        """The processors that its parent has made are no mistake of the child's."""
        self._has_processor = False

    def warn(self) -> None:
        """Warns where a processor was made and no recording was asked for, unless that may be intended."""
        if (
            not self._has_processor or self._has_recording
        ):  # first: at the exit a program may have taken away what the rest needs
            return
        uses_torch = "torch" in sys.modules and not any(name in sys.modules for name in _STARTS_ANEW)
        is_off = not config.ENABLED.read() or config.DETAIL.read() == "off" or is_disabled() or bool(left_out_by())
        if uses_torch and not is_off:
            warn_once(
                "a TorchSpanProcessor was made to which nothing was ever given, since torch was not instrumented: call "
                "TorchInstrumentor().instrument(), or start the program with opentelemetry-instrument"
            )


unused = UnusedProcessors()
"""Those of the process."""
process_changes.at_exit(process_changes.Order.LAST, unused.warn)
process_changes.at_fork(
    process_changes.Order.STATE, in_parent=unused.after_fork_in_parent, in_child=unused.after_fork_in_child
)
