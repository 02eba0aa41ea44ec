"""``diff --interleave`` of two programs that train: what one does more in each step is found by its operator."""

from __future__ import annotations

import os
import subprocess
import types

import preloaded
from checked_json import checked

from otel_torchprof._cli import interleaved
from otel_torchprof._cli import main as cli

PROGRAM = """
import sys
import torch

torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)), torch.randn(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    for _ in range(int(sys.argv[1])):
        torch.sort(x.flatten().repeat(2))
    loss.backward()
    optimizer.step()
"""


def started(words, *, stdout, stderr, **options):
    """A process that is forked from one that has torch; that one closes the descriptors that it is given."""
    ends = {name: os.dup(file.fileno()) for name, file in (("stdout", stdout), ("stderr", stderr))}
    return preloaded._PopenWithPackage(words, **ends, **options)


def test_an_operator_that_runs_more_often(tmp_path, monkeypatch, capsys):
    """Training that sorts six times in each step instead of once is slower, by ``aten::sort``, and the status says so."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setattr(interleaved, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": started}))
    monkeypatch.setattr(interleaved, "_REPETITIONS", 5)
    monkeypatch.chdir(tmp_path)
    status = cli.main(["diff", "-q", "--json", "--interleave", "6", "--", "train.py", "1", "--", "train.py", "6"])
    said = capsys.readouterr()
    assert (status, said.err) == (1, ""), said.out
    found = checked("diff", said.out)
    [sort] = [change for change in found["changes"] if change["name"] == "aten::sort"] or [found]
    assert (sort["calls_before"], sort["calls_after"]) == (2, 12)
    assert sort["after"] > 3 * sort["before"]
    assert found["rounds"]["pairs"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
