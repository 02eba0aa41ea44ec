"""Phases of training loops: what is recorded as which, of which object, and how it ends."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import torch.utils.checkpoint as checkpointing  # noqa: E402
from module_events import installed  # noqa: E402
from phase_events import model_and, recorded  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from otel_torchprof._record import phase_calls  # noqa: E402

X = torch.ones(2, 4)
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_each_part_of_a_loop_with_its_object():
    """A loop with mixed precision, clipping, evaluation and a checkpoint: each part in its order, nested, of its object."""
    model, optimizer = model_and()
    scaler = torch.amp.GradScaler("cpu")
    data = TensorDataset(torch.ones(4, 4))
    with recorded() as found:
        for (x,) in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            model(X)
            model.eval()(X)
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO(), _use_new_zipfile_serialization=False)
    assert found.lines() == [
        "NEXT",
        "ZEROING",
        "FORWARD",
        "BACKWARD",
        "UNSCALE",
        "CLIPPING",
        "CLIPPING",
        "SCALER_STEP",
        "  STEP",
        "SCALER_UPDATE",
        "NEXT",
        "INFERENCE",
        "EVALUATION",
        "SAVE",
        "SAVE",
        "SAVE",
    ]
    objects = found.objects()
    assert objects["NEXT"] == {id(data)}
    assert objects["FORWARD"] == objects["INFERENCE"] == objects["EVALUATION"] == {id(model)}
    assert objects["ZEROING"] == objects["STEP"] == {id(optimizer)}
    assert objects["UNSCALE"] == objects["SCALER_STEP"] == objects["SCALER_UPDATE"] == {id(scaler)}
    assert objects["BACKWARD"] == objects["CLIPPING"] == objects["SAVE"] == {0}


def test_all_ways_into_the_autograd_engine():
    """Tensor.backward, torch.autograd.backward and grad each are one phase."""
    x = torch.ones(2, requires_grad=True)
    with recorded() as found:
        x.sum().backward()
        torch.autograd.backward(x.sum())
        torch.autograd.grad(x.sum(), x)
    assert found.lines() == ["BACKWARD"] * 3
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_waiting_for_other_ranks():
    """Each wait for a collective is a phase, whether the program or torch calls it."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with recorded() as found:
            torch.distributed.all_reduce(torch.ones(2))
            torch.distributed.all_reduce(torch.ones(2), async_op=True).wait()
    finally:
        torch.distributed.destroy_process_group()
    assert found.lines() == ["COLLECTIVE"] * 2


def test_a_module_that_is_never_trained_has_no_evaluation():
    """Teachers and averaged models in eval() are inference: nothing says that they are evaluated."""
    model, _ = model_and()
    with recorded() as found, torch.no_grad():
        model.eval()(X)
    assert found.lines() == ["INFERENCE"]


class Fails(nn.Module):
    """Raises what it is told to, from an inner module."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.inner(x)


@pytest.mark.parametrize("with_modules", [False, True])
def test_an_exception_in_forward(with_modules):
    """It ends the phase with its class; the next phase is beside it."""
    model = Fails()
    with installed() if with_modules else nullcontext(), recorded() as found:
        model(X)
        model.error = KeyError("k")
        with pytest.raises(KeyError):
            model(X)
        model.error = None
        model(X)
    assert found.lines() == ["FORWARD", "FORWARD !KeyError", "FORWARD"]


def test_an_interrupt_in_forward():
    """Torch calls no hook then: the next phase of whatever kind ends what was left behind, unfinished."""
    model, (other, optimizer) = Fails(), model_and()
    afterwards = {
        "FORWARD": lambda: model(X),
        "INFERENCE": lambda: torch.no_grad()(other)(X),
        "ZEROING": lambda: torch.optim.Optimizer.zero_grad(optimizer),
        "STEP": optimizer.step,
        "SAVE": lambda: torch.save({}, io.BytesIO()),
    }
    other(X).sum().backward()
    for name, after in afterwards.items():
        with recorded() as found:
            model.error = None
            model(X)
            other(X)
            model.error = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                model(X)
            model.error = None
            after()
        assert found.lines()[2:4] == ["FORWARD ...", name]


def test_an_interrupt_in_an_optimizers_step():
    """The same, for which torch has no hook, and exceptions of any class."""
    for each in (KeyboardInterrupt, ValueError):

        class Stops(torch.optim.SGD):
            error = each

            def step(self, closure=None):
                raise self.error

        model, optimizer = model_and(Stops)
        with recorded() as found:
            with pytest.raises(each):
                optimizer.step()
            model(X)
            optimizer.zero_grad()
        assert found.lines() == ["STEP ...", "FORWARD", "ZEROING"]


def test_an_interrupt_in_a_step_that_the_scaler_calls():
    """The scaler's step ends by its wrapper, and the optimizer's with it."""

    class Stops(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyboardInterrupt

    model, optimizer = model_and(Stops)
    scaler = torch.amp.GradScaler("cpu")
    with recorded() as found:
        scaler.scale(model(X).sum()).backward()
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        model(X)
    assert found.lines()[2:] == ["SCALER_STEP !KeyboardInterrupt", "  UNSCALE", "  STEP ...", "FORWARD"]


def test_a_loader_that_fails_and_one_that_is_left():
    """A dataset's exception is an error; that there is no more, or that a loop is left, is none."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise KeyError

    with recorded() as found:
        for _ in DataLoader(TensorDataset(X), batch_size=1):
            break
        assert len(list(DataLoader(TensorDataset(X), batch_size=2))) == 1
        with pytest.raises(KeyError):
            next(iter(DataLoader(Broken())))
    assert found.lines() == ["NEXT", "NEXT", "NEXT", "NEXT !KeyError"]


