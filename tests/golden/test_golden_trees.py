"""Trees of small programs, kept as text: each is run three times, and `GOLDEN_ACCEPT=1 make test` writes the texts anew."""

from __future__ import annotations

import re
import threading

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from kept_texts import check  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13"),
        reason=f"the trees are those of torch 2.13, this is {torch.__version__}",
    ),
]

LINEAR_STEP = """\
thread 1
  forward (label)
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
    aten::sum
      aten::as_strided
      aten::fill_
  backward (label)
    aten::ones_like
      aten::empty_like
        aten::empty_strided
      aten::fill_
    autograd::engine::evaluate_function: SumBackward0
      SumBackward0
        aten::expand
          aten::as_strided
    autograd::engine::evaluate_function: AddmmBackward0
      AddmmBackward0
        aten::t
          aten::transpose
            aten::as_strided
        aten::mm
          aten::resolve_conj
          aten::resolve_conj
          aten::clone
            aten::empty_like
              aten::empty
            aten::copy_
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
  Optimizer.step#SGD.step (label)
    aten::add_
    aten::add_
"""
LABELS = """\
thread 1
  ours (label)
    generator (label)
      aten::ones
        aten::empty
        aten::fill_
      aten::ones
        aten::empty
        aten::fill_
    torch's (label)
      aten::ones
        aten::empty
        aten::fill_
      aten::neg
  left open (label)
"""
THREADS = """\
thread 1
  main (label)
thread 2
  in the thread (label)
    aten::ones
      aten::empty
      aten::fill_
    aten::neg
"""
SHAPES = """\
thread 1
  aten::cat [[], []]
  aten::mm [[4, 3], [3, 4]]
    aten::resolve_conj [[4, 4]]
    aten::resolve_conj [[3, 4]]
    aten::resolve_conj [[4, 3]]
  aten::add [[2, 3], [], []]
    aten::to [[], [], [], [], []]
      aten::_to_copy [[], [], [], [], [], [], []]
        aten::empty_strided [[], [], [], [], [], []]
        aten::copy_ [[], [], []]
"""


def normal(name):
    """A name without what differs from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0x", name)


def as_text(prof, *, shapes=False):
    """One event per line, indented under its parent; a thread's roots under its place among the threads that recorded."""
    lines = []

    def add(event, depth):
        reported = f" {event.input_shapes}" if shapes and event.input_shapes else ""
        flags = " (label)" if event.is_user_annotation else ""
        flags += " (async)" if event.is_async else ""
        lines.append("  " * depth + normal(event.name) + reported + flags)
        for child in event.cpu_children:
            add(child, depth + 1)

    events = prof.events()
    threads = list(dict.fromkeys(event.thread for event in events))
    for number, thread in enumerate(threads, start=1):
        lines.append(f"thread {number}")
        for event in events:
            if event.cpu_parent is None and event.thread == thread:
                add(event, 1)
    return "\n".join(lines) + "\n"


def test_a_linear_step():
    """Forward, backward and SGD of one linear layer."""
    layer, x = torch.nn.Linear(2, 1), torch.ones(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def run():
        optimizer.zero_grad()
        with otp.profile() as prof:
            with otp.record_function("forward"):
                loss = layer(x).sum()
            with otp.record_function("backward"):
                loss.backward()
            optimizer.step()
        return as_text(prof)

    run()
    check(globals(), "LINEAR_STEP", run)


def test_labels():
    """Labels of ours and torch's around operators, one of them a generator that takes turns, one left open."""

    @otp.record_function("generator")
    def generator():
        for _ in range(2):
            torch.ones(1)
            yield

    def run():
        with otp.profile() as prof, otp.record_function("ours"):
            running = generator()
            next(running)
            with torch.profiler.record_function("torch's"):
                torch.ones(1).neg()
            list(running)
            otp.record_function("left open").__enter__()
        return as_text(prof)

    check(globals(), "LABELS", run)


def test_threads():
    """Operators and labels of a second thread, seen with all_threads."""

    def work():
        with otp.record_function("in the thread"):
            torch.ones(1).neg()

    def run():
        with otp.profile(all_threads=True) as prof, otp.record_function("main"):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return as_text(prof)

    check(globals(), "THREADS", run)


def test_shapes():
    """Shapes of tensors, lists of tensors and other inputs."""

    def run():
        a, b = torch.ones(2, 3), torch.ones(3, 4)
        with otp.profile(record_shapes=True) as prof:
            torch.cat([a, a]).mm(b)
            torch.add(a, 1.0)
        return as_text(prof, shapes=True)

    check(globals(), "SHAPES", run)
