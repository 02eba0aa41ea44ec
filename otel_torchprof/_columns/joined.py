"""Several recordings as one batch, and a batch without some of its rows."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import Batch, Names, RecordedThread
from .frame_info import FrameInfo
from .samples import Samples
from .schema import (
    COLLECTIVE_COLUMNS,
    COLUMNS,
    CONTEXT,
    DEVICE_COLUMNS,
    ENERGY_COLUMNS,
    INPUTS,
    MEMORY_COLUMNS,
    OPTIONAL,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from .batch import Array
    from .schema import Column

_WITHOUT = {INPUTS.name: -1, CONTEXT.name: 0}
"""Values of optional columns for the events of a batch without them."""


def joined(batches: Sequence[Batch]) -> Batch:
    """The events of final batches as one, in the order of the batches within each thread.

    For batches of one process, which share a table of names. Open events are not copied, since final batches have none.
    Costs a copy of everything, and about 20 ns per event if several threads recorded; nothing for a single batch. Pure.

    Raises:
        ValueError: the batches do not share one table of names.
    """
    if not batches:
        return Batch.of({"start": []}, [""])
    if len(batches) == 1:
        return batches[0]
    threads, thread_maps = _one_list_of_threads(batches)
    columns = {c.name: np.concatenate([batch[c.name] for batch in batches]) for c in COLUMNS}
    for name in ("thread", "end_thread"):
        mapped = [new[batch[name]] for new, batch in zip(thread_maps, batches, strict=True)]
        columns[name] = np.concatenate(mapped).astype(np.uint32, copy=False)
    columns["parent"] = _shifted(batches, "parent", len)
    for column in OPTIONAL:
        if any(column.name in batch.columns for batch in batches):
            columns[column.name] = np.concatenate([_optional(batch, column.name, column.dtype) for batch in batches])
    words = [batch.inputs for batch in batches if batch.inputs is not None]
    if words:
        columns[INPUTS.name] = _shifted(batches, INPUTS.name, _word_count)
    dropped: Counter[str] = Counter()
    for batch in batches:
        dropped.update(batch.dropped)
    whole = Batch(
        columns,
        _longest(batches),
        threads,
        inputs=np.concatenate(words) if words else None,
        kept=functools.reduce(operator.or_, (batch.kept for batch in batches)),
        memory=_memory(batches, thread_maps),
        devices=_one_after_another([batch.devices for batch in batches], DEVICE_COLUMNS),
        energy=_one_after_another([batch.energy for batch in batches], ENERGY_COLUMNS),
        collectives=_one_after_another([batch.collectives for batch in batches], COLLECTIVE_COLUMNS),
        samples=_samples(batches, thread_maps),
        dropped=dict(dropped),
        frame_info=FrameInfo.joined([batch.frame_info for batch in batches if batch.frame_info is not None]),
    )
    return _by_thread(whole)


def without(batch: Batch, rows: npt.NDArray[np.bool_]) -> Batch:
    """Removes the rows of a mask from a batch; their children and memory records move to their parents."""
    if not rows.any():
        return batch
    parent, top_level = batch["parent"].copy(), np.arange(len(batch))
    moving = np.flatnonzero((parent >= 0) & rows[parent])
    while moving.size:
        above = parent[moving]
        parent[moving], top_level[moving] = parent[above], top_level[above]
        moving = moving[(parent[moving] >= 0) & rows[parent[moving]]]
    columns, memory = {**batch.columns, "parent": parent}, _moved_outwards(batch, rows, parent)
    left = replace(batch, columns=columns, memory=memory)
    if len(batch.outer_rows) or len(batch.opens):
        left = _with_outer(left, rows, top_level)
    return _picked(left, np.flatnonzero(~rows))


def with_rows(batch: Batch, added: Mapping[str, Any], count: int) -> Batch:
    """Returns the batch with rows at the end, of which ``added`` has columns; others are neutral. Ids are new ones.

    Costs a copy of all columns.
    """
    # Avoids ids of timing events whose event was dropped.
    taken = 0 if batch.devices is None else int(batch.devices["event"].max(initial=0))
    first = max(int(batch["id"].max(initial=0)), taken) + 1
    neutral = {"sequence_nr": -1, "parent": -1, **_WITHOUT}
    columns = {"id": np.arange(first, first + count, dtype=np.uint64), **added}
    columns = {name: columns.get(name, np.full(count, neutral.get(name, 0))) for name in batch.columns}
    return replace(
        batch,
        columns={
            name: np.concatenate((column, np.asarray(columns[name]).astype(column.dtype)))
            for name, column in batch.columns.items()
        },
    )


def _with_outer(batch: Batch, rows: npt.NDArray[np.bool_], top_level: Array) -> Batch:
    """Parents from earlier batches, of rows and of open events, for a batch that loses the rows of a mask.

    ``top_level``: for each row the outermost of the lost rows around it, or itself.
    """
    own = np.zeros(len(batch), dtype=np.uint64)
    own[batch.outer_rows.astype(np.intp)] = batch.outer_parents
    outer = own[top_level]
    outer[batch["parent"] >= 0] = 0
    opens, of_open = batch.opens, rows_of(batch, batch.opens.parent)
    gone = np.flatnonzero((of_open >= 0) & rows[of_open]) if len(batch) else of_open[:0]
    if gone.size:
        enclosing = batch["parent"][of_open[gone]]
        parent = opens.parent.copy()
        parent[gone] = np.where(enclosing >= 0, batch["id"][enclosing], outer[of_open[gone]])
        opens = replace(opens, parent=parent)
    outer_rows = np.flatnonzero(outer).astype(np.uint64)
    return replace(batch, outer_rows=outer_rows, outer_parents=outer[outer != 0], opens=opens)


def rows_of(batch: Batch, ids: Array) -> npt.NDArray[np.int64]:
    """Rows of the events with these ids, -1 for those that are not here. Ids rise within a thread, so runs are merged."""
    known, order = batch["id"], None
    if not len(known):
        return np.full(len(ids), -1, dtype=np.int64)
    if (known[1:] < known[:-1]).any():
        order = np.argsort(known, kind="stable")
        known = known[order]
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    rows = at if order is None else order[at]
    return np.where(known[at] == ids, rows, -1)


def _moved_outwards(batch: Batch, rows: npt.NDArray[np.bool_], enclosing: Array) -> Mapping[str, Array] | None:
    """The batch's memory, that of the rows of a mask as of the events around them."""
    if batch.memory is None or not len(batch.memory["time"]):
        return batch.memory
    event = batch.memory["event"].copy()
    of_event = rows_of(batch, event)
    moving = np.flatnonzero((of_event >= 0) & rows[of_event])
    above = enclosing[of_event[moving]]
    event[moving] = np.where(above >= 0, batch["id"][above], np.uint64(0))
    return {**batch.memory, "event": event}


