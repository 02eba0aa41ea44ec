"""Peaks of memory on columns: of rows, of events of a view, of spans of steps, and in averages."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from recorded_tables import recorded_table

from otel_torchprof import EventList
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, MemoryFlag
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.memory import (
    CPU_TYPES,
    DEVICE_TYPES,
    NO_PEAK,
    highest_between,
    peaks_of_rows,
    peaks_of_view,
    places_of,
    with_memory_events,
)
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._model.tree import torch_view

CPU, CUDA = 0, 1
THREADS = (RecordedThread(1, 1, 1, "one"), RecordedThread(2, 2, 2, "two"))
NESTED = {"start": [0, 1, 5], "end": [100, 50, 20], "name": [1, 2, 3], "parent": [-1, 0, 1]}


def batch_of(columns, records):
    """A batch with the events of ``columns`` and ``records`` of :func:`record`."""
    keys = ("time", "bytes", "event", "total_allocated", "thread", "device_type", "device_index", "flags")
    memory = dict(zip(keys, zip(*records, strict=True), strict=True)) if records else {key: [] for key in keys}
    memory |= {name: [0] * len(records) for name in ("address", "total_reserved")}
    names = ["", *(f"e{row}" for row in range(1, len(columns["start"]) + 1))]
    return Batch.of(columns, names, THREADS, memory=memory)


def record(time, size, event, total, *, thread=0, device=CPU, index=-1, flags=0):
    return time, size, event, total, thread, device, index, flags


def by_name(batch):
    """(CPU, device) peak of each event of the view, by its name."""
    view = torch_view(with_memory_events(batch))
    peaks = peaks_of_view(view, places_of(view))
    names = [view.batch.names[index] for index in view.batch["name"][view.rows]]
    device = itertools.repeat(None) if peaks.device is None else peaks.device.tolist()
    return dict(zip(names, zip(peaks.cpu.tolist(), device, strict=False), strict=True))


def test_the_highest_total_inside():
    """An event has the highest total that was told at an allocation in it or below; what others have in use counts."""
    records = [record(6, 10, 3, 1010), record(30, 4, 2, 500), record(60, 1, 1, 2000)]
    assert peaks_of_rows(batch_of(NESTED, records), CPU_TYPES).tolist() == [2000, 1010, 1010]


def test_only_allocations_count():
    """What is told when a block is freed, when there was none to give, or as unknown, is no peak of an event."""
    records = [
        record(6, -10, 3, 100),
        record(7, 5, 2, -1),
        record(8, 1 << 40, 2, 100, flags=MemoryFlag.OUT_OF_MEMORY),
        record(60, 1, 1, 7),
    ]
    assert peaks_of_rows(batch_of(NESTED, records), CPU_TYPES).tolist() == [7, NO_PEAK, NO_PEAK]


def test_not_told():
    """Where memory was not recorded, or no allocator of that sort tells a total, there is nothing."""
    plain = Batch.of({"start": [0], "end": [1], "name": [1]}, ["", "op"])
    assert peaks_of_rows(plain, CPU_TYPES) is None
    assert peaks_of_view(torch_view(plain), places_of(torch_view(plain))) is None
    reported = batch_of(NESTED, [record(6, 10, 3, -1), record(7, 10, 3, 5, device=CUDA, index=0)])
    assert peaks_of_rows(reported, CPU_TYPES) is None
    assert peaks_of_rows(batch_of(NESTED, [record(6, 10, 3, 5)]), DEVICE_TYPES) is None


def test_devices_are_apart():
    """CPU and devices have peaks of their own; of several devices it is the one with the most."""
    cuda = [record(7 + i, 8, 3, total, device=CUDA, index=i) for i, total in enumerate([300, 200])]
    assert by_name(batch_of(NESTED, [record(6, 10, 3, 10), *cuda]))["e3"] == (10, 300)


def test_events_of_lists():
    """Lists have 0 for what allocated nothing; memory of hidden or dropped events goes where its bytes go."""
    columns = {"start": [0, 10, 20], "end": [5, 15, 25], "name": [1, 2, 3]}
    found = by_name(batch_of(columns, [record(12, 10, 2, 99), record(30, 1, 0, 50)]))
    assert found == {"e1": (0, None), "e2": (99, None), "e3": (0, None), "[memory]": (50, None)}


def test_asynchronous_events():
    """They have the highest total of what any thread allocates meanwhile, and none of it is theirs alone."""
    columns = {
        "start": [0, 10, 50],
        "end": [100, 40, 60],
        "name": [1, 2, 3],
        "parent": [-1, 0, -1],
        "thread": [0, 0, 1],
        "flags": [0, Flag.ASYNC, 0],
    }
    records = [record(20, 1, 2, 5), record(30, 2, 0, 70, thread=1), record(55, 4, 3, 90, thread=1)]
    assert by_name(batch_of(columns, records)) == {"e1": (5, None), "e2": (70, None), "e3": (90, None)}


def grown(choose, length=200):
    """Random properly nested events on two threads that share one allocator; columns and records."""
    columns = {name: [] for name in ("start", "end", "name", "parent", "thread")}
    records, stacks, total = [], ([], []), 1000
    for now in range(1, length):
        thread = choose.randrange(2)
        stack, move = stacks[thread], choose.choice(["begin", "end", "memory"])
        if move == "begin":
            for name, value in zip(columns, (now, 0, len(columns["start"]) + 1, 0, thread), strict=True):
                columns[name].append(value)
            columns["parent"][-1] = stack[-1] if stack else -1
            stack.append(len(columns["start"]) - 1)
        elif move == "end" and stack:
            columns["end"][stack.pop()] = now
        else:
            size = choose.randrange(-min(total, 50), 50)
            total += size
            records.append(record(now, size, stack[-1] + 1 if stack else 0, total, thread=thread))
    for row, end in enumerate(columns["end"]):
        columns["end"][row] = end or length
    return columns, records


def recorded(columns, records):
    """The same as a batch, by thread as a recording is; and for each of its rows the one of ``columns``."""
    order = sorted(range(len(columns["start"])), key=lambda row: columns["thread"][row])
    place = {row: at for at, row in enumerate(order)} | {-1: -1}
    moved = {name: [column[row] for row in order] for name, column in columns.items()}
    moved |= {"parent": [place[parent] for parent in moved["parent"]], "id": [row + 1 for row in order]}
    return batch_of(moved, sorted(records, key=lambda r: r[4])), order


@pytest.mark.parametrize("seed", range(30))
def test_random_trees(seed):
    """On random trees events, and averages of all, have the largest total of the allocations in their time on their thread."""
    columns, records = grown(random.Random(seed))
    batch, order = recorded(columns, records)

    def expected(row):
        start, end, thread = (columns[name][row] for name in ("start", "end", "thread"))
        return max((r[3] for r in records if start <= r[0] <= end and r[4] == thread and r[1] > 0), default=NO_PEAK)

    assert peaks_of_rows(batch, CPU_TYPES).tolist() == [expected(row) for row in order]
    events = EventList.of(batch, origin_ns=0, profile_memory=True)
    of_events = {event.id: event.cpu_memory_peak for event in events if event.id <= len(order)}
    assert of_events == {row + 1: max(expected(row), 0) for row in order}
    every = max((r[3] for r in records if r[1] > 0), default=0)
    assert events.total_average().cpu_memory_peak == every


@pytest.mark.parametrize("seed", range(30))
def test_random_intervals(seed):
    """The highest total between any two times, both included, is what looking at every record finds."""
    choose = random.Random(seed)
    count = choose.randrange(70)
    time = np.array([choose.randrange(50) for _ in range(count)], dtype=np.int64)
    total = np.array([choose.randrange(-1, 1000) for _ in range(count)], dtype=np.int64)
    counted = np.array([choose.random() < 0.7 for _ in range(count)], dtype=bool)
    start = np.array([choose.randrange(-5, 55) for _ in range(100)], dtype=np.int64)
    end = start + np.array([choose.randrange(-3, 60) for _ in range(100)], dtype=np.int64)
    found = highest_between({"time": time, "total_allocated": total}, counted, start, end)
    assert found.tolist() == [
        max((*total[counted & (time >= low) & (time <= high)].tolist(), NO_PEAK))
        for low, high in zip(start.tolist(), end.tolist(), strict=True)
    ]


def test_spans():
    """Spans of events have the peak of what they allocated, spans of steps the highest total of any thread in their time."""
    columns = {"start": [10, 30], "end": [20, 40], "name": [1, 2]}
    records = [
        record(12, 5, 1, 100),
        record(25, 5, 0, 300, thread=1),
        record(35, 5, 2, 200),
        record(36, 5, 2, 60, device=CUDA, index=0),
        record(55, -5, 0, 50, thread=1),
    ]
    batch, ids = batch_of(columns, sorted(records, key=lambda r: r[4])), itertools.count(1)
    steps = [RecordedStep(0, 0, 22), RecordedStep(1, 22, 50), RecordedStep(2, 50, 60), RecordedStep(3, 60, 70)]
    made = recorded_table(
        batch, start=0, end=70, steps=steps, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids)
    )
    table = add_attributes(made, batch)
    found = {}
    for column in table.attributes:
        if column.key.endswith("memory.peak"):
            here = range(len(table)) if column.rows is None else column.rows.tolist()
            spans = {f"step {table.step[i]}" if table.row[i] < 0 else f"e{table.row[i] + 1}": i for i in here}
            found[column.key] = dict(zip(spans, column.values.tolist(), strict=True))
    assert found == {
        "torch.memory.peak": {"step 0": 100, "e1": 100, "step 1": 300, "e2": 200, "step 2": 50},
        "torch.device.memory.peak": {"step 1": 60, "e2": 60},
    }


def test_averages():
    """An average has the largest of its events' peaks, from columns and from objects alike, and can be sorted by it."""
    columns = {"start": [0, 10, 20], "end": [5, 15, 25], "name": [1, 2, 1]}
    records = [
        record(1, 5, 1, 70),
        record(12, 5, 2, 90),
        record(22, 5, 3, 60),
        record(23, 5, 3, 8, device=CUDA, index=0),
    ]
    events = EventList.of(batch_of(columns, records), origin_ns=0, profile_memory=True)

    def peaks():
        return {a.key: (a.cpu_memory_peak, a.device_memory_peak) for a in events.key_averages()}

    assert peaks() == {"e1": (70, 8), "e2": (90, 0)}
    rows = events.table(sort_by="cpu_memory_peak").splitlines()
    assert [row.split()[0] for row in rows if row.strip().startswith("e")] == ["e2", "e1", "e1"]
    assert events.total_average().cpu_memory_peak == 90
    events[2].cpu_memory_peak = 75
    assert peaks() == {"e1": (75, 8), "e2": (90, 0)}
    assert events.total_average().cpu_memory_peak == 90
