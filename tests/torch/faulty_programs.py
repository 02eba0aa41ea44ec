"""Small training programs, each with one fault, and one without: some 60 steps of a few ms on the CPU.

Each takes what to call at the end of a step, and the folder for its files.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 60
WIDTH, BATCH = 512, 64


class Rows(Dataset):
    """As many rows as there are steps, each of a batch; a read takes as long as it is told."""

    def __init__(self, seconds: float = 0.0, steps: int = STEPS) -> None:
        self.rows = torch.randn(BATCH, WIDTH)
        self.seconds, self.steps = seconds, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            spin(self.seconds)
        return self.rows


def spin(seconds: float) -> None:
    """Works for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Growing(Rows):
    """Every 10 steps a batch has a row more."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([self.rows, self.rows[: index // 10]])


class Loss(nn.Module):
    """A loss that is a module, as most are."""

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(found, wanted)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    )


def train(
    model: nn.Module,
    end_step: Callable[[], None],
    *,
    data: Dataset | None = None,
    before: Callable[[int], None] = lambda _step: None,
) -> None:
    """The loop that all have."""
    loss, optimizer = Loss(), torch.optim.SGD(model.parameters(), 1e-3)
    for step, x in enumerate(DataLoader(data or Rows(), batch_size=None)):
        before(step)
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()
        end_step()


def control(end_step: Callable[[], None], folder: Path) -> None:
    """Nothing is wrong."""
    train(network(), end_step)


def slow_loader(end_step: Callable[[], None], folder: Path) -> None:
    """Each batch takes longer than the step."""
    train(network(), end_step, data=Rows(0.01))


class Sorted(nn.Module):
    """Sorts, as slow operators go."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.detach().repeat(5, 1).flatten().sort().indices
        return x + order[0] * 0.0


def slow_operator(end_step: Callable[[], None], folder: Path) -> None:
    """The model sorts a large tensor in each step."""
    train(nn.Sequential(network(), Sorted()), end_step)


def gc_storm(end_step: Callable[[], None], folder: Path) -> None:
    """Many objects are alive, and each step collects garbage."""
    gc.freeze()  # those of torch would make it ten times slower
    held = [[number] for number in range(150_000)]
    try:
        train(network(), end_step, before=lambda _step: gc.collect() and None)
    finally:
        gc.unfreeze()
        held.clear()


def checkpoints(end_step: Callable[[], None], folder: Path) -> None:
    """A checkpoint of far more than the model every 20 steps."""
    model = network()
    state = {"model": model.state_dict(), "more": torch.randn(16_000_000)}

    def save(step: int) -> None:
        if step % 20 == 19:
            torch.save(state, folder / "model.pt")

    train(model, end_step, before=save)


def recompilation(end_step: Callable[[], None], folder: Path) -> None:
    """Batches get another size every 10 steps, and the model is compiled for each."""

    def backend(graph, inputs):
        spin(0.03)
        return graph.forward

    train(torch.compile(network(), backend=backend, dynamic=False), end_step, data=Growing())
