"""Chrome JSON of whole profiles: what goes beyond the events of a batch."""

from __future__ import annotations

from trace_validator import parse, validate

import otel_torchprof as otp
from otel_torchprof._encode.chrome import encode


def test_profiles_and_streams_draw_a_loop_alike(tmp_path):
    """The same loop has the same slices on the same track, whether a profile or a stream wrote the file."""

    def loop(step):
        for _ in range(3):
            with otp.record_function("work"):
                pass
            step()

    with otp.profile(operators=False) as prof:
        loop(prof.step)
    prof.export_chrome_trace(tmp_path / "profile.json")
    with otp.stream(otp.ChromeTraceExporter(tmp_path / "stream.json"), detail="modules") as running:
        loop(running.step)
    drawn = []
    for name in ("profile", "stream"):
        trace = parse((tmp_path / f"{name}.json").read_bytes())
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "Trace"]
        tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        slices = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
        drawn.append([(e["name"], tracks[e["tid"]]) for e in slices if e["name"] != "torch.job"])
    assert drawn[0] == drawn[1]
    assert drawn[0] == [(name, "MainThread") for i in range(3) for name in (f"ProfilerStep#{i}", "work")]


def test_the_recording_as_a_whole(tmp_path):
    """A profile draws when it began and ended, as Kineto does; a batch of which that is not known has none of it."""
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    prof.export_chrome_trace(tmp_path / "trace.json")
    trace = parse((tmp_path / "trace.json").read_bytes())
    found = {event["name"]: event for event in trace["traceEvents"]}
    begin, whole, end = (
        found[name] for name in ("Iteration Start: PyTorch Profiler", "PyTorch Profiler (0)", "Record Window End")
    )
    assert (whole["ph"], whole["cat"], whole["pid"], whole["tid"]) == ("X", "Trace", "Spans", "PyTorch Profiler")
    assert [(mark["ph"], mark["s"], mark["pid"]) for mark in (begin, end)] == [("i", "g", "Traces"), ("i", "g", "")]
    assert begin["ts"] == whole["ts"] <= found["label"]["ts"]
    assert end["ts"] == whole["ts"] + whole["dur"] >= found["label"]["ts"] + found["label"]["dur"]
    assert prof.health.start_ns == round(whole["ts"] * 1000) + trace["baseTimeNanoseconds"]
    assert not [
        event for event in validate(b"".join(encode(prof._batch())))["traceEvents"] if event.get("cat") == "Trace"
    ]
