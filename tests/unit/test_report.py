"""``report``: the page of trace files: sums that equal those of ``show``, texts that are inert, and reasons for what is left out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from checked_json import checked
from explained_files import STEP_MS, Trace, kineto, piece, served

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._columns.samples import Call, Samples
from otel_torchprof._encode.page import page
from otel_torchprof._files.box import BlackBox
from otel_torchprof._profile import report
from otel_torchprof._profile.call_sums import sampled_tree
from otel_torchprof.parsers import BlackBoxOptions

HOSTILE = '</script><script>document.title="changed"</script><img src=x onerror=alert(1)>\x1b[31m\u202e\udc80'
LONG = "x" * 10_000


def data_in(path):
    """The data of a page."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


@pytest.fixture
def reported(tmp_path, capsys):
    """The data of the page that the command writes of files, and its exit status and messages."""

    def make(*files, status=0, options=()):
        output = tmp_path / "report.html"
        assert cli.main(["report", *map(str, files), "-o", str(output), *options]) == status
        return data_in(output), capsys.readouterr().err

    return make


def nested(begin):
    """Operators of a step: one around two, and one more, with shapes."""
    shape = {"args": {"Input Dims": [[2, 3], [3, 4]]}}
    return [
        piece("aten::linear", begin + 1, 5),
        piece("aten::mm", begin + 2, 1.5, **shape),
        piece("aten::mm", begin + 4, 1),
        piece("aten::add", begin + 7, 0.25),
    ]


def rows_of(table, columns):
    """The rows of a table by name."""
    values = zip(*table["rows"], strict=True)
    return {name: dict(zip(columns, row, strict=True)) for name, row in zip(table["name"], values, strict=True)}


def test_sums_are_those_of_show(tmp_path, reported, capsys):
    """Each row has the calls and times that ``show --json`` prints, and the tree's sums are the table's."""
    file = kineto(tmp_path / "t.json", 30, nested)
    trace = json.loads(file.read_text())
    for number, event in enumerate(trace["traceEvents"], 1):
        event.setdefault("args", {})["External id"] = number  # without one, steps are beside the events
    file.write_text(json.dumps(trace))
    found, _ = reported(file)
    rows = rows_of(found["tables"][0], found["columns"])
    assert cli.main(["show", "--json", "--rows", "-1", str(file)]) == 0
    shown = {row["key"]: row for row in checked("show", capsys.readouterr().out)}
    times = {"calls": "count", "self": "self_cpu_time_total", "total": "cpu_time_total"}
    assert rows.keys() == shown.keys()
    for name, row in rows.items():
        expected = {column: shown[name][field] * (1 if column == "calls" else 1000) for column, field in times.items()}
        assert {column: row[column] for column in times} == pytest.approx(expected)
    [tree] = found["trees"]
    for name, row in rows.items():
        nodes = [node for node, number in enumerate(tree["name"]) if found["names"][number] == name]
        assert sum(tree["own"]["time"][node] for node in nodes) == row["self"]
        assert sum(tree["own"]["calls"][node] for node in nodes) == row["calls"]


def test_rows_by_shapes(tmp_path, reported):
    """With shapes in the file there is a second table, whose rows of one name add up to the row of the first."""
    found, _ = reported(kineto(tmp_path / "t.json", 30, nested))
    by_name, by_shape = found["tables"]
    assert [by_name["id"], by_shape["id"]] == ["name", "shape"]
    mm = [row for row, name in enumerate(by_shape["name"]) if name == "aten::mm"]
    assert {by_shape["shapes"][row] for row in mm} == {"[[2, 3], [3, 4]]", ""}
    own = found["columns"].index("self")
    assert sum(by_shape["rows"][own][row] for row in mm) == rows_of(by_name, found["columns"])["aten::mm"]["self"]


def test_verdict_and_steps(tmp_path, reported):
    """The headline, findings and slow steps are those of ``explain``; phases of each step add up to it; slow ones are marked."""
    trace = Trace().steps(60, data=0.5)
    trace.step(8 * STEP_MS, data=0.9)
    file = trace.chrome(tmp_path / "t.json")
    found, _ = reported(file)
    explanation = otp.explain(file)
    assert found["headline"] == explanation.headline
    assert [each["sentence"] for each in found["explanation"]["findings"]] == [e.sentence for e in explanation.findings]
    assert found["explanation"]["slow_steps"][0]["more"] == dict(explanation.slow_steps[0].more)
    [series] = found["steps"]
    assert (series["count"], series["steps"], series["slow"][-1], sum(series["slow"])) == (61, 1, 1, 1)
    sums = np.sum(list(series["phases"].values()), axis=0)
    assert sums == pytest.approx(np.array(series["duration"]), abs=len(series["phases"]))


