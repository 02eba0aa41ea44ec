"""Curves of memory in Perfetto's own format."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from perfetto_traces import read  # noqa: E402

import otel_torchprof as otp  # noqa: E402


def test_counters_are_those_of_chrome_json(tmp_path):
    """Each total of an allocator is a counter with the values and times that Chrome JSON has."""
    with otp.profile(profile_memory=True) as prof:
        kept = [torch.ones(100 * n) for n in range(1, 6)]
        del kept[1:3]
    prof.export_as(tmp_path / "t.pftrace")
    prof.export_as(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    samples = [event for event in document["traceEvents"] if event["ph"] == "C"]
    found = read(tmp_path / "t.pftrace").counters
    assert set(found) == {event["name"] for event in samples} != set()
    for name, values in found.items():
        expected = [event for event in samples if event["name"] == name]
        assert [value for _, value in values] == [next(iter(event["args"].values())) for event in expected]
        times = [document["baseTimeNanoseconds"] + round(event["ts"] * 1000) for event in expected]
        assert [time for time, _ in values] == pytest.approx(times, abs=300)  # which a double of ts can be off