class Odd(nn.Identity):
    """Raises where it is compared, hashed, tested, or asked whether it trains."""

    training = property(lambda _self: 1 // 0, lambda _self, _value: None)

    def __eq__(self, other):
        raise ValueError

    __hash__ = None

    def __bool__(self):
        raise ValueError


def test_a_module_that_cannot_be_asked():
    """Nothing of the module is run for us, and where an attribute of it raises, its call is as any other."""
    model = Odd()
    with recorded() as found:
        model(X)
        with torch.no_grad():
            model(X)
    assert found.lines() == ["FORWARD", "INFERENCE"]


def test_an_interrupt_as_soon_as_a_phase_has_begun(monkeypatch):
    """It ends all the same: what comes later is in no phase."""
    python_sources = phase_calls.python_sources
    begin = python_sources.phase_begin

    def interrupted(part, owner):
        begin(part, owner)
        raise KeyboardInterrupt

    monkeypatch.setattr(python_sources, "phase_begin", interrupted)
    _, optimizer = model_and()
    with recorded() as found:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                optimizer.zero_grad()
    assert found.lines() == ["ZEROING !KeyboardInterrupt"] * 2


def test_an_interrupt_inside_two_roots():
    """A root that its handler calls, which is still inside another one, is inside that and nothing else."""
    inner, tail = Fails(), nn.Linear(4, 1)

    class Outer(nn.Module):
        def forward(self, x):
            try:
                return inner(x)
            except KeyboardInterrupt:
                return tail(x)

    outer = Outer()
    optimizer = torch.optim.SGD(tail.parameters(), lr=0.1)
    with recorded() as found:
        inner(X)
        outer(X)
        inner.error = KeyboardInterrupt()
        outer(X)
        optimizer.step()
    assert found.lines() == ["FORWARD", "FORWARD", "FORWARD", "STEP"]


def test_an_optimizer_whose_step_calls_another():
    """Both are phases, one inside the other; a closure's forward and backward pass are inside too."""
    model, inner = model_and()

    class Outer(torch.optim.Optimizer):
        def step(self, closure=None):
            inner.step()

    outer = Outer(model.parameters(), {})
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure():
        lbfgs.zero_grad()
        loss = model(X).sum()
        loss.backward()
        return loss

    with recorded() as found:
        closure()
        outer.step()
        lbfgs.step(closure)
    assert found.lines() == [
        *("ZEROING", "FORWARD", "BACKWARD"),
        *("STEP", "  STEP"),
        *("STEP", "  ZEROING", "  FORWARD", "  BACKWARD"),
    ]


def test_an_optimizer_in_backward():
    """Its steps are inside the backward pass."""
    model, optimizer = model_and()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with recorded() as found:
        model(X).sum().backward()
    assert found.lines() == ["FORWARD", "BACKWARD", *["  STEP"] * 4]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forward_passes(reentrant):
    """Activation checkpointing: what runs again is a part of the backward pass, and no forward pass of any root."""
    block, tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.tail = block, tail

        def forward(self, x):
            return self.tail(checkpointing.checkpoint(self.block, x, use_reentrant=reentrant))

    model = Checkpointed()
    x = torch.ones(2, 4, requires_grad=True)
    again = ["  RECOMPUTATION", "    BACKWARD"] if reentrant else ["  RECOMPUTATION"]
    with recorded() as found:
        for _ in range(2):
            model(x).sum().backward()
    assert found.lines() == ["FORWARD", "BACKWARD", *again] * 2
    assert not block._forward_hooks


def test_nested_and_failing_checkpoints():
    """A checkpoint inside another one runs again inside of it; an error there is one, and nothing is left open."""
    fail = False

    def inner(x):
        if fail:
            raise KeyError
        return x.sin().cos()

    def outer(x):
        return checkpointing.checkpoint(inner, x.exp(), use_reentrant=False).cos()

    x = torch.ones(2, requires_grad=True)
    with recorded() as found:
        checkpointing.checkpoint(outer, x, use_reentrant=False).sum().backward()
        loss = checkpointing.checkpoint(inner, x, use_reentrant=False).sum()
        fail = True
        with pytest.raises(KeyError):
            loss.backward()
        torch.save({}, io.BytesIO())
    lines = found.lines()
    assert lines[:3] == ["BACKWARD", "  RECOMPUTATION", "  RECOMPUTATION"]
    assert lines[3:] == ["BACKWARD !KeyError", "  RECOMPUTATION !KeyError", "SAVE", "SAVE"]