def _memory(batches: Sequence[Batch], thread_maps: Sequence[Array]) -> dict[str, Array] | None:
    """The memory columns of all batches, sorted by thread and then by time, as in each batch."""
    parts = [
        {**batch.memory, "thread": new[batch.memory["thread"]]}
        for batch, new in zip(batches, thread_maps, strict=True)
        if batch.memory is not None
    ]
    if not parts:
        return None
    whole = {c.name: np.concatenate([part[c.name] for part in parts]).astype(c.dtype) for c in MEMORY_COLUMNS}
    order = np.argsort(whole["thread"], kind="stable")
    return {name: column[order] for name, column in whole.items()}


def _samples(batches: Sequence[Batch], thread_maps: Sequence[Array]) -> Samples | None:
    return Samples.joined(
        [
            replace(batch.samples, thread=new[batch.samples.thread])
            for batch, new in zip(batches, thread_maps, strict=True)
            if batch.samples is not None
        ]
    )


def _one_after_another(
    tables: Sequence[Mapping[str, Array] | None], columns: Sequence[Column]
) -> dict[str, Array] | None:
    """Arrays that batches have beside their rows; None where none has any."""
    parts = [table for table in tables if table is not None]
    if not parts:
        return None
    return {c.name: np.concatenate([part[c.name] for part in parts]).astype(c.dtype) for c in columns}


