"""Calls and operators in one tree, kept as text: three times each, and `GOLDEN_ACCEPT=1 make test` writes the texts anew."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from frame_trees import no_collections  # noqa: E402
from kept_texts import check  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13"),
        reason=f"the trees are those of torch 2.13, this is {torch.__version__}",
    ),
]

FORWARD = """\
module.py: _call_impl
  <built-in method _get_tracing_state of pybind11>
  container.py: forward
    container.py: __iter__
      <built-in method values of dict object>
      <built-in function iter>
    nn.Module: _Block_0
      module.py: _call_impl
        <built-in method _get_tracing_state of pybind11>
        test_golden_torch_frames.py: forward
          module.py: __getattr__
          nn.Module: Linear_0
            module.py: _call_impl
              <built-in method _get_tracing_state of pybind11>
              linear.py: forward
                module.py: __getattr__
                module.py: __getattr__
                <built-in function linear>
                  aten::linear
                    aten::t
                      aten::transpose
                        aten::as_strided
                    aten::addmm
                      aten::expand
                        aten::as_strided
                      aten::copy_
                      aten::resolve_conj
                      aten::resolve_conj
          test_golden_torch_frames.py: _activated
            <built-in method relu of Tensor object>
              aten::relu
                aten::clamp_min
    nn.Module: _Block_1
      module.py: _call_impl
        <built-in method _get_tracing_state of pybind11>
        test_golden_torch_frames.py: forward
          module.py: __getattr__
          nn.Module: Linear_1
            module.py: _call_impl
              <built-in method _get_tracing_state of pybind11>
              linear.py: forward
                module.py: __getattr__
                module.py: __getattr__
                <built-in function linear>
                  aten::linear
                    aten::t
                      aten::transpose
                        aten::as_strided
                    aten::addmm
                      aten::expand
                        aten::as_strided
                      aten::copy_
                      aten::resolve_conj
                      aten::resolve_conj
          test_golden_torch_frames.py: _activated
            <built-in method relu of Tensor object>
              aten::relu
                aten::clamp_min
"""
MODULES_ONLY = """\
nn.Module: _Block_0
  nn.Module: Linear_0
    aten::linear
      aten::t
        aten::transpose
          aten::as_strided
      aten::addmm
        aten::expand
          aten::as_strided
        aten::copy_
        aten::resolve_conj
        aten::resolve_conj
  aten::relu
    aten::clamp_min
nn.Module: _Block_1
  nn.Module: Linear_1
    aten::linear
      aten::t
        aten::transpose
          aten::as_strided
      aten::addmm
        aten::expand
          aten::as_strided
        aten::copy_
        aten::resolve_conj
        aten::resolve_conj
  aten::relu
    aten::clamp_min
"""
OWN_CODE_ONLY = """\
nn.Module: Sequential_0
  nn.Module: _Block_0
    test_golden_torch_frames.py: forward
      nn.Module: Linear_0
        aten::linear
          aten::t
            aten::transpose
              aten::as_strided
          aten::addmm
            aten::expand
              aten::as_strided
            aten::copy_
            aten::resolve_conj
            aten::resolve_conj
      test_golden_torch_frames.py: _activated
        <built-in method relu of Tensor object>
          aten::relu
            aten::clamp_min
  nn.Module: _Block_1
    test_golden_torch_frames.py: forward
      nn.Module: Linear_1
        aten::linear
          aten::t
            aten::transpose
              aten::as_strided
          aten::addmm
            aten::expand
              aten::as_strided
            aten::copy_
            aten::resolve_conj
            aten::resolve_conj
      test_golden_torch_frames.py: _activated
        <built-in method relu of Tensor object>
          aten::relu
            aten::clamp_min
<built-in method sum of Tensor object>
  aten::sum
    aten::as_strided
    aten::fill_
aten::ones_like
  aten::empty_like
    aten::empty_strided
  aten::fill_