def test_many_steps_are_put_together(tmp_path, reported, monkeypatch):
    """Bars of several steps have the mean of these, the longest of them, and the number of the first."""
    monkeypatch.setattr("otel_torchprof._answers.step_series.MOST_BARS", 40)
    trace = Trace()
    for number in range(100):
        trace.step(STEP_MS * (3 if number == 70 else 1))
    [series] = reported(trace.chrome(tmp_path / "t.json"))[0]["steps"]
    assert (series["steps"], series["number"][:3], len(series["duration"])) == (3, [0, 3, 6], 34)
    assert (series["duration"][23], series["longest"][23], series["slow"][23]) == (16_667, 30_000, 1)


def test_rates(tmp_path, reported):
    """Tokens per second are there where steps have tokens, and unknown in a step without them."""
    trace = Trace().steps(30, torch__step__tokens=500)
    trace.step()
    [series] = reported(trace.chrome(tmp_path / "t.json"))[0]["steps"]
    assert series["rates"] == {"tokens": [50_000.0] * 30 + [None]}


def test_memory_of_steps(tmp_path, reported):
    """Steps that know their memory are drawn; what is then missing are single allocations, and not memory over time."""
    found, _ = reported(Trace().steps(30, torch__step__memory__resident=1 << 30).chrome(tmp_path / "t.json"))
    [series] = found["steps"]
    assert series["memory"]["process"] == [1 << 30] * 30
    assert "Single allocations" in found["absent"]
    assert "Memory over time" not in found["absent"]


def test_mfu(tmp_path, reported, monkeypatch, capsys):
    """The share of the peak that the file says, weighted by durations; or that of the peak that the reader gives."""
    trace = Trace()
    for number in range(80):
        trace.step(
            STEP_MS * (1 + number % 2), torch__step__flops=4_000_000_000, torch__step__mfu=0.4 / (1 + number % 2)
        )
    file = trace.chrome(tmp_path / "t.json")
    monkeypatch.setattr("otel_torchprof._answers.step_series.MOST_BARS", 40)
    [series] = reported(file)[0]["steps"]
    assert series["rates"] == {"flops": [pytest.approx(8e9 / 3 / STEP_MS * 1e3)] * 40, "mfu": [0.2667] * 40}
    assert cli.main(["show", "--steps", "-q", str(file)]) == 0
    assert "FLOP/s, 26.7% MFU" in capsys.readouterr().out
    monkeypatch.setenv("OTEL_TORCHPROF_DEVICE", "peak_flops=2e12")
    [series] = reported(file)[0]["steps"]
    assert series["rates"]["mfu"] == [pytest.approx(4e9 * 2 / 3 / (STEP_MS / 1e3) / 2e12, abs=1e-4)] * 40


def test_ranks(tmp_path, reported):
    """With files of several ranks, each has its steps, with how late and how early it comes to collectives."""
    files = []
    for rank in range(3):
        trace = Trace(rank)
        for number in range(60):
            late = 3.0 * (rank == 1)
            call = {"torch__collective__group": "0", "torch__collective__sequence_nr": number}
            trace.span(
                "c10d::all", trace.now + 1 + late, STEP_MS - 3 - late, torch__collective__name="all_reduce", **call
            )
            trace.step(data=(1 + late) / STEP_MS, collective=(STEP_MS - 3 - late) / STEP_MS)
        files.append(trace.chrome(tmp_path / f"{rank}.json"))
    found, _ = reported(*files)
    assert [each["name"] for each in found["steps"]] == ["rank 0", "rank 1", "rank 2"]
    late, early = ([each[name][-1] for each in found["steps"]] for name in ("late", "early"))
    assert late == pytest.approx([-1500, 3000, -1500], abs=10)
    assert early == pytest.approx([3000, 0, 3000], abs=10)
    assert found["files"][0]["name"] == "0.json and 2 more"


