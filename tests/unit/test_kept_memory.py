"""Memory that was allocated in steps and is in use at the end, by phase, module and operator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from otel_torchprof._answers import kept_memory as module
from otel_torchprof._answers.kept_memory import MemoryInUse, kept_memory
from otel_torchprof._columns.batch import Batch, OpenEvents
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


def places_in(in_use):
    (device,) = in_use.by_device()
    return device.device, {each[:3]: (each.bytes, each.blocks) for each in device.kept}


def test_what_is_in_use_after_several_drains(monkeypatch):
    """Blocks of earlier drains stay where they were allocated until a later one frees them or uses their address again."""
    monkeypatch.setattr(module, "_FEW", 0)  # merges at each drain
    in_use = MemoryInUse()
    assert in_use.by_device() == []
    in_use.add(batch_of((10, 100, 7, 3, 0), (11, 200, 8, 3, 0), (12, 300, 9, 0, 0)))
    in_use.add(batch_of((20, -100, 7, 5, 0), (21, 50, 9, 5, 0)))
    in_use.add(batch_of((30, -900, 99, 5, 0)))
    assert places_in(in_use) == (
        "cpu",
        {("", "Net.enc", "aten::linear"): (200, 1), ("optimizer", "", "aten::mul"): (50, 1)},
    )
    in_use.add(batch_of((40, -200, 8, 0, 0), (41, -50, 9, 0, 0)))
    assert places_in(in_use) == ("cpu", {})


def test_events_that_are_open_are_places():
    """A block that was allocated in events that have not ended has their phase, module and operator."""
    batch = batch_of((10, 100, 7, 3, 0), (11, 200, 8, 12, 0))
    opens = OpenEvents(
        id=np.array([10, 11, 12], np.uint64),
        parent=np.array([0, 10, 11], np.uint64),
        start=np.zeros(3, np.int64),
        name=np.array([6, 1, 2], np.uint32),
        kind=np.array([Kind.PHASE, Kind.MODULE, Kind.OPERATOR], np.uint8),
        thread=np.zeros(3, np.uint32),
        scope=np.zeros(3, np.uint8),
        sequence_nr=np.zeros(3, np.int64),
    )
    outer = {"outer_rows": np.array([0], np.uint64), "outer_parents": np.array([10], np.uint64)}
    names = Batch.of({"start": []}, [*NAMES, "torch.phase.forward"]).names
    in_use = MemoryInUse()
    in_use.add(replace(batch, opens=opens, names=names, **outer))
    assert places_in(in_use) == ("cpu", {("forward", "Net.enc", "aten::linear"): (300, 2)})


def test_there_is_a_limit_to_what_is_kept(monkeypatch):
    """Of too many blocks the largest are kept; places beyond their limit are none."""
    monkeypatch.setattr(module, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(module, "_MOST_PLACES", 1)
    in_use = MemoryInUse()
    in_use.add(batch_of((10, 100, 7, 3, 0), (11, 200, 8, 5, 0), (12, 300, 9, 5, 0)))
    _, places = places_in(in_use)
    assert sum(size for size, _ in places.values()) == 500
    assert len(places) <= 2
