"""Calls of Python and C functions among the rows of a batch: around which rows they are, and the batch without them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.joined import without
from otel_torchprof._columns.schema import Flag, Kind

from .tree import lifted

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]

MODULE_PREFIX = "nn.Module: "
"""How the names of calls of modules begin; behind it stand the class, ``_``, and which of its instances."""


COLLECTION_PREFIX = "gc.collect: generation "
"""How the names of pauses of the garbage collector begin, which are among the calls."""


def collection_generation(name: str) -> int | None:
    """Which generation the pause with this name collected; None of what is no pause."""
    number = name.removeprefix(COLLECTION_PREFIX)
    return int(number) if number != name and number.isdecimal() else None


def frames_of(batch: Batch) -> npt.NDArray[np.bool_] | None:
    """Which rows are calls; None where there are none."""
    is_frame: npt.NDArray[np.bool_] = batch["kind"] == Kind.FRAME
    return is_frame if is_frame.any() else None


def nested_parents(parent: Array, start: Array, end: Array) -> Array:
    """Parents of rows as if whatever ends took along all that is open inside it, which is how torch sees stacks.

    A label that is entered by a function ends later than that function; what comes in between is inside the label, but not
    inside the function.
    """
    outlives = (parent >= 0) & (end > end[parent])
    affected = np.flatnonzero(_any_outwards(outlives, parent))
    if not affected.size:
        return parent
    found = np.append(parent, parent.dtype.type(-1))
    closed = np.append(np.minimum(end, np.where(parent >= 0, end[parent], end)), np.iinfo(np.int64).max)
    position = np.full(len(parent) + 1, -1, dtype=np.int64)
    position[affected] = np.arange(len(affected))
    for level in levels(position[parent[affected]]):
        rows = affected[level]
        above = _first_open(found, closed, found[rows], start[rows])
        found[rows] = above
        closed[rows] = np.minimum(end[rows], closed[above])
    return found[:-1]


def _first_open(parent: Array, closed: Array, candidate: Array, start: Array) -> Array:
    """The candidates, or what is around them, that were not closed yet; -1 is always open."""
    found = candidate.copy()
    moving = np.flatnonzero(closed[found] < start)
    while moving.size:
        found[moving] = parent[found[moving]]
        moving = moving[closed[found[moving]] < start[moving]]
    return found


def _any_outwards(flags: npt.NDArray[np.bool_], parent: Array) -> npt.NDArray[np.bool_]:
    """Whether anything around a row has its flag set. Each step looks twice as far outwards as the last."""
    if not flags.any():
        return np.zeros(len(flags), dtype=np.bool_)
    jump = np.append(parent, np.int32(-1))
    found: npt.NDArray[np.bool_] = np.append(flags, False)[jump]
    while (jump[:-1] >= 0).any():
        found |= found[jump]
        jump = jump[jump]
    return found[:-1]


def levels(enclosing: Array) -> list[Array]:
    """Positions by how many others are around them, the top-level first. Each step looks twice as far outwards as the last."""
    depth = np.append((enclosing >= 0).astype(np.int64), 0)
    jump = np.append(enclosing, -1)
    while (jump[:-1] >= 0).any():
        depth += depth[jump]
        jump = jump[jump]
    depth = depth[:-1]
    order = np.argsort(depth, kind="stable")
    return np.split(order, np.cumsum(np.bincount(depth))[:-1])


def with_info(batch: Batch, info: FrameInfo) -> Batch:
    """The batch with the facts of what is called in it, out of those of all that was called since the tracer came."""
    is_frame = frames_of(batch)
    if is_frame is None:
        return replace(batch, frame_info=FrameInfo(since=info.since))
    names, identities = batch["name"][is_frame], batch["fwd_thread"][is_frame]
    numbers = set(distinct(names)[0].tolist())
    steps = {number for number in info.optimizers if (identities == number).any()}
    return replace(batch, frame_info=info.chosen(numbers, steps))


class PythonIds(NamedTuple):
    """The numbers that torch gives to calls, by row of the batch; -1 for none."""

    own: npt.NDArray[np.int64]
    """Which call it is, from 1, by start."""
    caller: npt.NDArray[np.int64]
    """That number of the call around it."""
    module: npt.NDArray[np.int64]
    """Of a call of a module: which one of its class."""


def python_ids(batch: Batch) -> PythonIds | None:
    """The numbers of all calls; None where there are none."""
    is_frame = frames_of(batch)
    if is_frame is None:
        return None
    rows = np.flatnonzero(is_frame)
    own, caller, module = (np.full(len(batch) + 1, -1, dtype=np.int64) for _ in range(3))
    own[rows[np.argsort(batch["start"][rows], kind="stable")]] = np.arange(1, len(rows) + 1)
    caller[rows] = own[_callers(batch, is_frame)[rows]]
    names, name_of_row = distinct(batch["name"][rows])
    module[rows] = np.array([_module_number(batch.names[name]) for name in names.tolist()])[name_of_row]
    return PythonIds(own[:-1], caller[:-1], module[:-1])


def _callers(batch: Batch, is_frame: npt.NDArray[np.bool_]) -> Array:
    """The row of the innermost call around each row that had not returned; -1 for none."""
    caller = np.append(lifted(batch["parent"], ~is_frame), np.int32(-1))
    end = np.append(batch["end"], np.iinfo(np.int64).max)
    return _first_open(caller, end, caller[:-1], batch["start"])


def distinct(name: Array) -> tuple[Array, Array]:
    """The names that occur, or other numbers from 0, by size; and for each entry which of them it is.

    What ``np.unique`` gives, without sorting where the numbers are close together.
    """
    highest = int(name.max(initial=0))
    if highest > 8 * len(name) + 65536:
        return np.unique(name, return_inverse=True)
    occurs = np.zeros(highest + 1, dtype=np.bool_)
    occurs[name] = True
    used = np.flatnonzero(occurs)
    position = np.zeros(highest + 1, dtype=np.int64)
    position[used] = np.arange(len(used))
    return used, position[name]


def _module_number(name: str) -> int:
    return int(name.rpartition("_")[2]) if name.startswith(MODULE_PREFIX) else -1


def without_frames(batch: Batch) -> Batch:
    """The other rows, each under the nearest of them that was open around it; the batch itself where it has no calls."""
    is_frame = frames_of(batch)
    return batch if is_frame is None else without(batch, is_frame)


class ShortFrames:
    """Takes calls that took less than some time out of the batches of one recording, in the order of its drains.

    What is in them hangs under what is around them. Unfinished ones stay, and those that an earlier batch reported as open:
    what was inside them then is said to be so. Not thread-safe: a recording is drained by one thread at a time.
    """

    def __init__(self, seconds: float) -> None:
        self._shortest = seconds * 1e9
        self._reported: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def without(self, batch: Batch) -> Batch:
        """The next batch without them; itself where there are none."""
        if self._shortest <= 0:
            return batch
        short = batch["kind"] == Kind.FRAME
        short &= batch["end"] - batch["start"] < self._shortest
        short &= (batch["flags"] & Flag.UNFINISHED) == 0
        if self._reported.size:
            short &= ~np.isin(batch["id"], self._reported)
        self._reported = batch.opens.id
        return without(batch, short)
