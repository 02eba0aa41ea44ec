"""Memory in Chrome JSON: an instant for each record, and counters of what is in use."""

from __future__ import annotations

import numpy as np
import pytest
from trace_validator import validate

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof._encode import chrome
from otel_torchprof._model.memory import MOST_SAMPLES

THREADS = (RecordedThread(11, 1, 1, "one"), RecordedThread(12, 2, 2, "two"))


def batch_of(**columns):
    """A batch of nothing but records of memory, whose other columns are 0."""
    count = len(next(iter(columns.values())))
    reported = {c.name: columns.get(c.name, np.zeros(count, dtype=c.dtype)) for c in MEMORY_COLUMNS}
    return Batch.of({"start": [], "end": []}, [""], THREADS, memory=reported)


def pieces_of(batch):
    return list(chrome.encode(batch, base_ns=0, pid=7))


def events_of(batch, phase):
    return [event for event in validate(b"".join(pieces_of(batch)))["traceEvents"] if event["ph"] == phase]


def test_fields_of_an_instant():
    """Each record is an instant of its thread with Kineto's arguments; a failure has another name and no address."""
    batch = batch_of(
        time=[1500, 2500],
        bytes=[64, 1 << 60],
        address=[2**64 - 1, 0],
        total_allocated=[64, 64],
        total_reserved=[-1, 128],
        thread=[0, 1],
        device_type=[0, 1],
        device_index=[-1, 3],
        flags=[0, 1],
    )
    first, second = events_of(batch, "i")
    assert (first["name"], first["cat"], first["s"], first["tid"], str(first["ts"])) == (
        "[memory]",
        "cpu_instant_event",
        "t",
        11,
        "1.500",
    )
    assert first["args"] == {
        "Total Reserved": -1,
        "Total Allocated": 64,
        "Bytes": 64,
        "Device Id": -1,
        "Device Type": 0,
        "Addr": 2**64 - 1,
        "finished": False,
        "Ev Idx": 0,
    }
    assert (second["name"], second["tid"]) == ("[OutOfMemory]", 12)
    assert second["args"] == {
        "Total Reserved": 128,
        "Total Allocated": 64,
        "Bytes": 1 << 60,
        "Device Id": 3,
        "Device Type": 1,
        "finished": False,
        "Ev Idx": 1,
    }


def test_memory_alone():
    """A batch without events counts from the week of its first record."""
    parsed = validate(b"".join(chrome.encode(batch_of(time=[8 * 24 * 3600 * 10**9]))))
    assert parsed["baseTimeNanoseconds"] == 7 * 24 * 3600 * 10**9
    assert [event["ph"] for event in parsed["traceEvents"] if event["ph"] in "iC"] == ["i", "C"]


def test_a_thread_out_of_range():
    """Memory of a thread that is not in the table is refused before anything is written."""
    with pytest.raises(ValueError, match="memory points at a thread beyond the 2"):
        chrome.encode(batch_of(thread=[2]))


def test_fields_of_a_counter():
    """A sample is an event of the process with its time in us, the name of its track and the bytes."""
    (found,) = events_of(batch_of(time=[1500], total_allocated=[1 << 62]), "C")
    assert {**found, "ts": str(found["ts"])} == {
        "ph": "C",
        "name": "CPU:0 memory allocated",
        "pid": 7,
        "tid": 0,
        "ts": "1.500",
        "args": {"bytes": 1 << 62},
    }


def test_tracks():
    """A track for each quantity of each device, by torch's names of devices, with an index where there are several."""
    found = events_of(
        batch_of(
            time=[1, 2, 3, 4, 5],
            device_type=[0, 1, 1, 20, 77],
            device_index=[-1, 0, 3, 0, -1],
            total_allocated=[1] * 5,
            total_reserved=[0, 2, 0, 0, 0],
        ),
        "C",
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
    assert events_of(batch_of(time=[]), "C") == []
    assert events_of(Batch.of({"start": [1], "end": [2], "name": [0]}, ["a"], THREADS), "C") == []


def test_many_come_in_pieces():
    """All records are instants in their order, and of the counters at most the bounded number, with the peak; in pieces of about a MiB."""
    count = 120_000
    total = np.arange(count) * 7919 % 10_007
    total[83_457] = 1 << 40
    pieces = pieces_of(batch_of(time=np.arange(count) * 1000, total_allocated=total))
    assert max(map(len, pieces)) < (1 << 20) + 4096
    assert len(pieces) > 10
    events = validate(b"".join(pieces))["traceEvents"]
    assert [event["args"]["Ev Idx"] for event in events if event["ph"] == "i"] == list(range(count))
    found = [event for event in events if event["ph"] == "C"]
    assert MOST_SAMPLES // 2 < len(found) <= MOST_SAMPLES
    assert [event["args"]["bytes"] for event in found if event["args"]["bytes"] > 10_007] == [1 << 40]
    assert (int(found[0]["ts"]), int(found[-1]["ts"])) == (0, count - 1)
