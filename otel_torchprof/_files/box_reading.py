"""Reads black boxes: their contents, what is missing in them, and their events as those of a profile."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import NativeError, TorchProfError

from .attribute_keys import RANK, SERVICE
from .box_file import opened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._native.blackbox import Contents

    from .trace_batch import TraceTable


def read_box(path: str) -> Contents:
    """Reads a black box.

    Raises:
        TorchProfError: the file cannot be read, or is no black box.
    """
    from otel_torchprof._native.blackbox import read_file

    try:
        with opened(Path(path)) as file:
            return read_file(file)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise TorchProfError(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    except NativeError as error:
        raise TorchProfError(f"cannot read {path!r}: {error}") from error


def is_box(path: str) -> bool:
    """Whether a file begins as a black box does."""
    from otel_torchprof._native.blackbox import MAGIC

    with contextlib.suppress(OSError, ValueError), opened(Path(path)) as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def problems_of(contents: Contents) -> list[str]:
    """Returns messages about unreadable parts of a box."""
    problems = []
    if contents.chunks_damaged:
        problems.append(
            f"{contents.chunks_damaged} of {contents.chunks} chunks are damaged; what is whole in them was read"
        )
    if contents.dropped:
        problems.append(f"{contents.dropped:,} events found no room while all chunks were being written to")
    if contents.names_left_out:
        problems.append(f"{contents.names_left_out:,} names did not fit and are not known")
    return problems


def resource_of(info: Mapping[str, Any], pid: int) -> dict[str, Any]:
    """Returns the attributes of the process of a box, as those of a resource."""
    rank, program = info.get("rank"), info.get("program")
    attributes: dict[str, Any] = {"process.pid": pid}
    if isinstance(info.get("host"), str):
        attributes["host.name"] = info["host"]
    if isinstance(program, str) and program:
        attributes[SERVICE] = program
    if isinstance(rank, int):
        attributes[RANK] = rank
    return attributes


def table_of_box(contents: Contents) -> TraceTable:
    """Returns the events of a box. Events that were open at the end are unfinished."""
    from .trace_batch import TraceTable, labelled_steps  # not for `autopsy`, which a hang waits for

    batch = contents.batch
    steps = labelled_steps(batch)
    window = (int(batch["start"].min()) if len(batch) else contents.last_ns, contents.last_ns)
    resource = resource_of(contents.info, contents.pid)
    table = TraceTable(batch, steps, bool(steps), window, contents.pid, Counter(), resource)
    return replace(table, rank=resource.get(RANK))