def test_requests(tmp_path, reported, monkeypatch):
    """Without steps each trace is a request, with its outermost phases; slow ones are marked and listed with their traces."""
    file = served(tmp_path / "t.json", 60)
    found = reported(file)[0]["requests"]
    assert (found["count"], found["steps"], found["median"], sum(found["slow"])) == (60, 1, 1000, 6)
    assert (found["start"][:2], found["duration"][6:8], found["longest"][7]) == ([0, 10_000], [1000, 4000], 4000)
    assert {phase: times[6:8] for phase, times in found["phases"].items()} == {
        "inference": [500, 2000],
        "other": [500, 2000],
    }
    assert found["slowest"] == [[at, "POST /", f"{at + 1:x}", 0.004, 4.0] for at in range(7, 60, 10)]
    monkeypatch.setattr("otel_torchprof._answers.requests.MOST_BARS", 20)
    found = reported(file)[0]["requests"]
    assert (found["number"][:3], found["duration"][2], found["longest"][2], found["slow"][2]) == (
        [0, 3, 6],
        2000,
        4000,
        1,
    )
    assert reported(served(tmp_path / "two.json", 2))[0]["requests"] is None


def test_categories_of_memory(tmp_path):
    """What memory was for, over time, if the recording knows it: as the memory timeline has it, up to the peak."""
    model, peaks = torch.nn.Linear(64, 64), []
    for with_stack in (True, False):
        with otp.profile(record_shapes=True, profile_memory=True, with_stack=with_stack) as prof:
            model(torch.ones(32, 64)).sum().backward()
        prof.report(tmp_path / "r.html")
        [curve] = data_in(tmp_path / "r.html")["memory"]
        peaks.append(curve.get("categories"))
    time, *sums = peaks[0].values()
    assert peaks[0].keys() > {"parameter", "gradient"}
    assert max(np.sum(sums, axis=0)) >= 64 * 64 * 4
    assert time == sorted(time)
    assert peaks[1] is None


def test_device_work(tmp_path, reported):
    """Kernels are below what launched them, with their time, which the table counts once as work and once for the operator."""

    def launching(begin):
        link = {"args": {"correlation": round(begin), "External id": round(begin) + 1}}
        return [
            piece("aten::mm", begin + 1, 2, args={"External id": round(begin) + 1}),
            piece("cudaLaunchKernel", begin + 1.5, 0.5, cat="cuda_runtime", **link),
            piece("gemm", begin + 4, 3, cat="kernel", pid=9, tid=7, **link),
        ]

    found, _ = reported(kineto(tmp_path / "t.json", 30, launching))
    [tree] = found["trees"]
    [kernel] = [node for node, name in enumerate(tree["name"]) if found["names"][name] == "gemm"]
    assert tree["own"]["device"][kernel] == sum(tree["own"]["device"]) == 30 * 3_000_000
    assert found["names"][tree["name"][tree["parent"][kernel]]] in {"aten::mm", "cudaLaunchKernel"}
    assert "Device time" not in found["absent"]


def test_sampled_stacks():
    """Each call of a stack has the time of the samples in it itself, below its callers; stacks with common callers share these."""
    outer, middle, inner = (Call("a.py", line, name) for line, name in ((1, "main"), (2, "train"), (3, "load")))
    stacks = [(middle, outer), (inner, middle, outer), (outer,)]
    columns = [np.array(column, np.int64) for column in ([1, 2, 3, 4], [5, 7, 11, 13], [0, 0, 0, 0], [1, 0, 1, 2])]
    keys: dict[tuple[str, int], int] = {}
    tree = sampled_tree(Samples(*columns, stacks), keys)
    names = [name for name, _ in keys]
    found = {names[key]: (int(time), int(calls)) for key, time, calls in zip(tree.key, *tree.own.values(), strict=True)}
    assert list(tree.own) == ["calls", "time"]
    assert found == {"a.py(1): main": (1, 13), "a.py(2): train": (1, 7), "a.py(3): load": (2, 16)}
    assert tree.totals(tree.own["time"])[0] == 36


def test_what_is_left_out_is_said(tmp_path, reported):
    """Sections without data are left out, each with the reason; a file without steps has no verdict."""
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": [piece("aten::add", 1, 2)]}))
    found, said = reported(file)
    assert found["headline"] == ""
    assert "steps" not in found
    assert found["absent"]["Verdict and steps"].startswith("'t.json' has 1 events and no step")
    assert str(tmp_path) not in json.dumps(found)
    assert found["absent"].keys() >= {"Ranks", "Memory over time", "FLOPs of calls", "Device time"}
    assert said.endswith("report.html, for a browser\n")


