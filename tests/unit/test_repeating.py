"""Steps of a trace that marks none: between the steps of an optimizer, else between batches of a loader, and it is said."""

from __future__ import annotations

import json

import pytest

import otel_torchprof as otp
from otel_torchprof._cli.main import main

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
ADAM, SGD = "Optimizer.step#Adam.step", "Optimizer.step#SGD.step"


def trace(path, *marks, count=40, thread=1, more=()):
    """Periods of 100 us, each with these marks (name, begin, duration) around an operator."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": thread, "ts": 1000 + 100 * number + ts, "dur": dur}
        for number in range(count)
        for name, ts, dur in (*marks, ("aten::mm", 20, 30))
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*events, *more]}))
    return path


@pytest.mark.parametrize(
    ("marks", "between", "end"),
    [
        ([(SGD, 60, 20)], SGD, 1080),
        ([(LOADER, 0, 10)], LOADER, 1000),
        ([(LOADER, 0, 10), (SGD, 60, 20)], SGD, 1080),
        ([(SGD, 60, 5), (ADAM, 70, 10)], ADAM, 1080),
        ([(SGD, 60, 20), (ADAM, 65, 5)], SGD, 1080),
    ],
    ids=["an optimizer", "a loader", "an optimizer and a loader", "the last of two optimizers", "the outer one of two"],
)
def test_steps_from_what_repeats(tmp_path, marks, between, end):
    """Steps are between the ends of the optimizer's steps, or the begins of the loader's batches; what is before and after is in none."""
    loaded = otp.load(trace(tmp_path / "t.json", *marks))
    assert len(loaded.steps) == 39
    assert [step.number for step in loaded.steps] == list(range(39))
    assert {step.end - step.start for step in loaded.steps} == {100_000}
    assert loaded.steps[0].start == end * 1000
    assert any(f"one {between} to that of the next" in note for note in loaded.health.notes)
    explanation = loaded.explain()
    assert explanation.steps == 39
    assert "no step is marked: each is from" in str(explanation)
    assert explanation.step_rule in loaded.health.notes


def test_the_optimizer_with_the_fewest_steps_makes_them(tmp_path):
    """Where one optimizer steps twice in what another does once, a step is that of the other."""
    marks = [(SGD, 55, 5), (SGD, 62, 5), (ADAM, 70, 10)]
    loaded = otp.load(trace(tmp_path / "t.json", *marks))
    assert len(loaded.steps) == 39
    assert f"from the end of one {ADAM} to" in loaded.health.notes[-1]


def test_marked_steps_are_the_steps(tmp_path):
    """A trace that marks its steps has these and no others."""
    marked = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#7", "pid": 1, "tid": 1, "ts": 900, "dur": 5000}
    ]
    loaded = otp.load(trace(tmp_path / "t.json", (SGD, 60, 20), more=marked))
    assert [step.number for step in loaded.steps] == [7]
    assert not any("no step is marked" in note for note in loaded.health.notes)


def test_what_does_not_repeat_makes_no_steps(tmp_path, capsys):
    """Two steps of an optimizer are no loop: there are no steps, and explain says what makes some."""
    path = trace(tmp_path / "t.json", (SGD, 60, 20), count=2)
    assert otp.load(path).steps == ()
    assert main(["explain", str(path)]) == 1
    assert "and no step" in capsys.readouterr().err


def test_the_gap_of_such_steps(tmp_path):
    """Python's time is that of the loop's thread outside of all events."""
    explanation = otp.explain(trace(tmp_path / "t.json", (SGD, 60, 5)))
    [gap] = [finding for finding in explanation.findings if finding.verdict == "python-gap"]
    assert gap.share == pytest.approx(0.65)


def test_the_gap_inside_of_calls(tmp_path):
    """With Python's calls in the trace, the gap is what it is without them: calls in a step run no operator."""
    around = {
        "ph": "X",
        "cat": "python_function",
        "name": "train.py(1): train",
        "pid": 1,
        "tid": 1,
        "ts": 0,
        "dur": 10_000,
    }
    marks = [(SGD, 60, 5), ("train.py(9): wait", 70, 20)]
    explanation = otp.explain(trace(tmp_path / "t.json", *marks, more=[around]))
    [gap] = [finding for finding in (*explanation.findings, *explanation.notes) if finding.verdict == "python-gap"]
    assert gap.share == pytest.approx(0.65)


@pytest.mark.parametrize("name", ["t.json", "t.otlp"])
def test_a_profile_without_steps_is_explained(tmp_path, name):
    """A profile that marks no steps has those between the steps of its optimizer too, recorded and read back from any file."""
    with otp.profile() as prof:
        for _ in range(8):
            with otp.record_function(SGD), otp.record_function("inside"):
                pass
    assert prof.steps == ()
    prof.export_as(str(tmp_path / name), "chrome" if name.endswith("json") else "otlp")
    loaded = otp.load(tmp_path / name)
    rules = {explanation.step_rule for explanation in (prof.explain(), loaded.explain(), otp.explain(tmp_path / name))}
    assert rules == {f"no step is marked: each is from the end of one {SGD} to that of the next"}
    assert [prof.explain().steps, loaded.explain().steps, len(loaded.steps)] == [7, 7, 7]
    (tmp_path / name).unlink()
    assert loaded.explain().steps == 7
