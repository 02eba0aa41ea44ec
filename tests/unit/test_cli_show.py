"""``otel-torchprof show``: the same averages from whichever file."""

from __future__ import annotations

import gzip
import json
import re
import struct

import pytest
from checked_json import checked
from explained_files import otlp_line
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans = []

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of labels in two steps: its averages, its spans, and its Chrome trace."""
    path, kept = tmp_path_factory.mktemp("show") / "t.json", Kept()
    with otp.stream(otp.ChromeTraceExporter(path), kept, detail="modules") as streamed:
        for _ in range(2):
            for name in ("a", "b"):
                with otp.record_function(name), otp.record_function("inside"):
                    pass
            streamed.step()
    return {row.key: row for row in streamed.key_averages()}, kept.spans, path.read_bytes()


def as_json_lines(spans) -> bytes:
    """OTLP/JSON, a request in a line; its ids are hexadecimal, which protobuf's own JSON does not know."""
    lines = []
    for each in spans:
        request = MessageToDict(encode_spans([each]))
        [span] = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
        span["spanId"], span["traceId"] = f"{each.context.span_id:016x}", f"{each.context.trace_id:032x}"
        if each.parent is not None:
            span["parentSpanId"] = f"{each.parent.span_id:016x}"
        lines.append(json.dumps(request))
    return "\n".join(lines).encode() + b"\n"


def as_protobuf(spans) -> bytes:
    """Two requests, one after the other."""
    return b"".join(encode_spans(part).SerializeToString() for part in (spans[:3], spans[3:]))


def as_delimited(spans) -> bytes:
    """Likewise, each behind its length."""
    messages = [encode_spans(part).SerializeToString() for part in (spans[:3], spans[3:])]
    return b"".join(struct.pack(">I", len(message)) + message for message in messages)


@pytest.mark.parametrize("form", ["chrome", "array", "gzip", "lines", "protobuf", "delimited"])
def test_averages_are_those_of_the_recording(recorded, tmp_path, form):
    """Counts, totals and own times of each name are what the recording itself said, to the nanosecond or Chrome's nanosecond."""
    averages, spans, chrome = recorded
    data = {
        "chrome": lambda: chrome,
        "array": lambda: json.dumps(json.loads(chrome)["traceEvents"], indent=1).encode(),
        "gzip": lambda: gzip.compress(chrome),
        "lines": lambda: as_json_lines(spans),
        "protobuf": lambda: as_protobuf(spans),
        "delimited": lambda: as_delimited(spans),
    }[form]()
    (tmp_path / "file").write_bytes(data)
    sums, problems = read(str(tmp_path / "file"))
    assert problems == []
    found = {row.name: row for row in sums.averages()}
    for name in ("a", "b", "inside"):
        assert found[name].calls == averages[name].count
        assert found[name].total == pytest.approx(averages[name].cpu_time_total * 1000, abs=5)
        assert found[name].self_time == pytest.approx(averages[name].self_cpu_time_total * 1000, abs=10)
    assert "torch.job" not in found
    assert found["torch.step"].calls == averages["torch.step"].count == 2
    assert sums.steps[0].spans == 5


