"""Chrome traces of verbose profiles: stacks and thread numbers as torch writes them."""

from __future__ import annotations

import gc
import json

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from frame_programs import PROGRAMS, masked  # noqa: E402
from torch._C._profiler import _ExperimentalConfig  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

import otel_torchprof as otp  # noqa: E402


def trace_of(make, program, path, *, verbose=True):
    """The events of a Chrome trace of a program that runs for the second time."""
    program()
    config = _ExperimentalConfig(verbose=verbose)
    gc.collect()
    gc.disable()
    try:
        with make(activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=config) as prof:
            program()
    finally:
        gc.enable()
    prof.export_chrome_trace(str(path))
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] in "Xb"]


def stacks(events, program):
    """Name, category and stack of what is inside a program, the stack down to the program."""
    mark, found = f"): {program.__name__}", []
    for event in events:
        entries = event["args"].get("Call stack", "").split(";")
        inner = next((at for at, entry in enumerate(entries) if entry.endswith(mark)), None)
        if inner is not None:
            found.append((event["cat"], masked(event["name"]), [masked(entry) for entry in entries[: inner + 1]]))
    return sorted(found)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_stacks_are_torchs(program, tmp_path):
    """Calls, operators and labels have the stacks that torch gives them in the trace, in the backward pass too."""
    theirs = stacks(trace_of(torch.profiler.profile, program, tmp_path / "theirs.json"), program)
    ours = stacks(trace_of(otp.profile, program, tmp_path / "ours.json"), program)
    assert len(ours) > 5
    assert ours == theirs


def test_threads_have_numbers(tmp_path):
    """The thread of the profile is Python's thread 0, as in torch's trace, and only calls say so; none where it is not verbose."""
    program = PROGRAMS[0]
    for make in (torch.profiler.profile, otp.profile):
        events = trace_of(make, program, tmp_path / "trace.json")
        calls = [event for event in events if "Python id" in event["args"]]
        assert {(event["cat"], event["args"].get("Python thread")) for event in calls} == {("python_function", 0)}
    events = trace_of(otp.profile, program, tmp_path / "trace.json", verbose=False)
    assert any("Python id" in event["args"] for event in events)
    assert not any({"Call stack", "Python thread"} & event["args"].keys() for event in events)
