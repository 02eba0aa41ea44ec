"""Rows of a batch as begins and ends: their order, memory, device events, what another recording has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from otel_torchprof import EventList
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import DEVICE_COLUMNS, MEMORY_COLUMNS, Flag, Kind, MemoryFlag
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._profile import legacy_state as state
from otel_torchprof._profile.event_tree import build_tree
from otel_torchprof._profile.legacy import function_events
from otel_torchprof._profile.legacy_state import OtherRecordings, legacy_events
from otel_torchprof.errors import TorchProfError
from otel_torchprof.legacy import EventKind, LegacyEvent, OnDevice, ProfilerConfig, ProfilerState, ResolvedEvents

MAIN, OTHER = RecordedThread(10, 100, 1, "main"), RecordedThread(20, 200, 2, "other")
CPU, CUDA = 0, 1


def batch(*rows, memory=None):
    """Rows of (name, start, end) and whatever other columns they have."""
    names = ["", *dict.fromkeys(row[0] for row in rows)]
    columns = {
        "name": [names.index(row[0]) for row in rows],
        "start": [row[1] for row in rows],
        "end": [row[2] for row in rows],
    }
    for column in {name for row in rows for name in row[3]}:
        default = {"parent": -1, "kind": 1, "sequence_nr": -1}.get(column, 0)
        columns[column] = [row[3].get(column, default) for row in rows]
    return Batch.of(columns, names, (MAIN, OTHER), memory=memory)


def row(name, start, end, **rest):
    """One event."""
    return name, start, end, rest


def changes(*found):
    """Changes of memory: (time, bytes, event around it) and whatever else."""
    neutral = {column.name: 0 for column in MEMORY_COLUMNS}
    dicts = [{**neutral, "time": t, "bytes": b, "event": e, **rest} for t, b, e, rest in found]
    return {name: [each[name] for each in dicts] for name in neutral}


def listed(found, *, left_out=None, until=None, device_events=None):
    """The lists by the system's id of the thread."""
    return legacy_events(found, left_out=left_out or OtherRecordings(), until=until or {}, device_events=device_events)


def text(events):
    """Begins as ``+name``, ends as ``-handle``, memory as bytes."""
    return [
        {"push": f"+{e.name()}", "pop": f"-{e.handle()}", "memory_alloc": str(e.cpu_memory_usage())}[e.kind()]
        for e in events
    ]


def test_order():
    """Begins and ends by time; at the same time as the tree says."""
    found = batch(
        row("a", 10, 30),
        row("b", 10, 20, parent=0),
        row("c", 20, 30, parent=0),
        row("d", 30, 30, parent=-1),
        row("e", 30, 30, parent=3),
        row("f", 30, 40),
    )
    assert text(listed(found)[MAIN.os_tid]) == ["+a", "+b", "-2", "+c", "-3", "-1", "+d", "+e", "-5", "-4", "+f", "-6"]


def test_what_crosses():
    """Labels that end in the order in which they began stay in the order of time."""
    found = batch(row("a", 10, 30), row("b", 20, 40, parent=0))
    assert text(listed(found)[MAIN.os_tid]) == ["+a", "+b", "-1", "-2"]


def test_an_end_elsewhere():
    """It stands in the list of the begin, and names the thread of the end."""
    found = listed(
        batch(row("a", 10, 30, end_thread=1, flags=int(Flag.ASYNC)), row("b", 20, 25, thread=1, end_thread=1))
    )
    assert {ident: text(events) for ident, events in found.items()} == {
        MAIN.os_tid: ["+a", "-1"],
        OTHER.os_tid: ["+b", "-2"],
    }
    begin, end = found[MAIN.os_tid]
    assert (begin.thread_id(), end.thread_id(), begin.is_async()) == (1, 2, True)


def test_a_thread_id_that_was_used_again():
    """The events of both threads are there."""
    found = batch(row("a", 10, 20), row("b", 30, 40, thread=1, end_thread=1))
    twice = replace(found, threads=(MAIN, OTHER._replace(os_tid=MAIN.os_tid)))
    assert text(listed(twice)[MAIN.os_tid]) == ["+a", "-1", "+b", "-2"]


def test_what_is_open_has_no_end():
    """An event that the stop cut has a begin only."""
    assert text(listed(batch(row("a", 10, 30, flags=int(Flag.UNFINISHED))))[MAIN.os_tid]) == ["+a"]


def test_only_operators_and_labels():
    """Modules are none of this engine's events."""
    found = batch(row("m", 10, 30, kind=int(Kind.MODULE)), row("a", 11, 12, kind=int(Kind.LABEL), parent=0))
    assert text(listed(found)[MAIN.os_tid]) == ["+a", "-2"]