def test_small_nodes_and_rows_are_folded_with_their_number(tmp_path, reported, monkeypatch):
    """Beyond the limits the smallest are one node and one row that say how many they are, and no sum changes."""
    file = tmp_path / "t.json"
    events = [piece(f"op{number}", number, 0.9 if number < 3 else 0.1) for number in range(20)]
    file.write_text(json.dumps({"traceEvents": events}))
    whole, _ = reported(file)
    monkeypatch.setattr(report, "MOST_NODES", 3)
    monkeypatch.setattr(report, "MOST_ROWS", 3)
    found, _ = reported(file)
    [tree], table = found["trees"], found["tables"][0]
    assert (tree["shown"], tree["paths"], tree["folded"]) == (3, 20, [[3], [17]])
    assert (len(table["name"]), table["folded"]) == (3, 17)
    assert [sum(column) for column in table["rows"]] == [sum(column) for column in whole["tables"][0]["rows"]]
    assert sum(tree["own"]["time"]) == sum(whole["trees"][0]["own"]["time"])


def test_hostile_names_are_text(tmp_path, reported):
    """No name ends the data or begins an element; control characters and surrogates are escapes; a long name is cut, and says so."""
    file = tmp_path / "t.json"
    events = [piece(HOSTILE, 1, 2), piece(LONG, 4, 2), piece("aten::add", 7, 1, args={"Input Dims": HOSTILE})]
    file.write_text(json.dumps({"traceEvents": events, HOSTILE: 1}))
    found, _ = reported(file)
    text = (tmp_path / "report.html").read_text()
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text
    assert any(r"<img src=x onerror=alert(1)>\x1b[31m\u202e" in name for name in found["names"])
    assert all(len(name) < 1000 and name.isprintable() for name in found["names"])
    assert any("more characters)" in name for name in found["names"])


def test_only_its_own_script_and_style_may_run():
    """The policy forbids everything but the script and the style in the page, by their digests."""
    text = page({"headline": float("nan"), "names": np.array([1, 2])}).decode()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';")
    for kind, pattern in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        [source] = re.findall(pattern, text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert '{"headline":null,"names":[1,2]}' in text
    assert "innerHTML" not in text
    assert not re.findall(r"https?://", text)


def test_two_files(tmp_path, capsys):
    """``diff --html`` writes the answer of ``diff`` and both recordings, the second as what is displayed."""
    before, after = (
        kineto(tmp_path / f"{name}.json", 40, lambda begin, ms=ms: [piece("aten::mm", begin + 1, ms)])
        for name, ms in (("a", 2), ("b", 4))
    )
    output = tmp_path / "diff.html"
    assert cli.main(["diff", str(before), str(after), "--html", str(output)]) == 0
    found = data_in(output)
    assert capsys.readouterr().out.startswith(found["headline"])
    assert [each["name"] for each in found["files"]] == ["a.json", "b.json"]
    assert [(each["side"], each["name"]) for each in found["steps"]] == [(0, "before, a.json"), (1, "after, b.json")]
    table, own = found["tables"][0], found["columns"].index("self")
    place = table["name"].index("aten::mm")
    assert (table["before"][own][place], table["rows"][own][place]) == (80_000_000, 160_000_000)
    [tree] = found["trees"]
    node = [found["names"][name] for name in tree["name"]].index("aten::mm")
    assert (tree["own"]["before_time"][node], tree["own"]["time"][node]) == (80_000_000, 160_000_000)
    assert cli.main(["diff", "--interleave", "6", "--html", "x", "--", "a.py", "--", "b.py"]) == 3
    assert "--html is a page of two files" in capsys.readouterr().err


def test_a_file_that_ends_in_the_middle(tmp_path, reported):
    """What can be read is in the page, the reason for the end is printed and in the page, and the exit status is 1."""
    file = kineto(tmp_path / "t.json", 30, nested)
    file.write_text(file.read_text()[:-400])
    found, said = reported(file, status=1)
    assert "t.json" in said.splitlines()[0]
    assert any(note.startswith("'t.json': ") for note in found["notes"])
    assert cli.main(["report", str(tmp_path / "none.json")]) == 1


def test_a_black_box(tmp_path, reported):
    """A box is read as a trace, and the page and the messages have its own name, not that of a temporary file."""
    box = BlackBox(BlackBoxOptions("ops", str(tmp_path), 1 << 24), {})
    box.start()
    with otp.record_function("in the box"):
        pass
    shutil.copy(box.path, tmp_path / "dead.otpbox")
    box.stop()
    found, said = reported(tmp_path / "dead.otpbox")
    assert found["files"][0]["name"] == "dead.otpbox"
    assert "in the box" in found["names"]
    assert ".otlp" not in json.dumps(found) + said


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    """The error names the path, and says what to do."""
    file = kineto(tmp_path / "t.json", 30, nested)
    assert cli.main(["report", str(file), "-o", str(tmp_path / "none" / "x.html")]) == 1
    assert "create the folder first" in capsys.readouterr().err
