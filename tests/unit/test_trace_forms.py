"""Trace files as other programs write them: white space, times, categories of devices, and what is no slice; with every command."""

from __future__ import annotations

import gzip
import json

import pytest
from explained_files import kineto, piece
from fault_server import HttpReceiver
from merged_files import Meetings, WrongClock
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read
from otel_torchprof._files.chrome_events import KINDS, SliceKind

SPACES = {
    "line feed": b"\n",
    "lines": b"\r\n \t\n",
    "mark": b"\xef\xbb\xbf",
    "mark and line": b"\xef\xbb\xbf\n",
    "much": b"\n" * 70_000,
}
UNIX_US = 1_708_722_576_381_804


def slice_(name, ts, dur=None, pid=1, tid=1, **more):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, **({} if dur is None else {"dur": dur}), **more}


def sums_of(path, events, **document):
    """Counts, totals and self times by name, and what is said of the rest."""
    path.write_text(events if isinstance(events, str) else json.dumps({"traceEvents": events, **document}))
    sums, problems = read(str(path))
    assert problems == []
    return {row.name: tuple(row[2:5]) for row in sums.averages()}, sums.left_out


# ---- white space ----


@pytest.mark.parametrize(
    ("space", "packed"), [*((space, False) for space in SPACES), ("line feed", True), ("much", True)]
)
def test_white_space_before_json(tmp_path, capsys, space, packed):
    """Chrome JSON and OTLP JSON of two ranks are read by every command, whatever white space or mark they begin with."""
    meetings = Meetings(2, 30)
    files = [tmp_path / "chrome", tmp_path / "lines"]
    for rank, path in enumerate(files):
        getattr(meetings.trace(rank, WrongClock()), path.name)(path)
        content = SPACES[space] + path.read_bytes()
        path.write_bytes(gzip.compress(content) if packed else content)
    for path in files:
        assert cli.main(["show", "-q", str(path)]) == 0
        assert "c10d::allreduce_" in capsys.readouterr().out
    for command in (["explain", "-q"], ["diff", "-q"], ["merge", "-q", "-o", str(tmp_path / "merged.json")]):
        assert cli.main([*command, *map(str, files)]) == 0
    with HttpReceiver() as receiver:
        words = ["send", "--endpoint", receiver.url, "--protocol", "http/protobuf", str(files[1])]
        assert cli.main(words) == 0
    assert receiver.names.count("c10d::allreduce_") == 30


def test_a_message_that_begins_like_json(tmp_path):
    """A serialized message stays one where its first bytes are a line feed and a brace, and so on for the sizes inside it."""
    for size in (9, 10, 13, 32, 34, 91, 123):
        request = ExportTraceServiceRequest()
        span = request.resource_spans.add().scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8)
        request.resource_spans[0].scope_spans[0].scope.name = '{"a":'
        while request.resource_spans[0].scope_spans[0].ByteSize() < 121:
            span.name += '"'
        request.resource_spans[0].resource.attributes.add(key="{" * size)
        (tmp_path / "t").write_bytes(request.SerializeToString())
        sums, problems = read(str(tmp_path / "t"))
        assert (len(sums), problems) == (1, [])


# ---- times ----


@pytest.mark.parametrize("form", ["{}", '"{}"', "{}.0", "{}000e-3", "-{}", "{}.250", "{}.2500000001"])
@pytest.mark.parametrize("order", [1, -1])
def test_times_since_1970(tmp_path, form, order):
    """Parents and self times are exact where times are microseconds since 1970, however the numbers are written."""
    begin = -UNIX_US if form.startswith("-") else UNIX_US
    events = [
        event
        for step in range(40)
        for event in (
            slice_("outer", begin + 1001 * step, 1000),
            slice_("inner", begin + 1001 * step + 7, 993),
            slice_("innermost", begin + 1001 * step + 12, 988),
        )
    ]
    texts = [json.dumps(event) for event in events[::order]]
    for event, at in zip(events[::order], range(len(events)), strict=True):
        texts[at] = texts[at].replace(str(event["ts"]), form.format(abs(event["ts"])), 1)
    found, _ = sums_of(tmp_path / "t", f"[{','.join(texts)}]")
    assert found == {
        "outer": (40, 40_000_000, 280_000),
        "inner": (40, 39_720_000, 200_000),
        "innermost": (40, 39_520_000, 39_520_000),
    }


def test_durations_to_the_nanosecond(tmp_path):
    """Numbers of three decimals are nanoseconds, also where a double has half of one."""
    found, _ = sums_of(
        tmp_path / "t", '[{"ph":"X","name":"a","pid":1,"tid":1,"ts":4876562444244.221,"dur":4876562444244.223}]'
    )
    assert found["a"] == (1, 4876562444244223, 4876562444244223)