def test_what_another_recording_has():
    """Events and changes of memory that are in another recording too are not in these lists."""
    memory = changes((12, 8, 1, {}), (22, 16, 2, {}))
    whole = batch(row("a", 10, 15), row("b", 20, 25), memory=memory)
    inner = OtherRecordings()
    inner.add(batch(row("a", 10, 15), memory=changes((12, 8, 1, {}))))
    assert text(listed(whole, left_out=inner)[MAIN.os_tid]) == ["+b", "16", "-2"]


def test_a_thread_that_was_left():
    """Of a thread that was left only what began before counts; other threads are whole."""
    found = batch(
        row("a", 10, 30), row("b", 20, 25), row("c", 20, 25, thread=1), memory=changes((12, 1, 1, {}), (22, 2, 2, {}))
    )
    lists = listed(found, until={MAIN.os_tid: 15})
    assert {ident: text(events) for ident, events in lists.items()} == {
        MAIN.os_tid: ["+a", "1", "-1"],
        OTHER.os_tid: ["+c", "-3"],
    }


def test_memory():
    """A change stands inside the event that made it, on its thread, by device; what could not be had is none."""
    memory = changes(
        (10, 64, 1, {}),
        (20, -64, 0, {}),
        (11, 32, 1, {"device_type": CUDA}),
        (12, 99, 1, {"flags": int(MemoryFlag.OUT_OF_MEMORY)}),
        (30, 5, 0, {"thread": 1}),
    )
    lists = listed(batch(row("a", 10, 20), memory=memory))
    assert [(e.cpu_memory_usage(), e.cuda_memory_usage()) for e in lists[MAIN.os_tid]] == [
        (0, 0),
        (64, 0),
        (0, 32),
        (-64, 0),
        (0, 0),
    ]
    assert [(e.kind(), e.cpu_memory_usage(), e.thread_id()) for e in lists[OTHER.os_tid]] == [("memory_alloc", 5, 2)]


class Points:
    """Device events at the begin and the end of every event, on device 3."""

    def __init__(self, ends):
        self.ends = ends
        self.asked = []

    def begun(self, handle):
        self.asked.append(handle)
        return OnDevice(3, self)

    def ended(self, handle):
        return OnDevice(3, self) if handle in self.ends else None

    def elapsed_time(self, end_event):
        return 0.25


def start_mark(time=5):
    """What times are counted from."""
    return LegacyEvent(EventKind.MARK, "__start_profile", 1, cpu_ns=time)


def test_device_events():
    """View-like operators get none; the others show the device's time as a kernel."""
    points = Points({1})
    (events,) = listed(batch(row("aten::mm", 10, 20), row("aten::view", 20, 30)), device_events=points).values()
    assert points.asked == [1]
    assert [(e.has_cuda(), e.device()) for e in events] == [(True, 3), (True, 3), (False, -1), (False, -1)]
    product, view = function_events([[start_mark(), *events]])
    assert (product.use_device, product.kernels, product.device_time_total) == ("cuda", [("aten::mm", 3, 250.0)], 250.0)
    assert (view.use_device, view.kernels) == (None, [])


def test_a_missing_device_event():
    """An end without its device event is torch's error, not a wrong time."""
    (events,) = listed(batch(row("aten::mm", 10, 20)), device_events=Points(set())).values()
    with pytest.raises(TorchProfError, match="Events were not recorded for CUDA"):
        function_events([[start_mark(), *events]])


def test_function_events():
    """Utility operators are left out, an operator directly inside one of its name too; memory counts for all that is open."""
    memory = changes((16, 100, 3, {}), (50, -100, 0, {}))
    found = batch(
        row("lab", 10, 40),
        row("aten::sum", 12, 30, parent=0),
        row("aten::sum", 14, 28, parent=1),
        row("aten::is_leaf", 32, 33, parent=0),
        memory=memory,
    )
    (events,) = listed(found).values()
    parsed = build_tree(function_events([[start_mark(), *events]]))
    assert [(e.name, e.cpu_memory_usage, e.id, e.is_legacy) for e in parsed] == [
        ("[memory]", -100, 0, True),
        ("lab", 100, 1, True),
        ("aten::sum", 100, 2, True),
    ]
    memory_event, label, total = parsed
    assert (memory_event.thread, memory_event.trace_name, memory_event.cpu_time_total) == (0, None, 0)
    assert total.cpu_parent is label
    assert label.self_cpu_memory_usage == 0
    assert (label.time_range.start, label.time_range.end) == (0.005, 0.035)


