"""Memory that was allocated in steps and is in use at the end, by phase, module and operator."""

from __future__ import annotations

import numpy as np

from otel_torchprof._answers.kept_memory import kept_memory
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import MEMORY_COLUMNS, Kind, MemoryFlag

NAMES = ["", "Net.enc", "aten::linear", "aten::addmm", "Optimizer.step#SGD.step", "aten::mul"]


def batch_of(*records):
    """Two operators in a module, and one in an optimizer; records are (time, bytes, address, event, flags)."""
    events = {
        "id": [1, 2, 3, 4, 5],
        "name": [1, 2, 3, 4, 5],
        "parent": [-1, 0, 1, -1, 3],
        "start": [0, 1, 2, 50, 51],
        "end": [40, 39, 38, 90, 89],
        "kind": [Kind.MODULE, Kind.OPERATOR, Kind.OPERATOR, Kind.OPERATOR, Kind.OPERATOR],
    }
    given = dict(zip(("time", "bytes", "address", "event", "flags"), zip(*records, strict=True), strict=True))
    memory = {
        column.name: np.array(given.get(column.name, np.zeros(len(records))), column.dtype) for column in MEMORY_COLUMNS
    }
    return Batch.of(events, NAMES, memory=memory)


def test_what_is_freed_is_not_kept():
    """Blocks that were freed, or whose address was used again, that failed, or that are of another time, are left out."""
    batch = batch_of(
        (10, 100, 7, 3, 0),
        (11, 200, 8, 3, 0),
        (12, -200, 8, 0, 0),
        (13, 300, 9, 3, 0),
        (14, 400, 9, 5, 0),
        (15, 500, 10, 3, MemoryFlag.OUT_OF_MEMORY),
        (16, 600, 11, 3, 0),
        (99, 700, 12, 0, 0),
        (99, -400, 9, 0, 0),
    )
    found = kept_memory(batch, 5, 60, 98)
    assert [(each.phase, each.operator, each.bytes, each.blocks) for each in found] == [
        ("", "aten::linear", 700, 2),
        ("optimizer", "aten::mul", 400, 1),
    ]
    assert [(each.operator, each.bytes) for each in kept_memory(batch, 60, 100, 100)] == [("", 700)]


def test_without_records_there_is_nothing():
    """A profile without memory, or without allocations, has none."""
    assert kept_memory(batch_of((10, -100, 7, 0, 0)), 0, 99, 99) == []
