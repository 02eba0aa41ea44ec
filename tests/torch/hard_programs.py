"""Training programs whose shape is not that of a plain loop; each counts its iterations and times its phases itself."""

from __future__ import annotations

import contextlib
import copy
import itertools
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
from step_programs import adam, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable

    from own_counts import Own
    from step_programs import Sizes


# ---- what cuts iterations ----


def cut_by(error: type[BaseException], cut: dict[int, str]) -> Callable[[Own, Sizes], None]:
    """A program that catches an exception in some iterations, does not count them and continues with the next batch.

    ``cut``: by iteration in which phase it comes.
    """

    def program(own: Own, sizes: Sizes) -> None:
        raises: set[str] = set()

        def fail(where: str) -> None:
            if where in raises:
                raises.clear()
                raise error(where)

        class Failing(nn.Module):
            def forward(self, x: Any) -> Any:
                fail("forward")
                if torch.is_grad_enabled():
                    x = x * 1
                    x.register_hook(lambda _: fail("backward"))
                return x

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                fail("optimizer")
                return super().step(closure)

        model = nn.Sequential(sizes.network(), Failing(), *sizes.layers())
        optimizer = Optimizer(model.parameters(), 1e-3)
        for iteration, (x, y) in enumerate(own.batches(sizes.loader(sizes.iterations + len(cut)))):
            raises.update({cut[iteration]} if iteration in cut else ())
            with contextlib.suppress(error):
                own.zero(optimizer)
                own.backward((own.call(model, x) - y).square().mean())
                own.step(optimizer)
                own.count()
        assert own.iterations == sizes.iterations

    return program


_PASSES = {2: "forward", 4: "backward", 5: "forward"}
exceptions = cut_by(ValueError, _PASSES)
interrupts = cut_by(KeyboardInterrupt, _PASSES)
optimizers_fail = cut_by(ValueError, {3: "optimizer", 5: "optimizer"})


# ---- a loop inside of a loop ----


def nested(own: Own, sizes: Sizes, *, is_new: bool = False) -> None:
    """Reptile: a copy of the model is trained for some steps, and the model is moved toward it."""
    model = sizes.network()
    outer = sgd(model)
    fast = copy.deepcopy(model)
    inner = sgd(fast)
    alive = []
    batches = own.batches(sizes.loader(3 * sizes.iterations))
    for _ in range(sizes.iterations):
        if is_new:
            fast = copy.deepcopy(model)
            inner = sgd(fast)
            alive.append(inner)  # so that none has the address of one before
        else:
            fast.load_state_dict(model.state_dict())
        for _ in range(3):
            x, y = next(batches)
            own.zero(inner)
            own.backward((own.call(fast, x) - y).square().mean())
            own.step(inner)
        for mine, theirs in zip(model.parameters(), fast.parameters(), strict=True):
            mine.grad = (mine - theirs).detach()
        own.step(outer)
        own.count()
        if is_new:
            otp.TorchInstrumentor().step()


def nested_anew(own: Own, sizes: Sizes) -> None:
    """The same with a new copy, and a new optimizer, for each step of the outer loop."""
    nested(own, sizes, is_new=True)


