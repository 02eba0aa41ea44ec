"""Memory of events on columns: whose bytes and whose peaks they are, which of it is an event of its own, and in what spans and averages it stands."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from recorded_tables import recorded_table

import otel_torchprof as otp
from otel_torchprof import EventList
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import MEMORY_COLUMNS, MEMORY_KIND, Flag, Kind, MemoryFlag
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.memory import (
    CPU_TYPES,
    DEVICE_TYPES,
    MOST_SAMPLES,
    NO_PEAK,
    highest_between,
    memory_of,
    moved_memory,
    peaks_of_rows,
    peaks_of_view,
    places_of,
    thinned,
    totals_over_time,
    with_memory_events,
)
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._model.tree import torch_view
from otel_torchprof._native import torch_library

CPU, CUDA, MTIA = 0, 1, 19
THREADS = (RecordedThread(1, 1, 1, "one"), RecordedThread(2, 2, 2, "two"))
NESTED = {"start": [0, 1, 5], "end": [100, 50, 20], "name": [1, 2, 3], "parent": [-1, 0, 1]}


def record(time, size, event=0, total=0, *, thread=0, device=CPU, index=-1, flags=0):
    """A record of memory inside the event with this id."""
    return time, size, event, total, thread, device, index, flags


def batch_of(columns, records, *names):
    """A batch with the events of ``columns``, called e1, e2 and so on unless names are given, and these records."""
    keys = ("time", "bytes", "event", "total_allocated", "thread", "device_type", "device_index", "flags")
    memory = dict(zip(keys, zip(*records, strict=True), strict=True)) if records else {key: [] for key in keys}
    memory |= {name: [0] * len(records) for name in ("address", "total_reserved")}
    names = names or [f"e{row}" for row in range(1, len(columns["start"]) + 1)]
    return Batch.of(columns, ["", *names], THREADS, memory=memory)


def by_name(batch, of=memory_of):
    """(CPU, device) bytes of each event of the view, or peaks, by its name."""
    view = torch_view(with_memory_events(batch))
    found = of(view)
    names = [view.batch.names[index] for index in view.batch["name"][view.rows]]
    device = [0] * len(names) if found.device is None else found.device.tolist()
    return dict(zip(names, zip(found.cpu.tolist(), device, strict=True), strict=True))


def peaks_by_name(batch):
    return by_name(batch, lambda view: peaks_of_view(view, places_of(view)))


def test_devices_are_apart():
    """Bytes of devices are counted apart from the CPU's; those of other sorts of devices are counted nowhere, as in torch."""
    records = [record(6, 10, 3), record(7, 100, 3, device=CUDA), record(8, 1000, 3, device=MTIA)]
    assert by_name(batch_of(NESTED, records))["e3"] == (10, 100)
    assert not set(CPU_TYPES) & set(DEVICE_TYPES)


def test_hidden_events_give_theirs_to_their_parents():
    """Memory of an event that no list shows counts in the nearest one around it that is shown."""
    columns = {**NESTED, "kind": [Kind.OPERATOR, Kind.MODULE, Kind.OPERATOR]}
    batch = batch_of(columns, [record(6, 10, 3)], "outer", "module", "aten::is_leaf")
    assert by_name(batch) == {"outer": (10, 0)}


def test_namesakes_are_one():
    """Where an operator is merged with the only one inside it, of the same name, its memory counts once."""
    batch = batch_of({**NESTED, "name": [1, 2, 2]}, [record(6, 10, 3), record(7, 1, 2)], "outer", "same")
    assert by_name(batch) == {"outer": (11, 0), "same": (11, 0)}


def test_what_is_outside_of_every_event_is_one_itself():
    """Such memory becomes an event [memory] without duration or parent, at its place in time, with a number of its own."""
    columns = {"start": [10, 30], "end": [20, 40], "name": [1, 1]}
    batch = batch_of(columns, [record(5, 1), record(15, 2, 1), record(25, -3, thread=1), record(45, 4)], "op")
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
    batch = batch_of(NESTED, [failed, record(200, 8, flags=MemoryFlag.OUT_OF_MEMORY)])
    whole = with_memory_events(batch)
    assert [whole.names[index] for index in whole["name"][3:]] == ["[OutOfMemory]"] * 2
    assert whole["parent"][3:].tolist() == [2, -1]
    assert all(cpu == 0 for cpu in memory_of(torch_view(whole)).cpu.tolist())


def test_asynchronous_events_have_what_happens_meanwhile():
    """As in torch: all memory of all threads between begin and end, which is then no event of its own, and its highest total; none is theirs alone."""
    columns = {
        "start": [0, 10, 50],
        "end": [100, 40, 60],
        "name": [1, 2, 3],
        "parent": [-1, 0, -1],
        "thread": [0, 0, 1],
        "flags": [0, Flag.ASYNC, 0],
    }
    records = [
        record(20, 1, 2, 5),
        record(30, 2, 0, 70, thread=1),
        record(55, 4, 3, 90, thread=1),
        record(70, 8, thread=1),
    ]
    batch = batch_of(columns, records)
    assert by_name(batch) == {"e1": (1, 0), "e2": (3, 0), "e3": (4, 0), "[memory]": (8, 0)}
    assert peaks_by_name(batch) == {"e1": (5, 0), "e2": (70, 0), "e3": (90, 0), "[memory]": (0, 0)}


