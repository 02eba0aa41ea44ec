"""Functions that are labelled by their names inside torch.compile, torch.jit and torch.fx."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", minversion="2.6")

from observed import succeeds

MODEL = """
import torch

def double(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * 2

def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(self.linear(x))
"""

GRAPHS = """
import warnings
warnings.simplefilter("ignore")
import otel_torchprof as otp
labels = otp.label_functions(["labelled_model.double", "labelled_model:Model.forward", "torch.nn.Linear.forward linear"])
import torch
import labelled_model
assert len(labels.labelled) == 3

def names(run):
    run(x)
    with otp.profile() as prof:
        run(x)
    return [event.name for event in prof.events()]

x = torch.ones(2, 3)
model = labelled_model.Model()
expected = model(x)
assert names(model)[:3] == ["labelled_model.Model.forward", "linear", "aten::linear"], names(model)

scripted = torch.jit.script(model)
assert torch.equal(scripted(x), expected)
assert "aten::relu" in names(scripted)
assert torch.equal(torch.jit.script(labelled_model.double)(x), 2 * x)
assert torch.equal(torch.jit.trace(model, x)(x), expected)
assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)

compiled = torch.compile(model, fullgraph=True, backend="eager")
assert torch.equal(compiled(x), expected)
assert "aten::relu" in names(compiled)

labels.remove()
assert names(model)[0] == "aten::linear"
"""


def test_in_graphs(tmp_path):
    """Labelled functions and methods compile in TorchScript, dynamo without a break, and fx, and compute what they did."""
    (tmp_path / "labelled_model.py").write_text(MODEL)
    succeeds(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{GRAPHS}")