def test_what_it_prints(recorded, tmp_path, capsys):
    """The table of averages as sorted and cut, and the table of steps."""
    (tmp_path / "t.json").write_bytes(recorded[2])
    assert cli.main(["show", str(tmp_path / "t.json"), "--sort", "count", "--rows", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[0] == "inside"
    assert lines[3].split()[-1] == "4"
    assert lines[-1].startswith("Self CPU time total: ")
    assert cli.main(["show", str(tmp_path / "t.json"), "--steps", "--rows", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["Step", "Started", "Duration", "unattributed", "Spans"]
    assert (lines[1].split()[0], lines[1].split()[-1]) == ("0", "5")
    assert lines[2].endswith("more: --rows -1")


def test_what_is_between_steps(tmp_path, capsys):
    """A checkpoint after a step has a line of its own, with its phase, and is no step of the summary."""

    def span(name, at, **attributes):
        args = {"trace_id": "1", "span_id": f"{at + 1:x}", "attributes": attributes}
        return {"ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": 9, "name": name, "args": args}

    saved = span("torch.checkpoint", 10, **{"torch.phase.checkpoint.duration": 9e-6})
    steps = [span(f"ProfilerStep#{number}", 20 * number, **{"torch.step.number": number}) for number in (0, 1)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [*steps, saved]}))
    assert cli.main(["show", str(tmp_path / "t.json"), "--steps"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["Step", "0", "checkpoint", "1", "Steps:"]
    assert lines[0][3] == "checkpoint"
    assert lines[2][1:4] == ["10.000us", "9.00us", "9.00us"]
    assert lines[4][1] == "2,"
    assert cli.main(["show", "--json", str(tmp_path / "t.json"), "--steps"]) == 0
    found = checked("show", capsys.readouterr().out)
    assert [(step["number"], step["pause"]) for step in found] == [(0, ""), (-1, "checkpoint"), (1, "")]


def test_steps_with_phases(tmp_path, capsys):
    """Steps are listed with what each phase took, as far as any has such a phase."""

    def step(number, **phases):
        attributes = {f"torch.phase.{phase}.duration": seconds for phase, seconds in phases.items()}
        args = {
            "trace_id": "1",
            "span_id": f"{number + 1:x}",
            "attributes": {"torch.step.number": number, **attributes},
        }
        slice_ = {"ph": "X", "pid": 1, "tid": 1, "ts": 10 * number, "dur": 9}
        return {**slice_, "name": f"ProfilerStep#{number}", "args": args}

    events = [step(0, data=0.001, unattributed=2e-6), step(1, data=0.002, backward=0.5, unattributed=0.0)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert cli.main(["show", str(tmp_path / "t.json"), "--steps"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Step", "Started", "Duration", "data", "backward", "unattributed", "Spans"]
    assert lines[1] == ["0", "0.000us", "9.00us", "1.00ms", "2.00us", "2"]
    assert lines[2][3:6] == ["2.00ms", "500ms", "0.00us"]
    assert lines[3] == ["Steps:", "2,", "median", "9.00us,", "longest", "9.00us"]
    assert len(lines) == 4, "only lines of steps begin with a number"


def test_a_phase_in_one_of_its_name_is_counted_once(tmp_path):
    """It is a part of that, told by ids or by time, in any order, also in a label; one in another phase, and a label, are not."""

    def slice_(name, ts, dur, **ids):
        return {"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {"attributes": {}, **ids}}

    def of_id(number, parent):
        return {"trace_id": "1", "span_id": f"{number:x}", "parent_id": f"{parent:x}"}

    places = [
        ("torch.phase.forward", 0, 9),
        ("torch.phase.forward", 1, 6),
        ("torch.phase.gc", 2, 3),
        ("torch.phase.gc", 2, 1),
    ]
    places += [("label", 20, 9), ("label", 21, 5), ("torch.phase.forward", 22, 2)]
    optimizer = "torch.phase.optimizer"
    places += [
        (optimizer, 40, 30),
        ("label", 41, 25),
        (optimizer, 42, 20),
        ("torch.phase.forward", 43, 9),
        (optimizer, 44, 3),
    ]
    by_id = [slice_(*place, **of_id(at + 1, at)) for at, place in enumerate(places)]
    for events in ([slice_(*place) for place in places], by_id, by_id[::-1]):
        (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
        sums, _ = read(str(tmp_path / "t.json"))
        found = {each.name: each[2:4] for each in sums.averages()}
        assert found == {
            "torch.phase.forward": (3, 20_000),
            "torch.phase.gc": (1, 3_000),
            "label": (3, 39_000),
            optimizer: (2, 33_000),
        }
        assert [each.self_time for each in sums.averages() if each.name == "label"] == [4_000 + 3_000 + 16_000]


@pytest.mark.parametrize("has_spans", [False, True])
def test_steps_of_several_ranks(tmp_path, capsys, has_spans):
    """A file of merged ranks has a column that says which rank each step is of; one of a single rank has none."""

    def step(rank, number):
        span = {"trace_id": f"{rank + 1}", "span_id": f"{number + 1:x}", "attributes": {"torch.step.number": number}}
        slice_ = {"ph": "X", "pid": rank, "tid": 1, "ts": 10 * number + rank, "dur": 9}
        return {**slice_, "name": f"ProfilerStep#{number}", "args": span if has_spans else {}}

    events = [step(rank, number) for rank in (0, 1) for number in (0, 1)]
    merged = {"merged_ranks": [{"pid": 0, "rank": 4}, {"pid": 1, "rank": 5}]}
    (tmp_path / "t.json").write_text(json.dumps({"otherData": merged, "traceEvents": events}))
    assert cli.main(["show", str(tmp_path / "t.json"), "--steps"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["Rank", "Step"]
    assert [line[:2] for line in lines[1:5]] == [["4", "0"], ["5", "0"], ["4", "1"], ["5", "1"]]
    (tmp_path / "t.json").write_text(
        json.dumps({"otherData": {"merged_ranks": merged["merged_ranks"][:1]}, "traceEvents": events})
    )
    assert cli.main(["show", str(tmp_path / "t.json"), "--steps"]) == 0
    assert capsys.readouterr().out.split()[0] == "Step"


def test_a_trace_of_torchs_profiler(tmp_path):
    """Slices without ids are inside one another by time, track by track; kernels and the trace's own frame are left out."""

    def slice_(name, ts, dur, tid=1, cat="cpu_op"):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}

    events = [
        slice_("aten::mm", 12.5, 2),
        slice_("aten::linear", 10, 5.25),
        slice_("aten::mm", 20, 1),
        slice_("ProfilerStep#7", 9, 10, cat="user_annotation"),
        slice_("backward", 11, 3, tid=2),
        slice_("gemm", 12, 9, tid=7, cat="kernel"),
        slice_("PyTorch Profiler (0)", 0, 99, tid="x", cat="Trace"),
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"deviceProperties": [{"id": 0}], "traceEvents": events}, indent=2))
    sums, _ = read(str(tmp_path / "t.json"))
    assert {row.name: row[2:5] for row in sums.averages()} == {
        "aten::mm": (2, 3000, 3000),
        "aten::linear": (1, 5250, 3250),
        "ProfilerStep*": (1, 10000, 4750),
        "backward": (1, 3000, 3000),
    }
    assert [(step.number, step.duration) for step in sums.steps] == [(7, 10000)]


def test_what_had_not_ended(tmp_path):
    """The job, a step that was cut off and roots of operators are in no average, as in those of the recording; the step is listed as such."""
    spans = [
        ("torch.job", 0, 1000, 1, 0, {}),
        ("torch.step", 0, 1000, 2, 0, {"torch.step.number": 7, "torch.unfinished": True}),
        ("op", 0, 900, 3, 2, {}),
        ("torch.operators", 0, 1000, 4, 0, {"torch.collapsed.count": 2, "torch.collapsed.duration": 1e-7}),
    ]
    (tmp_path / "t").write_text(otlp_line(spans))
    sums, _ = read(str(tmp_path / "t"))
    assert [(row.name, row.calls) for row in sums.averages()] == [("op", 1), ("(collapsed into others)", 2)]
    assert [(step.number, step.is_unfinished) for step in sums.steps] == [(7, True)]


def test_spans_that_stand_for_many(tmp_path):
    """An aggregate span counts as what it was made of, for its own name and in its parent; what was collapsed has an entry of its own."""
    spans = [
        ("parent", 0, 1000, 1, 0, {"torch.collapsed.count": 3, "torch.collapsed.duration": 1e-7}),
        ("op", 0, 900, 2, 1, {"torch.aggregated.count": 5, "torch.aggregated.duration": 4e-7}),
    ]
    (tmp_path / "t").write_text(otlp_line(spans))
    assert {row.name: row[2:5] for row in read(str(tmp_path / "t"))[0].averages()} == {
        "parent": (1, 1000, 500),
        "op": (5, 400, 400),
        "(collapsed into others)": (3, 100, 100),
    }


def test_files_that_end_too_early(recorded, tmp_path, capsys):
    """What is there is counted, and the error names the file and the byte; the exit status is 1."""
    _, spans, chrome = recorded
    forms = (
        chrome[: len(chrome) * 2 // 3],
        gzip.compress(chrome)[:-20],
        as_protobuf(spans)[:-5],
        as_json_lines(spans)[:-9],
    )
    for data in forms:
        (tmp_path / "cut").write_bytes(data)
        assert cli.main(["show", str(tmp_path / "cut")]) == 1
        found = capsys.readouterr()
        assert re.search(f"^otel-torchprof: '{tmp_path}/cut': at byte \\d+", found.err)
        assert "what comes before that is counted" in found.err
        assert "torch.step" in found.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read '{path}': No such file or directory; check the name"),
        (b"", "'{path}': at byte 0: the file is empty"),
        (b"print('hello')", "'{path}': at byte 0: expected a Chrome trace, or OTLP for traces"),
        (b'{"a": 1}', "'{path}': at byte 7: expected an object with traceEvents of a Chrome trace, or resourceSpans"),
        (b'{"traceEvents": []}', "'{path}' is a trace without a span"),
        (b'{"traceEvents": [{"ph":"X","name":"a","ts":1,"dur":2,"pid":1,"tid":1}]}', "'{path}' has no steps"),
    ],
)
def test_what_is_no_trace(tmp_path, capsys, content, said):
    """One message, and status 1."""
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    assert cli.main(["show", "--steps", str(tmp_path / "t")]) == 1
    assert said.format(path=tmp_path / "t") in capsys.readouterr().err
