"""Tracks of devices in Chrome JSON."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from device_runs import WEEK_NS, Pair, Program, batch_of, device_columns
from hypothesis import given
from hypothesis import strategies as st
from random_recordings import recordings, with_devices
from trace_validator import validate

import otel_torchprof as otp
from otel_torchprof import ProfilerActivity
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.joined import joined
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._encode import chrome
from otel_torchprof._profile.kineto_event import displayed_devices, displayed_events

GOLDEN = """\
{"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"GPU"}},
{"ph":"M","name":"process_labels","pid":0,"tid":0,"args":{"labels":"GPU 0"}},
{"ph":"M","name":"process_sort_index","pid":0,"tid":0,"args":{"sort_index":5000000}},
{"ph":"M","name":"thread_name","pid":0,"tid":7,"args":{"name":"stream 7"}},
{"ph":"M","name":"thread_sort_index","pid":0,"tid":7,"args":{"sort_index":0}},
{"ph":"X","cat":"user_annotation","name":"op1","pid":42,"tid":111,"ts":1.000,"dur":8.000,"args":{"External id":1,"Ev Idx":0}},
{"ph":"X","cat":"cpu_op","name":"op2","pid":42,"tid":111,"ts":2.000,"dur":1.000,"args":{"External id":2,"Ev Idx":1}},
{"ph":"X","cat":"gpu_user_annotation","name":"op1","pid":0,"tid":7,"ts":3.500,"dur":40.000,"args":{"External id":1,"device":0,"stream id":7}},
{"ph":"s","id":1,"cat":"ac2g","name":"ac2g","pid":42,"tid":111,"ts":1.000},
{"ph":"f","id":1,"cat":"ac2g","name":"ac2g","pid":0,"tid":7,"ts":3.500,"bp":"e"},
{"ph":"X","cat":"gpu_user_annotation","name":"op2","pid":0,"tid":7,"ts":4.123,"dur":30.001,"args":{"External id":2,"device":0,"stream id":7}},
{"ph":"s","id":2,"cat":"ac2g","name":"ac2g","pid":42,"tid":111,"ts":2.000},
{"ph":"f","id":2,"cat":"ac2g","name":"ac2g","pid":0,"tid":7,"ts":4.123,"bp":"e"}
]}
"""


def text_of(batch: Batch, **options: Any) -> bytes:
    return b"".join(chrome.encode(batch, **{"pid": 42} | options))


def trace_of(batch: Batch, **options: Any) -> list[dict[str, Any]]:
    return validate(text_of(batch, **options))["traceEvents"]


def device_slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == "gpu_user_annotation"]


def names_of_tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def arrows(events: list[dict[str, Any]]) -> int:
    return sum(event["ph"] == "f" and event["cat"] == "ac2g" for event in events)


def test_text():
    """A label and an operator inside of it come out as these lines, behind what the CPU did."""
    pairs = [Pair(2, 4123, 30_001, 7), Pair(1, 3500, 40_000, 7)]
    batch = batch_of([(1000, 9000), (2000, 3000)], pairs, parent=[-1, 0], kind=[Kind.LABEL, Kind.OPERATOR])
    assert text_of(batch).decode().endswith(GOLDEN)
    validate(text_of(batch))


def test_each_stream_and_device_has_a_track():
    """Devices are processes by index, streams their threads by id, in their order."""
    pairs = [Pair(1, 50, 5, 20, 1), Pair(2, 60, 5, 0, 1), Pair(3, 70, 5, 20, 0)]
    events = trace_of(batch_of([(0, 9), (10, 19), (20, 29)], pairs))
    assert names_of_tracks(events) == {
        (42, 111): "main",
        (42, 112): "autograd",
        (0, 20): "stream 20",
        (1, 0): "stream 0",
        (1, 20): "stream 20",
    }
    reported = {e["args"]["External id"]: (e["pid"], e["tid"]) for e in device_slices(events)}
    assert reported == {1: (1, 20), 2: (1, 0), 3: (0, 20)}


def test_ids_that_are_taken():
    """A device whose index is the id of the process, and a stream whose id is a pointer, get ids that are free."""
    pairs = [Pair(1, 50, 5, 1 << 47, 42), Pair(2, 60, 5, -1, 42), Pair(3, 70, 5, 3, 0), Pair(4, 80, 5, 3, 0, 20)]
    events = trace_of(batch_of([(0, 9), (10, 19), (20, 29), (30, 39)], pairs))
    found = {(e["pid"], e["tid"]): e["args"]["stream id"] for e in device_slices(events)}
    assert found == {
        (5_000_000, 1_000_000): -1,
        (5_000_000, 1_000_001): 1 << 47,
        (0, 3): 3,
        (5_000_001, 3): 3,
    }
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {42: "python", 5_000_000: "GPU 42", 0: "GPU", 5_000_001: "device 0"}


def test_what_overlaps_is_on_another_lane():
    """Pairs of two threads on one stream that overlap are on two tracks of the stream."""
    batch = batch_of([(0, 90), (1, 80)], [Pair(1, 100, 50, 5), Pair(2, 120, 60, 5)], thread=[0, 1])
    tracks = names_of_tracks(events := trace_of(batch))
    assert [tracks[e["pid"], e["tid"]] for e in device_slices(events)] == ["stream 5", "stream 5 (2)"]
    assert arrows(events) == 2


def test_an_asynchronous_event_has_a_slice_without_an_arrow():
    """What is no slice on the CPU cannot be where an arrow starts."""
    events = trace_of(batch_of([(0, 9)], [Pair(1, 5, 5)], flags=[Flag.ASYNC]))
    assert (len(device_slices(events)), arrows(events)) == (1, 0)


def test_arrows_are_numbered_behind_those_to_backward():
    """The numbers of the two kinds of arrows do not meet."""
    columns = {"sequence_nr": [3, 3], "fwd_thread": [0, 1], "scope": [0, 1], "thread": [0, 1]}
    events = trace_of(batch_of([(0, 9), (20, 29)], [Pair(1, 30, 5), Pair(2, 40, 5)], **columns))
    numbers = {e["id"]: e["cat"] for e in events if e["ph"] == "s"}
    assert sorted(numbers.values()) == ["ac2g", "ac2g", "fwdbwd"]


def test_the_base_is_before_events_that_are_not_shown():
    """Times count from before the first launch, also where the event that launched is left out of the trace."""
    batch = batch_of([(0, 9), (2 * WEEK_NS, 3 * WEEK_NS)], [Pair(1, 5, 5)])
    displayed = displayed_events(
        replace(batch, columns={**batch.columns, "scope": np.array([0, 7], dtype=np.uint8)}), LABELS
    )
    (event,) = device_slices(trace_of(displayed, devices_of=batch))
    assert event["ts"] == Decimal("0.005")


LABELS = {ProfilerActivity.CPU: {"USER_ANNOTATION"}}


@pytest.mark.parametrize(
    ("filters", "names", "with_arrows"),
    [
        ({}, ["op1", "op2", "op3"], 3),
        (LABELS, ["op1", "op2", "op3"], 1),
        ({ProfilerActivity.CUDA: {"GPU_USER_ANNOTATION"}}, ["op1", "op3"], 2),
        ({ProfilerActivity.CUDA: {"CONCURRENT_KERNEL", "GPU_MEMCPY"}}, ["op2"], 1),
        ({ProfilerActivity.CUDA: set()}, [], 0),
        ({ProfilerActivity.XPU: set()}, ["op1", "op2", "op3"], 3),
        (LABELS | {ProfilerActivity.CUDA: {"GPU_USER_ANNOTATION"}}, ["op1", "op3"], 1),
    ],
)
def test_filters_of_activities(filters, names, with_arrows):
    """A device's group leaves out labels or operators of that device, the CPU's leaves out no slice of a device."""
    columns = {"kind": [Kind.LABEL, Kind.OPERATOR, Kind.MODULE], "scope": [7, 0, 0], "parent": [-1, 0, 0]}
    batch = batch_of([(0, 90), (10, 19), (20, 29)], [Pair(1, 50, 90), Pair(2, 60, 5), Pair(3, 70, 5)], **columns)
    events = trace_of(displayed_events(batch, filters), devices_of=displayed_devices(batch, filters))
    assert [event["name"] for event in device_slices(events)] == names
    assert arrows(events) == with_arrows


@given(st.integers(0, 1 << 32), st.integers(0, 60), st.integers(1, 3))
def test_any_recording_with_any_times(seed, moves, segments):
    """Whatever was recorded and whatever devices tell, the trace is valid and the CPU's part is what it is without them."""
    batch = with_devices(joined(recordings(seed, moves, segments=segments)), seed)
    count = len(batch.devices["event"])
    text = text_of(batch)
    assert len(device_slices(validate(text)["traceEvents"])) == count
    lines = [line.rstrip(b",") for line in text.splitlines()]
    without = [line.rstrip(b",") for line in text_of(replace(batch, devices=None)).splitlines()]
    of_devices = (b'"cat":"gpu_user_annotation"', b'"cat":"ac2g"', b'"pid":0,', b'"pid":1,')
    assert [line for line in lines if not any(mark in line for mark in of_devices)] == without


