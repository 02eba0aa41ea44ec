"""``otel-torchprof convert``: any file that is read, in any format that is written, and what is lost on the way."""

from __future__ import annotations

import json

import pytest
from kineto_events import cuda_trace, event, memory

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli import terminal
from otel_torchprof._export.formats import TRACE_ENDINGS


def converted(source, target):
    return cli.main(["convert", str(source), "-o", str(target)])


def figures(path):
    """Calls, total and self time of each name, ns."""
    return {
        row.key: (row.count, round(row.cpu_time_total * 1000), round(row.self_cpu_time_total * 1000))
        for row in otp.load(path).key_averages()
    }


@pytest.mark.parametrize("ending", TRACE_ENDINGS)
@pytest.mark.parametrize("source", ["t.json", "t.otlp", "t.jsonl.gz"])
def test_each_format_into_each(tmp_path, capsys, source, ending):
    """The averages and the steps of the output are those of the input, and the output is named with what opens it."""
    with otp.profile(operators=False) as prof:
        for _ in range(3):
            with otp.record_function("outer"), otp.record_function("inner"):
                pass
            prof.step()
    names = {"t.json": "chrome", "t.otlp": "otlp", "t.jsonl.gz": "otlp_json"}
    prof.export_as(tmp_path / source, names[source])
    output = tmp_path / f"out{ending}"
    assert converted(tmp_path / source, output) == 0
    assert figures(output) == figures(tmp_path / source)
    assert [step[:3] for step in otp.load(output).steps] == [step[:3] for step in prof.steps]
    assert f"wrote {output}, for " in capsys.readouterr().err


def test_a_long_reading_shows_how_far_it_is(tmp_path, monkeypatch, capsys):
    """The file that is read is followed, unless ``-q`` is given."""
    (tmp_path / "t.json").write_text(json.dumps([event("op", 0, 100)]))
    followed, lines = [], []

    class Watched(terminal.ReadingProgress):
        def watch(self, path, stream):
            super().watch(path, stream)
            followed.append(self)

    monkeypatch.setattr(terminal, "ReadingProgress", Watched)
    monkeypatch.setattr(terminal.Progress, "start", lambda progress: lines.append(progress.report_if_due()))
    assert converted(tmp_path / "t.json", tmp_path / "t.otlp") == 0
    assert "100%" in followed[0].line()
    assert len(lines) == 1
    assert cli.main(["convert", "-q", str(tmp_path / "t.json"), "-o", str(tmp_path / "t.otlp")]) == 0
    assert len(lines) == 1


def test_what_is_lost_is_said(tmp_path, capsys):
    """Parts that were not read set the exit status; what only Chrome traces have is named where the output is OTLP."""
    step = event("ProfilerStep#1", 0, 100, cat="user_annotation", **{"External id": 9})
    bad = event("bad", "x", 1)
    (tmp_path / "t.json").write_text(json.dumps([step, *cuda_trace(), memory(5, 100, 100), bad]))
    assert converted(tmp_path / "t.json", tmp_path / "t.otlp") == 1
    said = capsys.readouterr().err
    for text in ("not counted: 1", "work of devices (", "allocations are sums per event", "labels of steps are steps"):
        assert text in said
    assert converted(tmp_path / "t.json", tmp_path / "again.json") == 1
    said = capsys.readouterr().err
    assert "not counted: 1" in said
    assert "in the output" not in said


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("t.json", "t.txt", "--output is "),
        ("none.json", "t.otlp", "No such file"),
        ("t.json", "no/t.otlp", "create the folder first"),
    ],
)
def test_errors(tmp_path, capsys, source, target, message):
    """An unknown suffix, a missing input and a missing folder are errors with the way out."""
    (tmp_path / "t.json").write_text("[]")
    assert converted(tmp_path / source, tmp_path / target) == 1
    assert message in capsys.readouterr().err


def test_an_input_is_never_replaced(tmp_path, capsys):
    """An output that is the input, by whatever name, is refused before anything is written."""
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    path, link = tmp_path / "t.json", tmp_path / "link.json"
    prof.export_chrome_trace(path)
    link.symlink_to(path)
    before = path.read_bytes()
    for command in (["convert", str(path), "-o", str(link)], ["report", str(link), "-o", str(path)]):
        assert cli.main(command) == 1
        assert "is one of the files that are read: give it another name" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_trace_of_perfetto_is_no_otlp(tmp_path, capsys):
    """Perfetto's format begins like OTLP, and is refused like any file that is no trace that can be read."""
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    prof.export_as(tmp_path / "t.pftrace")
    assert cli.main(["convert", str(tmp_path / "t.pftrace"), "-o", str(tmp_path / "t.json")]) == 1
    assert "expected a Chrome trace, or OTLP for traces" in capsys.readouterr().err
