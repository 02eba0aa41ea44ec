"""Instants of memory in Chrome JSON."""

from __future__ import annotations

import numpy as np
import pytest
from trace_validator import validate

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._encode import chrome

THREADS = (RecordedThread(11, 1, 1, "one"), RecordedThread(12, 2, 2, "two"))


def memory(count, **given):
    columns = (
        "time",
        "bytes",
        "address",
        "total_allocated",
        "total_reserved",
        "event",
        "thread",
        "device_type",
        "device_index",
        "flags",
    )
    return {name: given.get(name, [0] * count) for name in columns}


def trace(batch):
    return validate(b"".join(chrome.encode(batch, base_ns=0)))


def instants(parsed):
    return [event for event in parsed["traceEvents"] if event["ph"] == "i"]


def test_fields():
    """Each record is an instant of its thread with Kineto's arguments; a failure has another name and no address."""
    reported = memory(
        2,
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
    batch = Batch.of({"start": [1000], "end": [3000], "name": [1]}, ["", "op"], THREADS, memory=reported)
    first, second = instants(trace(batch))
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
        "Ev Idx": 1,
    }
    assert (second["name"], second["tid"]) == ("[OutOfMemory]", 12)
    assert second["args"] == {
        "Total Reserved": 128,
        "Total Allocated": 64,
        "Bytes": 1 << 60,
        "Device Id": 3,
        "Device Type": 1,
        "finished": False,
        "Ev Idx": 2,
    }


def test_memory_alone():
    """A batch without events writes its memory, counted from its first moment's week."""
    reported = memory(1, time=[8 * 24 * 3600 * 10**9])
    parsed = validate(b"".join(chrome.encode(Batch.of({"start": [], "end": []}, [""], THREADS, memory=reported))))
    assert parsed["baseTimeNanoseconds"] == 7 * 24 * 3600 * 10**9
    assert len(instants(parsed)) == 1


def test_many_come_in_pieces():
    """A hundred thousand records are written in pieces of about a MiB, all of them, in their order."""
    count = 100_000
    reported = memory(count, time=np.arange(count) * 1000)
    pieces = list(chrome.encode(Batch.of({"start": [], "end": []}, [""], THREADS, memory=reported), base_ns=0))
    assert max(map(len, pieces)) < (1 << 20) + 4096
    assert len(pieces) > 10
    found = instants(validate(b"".join(pieces)))
    assert [event["args"]["Ev Idx"] for event in found] == list(range(count))


def test_a_thread_out_of_range():
    """Memory of a thread that is not in the table is refused before anything is written."""
    batch = Batch.of({"start": [], "end": []}, [""], THREADS, memory=memory(1, thread=[2]))
    with pytest.raises(ValueError, match="memory points at a thread beyond the 2"):
        chrome.encode(batch)
