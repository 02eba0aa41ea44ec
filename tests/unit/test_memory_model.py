"""Memory of events on columns: what belongs to whom, which of it is an event of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import MEMORY_KIND, Flag, Kind, MemoryFlag
from otel_torchprof._model.memory import CPU_TYPES, DEVICE_TYPES, memory_of, moved_memory, with_memory_events
from otel_torchprof._model.tree import torch_view

CPU, CUDA, MTIA = 0, 1, 19
THREADS = (RecordedThread(1, 1, 1, "one"), RecordedThread(2, 2, 2, "two"))


def batch_of(columns, names, records):
    """A batch with the events of ``columns`` and ``records`` of (time, bytes, id of the event around, thread, device, flags)."""
    time, size, event, thread, device, flags = zip(*records, strict=True) if records else [()] * 6
    memory = {"time": time, "bytes": size, "event": event, "thread": thread, "device_type": device, "flags": flags}
    rest = {name: [0] * len(records) for name in ("address", "total_allocated", "total_reserved", "device_index")}
    return Batch.of(columns, ["", *names], THREADS, memory={**memory, **rest})


def record(time, size, event=0, *, thread=0, device=CPU, flags=0):
    return time, size, event, thread, device, flags


def by_name(batch):
    """(CPU, device) bytes of each event of the view, by its name."""
    view = torch_view(with_memory_events(batch))
    use = memory_of(view)
    names = [view.batch.names[index] for index in view.batch["name"][view.rows]]
    device = [0] * len(names) if use.device is None else use.device.tolist()
    return dict(zip(names, zip(use.cpu.tolist(), device, strict=True), strict=True))


NESTED = {"start": [0, 1, 5], "end": [100, 50, 20], "name": [1, 2, 3], "parent": [-1, 0, 1]}


def test_bytes_belong_to_the_event_and_all_around_it():
    """What is allocated and freed in an event counts there and in every event around it."""
    batch = batch_of(NESTED, ["outer", "middle", "inner"], [record(6, 10, 3), record(30, -4, 2), record(60, 1, 1)])
    assert by_name(batch) == {"outer": (7, 0), "middle": (6, 0), "inner": (10, 0)}


def test_devices_are_apart():
    """Bytes of devices are counted apart from the CPU's; those of other sorts of devices are counted nowhere, as in torch."""
    records = [record(6, 10, 3), record(7, 100, 3, device=CUDA), record(8, 1000, 3, device=MTIA)]
    batch = batch_of(NESTED, ["outer", "middle", "inner"], records)
    assert by_name(batch)["inner"] == (10, 100)
    assert not set(CPU_TYPES) & set(DEVICE_TYPES)


def test_hidden_events_give_theirs_to_their_parents():
    """Memory of an event that no list shows counts in the nearest one around it that is shown."""
    batch = batch_of(
        {**NESTED, "kind": [Kind.OPERATOR, Kind.MODULE, Kind.OPERATOR]},
        ["outer", "module", "aten::is_leaf"],
        [record(6, 10, 3)],
    )
    assert by_name(batch) == {"outer": (10, 0)}


def test_namesakes_are_one():
    """Where an operator is merged with the only one inside it, of the same name, its memory counts once."""
    batch = batch_of({**NESTED, "name": [1, 2, 2]}, ["outer", "same"], [record(6, 10, 3), record(7, 1, 2)])
    assert by_name(batch) == {"outer": (11, 0), "same": (11, 0)}


def test_what_is_outside_of_every_event_is_one_itself():
    """Such memory becomes an event [memory] without duration or parent, at its place in time, with a number of its own."""
    columns = {"start": [10, 30], "end": [20, 40], "name": [1, 1]}
    batch = batch_of(columns, ["op"], [record(5, 1), record(15, 2, 1), record(25, -3, thread=1), record(45, 4)])
    whole = with_memory_events(batch)
    view = torch_view(whole)
    rows = view.rows.tolist()
    assert [whole.names[whole["name"][row]] for row in rows] == ["[memory]", "op", "[memory]", "op", "[memory]"]
    assert memory_of(view).cpu.tolist() == [1, 2, -3, 0, 4]
    added = whole["kind"] == MEMORY_KIND
    assert (whole["start"][added] == whole["end"][added]).all()
    assert whole["parent"][added].tolist() == [-1] * 3
    assert whole["thread"][added].tolist() == [0, 1, 0]
    assert len(set(whole["id"].tolist())) == 5
    assert len(batch) == 2
    assert batch.memory["event"].tolist() == [0, 1, 0, 0]


