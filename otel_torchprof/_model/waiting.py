"""Adds the calls of waiting threads to a batch, around the other events of those threads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.joined import joined, rows_of
from otel_torchprof._columns.schema import Flag, Kind

from .frames import collection_generation, distinct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_torchprof._columns.batch import RecordedThread, WaitingStack

_ids = itertools.count(1)
"""Ids of events that no thread has recorded. All are smaller than the recorder's, whose upper bits contain a thread number."""


def with_waiting(batch: Batch, stacks: Sequence[WaitingStack], times: tuple[int, int]) -> Batch:
    """Adds to a final batch the calls that were open all the time, marked unfinished, at the top level of their threads.

    Leaves out the stack of a thread with calls in the batch: it resumed at the last moment, and the recorder has its whole stack. Costs
    a copy of the batch; nothing if no thread waits.

    Args:
        batch: the recorded events.
        stacks: one per thread.
        times: start and end of the recording, Unix ns.
    """
    places = {(thread.os_tid, thread.ident): at for at, thread in enumerate(batch.threads)}
    known = [(places.get((stack.thread.os_tid, stack.thread.ident), -1), stack) for stack in stacks]
    inside = [(at, stack) for at, stack in known if at >= 0 and not _has_calls(batch, at)]
    alone = [stack for at, stack in known if at < 0]
    if not inside and not alone:
        return batch
    threads = [*batch.threads, *(stack.thread for stack in alone)]
    before = _batch_of(batch, inside, threads, times)
    behind = _batch_of(batch, enumerate(alone, len(batch.threads)), threads, times)
    whole = joined([before, replace(batch, threads=threads), behind])
    innermost = np.cumsum([len(stack.names) for _, stack in inside], dtype=np.int64) - 1
    for row in rows_of(whole, before["id"][innermost]).tolist():
        _put_inside(whole, row)
    return whole


def _has_calls(batch: Batch, thread: int) -> bool:
    """Whether a thread has calls in the batch; pauses of the garbage collector are none."""
    names, _ = distinct(batch["name"][(batch["thread"] == thread) & (batch["kind"] == Kind.FRAME)])
    return any(collection_generation(batch.names[name]) is None for name in names.tolist())


def _batch_of(
    batch: Batch, stacks: Iterable[tuple[int, WaitingStack]], threads: list[RecordedThread], times: tuple[int, int]
) -> Batch:
    """Returns the calls as a batch with the same names; ``stacks`` have the index of their thread."""
    columns: dict[str, list[Any]] = {name: [] for name in ("name", "fwd_thread", "thread", "parent")}
    for thread, stack in stacks:
        first, depth = len(columns["name"]), len(stack.names)
        columns["name"] += stack.names
        columns["fwd_thread"] += stack.identities
        columns["thread"] += [thread] * depth
        columns["parent"] += [-1, *range(first, first + depth - 1)]
    rows = len(columns["name"])
    same = {"start": times[0], "end": times[1], "kind": Kind.FRAME, "flags": Flag.UNFINISHED}
    columns |= {name: [value] * rows for name, value in same.items()}
    columns["id"] = list(itertools.islice(_ids, rows))
    return replace(Batch.of(columns, [""], threads), names=batch.names, kept=0)


def _put_inside(batch: Batch, row: int) -> None:
    """Makes later events and memory records on the thread of a row its children, unless they have another parent."""
    thread = batch["thread"][row]
    end = np.searchsorted(batch["thread"], thread, side="right")
    parents: npt.NDArray[np.int32] = batch["parent"][row + 1 : end]
    parents[parents < 0] = row
    if batch.memory is not None:
        event = batch.memory["event"]
        event[(batch.memory["thread"] == thread) & (event == 0)] = batch["id"][row]
