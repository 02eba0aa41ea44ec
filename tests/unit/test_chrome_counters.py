"""Counters of memory in Chrome JSON."""

from __future__ import annotations

import numpy as np
from trace_validator import validate

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof._encode import chrome
from otel_torchprof._model.memory import MOST_SAMPLES

THREADS = (RecordedThread(11, 1, 1, "one"), RecordedThread(12, 2, 2, "two"))


def counters(pid=7, **columns):
    count = len(columns["time"])
    reported = {c.name: columns.get(c.name, np.zeros(count, dtype=c.dtype)) for c in MEMORY_COLUMNS}
    batch = Batch.of({"start": [], "end": []}, [""], THREADS, memory=reported)
    parsed = validate(b"".join(chrome.encode(batch, base_ns=0, pid=pid)))
    return [event for event in parsed["traceEvents"] if event["ph"] == "C"]


def test_fields():
    """A sample is an event of the process with its time in us, the name of its track and the bytes."""
    found = counters(time=[1500], total_allocated=[1 << 62])
    assert [{**event, "ts": str(event["ts"])} for event in found] == [
        {
            "ph": "C",
            "name": "CPU:0 memory allocated",
            "pid": 7,
            "tid": 0,
            "ts": "1.500",
            "args": {"bytes": 1 << 62},
        }
    ]


def test_tracks():
    """A track for each quantity of each device, by torch's names of devices, with an index where there are several."""
    found = counters(
        time=[1, 2, 3, 4, 5],
        device_type=[0, 1, 1, 20, 77],
        device_index=[-1, 0, 3, 0, -1],
        total_allocated=[1] * 5,
        total_reserved=[0, 2, 0, 0, 0],
    )
    assert sorted(event["name"] for event in found) == [
        "CPU memory allocated",
        "CUDA:0 memory allocated",
        "CUDA:0 memory reserved",
        "CUDA:3 memory allocated",
        "PrivateUse1:0 memory allocated",
        "device 77 memory allocated",
    ]


def test_none_without_memory():
    """A trace of a recording without memory, or without any record of it, has no counter."""
    assert counters(time=[]) == []
    parsed = validate(b"".join(chrome.encode(Batch.of({"start": [1], "end": [2], "name": [0]}, ["a"], THREADS))))
    assert all(event["ph"] != "C" for event in parsed["traceEvents"])


def test_many_come_in_pieces():
    """More records than are drawn have at most the bounded number of samples, in pieces of about a MiB, with the peak."""
    count = 120_000
    reported = {c.name: np.zeros(count, dtype=c.dtype) for c in MEMORY_COLUMNS}
    total = np.arange(count) * 7919 % 10_007
    total[83_457] = 1 << 40
    reported |= {"time": np.arange(count) * 1000, "total_allocated": total}
    pieces = list(chrome.encode(Batch.of({"start": [], "end": []}, [""], THREADS, memory=reported), base_ns=0))
    assert max(map(len, pieces)) < (1 << 20) + 4096
    found = [event for event in validate(b"".join(pieces))["traceEvents"] if event["ph"] == "C"]
    assert MOST_SAMPLES // 2 < len(found) <= MOST_SAMPLES
    assert [event["args"]["bytes"] for event in found if event["args"]["bytes"] > 10_007] == [1 << 40]
    assert (int(found[0]["ts"]), int(found[-1]["ts"])) == (0, count - 1)
