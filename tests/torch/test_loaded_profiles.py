"""``otp.load`` against the profiles that wrote the files: this package's, and torch's own."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import TraceSums
from otel_torchprof._files.reading import read_events
from otel_torchprof._model.reductions import COLLAPSED


@pytest.fixture(scope="module")
def train():
    """One step of a small transformer, with everything that profilers see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        with otp.record_function("forward"), torch.profiler.record_function("loss"):
            loss = model(torch.randn(2, 8, 16)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


CALL = re.compile(r"<built-in|\(\d+\): ")
"""In the names of Python calls."""


def rows(averages, *, by_stack=False, with_memory_of_calls=True):
    """What an average says, sorted; times in whole ns."""
    return sorted(
        (
            average.key,
            average.count,
            round(average.cpu_time_total * 1000),
            round(average.self_cpu_time_total * 1000),
            *(
                (average.cpu_memory_usage, average.self_cpu_memory_usage)
                if with_memory_of_calls or not CALL.search(average.key)
                else ()
            ),
            average.flops or 0,
            str(average.input_shapes),
            str(list(average.stack or ())[:5]) if by_stack else "",
        )
        for average in averages
    )


GROUPS = ({}, {"group_by_input_shape": True}, {"group_by_stack_n": 5})
OPTIONS = {
    "plain": {},
    "shapes": {"record_shapes": True},
    "all": {"record_shapes": True, "with_stack": True, "profile_memory": True, "with_flops": True},
    "modules": {"with_modules": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_own_traces_have_the_averages_of_their_profile(train, tmp_path, options):
    """Averages by name, shapes and stacks, and all columns of all events, are those of the profile that wrote the file."""
    with otp.profile(**options) as prof:
        for _ in range(2):
            train()
            prof.step()
    prof.export_chrome_trace(tmp_path / "t.json")
    loaded = otp.load(tmp_path / "t.json")
    for groups in GROUPS:
        by_stack = "group_by_stack_n" in groups
        # Memory that moves in the moment in which a call ends is of that call or of the one around it, by rounded times.
        of_file, of_torch = (
            rows(one.key_averages(**groups), by_stack=by_stack, with_memory_of_calls=False) for one in (loaded, prof)
        )
        assert of_file == of_torch
    ours, theirs = loaded.to_pandas(), prof.to_pandas()
    different = [name for name in theirs if not ours[name].equals(theirs[name])]
    assert different == ["id"]  # numbers, in the same order
    assert len(loaded.steps) == 2
    loaded.export_chrome_trace(tmp_path / "again.json")
    assert again(tmp_path / "again.json") == again(tmp_path / "t.json")


OTLP_OPTIONS = {**OPTIONS, "all": {**OPTIONS["all"], "with_stack": False}, "stacks": {"with_stack": True}}


@pytest.mark.parametrize("name", ["t.otlp", "t.jsonl"])
@pytest.mark.parametrize("options", OTLP_OPTIONS.values(), ids=OTLP_OPTIONS)
def test_own_spans_have_the_averages_of_their_profile(train, tmp_path, options, name):
    """Averages by name and shapes of OTLP are those of its profile, without addresses and what was allocated outside of events."""
    with otp.profile(**options) as prof:
        for _ in range(2):
            train()
            prof.step()
    prof.export_otlp(tmp_path / name, detail="frames" if "with_stack" in options else "ops")
    loaded = otp.load(tmp_path / name)
    for groups in GROUPS[:2]:
        ours, theirs = (rows(each.key_averages(**groups)) for each in (loaded, prof))
        without = sorted((re.sub(r" at 0x[0-9a-f]+>", ">", key), *sums) for key, *sums in theirs if key != "[memory]")
        assert summed(ours) == summed(without)
    assert [step[:2] for step in loaded.steps] == [step[:2] for step in prof.steps]
    assert loaded.with_flops == bool(options.get("with_flops"))


def summed(averages):
    """Sums by name and shapes: functions that differ in their address only are one in OTLP."""
    sums = {}
    for key, *numbers, shapes, stack in averages:
        before = sums.get((key, shapes, stack), [0] * len(numbers))
        sums[key, shapes, stack] = [a + b for a, b in zip(before, numbers, strict=True)]
    return sums


def again(path):
    """The slices of a file, without their numbers."""
    return [
        (each["name"], each["ts"], each["dur"], each.get("cat"), each["args"].get("Input Dims"))
        for each in json.loads(path.read_bytes())["traceEvents"]
        if each["ph"] == "X"
    ]


@pytest.mark.parametrize("exporter", [otp.ChromeTraceExporter, otp.OTLPFileExporter])
def test_traces_of_an_instrumentation_have_its_averages(train, tmp_path, exporter):
    """The events of a stream's trace have the averages of the stream, and its steps; a step has the name that torch gives it."""
    with otp.stream(exporter(tmp_path / "t.json"), record_shapes=True) as streamed:
        for _ in range(3):
            train()
            streamed.step()
    loaded = otp.load(tmp_path / "t.json")
    sums = [
        {row.key: (row.count, row.cpu_time_total, row.self_cpu_time_total) for row in each.key_averages()}
        for each in (streamed, loaded)
    ]
    assert sums[1].pop("ProfilerStep*")[:2] == sums[0].pop("torch.step")[:2]
    del sums[0]["torch.phase.unattributed"]  # a part of each step, and no event
    assert sums[1] == sums[0]
    assert [step.number for step in loaded.steps] == [0, 1, 2]
    shapes = {str(row.input_shapes) for row in loaded.key_averages(group_by_input_shape=True) if row.key == "aten::mm"}
    assert shapes > {"[[16, 16], [16, 32]]"}


@pytest.mark.parametrize("name", ["t.otlp", "t.jsonl", "t.json"])
def test_reduced_traces_have_the_averages_of_show(train, tmp_path, name):
    """Operators that were aggregated and collapsed count as ``show`` counts them; only torch leaves out an only child with its parent's name."""
    written = tmp_path / ("live.jsonl" if name == "t.jsonl" else "live.otlp")
    policy = otp.SpanPolicy(max_spans=100)
    with otp.stream(otp.OTLPFileExporter(written), record_shapes=True, policy=policy) as streamed:
        for _ in range(30):
            train()
            streamed.step()
    path = tmp_path / name
    assert cli.main(["convert", "-q", str(written), "-o", str(path)]) == 0
    for each in (written, path):
        events = read_events([str(each)])
        above = events.parent
        has_namesake = (events.name[above] == events.name) & (above >= 0)
        namesakes = {events.names[number] for number in events.name[has_namesake].tolist()}
        given = {row.name: row for row in TraceSums(events).averages() if row.name not in {"torch.step", "torch.setup"}}
        loaded = otp.load(each)
        found = {row.key: row for row in loaded.key_averages()}
        assert {name: round(found[name].self_cpu_time_total * 1000) for name in given} == {
            name: row.self_time for name, row in given.items()
        }
        alike = given.keys() - namesakes
        assert {(name, found[name].count, round(found[name].cpu_time_total * 1000)) for name in alike} == {
            (name, given[name].calls, given[name].total) for name in alike
        }
        assert found[COLLAPSED].count > 100
        assert any(row.count > 1 for row in loaded.events())
        assert loaded.explain().steps == otp.explain(each).steps == 30


@pytest.mark.parametrize("name", ["plain", "shapes", "all"])
def test_torchs_traces_have_torchs_averages(train, tmp_path, name):
    """Averages by name, shapes and stacks of torch's file are what torch's own ``key_averages()`` gives for that recording."""
    verbose = _ExperimentalConfig(verbose=True)  # else torch's events have no stacks
    with torch.profiler.profile(**OPTIONS[name], experimental_config=verbose) as prof:
        for _ in range(2):
            train()
            prof.step()
    prof.export_chrome_trace(str(tmp_path / "t.json"))
    loaded = otp.load(tmp_path / "t.json")
    for groups in GROUPS:
        by_stack = "group_by_stack_n" in groups
        assert rows(loaded.key_averages(**groups), by_stack=by_stack) == rows(
            prof.key_averages(**groups), by_stack=by_stack
        )
    assert loaded.health.operators == loaded.health.labels == "on"


def test_a_schedule_has_steps_to_explain(train, tmp_path):
    """Steps of torch's schedule are the labels of its trace, and an explanation of the loaded profile is that of the file."""
    plan = torch.profiler.schedule(wait=0, warmup=1, active=30, repeat=1)
    with torch.profiler.profile(schedule=plan) as prof:
        for _ in range(31):
            train()
            prof.step()
    prof.export_chrome_trace(str(tmp_path / "t.json"))
    loaded = otp.load(tmp_path / "t.json")
    assert [step.number for step in loaded.steps] == list(range(1, 31))
    assert rows(loaded.key_averages()) == rows(prof.key_averages())
    assert str(loaded.explain()) == str(otp.explain(str(tmp_path / "t.json")))
