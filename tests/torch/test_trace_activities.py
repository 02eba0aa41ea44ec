"""``kineto_results.trace_activities()``: what torch 2.13 writes a Chrome trace of in Python."""

from __future__ import annotations

import json
from collections import Counter

import pytest

torch = pytest.importorskip("torch", minversion="2.13")

from observed import torchs  # noqa: E402
from torch.profiler import _chrome_trace_export, _trace_validator  # noqa: E402

import otel_torchprof as otp  # noqa: E402


def program(label):
    with label("label"):
        x = torch.ones(4, 4, requires_grad=True)
        torch.nn.Linear(4, 4)(x @ x).add(1).sum().backward()
    torch.full((2,), 3.0)


def slices(events):
    """What events are in a trace file, but for where it begins to count."""
    found = []
    for event in events:
        if event.get("cat") in {"cpu_op", "user_annotation", "python_function", "cpu_instant_event"}:
            arguments = {key: value for key, value in event.get("args", {}).items() if key != "External id"}
            place = event["name"], event["cat"], event["pid"], event["tid"], round(event.get("dur", 0), 3)
            found.append((*place, json.dumps(arguments, sort_keys=True)))
    return Counter(found)


def test_torch_writes_our_profile_in_python(tmp_path):
    """Torch's writer in Python makes of our results the slices, arguments and arrows of the file that we write."""
    with otp.profile(record_shapes=True, profile_memory=True, with_stack=True) as prof:
        program(otp.record_function)
    _chrome_trace_export.export_chrome_trace(prof.kineto_results, str(tmp_path / "torchs.json"), {"key": '"value"'})
    prof.export_chrome_trace(tmp_path / "ours.json")
    theirs, ours = (json.loads((tmp_path / name).read_text()) for name in ("torchs.json", "ours.json"))
    assert theirs["key"] == "value"
    assert slices(theirs["traceEvents"]) == slices(ours["traceEvents"])
    arrows = [Counter(event["ph"] for event in file["traceEvents"]) for file in (theirs, ours)]
    assert arrows[0]["s"] == arrows[0]["f"] == arrows[1]["s"] > 0
    assert _trace_validator.validate_trace(str(tmp_path / "ours.json")) == (True, [])


def test_they_say_what_torchs_say():
    """Operators and labels have the names, types and arguments that torch's have, but for the id of an execution trace."""
    found = []
    for make in (lambda: torchs(shapes=True), lambda: otp.profile(record_shapes=True)):
        with make() as prof:
            program(torch.profiler.record_function)
        rows = []
        for activity in prof.profiler.kineto_results.trace_activities():
            arguments = json.loads("{" + activity.metadata_json() + "}")
            for key in ("Record function id", "Sequence number", "Ev Idx"):
                arguments.pop(key, None)
            rows.append((activity.name(), activity.type(), activity.device_id(), activity.linked_activity(), arguments))
        found.append(rows)
        methods = {name for name in dir(torch._C._autograd._ITraceActivity) if name[0] != "_"}
        assert methods <= {name for name in dir(activity) if name[0] != "_"}
    assert found[0] == found[1]


def test_nothing_recorded():
    """Of a profile of nothing there are none."""
    with otp.profile() as prof:
        pass
    assert prof.kineto_results.trace_activities() == []


def test_what_torch_has_for_its_own_profiler_alone():
    """Torch's switches: its arrows go with one, ours stay; its profiler is not said to be active in ours."""
    arrows = []
    torch._C._profiler._set_fwd_bwd_enabled_val(False)
    try:
        for make in (torchs, otp.profile):
            with make() as prof:
                program(otp.record_function)
                kind = torch._C._autograd._profiler_type().name
            arrows.append((kind, any(event.flow_id() for event in prof.profiler.kineto_results.events())))
    finally:
        torch._C._profiler._set_fwd_bwd_enabled_val(True)
    assert arrows == [("KINETO", False), ("NONE", True)]


def test_ids_of_an_execution_trace_are_in_torchs_file_only(tmp_path):
    """What docs/profile.md says of "Record function id": torch's is that of the execution trace, where one is recorded; ours has none."""
    found = []
    for make in (torch.profiler.profile, otp.profile):
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "execution.json"))
        with make(execution_trace_observer=observer) as prof:
            torch.ones(2)
        prof.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        (arguments,) = [event["args"] for event in events if event["name"] == "aten::ones"]
        found.append(arguments.get("Record function id", 0) > 0)
    assert found == [True, False]