def test_the_tree():
    """Parents by time per thread and node; partial overlap makes none; only children of the name are merged, kernels kept."""

    def event(name, start, end, **rest):
        return [
            LegacyEvent(kind, name if kind == EventKind.PUSH else "", 1, cpu_ns=time, handle=start, **rest)
            for kind, time in ((EventKind.PUSH, start), (EventKind.POP, end))
        ]

    remote = {"node_id": 4, "is_remote": True, "device": 0}
    lists = [
        [start_mark(1), *event("a", 1000, 9000), *event("a", 2000, 8000), *event("b", 3000, 9500)],
        event("far", 1500, 1600, **remote, cuda_us=7),
    ]
    lists[0].sort(key=LegacyEvent.start_us)
    lists[1][1] = LegacyEvent(EventKind.POP, "", 1, cpu_ns=1600, handle=1500, cuda_us=19, **remote)
    parsed = build_tree(function_events(lists))
    assert [(e.name, e.node_id, e.is_remote, e.cpu_parent) for e in parsed] == [
        ("a", -1, False, None),
        ("far", 4, True, None),
        ("b", -1, False, None),
    ]
    assert parsed[1].kernels == [("far", 0, 12.0)]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([], "valid local start_record"),
        ([[start_mark().from_node(1)]], "valid local start_record"),
        ([[start_mark(), LegacyEvent(EventKind.POP, "", 1, cpu_ns=9, handle=6)]], "handle 6 of node -1 has no begin"),
    ],
)
def test_lists_that_make_no_sense(lists, message):
    """A start that is missing or remote and an end without a begin are errors that say so."""
    with pytest.raises(TorchProfError, match=message):
        function_events(lists)


def pairs(*rows):
    """Pairs of marks: (event, start, duration, index of the device)."""
    event, start, duration, index = zip(*rows, strict=True)
    neutral = [0] * len(rows)
    return {
        "event": event,
        "start": start,
        "duration": duration,
        "device_index": index,
        "stream": neutral,
        "device_type": [CUDA] * len(rows),
    }


def with_pairs(found, *rows):
    """A batch with pairs of its own."""
    values = pairs(*rows)
    devices = {column.name: np.array(values[column.name], column.dtype) for column in DEVICE_COLUMNS}
    return replace(found, devices=devices)


def test_the_recordings_own_device_events():
    """A pair is both device events of an event, also where it came with another batch; an event without has none."""
    one = batch(row("aten::mm", 10, 20), row("aten::add", 30, 40), row("aten::view", 50, 60))
    later = with_pairs(batch(), (1, 1_000, 250_000, 2), (3, 0, 5_000, 2))
    found = ResolvedEvents([one, later])
    assert len(found) == 2
    begun, ended = found.begun(1), found.ended(1)
    assert (begun.device, ended.device, begun.event.elapsed_time(ended.event)) == (2, 2, 0.25)
    assert (found.begun(2), found.ended(2)) == (None, None)
    (events,) = listed(one, device_events=found).values()
    product, add, view = function_events([[start_mark(), *events]])
    assert (product.kernels, product.device_time_total) == ([("aten::mm", 2, 250.0)], 250.0)
    assert (add.kernels, view.kernels) == ([], [])


@pytest.mark.parametrize(("kind", "expected"), [(ProfilerState.CUDA, [50.0, 20.0]), (ProfilerState.CPU, [0, 0])])
def test_a_profile_takes_what_its_recording_tells_of_devices(monkeypatch, kind, expected):
    """With the state CUDA the engine's events have the device times of the recording, without anybody giving it any."""

    class Known:
        """A recording of two operators, the second within the first."""

        is_parents = False
        start = stop = lambda _: None

        def drain(self):
            now = now_ns()
            rows = batch(row("outer", now, now + 9_000), row("inner", now + 2_000, now + 5_000, parent=0))
            return with_pairs(rows, (1, 0, 50_000, 0), (2, 0, 20_000, 0))

    monkeypatch.setattr(state, "_recording", lambda *_: Known())
    state.enable_profiler_legacy(ProfilerConfig(kind))
    found = EventList(function_events(state.disable_profiler_legacy()), use_device="cuda")
    assert [event.device_time_total for event in found] == expected
    if kind == ProfilerState.CUDA:
        found._build_tree()
        averages = {average.key: average for average in found.key_averages()}
        assert averages["outer"].self_device_time_total == 30.0
        assert "Self CUDA time total: 50.000us" in found.key_averages().table()
