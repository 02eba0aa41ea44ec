"""Programs of torch's with calls of every sort: models, hooks, training, data. Their frames are compared with torch's own.

Each keeps its modules to its end: torch takes a module for another one that has been where it is now.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


class _Reentrant(nn.Module):
    """Calls itself, and a part of it twice."""

    def __init__(self):
        super().__init__()
        self.part = _Block()

    def forward(self, x, depth=2):
        x = self.part(self.part(x))
        return self(x, depth - 1) if depth else x


def reentrant():
    """A module that calls itself, parts that are called more than once, one class many times."""
    model, x = nn.Sequential(_Block(), _Reentrant(), _Block()), torch.ones(1, 2)
    with torch.no_grad():
        model(x), model(x)


def hooks():
    """Hooks before, after and around a module, some with keywords; of tensors and of modules, in the backward pass too."""

    def before(module, arguments):
        return tuple(argument + 1 for argument in arguments)

    def before_with_keywords(module, arguments, keywords):
        return arguments, keywords

    def after(module, arguments, output):
        return output * 2

    def backward(module, given, received):
        return None

    model = _Block()
    model.first.register_forward_pre_hook(before)
    model.first.register_forward_pre_hook(before_with_keywords, with_kwargs=True)
    model.first.register_forward_hook(after)
    model.second.register_full_backward_hook(backward)
    model.second.register_full_backward_pre_hook(lambda module, received: None)
    x = torch.ones(1, 2, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    x.register_post_accumulate_grad_hook(lambda tensor: None)
    model(x).sum().backward()


class _OwnCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return self.part(x)


class _Meddling(nn.Module):
    """Looks at itself by names that it has not, and changes what `self` is."""

    def forward(self, x):
        with contextlib.suppress(AttributeError):
            self.missing  # noqa: B018
        self = x  # noqa: PLW0642 - that is the point
        return self + 1


def own_call():
    """Modules with a `__call__` of their own, functional ones, containers, one that fails."""
    x, kept = torch.ones(1, 2), []
    parts = nn.ModuleDict({"a": nn.ReLU(), "b": nn.ModuleList([nn.Identity()])})
    wrong = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    encoder = nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)
    for module in (_OwnCall(), _Meddling(), nn.Sequential(*(_OwnCall() for _ in range(2))), parts["a"], parts["b"][0]):
        kept.append(module)
        module(x)
    with contextlib.suppress(RuntimeError):
        wrong(x)
    nn.functional.softmax(x, dim=-1)
    encoder(torch.ones(1, 2, 2))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward pass")


def functions_of_autograd():
    """Functions of autograd written in Python, one that fails backward, gradients of gradients, a checkpoint."""
    x = torch.ones(2, requires_grad=True)
    _Square.apply(_Square.apply(x)).sum().backward()
    with contextlib.suppress(ValueError):
        _Failing.apply(x).sum().backward()
    (gradient,) = torch.autograd.grad(_Square.apply(x).sum(), x, create_graph=True)
    gradient.sum().backward()
    torch.utils.checkpoint.checkpoint(_Square.apply, x, use_reentrant=False).sum().backward()


class _Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        return super().__torch_function__(function, types, arguments, keywords or {})


class _Wrapping(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        plain = [argument.inner if isinstance(argument, cls) else argument for argument in arguments]
        return cls(function(*plain, **(keywords or {})))


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


def subclasses():
    """Subclasses of tensors that see each function or each operator, and a mode that does."""
    loud = torch.ones(2).as_subclass(_Loud)
    loud + 1, loud.sum(), torch.cat([loud, loud])
    wrapping = _Wrapping(torch.ones(2))
    wrapping + 1, wrapping.neg()
    with _Mode():
        torch.ones(2).add(1)


def _train(make_optimizer):
    model = _Block()
    optimizer = make_optimizer(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    for _ in range(2):
        with torch.profiler.record_function("step"):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return model, optimizer


def optimizers():
    """Optimizers of several kinds, one with a closure, a schedule."""
    kept, sgd = _train(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)
    sgd.step()
    schedule.step()
    kept = kept, _train(functools.partial(torch.optim.AdamW, lr=0.1))
    x = torch.ones(2, requires_grad=True)
    lbfgs = torch.optim.LBFGS([x], max_iter=2)

    def closure():
        lbfgs.zero_grad()
        loss = (x * x).sum()
        loss.backward()
        return loss

    lbfgs.step(closure)


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def _collated(samples):
    return torch.stack(samples)


def data():
    """Batches loaded in this process, with torch's way of putting them together and with one of the program's."""
    for batch in torch.utils.data.DataLoader(_Numbers(), batch_size=2):
        batch.sum()
    for batch in torch.utils.data.DataLoader(_Numbers(), batch_size=2, collate_fn=_collated):
        batch.sum()


def _labelled():
    with torch.profiler.record_function("inner"):
        yield torch.ones(1)
        yield torch.ones(1)


@torch.profiler.record_function("decorated")
def _decorated(x):
    return x + 1


def labels():
    """Labels of torch's around calls, in generators that take turns, left by exceptions, as decorators."""
    left = torch.profiler.record_function("left by an exception")
    with torch.profiler.record_function("outer"), contextlib.suppress(ValueError), left:
        raise ValueError
    _decorated(torch.ones(1))
    one, other = _labelled(), _labelled()
    next(one), next(other), next(one), next(other)
    list(one), list(other)


def modes():
    """Managers and decorators of torch's: gradients off and on, types, devices, vmap and grad."""
    x = torch.ones(2)

    @torch.no_grad()
    def without(value):
        return value + 1

    without(x)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        nn.Linear(2, 2)(x)
    with torch.inference_mode(), torch.device("cpu"):
        torch.ones(2)
    torch.func.grad(lambda value: (value * value).sum())(x)
    torch.func.vmap(lambda value: value.sin())(x)


PROGRAMS: tuple[Callable[[], object], ...] = (
    reentrant,
    hooks,
    own_call,
    functions_of_autograd,
    subclasses,
    optimizers,
    data,
    labels,
    modes,
)
