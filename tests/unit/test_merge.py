"""``otel-torchprof merge``: the files of ranks on one clock, with everything that stands in them."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
from merged_files import BASE, BEGIN, STEP, Meetings, RankTrace, WrongClock, attributes, micros

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read
from otel_torchprof._encode import otlp_json
from otel_torchprof._files.merge import merge

CLOCKS = [WrongClock(), WrongClock(10**9, 50e-6), WrongClock(-(10**9), -50e-6)]


def merged(tmp_path, *files, name="merged.json"):
    """The document that the files become, its times exactly."""
    found = merge([str(file) for file in files], str(tmp_path / name))
    assert found.problems == ()
    return loaded(tmp_path / name)


def loaded(path):
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text, parse_float=Decimal)


def nanoseconds(value):
    found = value * 1000
    assert found == int(found)
    return int(found)


def spans_of(document, pid, name="c10d::allreduce_"):
    """Begin and end of the spans of a name, in Unix ns."""
    base = document["baseTimeNanoseconds"]
    events = [
        each for each in document["traceEvents"] if each["ph"] == "X" and (each["pid"], each["name"]) == (pid, name)
    ]
    times = ((nanoseconds(each["ts"]), nanoseconds(each["dur"])) for each in events)
    return np.array([(base + start, base + start + duration) for start, duration in times])


def in_form(trace, path, form):
    """The file of a rank, as it may come."""
    if form == "protobuf":
        path.write_bytes(otlp_json.request_of(trace.request()).SerializeToString())
    elif form == "gzip":
        path.write_bytes(gzip.compress(trace.chrome(path).read_bytes()))
    else:
        getattr(trace, form)(path)
    return path


# ---- clocks ----


@pytest.mark.parametrize("forms", [("chrome", "gzip", "lines"), ("protobuf", "chrome", "protobuf")])
def test_ranks_on_one_clock(tmp_path, forms):
    """Whatever the forms of the files, begins and ends are on the first rank's clock, to less than the jitter; the file states the error."""
    meetings = Meetings(3, 1000)
    files = [
        in_form(meetings.trace(rank, clock), tmp_path / f"{rank}", form)
        for rank, (clock, form) in enumerate(zip(CLOCKS, forms, strict=True))
    ]
    document = merged(tmp_path, *files, name="merged.json.gz")
    info = document["otherData"]["merged_ranks"]
    assert [(each["pid"], each["rank"], each["name"]) for each in info] == [(n, n, f"rank {n}") for n in range(3)]
    for rank, clock in enumerate(CLOCKS):
        found = spans_of(document, rank)
        off = np.abs(found - np.stack((meetings.start[rank], meetings.end[rank]), axis=1)).max()
        assert off < (190_000 / 2 if rank else 1)
        if rank:
            assert off < info[rank]["alignment_error_ns"] < info[rank]["alignment_largest_error_ns"]
            assert info[rank]["collectives"] == 1000
            assert float(info[rank]["clock_drift_ppm"]) == pytest.approx(clock.drift * 1e6, abs=5)
            assert info[rank]["clock_offset_ns"] == pytest.approx(clock.offset, abs=10**6)


def test_times_to_the_nanosecond(tmp_path):
    """Times of the reference stay what they were, digit by digit, also where a double has no room for them; slices stay inside one another."""
    meetings = Meetings(2, 50)
    first = meetings.trace(0, CLOCKS[0])
    odd = [BEGIN + 123_456_789, BEGIN + 8 * 7 * 86400 * 10**9 + 1]
    for _ in odd:
        first.events.append({"ph": "i", "name": "odd", "pid": 4711, "tid": 1, "ts": "AT"})
    path = first.chrome(tmp_path / "0")
    text = path.read_text()
    for at in odd:
        text = text.replace('"AT"', micros(at - BASE), 1)
    path.write_text(text)
    document = merged(tmp_path, path, meetings.trace(1, CLOCKS[1]).chrome(tmp_path / "1"))
    assert (spans_of(document, 0) == np.stack((meetings.start[0], meetings.end[0]), axis=1)).all()
    base = document["baseTimeNanoseconds"]
    assert [base + nanoseconds(each["ts"]) for each in document["traceEvents"] if each["name"] == "odd"] == odd
    assert base % (7 * 86400 * 10**9) == 0
    for rank in (0, 1):
        inner, outer = (
            spans_of(document, rank),
            np.concatenate([spans_of(document, rank, f"ProfilerStep#{n}") for n in range(50)]),
        )
        assert (inner[:, 0] >= outer[:, 0]).all()
        assert (inner[:, 1] <= outer[:, 1]).all()
        assert (np.diff(outer[:, 1]) > 0).all()


