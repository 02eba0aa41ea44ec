"""Training programs of many kinds, on the CPU; each counts its iterations and times its phases itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from pathlib import Path

    from own_counts import Own

INFINITE = frozenset({1, 4, 5})
"""Iterations of the program with mixed precision whose gradients are infinite."""


class Sizes:
    """How large the programs are.

    Args:
        width: of all layers.
        batch: rows in a batch.
        iterations: of the training loop.
        folder: where checkpoints are written.
    """

    def __init__(self, folder: Path, *, width: int = 16, batch: int = 8, iterations: int = 8) -> None:
        self.folder = folder
        self.width = width
        self.batch = batch
        self.iterations = iterations

    def network(self) -> nn.Module:
        return nn.Sequential(*self.layers(), *self.layers(), nn.Linear(self.width, self.width))

    def layers(self) -> tuple[nn.Module, ...]:
        return nn.Linear(self.width, self.width), nn.ReLU()

    def loader(self, batches: int | None = None) -> DataLoader[Any]:
        """Of that many batches; as many as there are iterations."""
        rows = (self.iterations if batches is None else batches) * self.batch
        return DataLoader(TensorDataset(torch.randn(rows, self.width), torch.randn(rows, self.width)), self.batch)

    def noise(self) -> Any:
        return torch.randn(self.batch, self.width)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 1e-3)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1e-4)


def evaluate(own: Own, module: nn.Module, loader: DataLoader[Any]) -> None:
    """An epoch of an evaluation."""
    with own.segment("evaluation"), torch.no_grad():
        module.eval()
        for x, _ in own.batches(loader):
            own.call(module, x)
        module.train()


# ---- one iteration, several optimizers ----


def gan(own: Own, sizes: Sizes) -> None:
    """The discriminator's step, then the generator's, of each batch; evaluated now and then."""
    generator, discriminator = sizes.network(), sizes.network()
    of_generator, of_discriminator = adam(generator), adam(discriminator)
    for x, _ in own.batches(sizes.loader()):
        own.zero(of_discriminator)
        fake = own.call(generator, sizes.noise())
        loss = own.call(discriminator, x).mean() - own.call(discriminator, fake.detach()).mean()
        own.backward(loss)
        own.step(of_discriminator)
        own.zero(of_generator)
        own.backward(own.call(discriminator, fake).mean())
        own.step(of_generator)
        own.count()


def wgan(own: Own, sizes: Sizes) -> None:
    """Five steps of the critic, each with a batch, for one of the generator; a checkpoint in the middle."""
    generator, critic = sizes.network(), sizes.network()
    of_generator, of_critic = torch.optim.RMSprop(generator.parameters(), 1e-4), adam(critic)
    batches = own.batches(sizes.loader(5 * sizes.iterations))
    for iteration in range(sizes.iterations):
        for _ in range(5):
            x, _ = next(batches)
            own.zero(of_critic)
            with torch.no_grad():
                fake = own.call(generator, sizes.noise())
            own.backward(own.call(critic, fake).mean() - own.call(critic, x).mean())
            own.step(of_critic)
        own.zero(of_generator)
        own.backward(-own.call(critic, own.call(generator, sizes.noise())).mean())
        own.step(of_generator)
        own.count()
        if iteration == sizes.iterations // 2:
            with own.segment("checkpoint"):
                own.save(generator.state_dict(), sizes.folder / "generator.pt")
                own.save(critic.state_dict(), sizes.folder / "critic.pt")


def two_optimizers(own: Own, sizes: Sizes) -> None:
    """An optimizer for the body of a model and one for its head, after one backward pass."""
    body, head = sizes.network(), sizes.network()
    model = nn.Sequential(body, head)
    of_body, of_head = adam(body), sgd(head)
    training, validation = sizes.loader(sizes.iterations // 2), sizes.loader(2)
    for _ in range(2):
        for x, y in own.batches(training):
            own.zero(of_body)
            own.zero(of_head)
            own.backward((own.call(model, x) - y).square().mean())
            own.step(of_body)
            own.step(of_head)
            own.count()
        evaluate(own, model, validation)


# ---- an optimizer that does something else than to step ----


def skipped_steps(own: Own, sizes: Sizes) -> None:
    """Mixed precision: the scaler skips steps whose gradients are infinite, and iterations they are all the same."""
    model = sizes.network()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for iteration, (x, y) in enumerate(own.batches(sizes.loader())):
        own.zero(optimizer)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (own.call(model, x) - y).square().mean()
        own.backward(scaler.scale(loss * (torch.inf if iteration in INFINITE else 1)))
        with own.phase("optimizer"):
            scaler.unscale_(optimizer)
        with own.phase("optimizer"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with own.phase("optimizer"):
            scaler.step(optimizer)
        with own.phase("optimizer"):
            scaler.update()
        own.count()


def closures(own: Own, sizes: Sizes) -> None:
    """LBFGS, which calls for passes itself, some times in each of its steps."""
    model = sizes.network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    for x, y in own.batches(sizes.loader()):

        def closure(x: Any = x, y: Any = y) -> Any:
            own.zero(optimizer)
            loss = (own.call(model, x) - y).square().mean()
            own.backward(loss)
            return loss

        own.step(optimizer, closure)
        own.count()


def in_backward(own: Own, sizes: Sizes) -> None:
    """An optimizer for each parameter, which steps in the backward pass as soon as its gradient is there."""
    model = sizes.network()
    optimizers = {parameter: torch.optim.SGD([parameter], 1e-3) for parameter in model.parameters()}

    def step(parameter: Any) -> None:
        own.step(optimizers[parameter])
        own.zero(optimizers[parameter])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in own.batches(sizes.loader()):
        own.backward((own.call(model, x) - y).square().mean())
        own.count()


def by_hand(own: Own, sizes: Sizes) -> None:
    """No optimizer: the program moves the parameters itself."""
    model = sizes.network()
    training, validation = sizes.loader(sizes.iterations // 2), sizes.loader(2)
    for _ in range(2):
        for x, y in own.batches(training):
            model.zero_grad()
            own.backward((own.call(model, x) - y).square().mean())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)
            own.count()
        evaluate(own, model, validation)


# ---- a loop like any other ----


def plain(own: Own, sizes: Sizes, wrap: Any = lambda model: model) -> None:
    """Two epochs, an evaluation and a checkpoint after each."""
    model = wrap(sizes.network())
    optimizer = adam(model)
    training, validation = sizes.loader(sizes.iterations // 2), sizes.loader(2)
    for _ in range(2):
        for x, y in own.batches(training):
            own.zero(optimizer)
            own.backward((own.call(model, x) - y).square().mean())
            own.step(optimizer)
            own.count()
        evaluate(own, model, validation)
        with own.segment("checkpoint"):
            own.save(model.state_dict(), sizes.folder / "model.pt")


def validated(own: Own, sizes: Sizes) -> None:
    """A loss that is a module, and validations of more batches than there are steps: without gradients, with them, and in ``eval()``."""
    model, criterion = sizes.network(), nn.MSELoss()
    optimizer, validation = sgd(model), sizes.loader(70)
    modes = iter([torch.no_grad(), torch.enable_grad(), torch.inference_mode()] * sizes.iterations)
    for iteration, (x, y) in enumerate(own.batches(sizes.loader())):
        own.zero(optimizer)
        own.backward(own.call(criterion, own.call(model, x), y))
        own.step(optimizer)
        own.count()
        if iteration % 3 == 2:
            with own.segment("evaluation"), next(modes):
                model.train(iteration < sizes.iterations // 2)
                for batch, wanted in own.batches(validation):
                    own.call(criterion, own.call(model, batch), wanted)
                model.train()


def compiled(own: Own, sizes: Sizes, backend: str = "aot_eager") -> None:
    """A compiled model."""
    plain(own, sizes, lambda model: torch.compile(model, backend=backend))


def diffusion(own: Own, sizes: Sizes) -> None:
    """A denoising model, and its averaged copy, from which is sampled now and then."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = sizes.network()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adam(model)
    for iteration, (x, _) in enumerate(own.batches(sizes.loader())):
        noise, level = sizes.noise(), torch.rand(sizes.batch, 1)
        loss = (own.call(model, (1 - level) * x + level * noise) - noise).square().mean()
        own.zero(optimizer)
        own.backward(loss)
        own.step(optimizer)
        with own.phase("optimizer"):
            averaged.update_parameters(model)
        own.count()
        if iteration % 3 == 0:
            with torch.no_grad():
                sample = sizes.noise()
                for _ in range(4):
                    sample = sample - 0.1 * own.call(averaged, sample)


def inference(own: Own, sizes: Sizes) -> None:
    """No training at all."""
    model = sizes.network().eval()
    with torch.inference_mode():
        for x, _ in own.batches(sizes.loader()):
            with own.phase("inference"):
                model(x)