def test_failures_are_events_inside_others():
    """An allocation that failed is an event inside the one around it, and counts as no bytes anywhere."""
    failed = record(6, 1 << 40, 3, flags=MemoryFlag.OUT_OF_MEMORY)
    batch = batch_of(NESTED, ["outer", "middle", "inner"], [failed, record(200, 8, flags=MemoryFlag.OUT_OF_MEMORY)])
    whole = with_memory_events(batch)
    assert [whole.names[index] for index in whole["name"][3:]] == ["[OutOfMemory]"] * 2
    assert whole["parent"][3:].tolist() == [2, -1]
    assert all(cpu == 0 for cpu in memory_of(torch_view(whole)).cpu.tolist())


def test_asynchronous_events_have_what_happens_meanwhile():
    """As in torch: all memory of all threads between begin and end, which is then no event of its own; and none is theirs alone."""
    columns = {
        "start": [0, 10, 50],
        "end": [100, 40, 60],
        "name": [1, 2, 3],
        "parent": [-1, 0, -1],
        "thread": [0, 0, 1],
        "flags": [0, Flag.ASYNC, 0],
    }
    records = [record(20, 1, 2), record(30, 2, thread=1), record(55, 4, 3, thread=1), record(70, 8, thread=1)]
    assert by_name(batch_of(columns, ["outer", "async", "other"], records)) == {
        "outer": (1, 0),
        "async": (3, 0),
        "other": (4, 0),
        "[memory]": (8, 0),
    }


def test_one_threads_memory_is_not_anothers():
    """What one thread allocates is not counted in an operator that is open on another."""
    columns = {"start": [0, 5], "end": [100, 50], "name": [1, 2], "thread": [0, 1]}
    assert by_name(batch_of(columns, ["one", "two"], [record(20, 7, 2, thread=1)])) == {"one": (0, 0), "two": (7, 0)}


def test_events_that_are_not_here_are_none():
    """Memory of an event that was dropped stands alone."""
    assert by_name(batch_of(NESTED, ["outer", "middle", "inner"], [record(6, 10, 99)]))["[memory]"] == (10, 0)


@pytest.mark.parametrize("records", [[], [record(5, 1)]])
def test_without_events(records):
    """No events at all, with memory or without, are no error."""
    whole = with_memory_events(batch_of({"start": [], "end": []}, [], records))
    assert memory_of(torch_view(whole)).cpu.tolist() == [size for _, size, *_ in records]


def test_not_recorded():
    """Where memory was not recorded nothing is made of it."""
    batch = Batch.of({"start": [0], "end": [1], "name": [1]}, ["", "op"])
    assert with_memory_events(batch) is batch
    assert memory_of(torch_view(batch)) is None
    assert moved_memory(batch, CPU_TYPES) is None


def test_moved_memory_is_apart_by_direction():
    """What rows allocated and what they freed are two sums, each with everything below; nothing for other devices."""
    batch = batch_of(NESTED, ["outer", "middle", "inner"], [record(6, 10, 3), record(7, -3, 3), record(30, -4, 2)])
    moved = moved_memory(batch, CPU_TYPES)
    assert moved.allocated.tolist() == [10, 10, 10]
    assert moved.released.tolist() == [7, 7, 3]
    assert moved_memory(batch, DEVICE_TYPES) is None


@pytest.mark.parametrize("seed", range(30))
def test_random_trees(seed):
    """On random properly nested threads, each event has exactly the bytes between its begin and its end on its thread."""
    choose = random.Random(seed)
    columns = {name: [] for name in ("start", "end", "name", "parent", "thread")}
    records, now = [], 0
    for thread in (0, 1):
        stack = []
        for _ in range(200):
            now += 1
            move = choose.choice(["begin", "end", "memory"])
            if move == "begin":
                columns["start"].append(now)
                columns["end"].append(0)
                columns["name"].append(len(columns["start"]))
                columns["parent"].append(stack[-1] if stack else -1)
                columns["thread"].append(thread)
                stack.append(len(columns["start"]) - 1)
            elif move == "end" and stack:
                columns["end"][stack.pop()] = now
            else:
                records.append(record(now, choose.randrange(-50, 50), stack[-1] + 1 if stack else 0, thread=thread))
        while stack:
            now += 1
            columns["end"][stack.pop()] = now
    rows = len(columns["start"])
    batch = batch_of(columns, [f"e{row}" for row in range(rows)], records)
    view = torch_view(with_memory_events(batch))
    use = memory_of(view).cpu
    for position, row in enumerate(view.rows.tolist()):
        if row < rows:
            inside = [
                r
                for r in records
                if columns["start"][row] <= r[0] <= columns["end"][row] and r[3] == columns["thread"][row]
            ]
            assert use[position] == sum(size for _, size, *_ in inside)
    alone = [size for _, size, event, *_ in records if event == 0]
    assert use[np.flatnonzero(view.rows >= rows)].tolist() == alone
