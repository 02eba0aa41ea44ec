"""``stream`` and ``otel-torchprof run`` around a training loop."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
from pathlib import Path

import preloaded
import pytest

torch = pytest.importorskip("torch")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._cli.show import read  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


class Loop:
    """A small training loop."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_hours_in_small(tmp_path, monkeypatch):
    """After ten times as many steps no more is held, each step is in one of the files, and the averages know all of them."""
    monkeypatch.setenv(
        "OTEL_TORCHPROF_SAMPLING", "false"
    )  # texts of stacks are kept by their number, not by that of steps
    loop = Loop()
    exporter = otp.ChromeTraceExporter(tmp_path / "t.json", steps_per_file=50)
    with otp.stream(exporter) as streamed:
        held = []
        tracemalloc.start()
        try:
            for rounds in (2, 20):
                for _ in range(rounds):
                    loop.run(10)
                    assert streamed.flush()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert streamed.steps == 219  # the last one has begun
    # Of the last thousand steps some 0.9 KB each are remembered: when they ended, what they took, and what their traces may still have.
    assert held[1] - held[0] < 230_000  # the ids of some steps, for what may still come of them
    counts = {row.key: row.count for row in streamed.key_averages()}
    assert counts["aten::addmm"] == 220
    numbers, operators = [], 0
    for file in exporter.files:
        sums, _ = read(file)
        numbers += [step.number for step in sums.steps]
        operators += next((row.calls for row in sums.averages() if row.name == "aten::addmm"), 0)
    assert sorted(numbers)[:220] == list(range(220))  # see below
    assert operators == 220
    assert len(exporter.files) in {5, 6}


def run_script(folder, *options, **variables):
    """``otel-torchprof run`` of the folder's ``train.py``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    words = ("run", *options, "train.py")
    return preloaded.run(("-m", "otel_torchprof"), *words, environment=environment, folder=folder, has_package=True)


def test_a_script_with_stacks(tmp_path):
    """An untouched script: its operators are inside of its functions, and its steps are listed."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train():\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "for _ in range(4):\n"
        "    train()\n"
    )
    options = ("--stacks", "--table", "--rows", "-1", "-o", "t.json")
    done = run_script(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert "aten::addmm" in done.stderr
    assert ", 4 steps, " in done.stderr
    sums, problems = read(str(tmp_path / "t.json"))
    calls = {row.name: row.calls for row in sums.averages()}
    assert (problems, calls["aten::addmm"], calls["train.py(4): train"]) == ([], 4, 4)
    assert sorted(step.number for step in sums.steps)[:4] == [0, 1, 2, 3]  # a drain may write the first one late
    json.loads((tmp_path / "t.json").read_text())


def test_a_script_that_ends_its_own_steps(tmp_path):
    """``TorchInstrumentor()`` of a script reaches the recording that ``run`` has made, and a stream of the script: steps, tokens, health."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "import otel_torchprof as otp\n"
        "with otp.stream() as recording:\n"
        "    for _ in range(4):\n"
        "        torch.ones(4).sum()\n"
        "        otp.TorchInstrumentor().step({'torch.step.loss': 2.5}, tokens=64)\n"
        "    recording.flush()\n"
        "    print(recording.steps, otp.TorchInstrumentor().health.sources['recording'])\n"
    )
    done = run_script(tmp_path, "-o", "t.jsonl")
    assert (done.returncode, done.stdout) == (0, "4 on\n"), done.stderr
    assert ", 4 steps, " in done.stderr
    sums, _ = read(str(tmp_path / "t.jsonl"))
    assert sorted(step.number for step in sums.steps if not step.is_unfinished) == list(range(4))
    assert (tmp_path / "t.jsonl").read_text().count('"torch.step.loss"') == 4


def test_a_script_of_which_some_steps_are_told(tmp_path):
    """``--schedule`` and ``--every`` say which steps have their operators in the file; the others have their span only."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "weight = torch.ones(4, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(6):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
    )
    options = ("-o", "t.jsonl", "--schedule", "wait=1,active=2", "--every", "2")
    assert run_script(tmp_path, *options, OTEL_TORCHPROF_POLICY="every=3").returncode == 0
    sums, _ = read(str(tmp_path / "t.jsonl"))
    steps = [step for step in sums.steps if not step.is_unfinished]
    assert sorted(step.number for step in steps) == list(range(6))
    assert {step.number for step in steps if step.spans > 1} == {2, 4}


def test_memory_of_events_that_are_open_over_drains():
    """With profile_memory each span has what was allocated and freed inside it, also before a drain in which it was open."""
    exporter = InMemorySpanExporter()
    with otp.stream(exporter, profile_memory=True) as streamed:
        outside = torch.ones(20)
        with otp.record_function("outer"):
            first = torch.ones(1000)
            with otp.record_function("inner"):
                second = torch.ones(3000)
                assert streamed.flush()
                third = torch.ones(50)
            assert streamed.flush()
            del first, second
    moved = {span.name: moved_in(span) for span in exporter.get_finished_spans()}
    assert moved["inner"] == (12_200, None)
    assert moved["outer"] == (16_200, 16_000)
    peaks = {span.name: span.attributes.get("torch.memory.peak") for span in exporter.get_finished_spans()}
    assert peaks["outer"] == peaks["inner"] >= 16_280
    del outside, third


def moved_in(span):
    """What was allocated and released inside a span, None for nothing."""
    return tuple(span.attributes.get(f"torch.memory.{name}") for name in ("allocated", "released"))


@pytest.mark.parametrize("name", ["t.otlp", "t.json.gz"])
def test_memory_by_module_from_the_command_line(tmp_path, name):
    """``otel-torchprof run --memory`` writes what each module has allocated, as profile(profile_memory=True) has it."""
    (tmp_path / "train.py").write_text(
        "import torch\nfor _ in range(3):\n    torch.nn.Linear(100, 10)(torch.ones(8, 100))\n"
    )
    words = ("run", "-q", "--memory", "-o", name, "train.py")
    done = preloaded.run(
        ("-m", "otel_torchprof"),
        *words,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        folder=tmp_path,
        has_package=True,
    )
    assert done.returncode == 0, done.stderr
    rows = otp.load(tmp_path / name).key_averages(group_by_module=True)
    assert sum(row.cpu_memory_usage for row in rows if row.key.startswith("Linear")) >= 3 * 8 * 10 * 4