autograd::engine::evaluate_function: SumBackward0
  SumBackward0
    aten::expand
      aten::as_strided
autograd::engine::evaluate_function: ReluBackward0
  ReluBackward0
    aten::threshold_backward
autograd::engine::evaluate_function: AddmmBackward0
  AddmmBackward0
    aten::t
      aten::transpose
        aten::as_strided
    aten::mm
      aten::resolve_conj
      aten::resolve_conj
      aten::resolve_conj
    aten::t
      aten::transpose
        aten::as_strided
    aten::mm
      aten::resolve_conj
      aten::resolve_conj
    aten::t
      aten::transpose
        aten::as_strided
  aten::sum
    aten::fill_
  aten::view
autograd::engine::evaluate_function: torch::autograd::AccumulateGrad
  torch::autograd::AccumulateGrad
    aten::detach
      detach
autograd::engine::evaluate_function: TBackward0
  TBackward0
    aten::t
      aten::transpose
        aten::as_strided
autograd::engine::evaluate_function: torch::autograd::AccumulateGrad
  torch::autograd::AccumulateGrad
    aten::detach
      detach
autograd::engine::evaluate_function: ReluBackward0
  ReluBackward0
    aten::threshold_backward
autograd::engine::evaluate_function: AddmmBackward0
  AddmmBackward0
    aten::t
      aten::transpose
        aten::as_strided
    aten::mm
      aten::resolve_conj
      aten::resolve_conj
    aten::t
      aten::transpose
        aten::as_strided
  aten::sum
    aten::fill_
  aten::view
autograd::engine::evaluate_function: torch::autograd::AccumulateGrad
  torch::autograd::AccumulateGrad
    aten::detach
      detach
autograd::engine::evaluate_function: TBackward0
  TBackward0
    aten::t
      aten::transpose
        aten::as_strided
autograd::engine::evaluate_function: torch::autograd::AccumulateGrad
  torch::autograd::AccumulateGrad
    aten::detach
      detach
Optimizer.step#SGD.step
  aten::add_
  aten::add_
  aten::add_
  aten::add_
  optimizer.py: _optimizer_step_code
"""


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return _activated(self.linear(x))


def _activated(x):
    return x.relu()


def as_text(prof, start):
    """What is inside a call: an event per line, indented under the one around it."""
    lines = []

    def add(event, depth):
        name = re.sub(r"^.*/|\(\d+\)| at 0x[0-9a-f]+", "", event.name)
        lines.append("  " * depth + re.sub(r" of pybind11\S+ object", " of pybind11", name))
        for child in event.cpu_children:
            add(child, depth + 1)

    for event in prof.events():
        if event.name.endswith(start):
            for child in event.cpu_children:
                add(child, 0)
    return "\n".join(lines) + "\n"


def _run(frames=None, *, train=False):
    model, x = torch.nn.Sequential(_Block(), _Block()), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.set_grad_enabled(train):
            loss = model(x).sum()
        if train:
            loss.backward()
            optimizer.step()

    step()
    optimizer.zero_grad()
    with no_collections(), otp.profile(with_stack=True, frames=frames) as prof:
        step()
    return prof


def test_forward():
    """A forward pass: modules, torch's functions around them, this file's, and operators."""
    check(globals(), "FORWARD", lambda: as_text(_run(), "nn.Module: Sequential_0"))


def test_modules_only():
    """The same with nothing but modules and operators."""
    modules = otp.FrameFilter(modules_only=True)
    check(globals(), "MODULES_ONLY", lambda: as_text(_run(modules), "nn.Module: Sequential_0"))


def test_own_code_only():
    """A step of training without torch's own functions: this file's, its C functions, and operators, backward too."""
    own = otp.FrameFilter(include=["tests/golden"])
    check(globals(), "OWN_CODE_ONLY", lambda: as_text(_run(own, train=True), "): step"))