@pytest.mark.parametrize(
    "number", ["1e999999999", "1e99999999999999999999", "1" * 5000, "1." + "1" * 5000, "NaN", "-Infinity"]
)
def test_numbers_without_bounds(tmp_path, number):
    """A time, a rank or an attribute of any exponent is at most left out, in no time and no memory."""
    events = [
        slice_("a", "HERE", 1),
        slice_("a", 1, "HERE"),
        slice_("a", 1, 1, pid="HERE", tid="HERE"),
        slice_(
            "a",
            1,
            1,
            args={"span_id": "1", "attributes": {"torch.step.number": "HERE", "torch.phase.data.duration": "HERE"}},
        ),
        slice_("good", 1, 1, cat="cpu_op"),
    ]
    text = json.dumps({"distributedInfo": {"rank": "HERE"}, "traceEvents": events})
    (tmp_path / "t").write_text(text.replace('"HERE"', number))
    sums, _ = read(str(tmp_path / "t"))
    assert {row.name: row.calls for row in sums.averages()}["good"] == 1


# ---- devices ----


@pytest.mark.parametrize("category", [name for name, kind in KINDS.items() if kind is not SliceKind.HOST])
def test_categories_of_devices(tmp_path, category):
    """No slice of a device, or of the profiler, is time of the processor."""
    events = [slice_("aten::mm", 0, 100, cat="cpu_op"), slice_("other", 50, 900, pid=0, tid=7, cat=category)]
    found, left_out = sums_of(tmp_path / "t", events)
    assert found == {"aten::mm": (1, 100_000, 100_000)}
    assert left_out == f"{KINDS[category].value} (1)"


@pytest.mark.parametrize("category", [name for name, kind in KINDS.items() if kind is SliceKind.DEVICE])
def test_explain_knows_the_work_of_devices(tmp_path, category):
    """Whatever the category of its work, a device that always works is found."""

    def on_device(begin):
        work = piece("work", begin + 0.5, 9.4, cat=category, pid=0, tid=7)
        return [piece("cudaLaunchKernel", begin, 0.1, cat="cuda_runtime"), work]

    found = otp.explain(kineto(tmp_path / "t.json", 40, on_device))
    assert [each.verdict for each in found.findings] == ["device-bound"]


LABEL = {"ph": "M", "name": "process_labels", "tid": 0}
DEVICES = {
    "label before": ([{**LABEL, "pid": 5, "args": {"labels": "GPU 5"}}], {"pid": 5}, []),
    "label after": ([], {"pid": 5}, [{**LABEL, "pid": 5, "args": {"labels": "XPU 5"}}]),
    "name": ([{**LABEL, "name": "process_name", "pid": 9, "args": {"name": "/device:TPU:0 (pid 9)"}}], {"pid": 9}, []),
    "merged": ([{**LABEL, "name": "process_name", "pid": 10**6, "args": {"name": "rank 1 GPU 0"}}], {"pid": 10**6}, []),
    "stream": ([], {"pid": 0, "args": {"device": 0, "stream": 7}}, []),
    "process": ([], {"pid": "CUDA functions"}, []),
}


@pytest.mark.parametrize("case", DEVICES)
@pytest.mark.parametrize("category", ["new_in_kineto", None])
def test_what_is_unknown_on_a_device(tmp_path, case, category):
    """A slice of no known category is a device's where its process is one, which may be said after it; else it is the program's."""
    before, of_device, after = DEVICES[case]
    cat = {} if category is None else {"cat": category}
    host = [slice_("a", 0, 10, **cat), slice_("inside a", 2, 3, **cat), slice_("aten::mm", 3, 1, cat="cpu_op")]
    found, left_out = sums_of(tmp_path / "t", [*before, *host, slice_("k", 0, 9, **cat, **of_device), *after])
    assert found == {"a": (1, 10_000, 7_000), "inside a": (1, 3_000, 2_000), "aten::mm": (1, 1_000, 1_000)}
    assert left_out == "slices of devices (1)"


def test_a_program_with_the_number_of_a_device(tmp_path):
    """In a container a program's number may be that of a device: both are labelled, and the program's slices stay its own."""
    labels = [{**LABEL, "pid": 1, "args": {"labels": label}} for label in ("CPU", "GPU 1")]
    events = [
        slice_("a", 0, 10, cat="unknown"),
        slice_("aten::mm", 1, 2, cat="cpu_op"),
        slice_("k", 0, 9, cat="kernel"),
    ]
    for order in (labels, labels[::-1]):
        for document in ([*order, *events], [*events, *order]):
            found, left_out = sums_of(tmp_path / "t", document)
            assert found == {"a": (1, 10_000, 8_000), "aten::mm": (1, 2_000, 2_000)}
            assert left_out == "slices of devices (1)"