def test_events_that_are_not_here_are_none():
    """Memory of an event that was dropped stands alone."""
    assert by_name(batch_of(NESTED, [record(6, 10, 99)]))["[memory]"] == (10, 0)


@pytest.mark.parametrize("records", [[], [record(5, 1)]])
def test_without_events(records):
    """No events at all, with memory or without, are no error."""
    whole = with_memory_events(batch_of({"start": [], "end": []}, records))
    assert memory_of(torch_view(whole)).cpu.tolist() == [size for _, size, *_ in records]


def test_not_recorded():
    """Where memory was not recorded nothing is made of it."""
    batch = Batch.of({"start": [0], "end": [1], "name": [1]}, ["", "op"])
    assert with_memory_events(batch) is batch
    assert memory_of(torch_view(batch)) is None
    assert moved_memory(batch, CPU_TYPES) is None
    assert peaks_of_rows(batch, CPU_TYPES) is None
    assert peaks_of_view(torch_view(batch), places_of(torch_view(batch))) is None


def test_moved_memory_is_apart_by_direction():
    """What rows allocated and what they freed are two sums, each with everything below; nothing for other devices."""
    batch = batch_of(NESTED, [record(6, 10, 3), record(7, -3, 3), record(30, -4, 2)])
    moved = moved_memory(batch, CPU_TYPES)
    assert moved.allocated.tolist() == [10, 10, 10]
    assert moved.released.tolist() == [7, 7, 3]
    assert moved_memory(batch, DEVICE_TYPES) is None


# ---- peaks ----


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
    """Where no allocator of that sort tells a total there is nothing."""
    reported = batch_of(NESTED, [record(6, 10, 3, -1), record(7, 10, 3, 5, device=CUDA, index=0)])
    assert peaks_of_rows(reported, CPU_TYPES) is None
    assert peaks_of_rows(batch_of(NESTED, [record(6, 10, 3, 5)]), DEVICE_TYPES) is None


def test_peaks_of_devices_are_apart():
    """CPU and devices have peaks of their own; of several devices it is the one with the most."""
    cuda = [record(7 + i, 8, 3, total, device=CUDA, index=i) for i, total in enumerate([300, 200])]
    assert peaks_by_name(batch_of(NESTED, [record(6, 10, 3, 10), *cuda]))["e3"] == (10, 300)


def test_events_of_lists():
    """Lists have 0 for what allocated nothing; memory of hidden or dropped events goes where its bytes go."""
    columns = {"start": [0, 10, 20], "end": [5, 15, 25], "name": [1, 2, 3]}
    found = peaks_by_name(batch_of(columns, [record(12, 10, 2, 99), record(30, 1, 0, 50)]))
    assert found == {"e1": (0, 0), "e2": (99, 0), "e3": (0, 0), "[memory]": (50, 0)}


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
    """On random trees events have the bytes between their begin and end on their thread, and the largest total; averages of all, that of all."""
    columns, records = grown(random.Random(seed))
    batch, order = recorded(columns, records)

    def inside(row):
        start, end, thread = (columns[name][row] for name in ("start", "end", "thread"))
        return [r for r in records if start <= r[0] <= end and r[4] == thread]

    peaks = [max((r[3] for r in inside(row) if r[1] > 0), default=NO_PEAK) for row in order]
    assert peaks_of_rows(batch, CPU_TYPES).tolist() == peaks
    events = EventList.of(batch, origin_ns=0, profile_memory=True)
    own = {event.id: event for event in events if event.id <= len(order)}
    assert {id_: event.cpu_memory_peak for id_, event in own.items()} == {
        row + 1: max(peak, 0) for row, peak in zip(order, peaks, strict=True)
    }
    assert {id_: event.cpu_memory_usage for id_, event in own.items()} == {
        row + 1: sum(r[1] for r in inside(row)) for row in order
    }
    alone = [event.cpu_memory_usage for event in events if event.id > len(order)]
    assert alone == [r[1] for r in records if r[2] == 0]
    assert events.total_average().cpu_memory_peak == max((r[3] for r in records if r[1] > 0), default=0)


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
    assert events[0].self_cpu_memory_usage == 5
    events[0].cpu_memory_usage = 1
    assert events[0].self_cpu_memory_usage == 1
    events[2].cpu_memory_peak = 75
    assert peaks() == {"e1": (75, 8), "e2": (90, 0)}
    assert events.total_average().cpu_memory_peak == 90


# ---- recordings ----


