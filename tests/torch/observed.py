"""What both profilers saw, in a form that can be compared."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded

if TYPE_CHECKING:
    import otel_torchprof as otp

ROOT = Path(__file__).resolve().parent.parent.parent
STEP = "## step ##"
"""Torch's own label around what is compared: what a profiler does at its start and stop is outside."""


def run(body: Any) -> Any:
    """Runs ``body`` inside the label that marks what is compared."""
    import torch

    with torch.profiler.record_function(STEP):
        return body()


def torchs(shapes: bool = False, **rest: Any) -> Any:
    """Torch's profiler of the CPU."""
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=shapes, **rest)


def path(event: Any) -> tuple[str, ...]:
    """Names from the outermost event to this one."""
    names: list[str] = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return tuple(reversed(names))


def inside(events: Any) -> list[Any]:
    """The events inside the marked step (or on another thread while it ran), in the order of each thread."""
    marks = [event.time_range for event in events if event.name == STEP]
    found = [
        event
        for event in events
        if any(mark.start <= event.time_range.start and event.time_range.end <= mark.end for mark in marks)
    ]
    found.sort(key=lambda event: event.thread)
    return found


def info(events: Any, *, shapes: bool = False) -> list[tuple[Any, ...]]:
    """One line per event inside the marked step."""
    found = []
    for event in inside(events):
        line = (event.thread, path(event), event.sequence_nr, event.fwd_thread, int(event.scope), event.is_async)
        found.append((*line, event.input_shapes if shapes else None))
    return found


def counts(averages: Any, *, shapes: bool = False) -> dict[Any, int]:
    """How often each row of ``key_averages()`` was called."""
    return {(row.key, str(row.input_shapes) if shapes else "", row.is_user_annotation): row.count for row in averages}


def columns_of(prof: otp.profile) -> list[tuple[str, str]]:
    """Name and parent's name of every recorded event, as they stand in the columns."""
    names, columns = prof.names, prof.columns
    recorded = [names[name] for name in columns["name"].tolist()]
    parents = columns["parent"].tolist()
    return [(name, recorded[parent] if parent >= 0 else "") for name, parent in zip(recorded, parents, strict=True)]


def recorded_names(prof: otp.profile) -> list[str]:
    """Names of all recorded events."""
    return [name for name, _ in columns_of(prof)]


_FILTER = "error::RuntimeWarning:otel_torchprof"


def python(program: str, *, has_torch: bool = False, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own that finds this checkout first.

    Args:
        program: its text.
        has_torch: it is a fork of a process that has imported torch and this package, in this order, for programs to which that
            makes no difference; else an interpreter that is started for it.
        environment: variables besides those of this process; one that is None is removed.
    """
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    variables = {name: value for name, value in given.items() if value is not None}
    if has_torch:
        return preloaded.run(program, environment=variables, filters=(_FILTER,), has_package=True)
    command = [sys.executable, "-W", _FILTER, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables, check=False)


def succeeds(program: str, *, has_torch: bool = False, **environment: str | None) -> str:
    """What the program printed; fails with both outputs where it does not end with 0."""
    done = python(program, has_torch=has_torch, **environment)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def callbacks() -> tuple[bool, ...]:
    """Whether torch has observers: of all threads, of the calling thread. Asked of torch's own library."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    symbols = ("_ZN2at18hasGlobalCallbacksEv", "_ZN2at23hasThreadLocalCallbacksEv")
    return tuple(bool(getattr(library, symbol)() & 255) for symbol in symbols)
