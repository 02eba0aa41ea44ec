"""Perfetto's own format, read by the classes of its proto files."""

from __future__ import annotations

import gzip
import json
import threading

from hypothesis import given
from hypothesis import strategies as st
from perfetto_traces import PerfettoTrace, read

import otel_torchprof as otp
from otel_torchprof._cli import main as cli


def recorded():
    with otp.profile(operators=False) as prof:
        for _ in range(3):
            with otp.record_function("outer"), otp.record_function("inner"):
                pass
            prof.step()
    return prof


def test_slices_are_the_spans(tmp_path):
    """Each span is a slice of its times, on the track of its thread, with its ids and attributes as arguments."""
    prof = recorded()
    prof.export_as(tmp_path / "t.pftrace")
    found, spans = read(tmp_path / "t.pftrace").slices, prof.spans(detail="frames")
    assert len(found) == len(spans) == 9
    by_id = {each.arguments["span_id"]: each for each in found}
    for span in spans:
        each, parent = by_id[f"{span.context.span_id:016x}"], span.parent
        assert (each.start, each.end) == (span.start_time, span.end_time)
        assert each.arguments["trace_id"] == f"{span.context.trace_id:032x}"
        assert each.arguments.get("parent_id") == (f"{parent.span_id:016x}" if parent else None)
        assert each.arguments.get("attributes", {}) == dict(span.attributes)
    assert [each.name for each in found if each.name.startswith("Profiler")] == [f"ProfilerStep#{n}" for n in range(3)]
    assert {each.track for each in found if each.name in {"outer", "inner"}} == {"MainThread"}
    assert {each.depth - by_id[each.arguments["parent_id"]].depth for each in found if each.name == "inner"} == {1}


def test_what_chrome_json_has(tmp_path):
    """Slices, tracks and arrows are those of Chrome JSON of the same spans; ``convert`` and compression give the same."""
    exporter = otp.ChromeTraceExporter(tmp_path / "t.json")
    prof = recorded()
    prof.export(exporter)
    exporter.shutdown()
    prof.export_as(tmp_path / "t.pftrace.gz")
    found = PerfettoTrace(gzip.decompress((tmp_path / "t.pftrace.gz").read_bytes()))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    key = sorted((event["name"], event["args"]["span_id"], names[event["tid"]], event["cat"]) for event in slices)
    assert key == sorted((each.name, each.arguments["span_id"], each.track, each.category) for each in found.slices)
    arrows = sum(event["ph"] == "s" for event in events)
    starts, ends = (
        sorted(flow for each in found.slices for flow in flows(each))
        for flows in (lambda each: each.flows, lambda each: each.ending_flows)
    )
    assert starts == ends == list(range(1, arrows + 1))
    assert arrows == 2  # of each step to the one before
    assert cli.main(["convert", "-q", str(tmp_path / "t.json"), "-o", str(tmp_path / "c.pftrace")]) == 0
    converted = read(tmp_path / "c.pftrace").slices
    assert sorted(each.name for each in converted) == sorted(each.name for each in found.slices)


def test_threads_have_tracks_and_what_overlaps_has_lanes(tmp_path):
    """Slices of threads are on their tracks; those that overlap on one thread without nesting are on lanes, each whole."""
    with otp.profile(operators=False, all_threads=True) as prof:
        one, other = otp.record_function("one"), otp.record_function("other")
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        other.__exit__(None, None, None)
        thread = threading.Thread(target=lambda: otp.record_function("beside").__enter__().__exit__(None, None, None))
        thread.start()
        thread.join()
    prof.export_as(tmp_path / "t.pftrace")
    found = {each.name: each for each in read(tmp_path / "t.pftrace").slices}
    assert found["beside"].track != "MainThread"
    spans = {span.name: (span.start_time, span.end_time) for span in prof.spans()}
    assert {name: (each.start, each.end) for name, each in found.items()} == spans


@given(st.lists(st.text(st.characters(codec=None), min_size=1, max_size=40), min_size=1, max_size=8))
def test_any_names(tmp_path_factory, names):
    """Names are what they were, in any characters; lone surrogates become U+FFFD or question marks; all can be read."""
    path = tmp_path_factory.mktemp("names") / "t.pftrace"
    with otp.profile(operators=False) as prof:
        for name in names:
            with otp.record_function(name):
                pass
    prof.export_as(path)
    found = [each.name for each in read(path).slices if each.arguments.get("attributes", {}).get("torch.op.scope")]
    assert found == [span.name for span in prof.spans() if span.attributes.get("torch.op.scope")]


def test_nothing_recorded(tmp_path):
    """A profile without events is a file with its process and the profile's own span at most."""
    with otp.profile(operators=False) as prof:
        pass
    prof.export_as(tmp_path / "t.pftrace")
    found = read(tmp_path / "t.pftrace")
    assert found.process
    assert len(found.slices) == len(prof.spans())