def test_without_torch(monkeypatch):
    """Where torch is not installed labels are recorded all the same, and ``health`` says why there is no memory."""
    monkeypatch.setattr(torch_library, "installed_torch", lambda: None)
    with otp.profile(profile_memory=True) as prof, otp.record_function("label"):
        pass
    assert [event.name for event in prof.events()] == ["label"]
    assert [event.cpu_memory_usage for event in prof.events()] == [0]
    assert not len(prof.memory["time"])
    assert "memory is not recorded: torch is not installed" in str(prof.health)


def test_switched_off(monkeypatch):
    """With the switch off nothing is recorded, and that is no error."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    with otp.profile(profile_memory=True) as prof:
        pass
    assert not len(prof.events())
    assert prof.memory is None


# ---- totals over time ----


def totals(most=MOST_SAMPLES, **columns):
    """{(device type, index, quantity): [(time, bytes)]} of records whose other columns are 0."""
    count = len(columns["time"])
    reported = {c.name: columns.get(c.name, [0] * count) for c in MEMORY_COLUMNS}
    memory = Batch.of({"start": []}, [""], memory=reported).memory
    found = list(totals_over_time(memory, most))
    assert all(total.time.dtype == total.bytes.dtype == np.int64 for total in found)
    return {
        (total.device_type, total.device_index, total.quantity): list(
            zip(total.time.tolist(), total.bytes.tolist(), strict=True)
        )
        for total in found
    }


def test_devices_and_quantities_are_apart():
    """Each device of each type has its own curve, and one of what is reserved if that is told."""
    found = totals(
        time=[1, 2, 3, 4],
        device_type=[CPU, CUDA, CUDA, CUDA],
        device_index=[-1, 0, 1, 0],
        total_allocated=[5, 6, 7, 8],
        total_reserved=[0, 20, 30, 40],
    )
    assert found == {
        (CPU, -1, "allocated"): [(1, 5)],
        (CUDA, 0, "allocated"): [(2, 6), (4, 8)],
        (CUDA, 0, "reserved"): [(2, 20), (4, 40)],
        (CUDA, 1, "allocated"): [(3, 7)],
        (CUDA, 1, "reserved"): [(3, 30)],
    }


def test_what_is_not_told_is_not_there():
    """A total of -1 is no sample; where nothing but that or nothing but 0 reserved is told there is no curve."""
    assert totals(time=[1, 2, 3], total_allocated=[-1, 4, -1], total_reserved=[-1, -1, 0]) == {
        (CPU, 0, "allocated"): [(2, 4)]
    }
    assert totals(time=[1], total_allocated=[-1], total_reserved=[-1]) == {}
    assert totals(time=[]) == {}


def test_threads_are_merged_by_time():
    """Records of several threads, which stand one thread after another, become one curve by time."""
    assert totals(time=[1, 5, 2, 6], thread=[0, 0, 1, 1], total_allocated=[10, 30, 20, 40]) == {
        (CPU, 0, "allocated"): [(1, 10), (2, 20), (5, 30), (6, 40)]
    }


def test_only_changes_are_samples():
    """A total that stays as it is has one sample; what is reserved changes seldom."""
    assert totals(time=[1, 2, 3], total_allocated=[5, 6, 6], total_reserved=[9, 9, 9]) == {
        (CPU, 0, "allocated"): [(1, 5), (2, 6)],
        (CPU, 0, "reserved"): [(1, 9)],
    }


def test_too_many_are_thinned():
    """Up to the bound every change is there; beyond it the bound holds."""
    exact = [(time, time % 7 + 1) for time in range(100)]
    time, value = zip(*exact, strict=True)
    assert totals(100, time=time, total_allocated=value)[CPU, 0, "allocated"] == exact
    many = totals(100, time=range(1000), total_allocated=[time % 7 + 1 for time in range(1000)])[CPU, 0, "allocated"]
    assert 50 <= len(many) <= 100


@pytest.mark.parametrize("seed", range(20))
def test_thinning_keeps_the_picture(seed):
    """Of random walks as many samples stay as allowed, among them the first, lowest, highest and last of every segment."""
    choose = random.Random(seed)
    count, most = choose.randrange(101, 3000), choose.choice([8, 40, 100])
    value, total = [], 0
    for _ in range(count):
        total = max(0, total + choose.randrange(-50, 60))
        value.append(total)
    given = list(zip(range(count), value, strict=True))
    kept = list(zip(*(column.tolist() for column in thinned(np.arange(count), np.array(value), most)), strict=True))
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert set(kept) <= set(given)
    width = -(-count // (most // 4))
    for begin in range(0, count, width):
        segment = given[begin : begin + width]
        inside = [sample for sample in kept if begin <= sample[0] < begin + width]
        assert (inside[0], inside[-1]) == (segment[0], segment[-1])
        for extreme in (min, max):
            assert extreme(v for _, v in inside) == extreme(v for _, v in segment)
