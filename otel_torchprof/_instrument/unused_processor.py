"""A TorchSpanProcessor in a program that uses torch and never instruments it: nothing is recorded, and nothing else would say so."""

from __future__ import annotations

import os
import sys

from otel_torchprof import config
from otel_torchprof._export.sdk import is_disabled

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


def warn_of_unused() -> None:
    """Warns, at the exit of a process with a processor to which nothing was given, unless that may be meant."""
    uses_torch = "torch" in sys.modules and not any(name in sys.modules for name in _STARTS_ANEW)
    is_off = not config.ENABLED.read() or config.DETAIL.read() == "off" or is_disabled() or bool(left_out_by())
    if uses_torch and not is_off:
        config.warn_once(
            "a TorchSpanProcessor was made to which nothing was ever given, since torch was not instrumented: call "
            "TorchInstrumentor().instrument(), or start the program with opentelemetry-instrument"
        )