def meta(own: Own, sizes: Sizes) -> None:
    """MAML of first order: adapted copies, whose gradients the model's optimizer gets after a pass of their own."""
    model = sizes.network()
    outer, fast = adam(model), copy.deepcopy(model)
    inner = sgd(fast)
    support, query = sizes.loader(2), sizes.loader(2)
    for _ in range(sizes.iterations):
        fast.load_state_dict(model.state_dict())
        for x, y in own.batches(support):
            own.zero(inner)
            own.backward((own.call(fast, x) - y).square().mean())
            own.step(inner)
        own.zero(inner)
        own.zero(outer)
        for x, y in own.batches(query):
            own.backward((own.call(fast, x) - y).square().mean())
        for mine, theirs in zip(model.parameters(), fast.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        own.step(outer)
        own.count()


# ---- threads ----


def _loop(own: Own, model: nn.Module, batches: Any, after: Callable[[], object] = lambda: None) -> None:
    optimizer = adam(model)
    for x, y in batches:
        own.zero(optimizer)
        own.backward((own.call(model, x) - y).square().mean())
        own.step(optimizer)
        own.count()
        after()


def threads(owns: list[Own], sizes: Sizes) -> None:
    """A training loop in each of two threads, which wait for one another after each iteration; the models were tried before."""
    turns = threading.Barrier(2)

    def train(own: Own, model: nn.Module) -> None:
        own.thread = threading.get_ident()
        _loop(own, model, own.batches(sizes.loader()), turns.wait)

    models = [sizes.network() for _ in owns]
    for model in models:
        model(sizes.noise())
    running = [threading.Thread(target=train, args=pair) for pair in zip(owns, models, strict=True)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def prefetched(own: Own, sizes: Sizes) -> None:
    """Another thread asks the loader, and hands its batches over."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=2)

    def fetch() -> None:
        for batch in sizes.loader():
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    _loop(own, sizes.network(), iter(ready.get, None))
    thread.join()


# ---- passes inside of passes ----


def _trained(own: Own, sizes: Sizes, model: nn.Module) -> None:
    optimizer = adam(model)
    for x, y in own.batches(sizes.loader()):
        own.zero(optimizer)
        own.backward((own.call(model, x.requires_grad_()) - y).square().mean())
        own.step(optimizer)
        own.count()


def checkpointing(own: Own, sizes: Sizes, *, use_reentrant: bool = False) -> None:
    """Activations are not kept: parts of the forward pass run again in the backward pass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(sizes.network() for _ in range(2))

        def forward(self, x: Any) -> Any:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=use_reentrant)
            return x

    _trained(own, sizes, Model())


def reentrant_checkpointing(own: Own, sizes: Sizes) -> None:
    """The same, where what runs again has a backward pass of its own inside the other."""
    checkpointing(own, sizes, use_reentrant=True)


def reentrant(own: Own, sizes: Sizes) -> None:
    """A function whose backward runs another model, forward and backward."""
    other = sizes.network()

    class Guided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                other(x).square().sum().backward()
            return gradient + x.grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = sizes.network()

        def forward(self, x: Any) -> Any:
            return Guided.apply(self.network(x))

    _trained(own, sizes, Model())


# ---- other orders ----


def rollouts(own: Own, sizes: Sizes) -> None:
    """Reinforcement learning: the policy acts without gradients, then is trained with what came of it for two epochs."""
    policy, value = sizes.network(), sizes.network()
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 1e-3)
    for _ in range(max(sizes.iterations // 4, 1)):
        states = [sizes.noise()]
        with torch.no_grad():
            for _ in range(5):
                states.append(own.call(policy, states[-1]).tanh())
        seen = torch.cat(states)
        for _ in range(2):
            for rows in seen.split(len(seen) // 2):
                loss = own.call(policy, rows).square().mean() + own.call(value, rows).square().mean()
                own.zero(optimizer)
                own.backward(loss)
                own.step(optimizer)
                own.count()


def micro_batches(own: Own, sizes: Sizes) -> None:
    """As a pipeline does: the two halves of a model take four parts of a batch, then the backward passes of these come."""
    first, second = sizes.network(), sizes.network()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-4)
    for x, y in own.batches(sizes.loader()):
        losses = []
        for rows, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            losses.append((own.call(second, own.call(first, rows)) - wanted).square().mean())
        for loss in losses:
            own.backward(loss)
        own.step(optimizer)
        own.zero(optimizer)
        own.count()


def new_optimizers(own: Own, sizes: Sizes) -> None:
    """Each batch has an optimizer of its own, as where something is fitted to each."""
    model, alive = sizes.network(), []
    for x, y in itertools.islice(own.batches(sizes.loader()), sizes.iterations):
        optimizer = adam(model)
        alive.append(optimizer)  # so that none has the address of one before
        own.zero(optimizer)
        own.backward((own.call(model, x) - y).square().mean())
        own.step(optimizer)
        own.count()
        otp.TorchInstrumentor().step()


def new_data_sets(own: Own, sizes: Sizes) -> None:
    """Each epoch has data sets of its own, for training and for the evaluation."""
    model = sizes.network()
    optimizer = adam(model)
    epochs = [(sizes.loader(max(sizes.iterations // 4, 1)), sizes.loader(2)) for _ in range(4)]
    for training, validation in epochs:
        for x, y in own.batches(training):
            own.zero(optimizer)
            own.backward((own.call(model, x) - y).square().mean())
            own.step(optimizer)
            own.count()
        with own.segment("evaluation"), torch.no_grad():
            model.eval()
            for x, _ in own.batches(validation):
                own.call(model, x)
            model.train()
