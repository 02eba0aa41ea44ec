"""Programs whose calls are recorded, and what was recorded as text."""

from __future__ import annotations

import contextlib
import gc
import re
from typing import TYPE_CHECKING, Any

import pytest

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.ffi import python_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


def calls(**requested: Any) -> otp.profile:
    """A profile of calls, without operators."""
    return otp.profile(operators=False, with_stack=True, **requested)


@contextlib.contextmanager
def recording(**requested: Any) -> Iterator[otp.profile]:
    """A profile of calls that runs in the block."""
    with no_collections(), calls(**requested) as prof:
        yield prof


def recorded(program: Callable[[], object], **requested: Any) -> otp.profile:
    """What a program called."""
    with no_collections():
        prof = calls(**requested)
        prof.start()
        program()
        prof.stop()
    return prof


def masked(name: str) -> str:
    """A name without what is different each time: the file's path and line, and addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"^.*\(\d+\): ", "", name))


def names_of(found: Any, thread: str | None = None) -> list[str]:
    """The names of all calls, or of those of a thread."""
    of_row = found.columns["thread"].tolist()
    return [
        masked(found.names[name])
        for row, name in enumerate(found.columns["name"].tolist())
        if thread is None or found.threads[of_row[row]].name == thread
    ]


def tree(found: Any, within: str, thread: str | None = None) -> list[str]:
    """What was called inside calls of a function, each with as many dots as calls are around it there."""
    lines = []
    names, parents, threads = names_of(found), found.columns["parent"].tolist(), found.columns["thread"].tolist()
    for row, name in enumerate(names):
        if thread is not None and found.threads[threads[row]].name != thread:
            continue
        above = []
        at = row
        while at >= 0:
            above.append(names[at])
            at = parents[at]
        if within in above[1:]:
            lines.append("." * above.index(within, 1) + name)
    return lines


def flags_of(found: Any, name: str) -> list[Flag]:
    """The flags of all calls of a function."""
    return [
        Flag(flags)
        for each, flags in zip(names_of(found), found.columns["flags"].tolist(), strict=True)
        if each == name
    ]