@given(st.integers(0, 1 << 32), st.integers(1, 40), st.sampled_from([0, 3000]))
def test_any_program(seed, events, behind):
    """What streams ran in their order is nested as the events are, with an arrow to each."""
    program = Program(seed, events, 2)
    trace = trace_of(program.batch(behind=behind, rounding=64))
    assert arrows(trace) == events
    assert len({(e["pid"], e["tid"]) for e in device_slices(trace)}) == len({pair.stream for pair in program.pairs})


def test_many_come_in_pieces():
    """A hundred thousand slices are written in pieces of about a MiB, all of them, each with its arrow."""
    count = 100_000
    start = WEEK_NS + np.arange(count) * 10
    pairs = device_columns([Pair(at + 1, at * 10 + 3, 9) for at in range(count)])
    pieces = list(chrome.encode(Batch.of({"start": start, "end": start + 5}, [""], devices=pairs), pid=42))
    assert max(map(len, pieces)) < (1 << 20) + 4096
    text = b"".join(pieces)
    assert text.count(b'"cat":"gpu_user_annotation"') == count
    assert text.count(b'"ph":"s"') == text.count(b'"ph":"f"') == count


@pytest.mark.parametrize(("types", "count"), [(["GPU_USER_ANNOTATION"], 1), (["CONCURRENT_KERNEL"], 0)])
def test_a_profile_exports_its_devices(tmp_path, monkeypatch, types, count):
    """The trace that a profile writes has the tracks of the devices in its recording, by its filters."""
    filters = {ProfilerActivity.CUDA: types}
    with otp.profile(operators=False, activity_filters=filters) as prof, otp.record_function("label"):
        pass
    batch = prof._segments.batch()
    pair = Pair(int(batch["id"][0]), int(batch["start"][0]) - WEEK_NS, 500, 7)
    devices = {name: np.array(values) for name, values in device_columns([pair]).items()}
    monkeypatch.setattr(prof._segments, "batch", lambda: replace(batch, devices=devices))
    prof.export_chrome_trace(tmp_path / "trace.json")
    events = validate((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert [(event["name"], event["tid"]) for event in device_slices(events)] == [("label", 7)] * count
