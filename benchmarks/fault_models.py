"""Small models for the matrix of faults, each with the data, the loss and the optimizer that it is trained with.

The models of the develop half and of the unseen half are different ones. Steps take some ms to tens of ms on one core.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKENS, _CLASSES = 1000, 10
_SGD = partial(torch.optim.SGD, lr=1e-3)
_MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)


@dataclass
class Task:
    """What a program trains."""

    model: nn.Module
    inputs: torch.Tensor
    """One batch, which every step gets."""
    targets: torch.Tensor
    loss: nn.Module
    optimizer: Callable[..., torch.optim.Optimizer] = _SGD
    accumulate: int = 1
    """Batches per step of the optimizer."""
    has_autocast: bool = False
    """Computes in bfloat16."""


class Last(nn.Module):
    """The output of a recurrent layer at the last position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


class Residual(nn.Module):
    """A layer whose input is added to its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Decoder(nn.Module):
    """Predicts tokens from the ones before."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, _TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens), mask=self.mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)


class Towers(nn.Module):
    """Scores pairs of bags of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.EmbeddingBag(_TOKENS, width), nn.EmbeddingBag(_TOKENS, width)
        self.score = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, _CLASSES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        left, right = tokens.chunk(2, 1)
        return self.score(torch.cat([self.left(left), self.right(right)], 1))


def mlp(size: int) -> Task:
    model = nn.Sequential(*[nn.Linear(size, size), nn.ReLU()] * 2, nn.Linear(size, size))
    x = torch.randn(64, size)
    return Task(model, x, x, nn.MSELoss())


def convolutions(size: int) -> Task:
    model = nn.Sequential(
        nn.Conv2d(3, size, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(size, size, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(size, _CLASSES),
    )
    return Task(model, torch.randn(16, 3, 32, 32), _classes(16), nn.CrossEntropyLoss())


def transformer(size: int) -> Task:
    layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True)
    x = torch.randn(16, 32, size)
    return Task(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), x, x, nn.MSELoss(), _ADAMW)


def lstm(size: int) -> Task:
    model = nn.Sequential(Last(nn.LSTM(size, size, batch_first=True)), nn.Linear(size, _CLASSES))
    return Task(model, torch.randn(32, 24, size), _classes(32), nn.CrossEntropyLoss(), _MOMENTUM)


def embedding(size: int) -> Task:
    model = nn.Sequential(
        nn.Embedding(_TOKENS, size), Mean(), nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, _TOKENS)
    )
    return Task(model, _tokens(256, 16), torch.randint(_TOKENS, (256,)), nn.CrossEntropyLoss())


def wide_layer(size: int) -> Task:
    x = torch.randn(64, size)
    return Task(nn.Linear(size, size), x, x, nn.MSELoss())


def autoencoder(size: int) -> Task:
    model = nn.Sequential(
        nn.Linear(784, size), nn.ReLU(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, size), nn.ReLU(),
        nn.Linear(size, 784), nn.Sigmoid(),
    )  # fmt: skip
    x = torch.rand(128, 784)
    return Task(model, x, x, nn.BCELoss())


def accumulating_mlp(size: int) -> Task:
    task = mlp(size)
    task.accumulate = 4
    return task


def bfloat16_mlp(size: int) -> Task:
    task = mlp(size)
    task.has_autocast = True
    return task


def residual_mlp(size: int) -> Task:
    layers = (
        Residual(nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)))
        for _ in range(2)
    )
    model = nn.Sequential(*layers, nn.Linear(size, _CLASSES))
    return Task(model, torch.randn(96, size), _classes(96), nn.CrossEntropyLoss(), _MOMENTUM)


def sequence_convolutions(size: int) -> Task:
    layers = (
        nn.Sequential(nn.Conv1d(width, size, 5, padding=2), nn.BatchNorm1d(size), nn.ReLU()) for width in (8, size)
    )
    model = nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(size, _CLASSES))
    return Task(model, torch.randn(24, 8, 128), _classes(24), nn.CrossEntropyLoss(), _MOMENTUM)


def decoder(size: int) -> Task:
    tokens = _tokens(8, 32)
    return Task(Decoder(size, 32), tokens, tokens.roll(-1, 1), nn.CrossEntropyLoss(), _ADAMW)


def gru(size: int) -> Task:
    model = nn.Sequential(Last(nn.GRU(size, size, batch_first=True)), nn.Linear(size, 1))
    return Task(model, torch.randn(96, 10, size), torch.randn(96, 1), nn.MSELoss())


def two_towers(size: int) -> Task:
    return Task(Towers(size), _tokens(256, 32), _classes(256), nn.CrossEntropyLoss())


def wide_classifier(size: int) -> Task:
    return Task(nn.Linear(512, size), torch.randn(96, 512), torch.randint(size, (96,)), nn.CrossEntropyLoss())


def image_autoencoder(size: int) -> Task:
    model = nn.Sequential(
        nn.Conv2d(1, size, 4, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(size, 1, 4, stride=2, padding=1)
    )
    x = torch.randn(32, 1, 28, 28)
    return Task(model, x, x, nn.L1Loss(), _MOMENTUM)


def accumulating_decoder(size: int) -> Task:
    task = decoder(size)
    task.accumulate = 2
    return task


def bfloat16_residual_mlp(size: int) -> Task:
    task = residual_mlp(size)
    task.has_autocast = True
    return task


def _classes(rows: int) -> Any:
    return torch.randint(_CLASSES, (rows,))


def _tokens(rows: int, length: int) -> Any:
    return torch.randint(_TOKENS, (rows, length))