def _word_count(batch: Batch) -> int:
    return 0 if batch.inputs is None else len(batch.inputs)


def _optional(batch: Batch, name: str, dtype: Any) -> Array:
    return batch[name] if name in batch.columns else np.full(len(batch), _WITHOUT[name], dtype=dtype)


def _shifted(batches: Sequence[Batch], name: str, size: Callable[[Batch], int]) -> Array:
    """Joins a column of offsets, shifting each batch's by the sizes of the previous ones; negative offsets stay."""
    parts, before = [], 0
    for batch in batches:
        column = _optional(batch, name, np.int64) if name == INPUTS.name else batch[name]
        parts.append(np.where(column >= 0, column + column.dtype.type(before), column))
        before += size(batch)
    return np.concatenate(parts)


def _longest(batches: Sequence[Batch]) -> Names:
    """The table that has all names: names are interned once per process, so every table is the beginning of a later one."""
    longest = max((batch.names for batch in batches), key=len)
    for batch in batches:
        ends, data = batch.names.ends, batch.names.data
        if batch.names.is_of_table(longest) or not len(ends):
            continue
        same = np.array_equal(ends, longest.ends[: len(ends)]) and np.array_equal(data, longest.data[: len(data)])
        if not same:
            raise ValueError("the names of the batches are not of one table; only batches of one process can be joined")
    return longest


def _one_list_of_threads(batches: Sequence[Batch]) -> tuple[list[RecordedThread], list[npt.NDArray[np.int64]]]:
    """Returns all threads without duplicates, and for each batch the indices of its threads in that list.

    A thread is identified by the system's id and Python's. Both may be reused after a thread has ended; torch's id, given
    when torch first runs on a thread, tells such threads apart.
    """
    threads: list[RecordedThread] = []
    known: dict[tuple[int, int], int] = {}
    maps = []
    for batch in batches:
        places = []
        for thread in batch.threads:
            key = (thread.os_tid, thread.ident)
            at = known.get(key)
            if at is None or (thread.torch_tid and threads[at].torch_tid not in {0, thread.torch_tid}):
                at = known[key] = len(threads)
                threads.append(thread)
            latest = thread if thread.torch_tid else thread._replace(torch_tid=threads[at].torch_tid)
            threads[at] = latest if latest.name else latest._replace(name=threads[at].name)
            places.append(at)
        maps.append(np.array(places, dtype=np.int64))
    return threads, maps


def _by_thread(batch: Batch) -> Batch:
    """The rows grouped by thread, as every batch has them; the order within a thread stays."""
    thread = batch["thread"]
    if not (thread[1:] < thread[:-1]).any():
        return batch
    return _picked(batch, np.argsort(thread, kind="stable"))


def _picked(batch: Batch, rows: npt.NDArray[Any]) -> Batch:
    """Returns the rows in this order; their parents must be among them, or outside of the batch."""
    columns = {name: column[rows] for name, column in batch.columns.items()}
    # The last entry is for the roots, whose -1 reads it.
    position = np.full(len(batch) + 1, -1, dtype=np.int32)
    position[rows] = np.arange(len(rows), dtype=np.int32)
    columns["parent"] = position[columns["parent"]]
    outer = position[batch.outer_rows.astype(np.int64)]
    displayed = outer >= 0
    return replace(
        batch,
        columns=columns,
        outer_rows=outer[displayed].astype(np.uint64),
        outer_parents=batch.outer_parents[displayed],
    )
