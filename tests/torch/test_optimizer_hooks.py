"""Steps told by torch's optimizers."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref

import pytest

from examples import one_in

torch = pytest.importorskip("torch", minversion="2.6")

from observed import succeeds  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import optimizer as torch_optimizers  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._record.step_marks import StepTracker  # noqa: E402
from otel_torchprof._record.torch_hooks import OptimizerHooks  # noqa: E402


@pytest.fixture
def steps():
    """Numbers of the steps that optimizers begin while the hook is there."""
    begun = []
    tracker = StepTracker(lambda number, _: begun.append(number))
    hooks = OptimizerHooks()
    hooks.install(tracker.optimizer_stepped)
    yield begun
    hooks.remove()
    assert not torch_optimizers._global_optimizer_post_hooks


def model_and(kind, **options):
    """A small model and its optimizer."""
    model = nn.Linear(3, 1)
    return model, kind(model.parameters(), **options)


def backward(model):
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_one_optimizer(steps, kind):
    """Each call of an optimizer begins a step; gradients that are added up before it begin none."""
    model, optimizer = model_and(kind, lr=0.1)
    for number in range(1, 4):
        backward(model)
        backward(model)
        assert len(steps) == number - 1
        optimizer.step()
        optimizer.zero_grad()
    assert steps == [1, 2, 3]


def test_an_optimizer_with_a_closure_and_a_scheduler(steps):
    """An optimizer that calls the model itself, several times, and whose step a scheduler has wrapped, begins one per call."""
    model, optimizer = model_and(torch.optim.LBFGS, lr=0.1, max_iter=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        scheduler.step()
    assert steps == [1, 2, 3]


def test_two_optimizers(steps):
    """A generator and a discriminator with an optimizer each make one step per round."""
    (generator, first), (discriminator, second) = model_and(torch.optim.Adam), model_and(torch.optim.SGD)
    for number in range(1, 4):
        for model, optimizer in ((generator, first), (discriminator, second)):
            backward(model)
            optimizer.step()
        assert steps == list(range(1, number + 1))


def test_a_step_that_is_skipped(steps):
    """A step that a gradient scaler skips, since gradients are not finite, is none."""
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert steps == [1, 2]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # dynamo's own
def test_in_a_compiled_training_step(steps):
    """An optimizer that is called in a compiled function begins steps all the same."""
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)

    @torch.compile(backend="eager")
    def train(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        train(torch.ones(2, 3))
    assert steps == [1, 2, 3, 4]


def test_optimizers_are_let_go(steps):
    """An optimizer that has stepped goes when the program lets it go."""
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    backward(model)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_callback_that_raises(caplog):
    """Training goes on when the callback fails; that is logged once."""
    hooks = OptimizerHooks()

    def fail(_):
        raise RuntimeError("not ready")

    hooks.install(fail)
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    before = model.weight.clone()
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        for _ in range(3):
            backward(model)
            optimizer.step()
    hooks.remove()
    assert not torch.equal(model.weight, before)
    assert len(caplog.records) == 1
    assert "not ready" in caplog.text


def test_installed_again():
    """Installing again replaces the callback, removing twice does nothing, and torch is left without a hook."""
    first, second = [], []
    hooks = OptimizerHooks()
    hooks.install(first.append)
    hooks.install(second.append)
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    backward(model)
    optimizer.step()
    hooks.remove()
    hooks.remove()
    optimizer.step()
    assert (first, second) == ([], [optimizer])
    assert not torch_optimizers._global_optimizer_post_hooks


def test_others_come_and_go_during_a_step():
    """Hooks that are added and removed while a training loop calls them raise nothing in it."""
    first, second, third, called = OptimizerHooks(), OptimizerHooks(), OptimizerHooks(), []

    def others_come_and_go(optimizer):
        called.append("first")
        third.install(lambda _: called.append("third"))
        second.remove()

    first.install(others_come_and_go)
    second.install(lambda _: called.append("second"))
    try:
        model, optimizer = model_and(torch.optim.SGD)
        backward(model)
        optimizer.step()
        first.remove()
        optimizer.step()
    finally:
        for hooks in (first, second, third):
            hooks.remove()
    optimizer.step()
    assert called == ["first", "second", "third"]
    assert not torch_optimizers._global_optimizer_post_hooks


def test_hooks_that_the_program_took_out():
    """Where a program has cleared torch's hooks, who comes or goes next puts ours back for those that are left."""
    first, second, called = OptimizerHooks(), OptimizerHooks(), []
    first.install(lambda _: called.append("first"))
    second.install(lambda _: called.append("second"))
    torch_optimizers._global_optimizer_post_hooks.clear()
    second.remove()
    model, optimizer = model_and(torch.optim.SGD)
    backward(model)
    optimizer.step()
    first.remove()
    assert called == ["first"]
    assert not torch_optimizers._global_optimizer_post_hooks


def test_within_torchs_label():
    """The callback runs in the thread and inside torch's label of the optimizer's step, behind its operators."""
    hooks = OptimizerHooks()

    def mark(_):
        with otp.record_function("boundary"):
            pass

    hooks.install(mark)
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    backward(model)
    with otp.profile() as prof:
        optimizer.step()
    hooks.remove()
    (boundary,) = [event for event in prof.events() if event.name == "boundary"]
    assert boundary.cpu_parent.name == "Optimizer.step#SGD.step"
    assert boundary.cpu_parent.cpu_children[-1] is boundary


EXPECTED = """
import torch
from torch import nn
from otel_torchprof._record.step_marks import StepTracker

tracker = StepTracker(lambda number, now_ns: None)

class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

assert not tracker.expects_steps()
model = nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
assert not tracker.expects_steps()
{make}
assert tracker.expects_steps()
"""
MAKE = {
    "torch's": "torch.optim.AdamW(model.parameters())",
    "derived": "Own(model.parameters(), lr=0.1)",
    "derived without a step": "type('Plain', (torch.optim.SGD,), {})(model.parameters(), lr=0.1)",
}


@pytest.mark.parametrize("make", one_in(3, MAKE.values()), ids=MAKE)
def test_steps_are_expected_once_an_optimizer_was_made(make):
    """In a program without an optimizer no steps are expected; once one was made, of torch or of a derived class, they are."""
    succeeds(EXPECTED.format(make=make), has_torch=True)


def test_a_step_that_is_compiled(steps):
    """Dynamo does not read the hook, nor warn of what it cannot read there."""
    model, optimizer = model_and(torch.optim.SGD, lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")  # noqa: PLW0108 - as programs do
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            backward(model)
            step()
    assert not [each for each in caught if "does not know how to trace" in str(each.message)]