def test_many_slices_of_unknown_processes(tmp_path):
    """Slices do not wait in any number, and none is lost or moved out of its parent."""
    events = [slice_("outer", 0, 10**6), *(slice_("inner", 1 + n, 0.5) for n in range(25_000))]
    found, _ = sums_of(tmp_path / "t", events)
    assert found == {"outer": (1, 10**9, 10**9 - 12_500_000), "inner": (25_000, 12_500_000, 12_500_000)}


# ---- what is no slice ----


def test_begins_and_ends(tmp_path):
    """A begin and the end after it on its track are a slice, within others, of the program or a device; one without the other is reported."""

    def event(ph, ts, name=None, **more):
        return {"ph": ph, "pid": 1, "tid": 1, "ts": ts, **({} if name is None else {"name": name}), **more}

    events = [
        event("E", 0),
        event("B", 1, "ProfilerStep#3"),
        event("B", 2, "a", cat="cpu_op"),
        slice_("aten::mm", 3, 1, cat="cpu_op"),
        event("B", 3, "k", cat="kernel", tid=2),
        event("E", "6.5"),
        event("E", 9, "other name"),
        event("E", 10, tid=2),
        event("B", 11, "never"),
    ]
    found, left_out = sums_of(tmp_path / "t", events)
    assert found == {"aten::mm": (1, 1_000, 1_000), "a": (1, 4_500, 3_500), "ProfilerStep*": (1, 8_000, 3_500)}
    assert left_out == "ends of no slice (1), slices without end (1), slices of devices (1)"
    assert [(step.number, step.duration) for step in read(str(tmp_path / "t"))[0].steps] == [(3, 8000)]


def test_what_is_left_out_is_said(tmp_path, capsys):
    """Each kind of event that is in no average is named with its count, and each member that is passed over; in one line, status 0."""
    others = {phase: 1 + at for at, phase in enumerate("stfiICbneSTpFNODRP?")}
    events = [slice_("aten::mm", 3, 1, cat="cpu_op"), slice_("short", 5, cat="cpu_op"), {"name": "no phase"}]
    events += [{"ph": phase, "ts": 1} for phase, count in others.items() for _ in range(count)]
    document = {"schemaVersion": 1, "samples": [1], "traceEvents": events, "stackFrames": {}, "traceName": "x"}
    (tmp_path / "t").write_text(json.dumps(document))
    assert cli.main(["show", "-q", str(tmp_path / "t")]) == 0
    said = capsys.readouterr().err.strip().splitlines()
    expected = {
        f"arrows ({sum(others[each] for each in 'stf')})",
        f"instant events ({sum(others[each] for each in 'iI')})",
        f"counter values ({others['C']})",
        f"asynchronous events ({sum(others[each] for each in 'bneSTpF')})",
        f"events of objects ({sum(others[each] for each in 'NOD')})",
        f"marks, samples and dumps ({sum(others[each] for each in 'RP')})",
        f"events of unknown phase ({others['?'] + 1})",
        "slices without duration, counted as 0 (1)",
        "members of the document, as 'samples', 'stackFrames' (2)",
    }
    assert len(said) == 1
    start = f"otel-torchprof: '{tmp_path}/t': not in the averages: "
    assert said[0].startswith(start)
    assert {each for each in expected if each not in said[0]} == set()


def test_members_after_the_events(tmp_path):
    """The rank, and the base of the times, are found behind the events too."""
    meetings = Meetings(2, 30)
    files = []
    for rank in (0, 1):
        path = meetings.trace(rank, WrongClock()).chrome(tmp_path / f"{rank}")
        document = json.loads(path.read_text())
        events = document.pop("traceEvents")
        path.write_text(json.dumps({"traceEvents": events, **document}))
        files.append(str(path))
    assert cli.main(["merge", "-q", *files, "-o", str(tmp_path / "merged.json")]) == 0
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert [each["rank"] for each in merged["otherData"]["merged_ranks"]] == [0, 1]
    assert abs(merged["otherData"]["merged_ranks"][1]["clock_offset_ns"]) < 10**6


@pytest.mark.parametrize("end", ["", ",", ",\n", "]", ",{}]"])
def test_a_list_without_its_bracket(tmp_path, end):
    """The bracket at the end of a list of events may be missing, as the format has it; an event that is cut off is an error."""
    event = json.dumps(slice_("a", 0, 1, cat="cpu_op"))
    found, _ = sums_of(tmp_path / "t", f"[{event},\n{event}{end}")
    assert found["a"][0] == 2
    (tmp_path / "t").write_text(f"[{event},\n{event[:20]}")
    assert "the file is cut off" in read(str(tmp_path / "t"))[1][0]
    (tmp_path / "t").write_bytes(gzip.compress(f"[{event},\n{event}".encode())[:-6])
    assert "the file is cut off" in read(str(tmp_path / "t"))[1][0]
