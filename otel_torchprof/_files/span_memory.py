"""Changes of memory from spans, which say how much they and the spans inside them moved: what each event moved itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.schema import MEMORY_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Array


class PlacedSpans(NamedTuple):
    """The events of a batch, one entry each."""

    row: Array
    """Row in the file."""
    parent: Array
    end: Array
    thread: Array


def memory_of_spans(memory: Mapping[str, Array], events: PlacedSpans) -> dict[str, Array]:
    """The changes of memory as :attr:`Batch.memory`: per event one for what it allocated, and one for what it released.

    They are at the event's end, and have no address: a file has neither. Sums of events and their peaks are those of the
    file; changes outside of events are not in it.
    """
    event_of_row = np.full(int(max(events.row.max(initial=-1), memory["span"].max())) + 1, -1, np.int64)
    event_of_row[events.row] = np.arange(len(events.row))
    event = event_of_row[memory["span"].astype(np.int64)]
    parts = []
    for device in (0, 1):
        for is_allocated in (True, False):
            is_part = (event >= 0) & (memory["device_type"] == device) & ((memory["bytes"] > 0) == is_allocated)
            at = np.flatnonzero(is_part)
            parts.append(_moved(memory, events, at, event[at], np.maximum if is_allocated else np.minimum))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort((columns["event"], columns["time"], columns["thread"]))
    return {column.name: columns[column.name][order].astype(column.dtype) for column in MEMORY_COLUMNS}


def _moved(
    memory: Mapping[str, Array], events: PlacedSpans, at: Array, event: Array, limited: np.ufunc
) -> dict[str, Array]:
    """What each event moved itself, for one kind of change of one device: its sum without those of its children."""
    own = np.zeros(len(events.row), np.int64)
    own[event] = memory["bytes"][at]
    inside = events.parent[event]
    np.subtract.at(own, inside[inside >= 0], memory["bytes"][at][inside >= 0])
    peak = np.full(len(own), -1, np.int64)
    peak[event] = memory["total_allocated"][at]
    own = limited(own, 0)
    rows = np.flatnonzero(own)
    return {
        "time": events.end[rows],
        "bytes": own[rows],
        "address": np.zeros(len(rows)),
        "total_allocated": peak[rows],
        "total_reserved": np.full(len(rows), -1),
        "event": rows + 1,
        "thread": events.thread[rows],
        "device_type": np.full(len(rows), memory["device_type"][at].max(initial=0)),
        "device_index": np.full(len(rows), -1),
        "flags": np.zeros(len(rows)),
    }
