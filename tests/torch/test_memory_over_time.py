"""``profile_memory`` over time: the counters of the Chrome trace, and the peaks of events, averages and spans."""

from __future__ import annotations

import gc
import json
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from memory_programs import train  # noqa: E402
from observed import torchs  # noqa: E402
from trace_validator import validate  # noqa: E402

import otel_torchprof as otp  # noqa: E402


def in_use_before(prof):
    """What torch counted as allocated before the first record."""
    return prof.memory["total_allocated"].item(0) - prof.memory["bytes"].item(0)


def exported(prof, tmp_path, read):
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    return read(path.read_bytes())["traceEvents"]


def test_the_peak_of_a_program_whose_sizes_are_known():
    """A label's peak is what it holds at once, no more and no less, on the event, on the average and on the span."""
    torch.empty(1)
    gc.collect()
    with otp.profile(profile_memory=True) as prof:
        outside = torch.empty(10)
        with otp.record_function("label"):
            kept = torch.empty(1000)
            passing = torch.empty(5000)
            del passing
            more = torch.empty(100)
        later = torch.empty(100_000)
    before = in_use_before(prof)
    held = 4 * (outside.numel() + kept.numel() + 5000)
    [event] = [event for event in prof.events() if event.name == "label"]
    [average] = [average for average in prof.key_averages() if average.key == "label"]
    spans = {span.name: span.attributes for span in prof.spans()}
    found = (event.cpu_memory_peak, average.cpu_memory_peak, spans["label"]["torch.memory.peak"])
    assert [peak - before for peak in found] == [held] * 3
    everything = 4 * (outside.numel() + kept.numel() + more.numel() + later.numel())
    assert spans["torch.profile"]["torch.memory.peak"] - before == everything
    assert prof.key_averages().total_average().cpu_memory_peak - before == everything
    assert (event.device_memory_peak, average.device_memory_peak) == (0, 0)
    assert all("torch.device.memory.peak" not in attributes for attributes in spans.values())


def test_peaks_are_what_torchs_trace_says(tmp_path):
    """Each operator of a training step has the highest "Total Allocated" of the allocations that torch's own trace has in it."""
    train()
    gc.collect()
    with torchs(profile_memory=True) as theirs:
        train()
    with otp.profile(profile_memory=True) as ours:
        train()
    events = exported(theirs, tmp_path, json.loads)
    reported = [(e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    _, total, size = min(reported)
    before = total - size
    expected = []
    slices = [event for event in events if event.get("cat") == "cpu_op"]
    for op in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        inside = [t - before for ts, t, b in reported if b > 0 and op["ts"] <= ts <= op["ts"] + op["dur"]]
        expected.append((op["name"], max(inside, default=None)))
    before = in_use_before(ours)
    found = [
        (span.name, None if (peak := span.attributes.get("torch.memory.peak")) is None else peak - before)
        for span in sorted(ours.spans(), key=lambda span: (span.start_time, -span.end_time))
        if span.attributes.get("torch.op.scope") in {"function", "backward_function"}
    ]
    assert found == expected
    assert any(peak for _, peak in found)


def test_each_step_has_its_own_peak():
    """The span of a step has the highest total of its time, not of the recording's."""
    torch.empty(1)
    gc.collect()
    sizes = (1000, 50_000, 3000)
    with otp.profile(profile_memory=True) as prof:
        for size in sizes:
            torch.empty(size)
            prof.step()
    before = in_use_before(prof)
    peaks = {
        span.attributes["torch.step.number"]: span.attributes["torch.memory.peak"] - before
        for span in prof.spans()
        if span.name == "torch.step" and "torch.memory.peak" in span.attributes
    }
    assert peaks == {number: 4 * size for number, size in enumerate(sizes)}


def test_the_counter_says_what_the_instants_say(tmp_path):
    """The counter has every total that the trace's instants tell, in their order, at their times, and no other."""
    with otp.profile(profile_memory=True) as prof:
        train()
    events = exported(prof, tmp_path, validate)
    reported = [(e["ts"], e["args"]["Total Allocated"]) for e in events if e["name"] == "[memory]"]
    changes = reported[:1] + [new for old, new in pairwise(reported) if new[1] != old[1]]
    found = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert found == [("CPU memory allocated", *sample) for sample in changes]
    assert len(found) > 50


def test_none_without_profile_memory(tmp_path):
    """Without ``profile_memory`` the trace has no counter, and neither events nor spans have a peak."""
    with otp.profile() as prof:
        train()
    assert all(event["ph"] != "C" for event in exported(prof, tmp_path, validate))
    assert all(event.cpu_memory_peak == event.device_memory_peak == 0 for event in prof.events())
    assert all("torch.memory.peak" not in span.attributes for span in prof.spans())