def test_what_it_says(tmp_path, capsys):
    """One line for each clock, on stderr: how far it was off, how well that is known, from what."""
    meetings = Meetings(2, 1000)
    files = [str(meetings.trace(rank, CLOCKS[rank]).chrome(tmp_path / f"{rank}.json")) for rank in range(2)]
    assert cli.main(["merge", "-q", "-o", str(tmp_path / "out.json"), *files]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    pattern = r"rank 1: clock 1\.00s ahead of that of rank 0, drift \+\d\d\.\d{3} ppm; aligned to \d\d\.\dus, largest [\d.]+us, by 1,000 collectives\n"
    assert re.fullmatch(f"otel-torchprof: {pattern}", err)


# ---- what reads the merged file ----


@pytest.mark.parametrize("form", ["chrome", "lines"])
def test_explain_says_the_same(tmp_path, form):
    """Of the merged file as of the single ones: ranks, phases, the straggler and what it costs."""
    meetings = Meetings(3, 100, late=3_000_000)
    files = [in_form(meetings.trace(rank, clock), tmp_path / f"{rank}", form) for rank, clock in enumerate(CLOCKS)]
    merged(tmp_path, *files)
    single, together = otp.explain(*files), otp.explain(tmp_path / "merged.json")
    assert together.ranks == ("rank 0", "rank 1", "rank 2")
    assert together.headline == single.headline
    assert [(each.verdict, each.ranks) for each in together.faults] == [
        (each.verdict, each.ranks) for each in single.faults
    ]
    assert "straggler" in [each.verdict for each in together.faults]
    for found, expected in zip(together.phases, single.phases, strict=True):
        assert found[0] == expected[0]
        assert found[1:] == pytest.approx(expected[1:], rel=1e-4)


def test_show_says_the_same(tmp_path):
    """Averages and steps are those of the single files, self times too: spans know their parents by id."""
    meetings = Meetings(2, 60)
    files = [
        meetings.trace(0, CLOCKS[0]).chrome(tmp_path / "0"),
        meetings.trace(1, WrongClock(77)).lines(tmp_path / "1"),
    ]
    merged(tmp_path, *files)
    totals = Counter()
    for path in files:
        for each in read(str(path))[0].averages():
            totals[each.name, "count"] += each.calls
            totals[each.name, "total"] += each.total
            totals[each.name, "self"] += each.self_time
    sums, problems = read(str(tmp_path / "merged.json"))
    assert problems == []
    assert len(sums.steps) == 120
    for each in sums.averages():
        assert each.calls == totals[each.name, "count"]
        assert each.total == pytest.approx(totals[each.name, "total"], abs=1000)
        assert each.self_time == pytest.approx(totals[each.name, "self"], abs=1000)


# ---- events ----


def test_ids_processes_and_metadata(tmp_path):
    """Each rank is a process with its own name; flows, asynchronous events and devices of one rank are no other's; names stand once."""
    meetings = Meetings(2, 20)
    files = []
    for rank in range(2):
        trace = meetings.trace(rank, CLOCKS[rank])
        at = {"pid": 4711, "tid": 77, "ts": int(CLOCKS[rank].of(BEGIN) - BASE) / 1000}
        trace.events += [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
            {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 5_000_000}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
            {"ph": "M", "name": "thread_name", "pid": 4711, "tid": 77, "args": {"name": "MainThread"}},
            {
                "ph": "X",
                "name": "kernel",
                "cat": "kernel",
                **at,
                "pid": 0,
                "tid": 7,
                "dur": 1,
                "bind_id": 9,
                "flow_in": True,
            },
            {"ph": "s", "name": "a", "cat": "c", "id": 9, **at},
            {"ph": "f", "bp": "e", "name": "a", "cat": "c", "id": 9, **at},
            {"ph": "b", "name": "x", "cat": "y", "id": "0x9", **at},
            {"ph": "e", "name": "x", "cat": "y", "id": "0x9", **at},
            {"ph": "b", "name": "z", "cat": "y", "id2": {"local": "0x9"}, **at},
            {"ph": "n", "name": "z", "cat": "y", "id2": {"global": 9}, **at},
            {"ph": "C", "name": "memory", **at, "args": {"bytes": 5 + rank}},
        ]
        files.append(trace.chrome(tmp_path / f"{rank}"))
    events = merged(tmp_path, *files)["traceEvents"]
    names = {(each["pid"], each["args"]["name"]) for each in events if each["name"] == "process_name"}
    devices = sorted(pid for pid, name in names if "GPU" in name)
    assert {name for _, name in names} == {"rank 0: trainer", "rank 1: trainer", "rank 0 GPU 0", "rank 1 GPU 0"}
    assert len(names) == 4
    assert {pid for pid, _ in names} == {0, 1, *devices}
    threads = Counter((each["pid"], each["tid"]) for each in events if each["name"] == "thread_name")
    assert threads == dict.fromkeys(((0, 77), (1, 77), *((pid, 7) for pid in devices)), 1)
    assert [each["pid"] for each in events if each["name"] == "kernel"] == devices
    assert {(each["pid"], each["args"]["bytes"]) for each in events if each["ph"] == "C"} == {(0, 5), (1, 6)}
    by_phase = {phase: [each["id"] for each in events if each["ph"] == phase and "id" in each] for phase in "sfbe"}
    assert by_phase["s"] == by_phase["f"] == [each["bind_id"] for each in events if each["name"] == "kernel"]
    assert by_phase["b"] == by_phase["e"]
    assert len(set(by_phase["s"])) == len(set(by_phase["b"])) == 2
    assert [each["id2"] for each in events if each["name"] == "z" and each["ph"] == "b"] == [{"local": "0x9"}] * 2
    assert len({each["id2"]["global"] for each in events if each["ph"] == "n"}) == 2


def test_spans_of_otlp(tmp_path):
    """On the tracks of their threads, named, with links as arrows, events, status and kind, as this package's own traces have them."""
    meetings = Meetings(2, 20)
    request = meetings.trace(1, CLOCKS[1]).request()
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    begin = int(CLOCKS[1].of(BEGIN))
    overlapping = [
        {"name": "request", "traceId": "f" * 32, "spanId": f"{0xA0 + at:016x}", "startTimeUnixNano": str(begin + at)}
        | {"endTimeUnixNano": str(begin + 10**6 + at)}
        for at in range(2)
    ]
    overlapping[1] |= {
        "kind": 2,
        "status": {"code": 2, "message": "no"},
        "links": [{"traceId": "f" * 32, "spanId": f"{0xA0:016x}"}],
        "events": [{"name": "sent", "timeUnixNano": str(begin + 7)}],
        "attributes": [
            {"key": "list", "value": {"arrayValue": {"values": [{"intValue": "1"}, {"doubleValue": "NaN"}]}}}
        ],
    }
    spans += overlapping
    path = tmp_path / "1"
    path.write_text(json.dumps(request) + "\n")
    document = merged(tmp_path, meetings.trace(0, CLOCKS[0]).chrome(tmp_path / "0"), path)
    events = [each for each in document["traceEvents"] if each["pid"] == 1]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["MainThread", "spans 1", "spans 2"]
    steps = [each for each in events if each["name"] == "ProfilerStep#3"]
    assert [tracks[each["tid"]] for each in steps] == ["MainThread"]
    assert steps[0]["args"]["attributes"]["torch.step.number"] == 3
    assert steps[0]["args"]["span_id"] == f"{8:016x}"
    [inside] = [each for each in events if each.get("args", {}).get("span_id") == f"{7:016x}"]
    assert (inside["args"]["parent_id"], inside["cat"]) == (f"{8:016x}", "user_annotation")
    assert {tracks[each["tid"]] for each in events if each["name"] == "request"} == {"spans 1", "spans 2"}
    args = next(each["args"] for each in events if each["name"] == "request" and "kind" in each["args"])
    assert (args["kind"], args["status"], args["status_description"]) == ("SERVER", "ERROR", "no")
    assert args["attributes"] == {"list": [1, "NaN"]}
    assert len([each for each in events if each["ph"] in "sf"]) == 2
    [sent] = [each for each in events if each["name"] == "sent"]
    assert document["baseTimeNanoseconds"] + nanoseconds(sent["ts"]) == pytest.approx(BEGIN, abs=200_000)


def test_ranks_of_one_file(tmp_path):
    """A Collector's file with the spans of two ranks in turns is two ranks; their spans go to their own processes."""
    meetings = Meetings(2, 60)
    halves = []
    for rank in range(2):
        trace = meetings.trace(rank, CLOCKS[rank])
        whole = list(trace.spans)
        for half in (whole[:60], whole[60:]):
            trace.spans = half
            request = trace.request()
            for at, span in enumerate(request["resourceSpans"][0]["scopeSpans"][0]["spans"]):
                span["spanId"] = f"{1 + at + 1000 * len(halves):016x}"
                span.pop("parentSpanId")
            halves.append(json.dumps(request) + "\n")
    (tmp_path / "all.jsonl").write_text("".join(halves[at] for at in (2, 0, 1, 3)))
    document = merged(tmp_path, tmp_path / "all.jsonl")
    for rank in range(2):
        assert np.abs(spans_of(document, rank)[:, 0] - meetings.start[rank]).max() < 100_000


def test_files_that_follow_one_another(tmp_path):
    """Files of one instance of a rank are one process, whose names stand once."""
    meetings = Meetings(2, 60)
    trace = meetings.trace(0, CLOCKS[0], service__instance__id="a")
    whole = list(trace.spans)
    files = [meetings.trace(1, CLOCKS[1]).chrome(tmp_path / "r1")]
    for part in range(3):
        trace.spans = whole[part * 40 : part * 40 + 40]
        files.append(trace.chrome(tmp_path / f"{part}"))
    document = merged(tmp_path, *files)
    assert (spans_of(document, 0)[:, 0] == meetings.start[0]).all()
    info = document["otherData"]["merged_ranks"]
    assert [each["files"] for each in info] == [["0", "1", "2"], ["r1"]]
    assert sum(each["name"] == "thread_name" and each["pid"] == 0 for each in document["traceEvents"]) == 1


def test_files_without_a_rank(tmp_path):
    """They have the names of their files, and the first is the reference; collectives may tell the rank as well."""
    meetings = Meetings(2, 60)
    files = [
        meetings.trace(rank, CLOCKS[rank], is_named=False).chrome(tmp_path / f"{name}")
        for rank, name in ((1, "b"), (0, "a"))
    ]
    document = merged(tmp_path, *files)
    info = document["otherData"]
    assert (info["reference"], [each["name"] for each in info["merged_ranks"]]) == ("b", ["b", "a"])
    traces = [meetings.trace(rank, CLOCKS[rank], is_named=False) for rank in range(2)]
    for rank, trace in enumerate(traces):
        for _, _, _, found in trace.spans:
            found["torch.collective.rank"] = rank
    document = merged(tmp_path, *(trace.chrome(tmp_path / f"{at}") for at, trace in enumerate(traces)))
    assert [each["name"] for each in document["otherData"]["merged_ranks"]] == ["rank 0", "rank 1"]


# ---- what is refused ----


@pytest.fixture
def ranks(tmp_path):
    """Writes the files of ranks that meet so often."""

    def write(count=60, **more):
        meetings = Meetings(2, count)
        return [str(meetings.trace(rank, CLOCKS[rank], **more).chrome(tmp_path / f"{rank}.json")) for rank in range(2)]

    return write


def refused(tmp_path, capsys, *files, out="out.json"):
    """What it says; nothing is written."""
    assert cli.main(["merge", "-q", *map(str, files), "-o", str(tmp_path / out)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert not list(tmp_path.glob(".otel*"))
    assert not (tmp_path / "out.json").exists()
    return said.err


def test_too_few_collectives(tmp_path, capsys, ranks):
    """The ranks, their files, the count and what to record instead."""
    said = refused(tmp_path, capsys, *ranks(7))
    assert "rank 1 ('" in said
    assert "1.json'): 7 collectives whose end is known in common with rank 0, and 8 are needed" in said
    assert "record all ranks with this package's instrumentation" in said
    assert cli.main(["merge", "-q", *ranks(8), "-o", str(tmp_path / "out.json")]) == 0


@pytest.mark.parametrize("more", [{"torch.collective.async": True}, {"torch.collective.backend": "gloo"}])
@pytest.mark.parametrize("has_work", [False, True])
def test_collectives_that_return_at_once(tmp_path, capsys, more, has_work):
    """Ends of operators that do not wait are no moments in common; those of the work on the backend's threads are."""
    meetings = Meetings(2, 60)
    files = []
    for rank in range(2):
        trace = meetings.trace(rank, CLOCKS[rank])
        calls = [each for each in trace.spans if each[0] != "torch.step"]
        trace.spans = []
        for name, start, end, found in calls:
            trace.span(name, start, start + 10 + rank * 900_000, found | more)
            if has_work:
                trace.span("gloo:all_reduce", start + 5, end, {})
        files.append(trace.chrome(tmp_path / f"{rank}"))
    if has_work:
        found = spans_of(merged(tmp_path, *files), 1, "gloo:all_reduce")
        assert np.abs(found[:, 1] - meetings.end[1]).max() < 100_000
    else:
        assert "0 collectives whose end is known in common" in refused(tmp_path, capsys, *files)


def test_files_of_different_runs(tmp_path, capsys):
    """The same numbers at unrelated times are no alignment."""
    files = []
    for rank in range(2):
        trace, number = RankTrace(rank), np.random.default_rng(rank)
        for at, start in enumerate(np.sort(number.integers(BEGIN, BEGIN + 100 * STEP, 100)).tolist()):
            trace.span("c10d::barrier", start, start + 1000, attributes(at))
        files.append(trace.chrome(tmp_path / f"{rank}"))
    assert re.search(
        r"differs from that of rank 0 by [\d.]+ms from one collective to another, and these last 1\.00us",
        refused(tmp_path, capsys, *files),
    )


def test_one_rank(tmp_path, capsys, ranks):
    """One file, or files of one rank, are nothing to merge; of twins it is not known which is meant."""
    files = ranks()
    assert "nothing to merge" in refused(tmp_path, capsys, files[0])
    assert "is given twice" in refused(tmp_path, capsys, files[0], files[0])
    twin = tmp_path / "twin.json"
    twin.write_bytes((tmp_path / "0.json").read_bytes())
    assert "are both of rank 0: give files of one run" in refused(tmp_path, capsys, *files, twin)
    files = ranks(service__instance__id="same")
    twin.write_bytes((tmp_path / "0.json").read_bytes())
    assert "hold the same collectives of rank 0" in refused(tmp_path, capsys, *files, twin)


def test_a_merged_file(tmp_path, capsys, ranks):
    """It is not merged again; nor is a file in which somebody else has put ranks together."""
    files = ranks()
    assert cli.main(["merge", "-q", *files, "-o", str(tmp_path / "first.json")]) == 0
    capsys.readouterr()
    assert "was merged already" in refused(tmp_path, capsys, tmp_path / "first.json", files[0])
    document = json.loads((tmp_path / "first.json").read_text())
    (tmp_path / "first.json").write_text(json.dumps(document["traceEvents"]))
    assert "has collectives of 2 processes" in refused(tmp_path, capsys, tmp_path / "first.json", files[0])


def test_where_it_cannot_be_written(tmp_path, capsys, ranks):
    """Not over one of its own files, and not where there is no folder: said before anything is read."""
    files = ranks()
    content = (tmp_path / "0.json").read_bytes()
    assert "is one of the files that are read" in refused(tmp_path, capsys, *files, out="0.json")
    assert (tmp_path / "0.json").read_bytes() == content
    assert "create the folder first" in refused(tmp_path, capsys, "no such file", out="none/out.json")


def test_an_error_leaves_the_old_file(tmp_path, capsys, ranks):
    """A file that was there stays whole where ranks are refused."""
    (tmp_path / "old.json").write_text("old")
    refused(tmp_path, capsys, *ranks(3), out="old.json")
    assert (tmp_path / "old.json").read_text() == "old"
