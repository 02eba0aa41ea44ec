"""Programs whose calls are recorded, and what was recorded as text."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.ffi import python_sources
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.batch import Batch


by_profile_function = pytest.mark.skipif(
    python_sources.monitors_calls,
    reason="of profile functions, which are not used since Python 3.12; test_monitoring.py is of what is",
)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without the collections that the interpreter begins by itself: they would be among the calls."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def recording(**requested: Any) -> Iterator[ProfileSegment]:
    """A recording of calls, without operators."""
    record = ProfileSegment(RecordingOptions(operators=False, frames=True, **requested))
    with no_collections():
        record.start()
        try:
            yield record
        finally:
            record.stop()


def recorded(program: Callable[[], object], **requested: Any) -> Batch:
    """What a program called."""
    with no_collections():
        record = ProfileSegment(RecordingOptions(operators=False, frames=True, **requested))
        record.start()
        program()
        record.stop()
    return record.batch()


def masked(name: str) -> str:
    """A name without what is different each time: the file's path and line, and addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"^.*\(\d+\): ", "", name))


def tree(batch: Batch, within: str, thread: str | None = None) -> list[str]:
    """What was called inside calls of a function, each with as many dots as calls are around it there."""
    lines = []
    names = [masked(batch.names[name]) for name in batch["name"].tolist()]
    parents = batch["parent"].tolist()
    for row, name in enumerate(names):
        if thread is not None and batch.threads[batch["thread"][row]].name != thread:
            continue
        above = []
        at = row
        while at >= 0:
            above.append(names[at])
            at = parents[at]
        if within in above[1:]:
            lines.append("." * above.index(within, 1) + name)
    return lines


def flags_of(batch: Batch, name: str) -> list[Flag]:
    """The flags of all calls of a function."""
    rows = [row for row, index in enumerate(batch["name"].tolist()) if masked(batch.names[index]) == name]
    return [Flag(batch["flags"].item(row)) for row in rows]


def printed_by(program: str) -> list[str]:
    """The words that a program of its own prints, which must end well and say nothing else."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.split()
