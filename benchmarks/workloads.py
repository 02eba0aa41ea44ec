"""Work to be recorded."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def adds(count: int) -> None:
    """Small additions in a Python loop."""
    one = torch.ones(4, 4)
    add = torch.add
    for _ in itertools.repeat(None, count):
        add(one, one)


def allocations(count: int) -> None:
    """Small tensors in a Python loop: each is an event of the allocator, and another when it goes."""
    empty = torch.empty
    for _ in itertools.repeat(None, count // 2):
        empty(16)


def small_training(steps: int) -> None:
    """Forward and backward of one small layer: nested operators, on autograd's thread too."""
    layer = torch.nn.Linear(8, 8)
    data = torch.ones(4, 8)
    for _ in itertools.repeat(None, steps):
        layer(data).relu().sum().backward()


def gpt2_step(device: str = "cpu") -> Callable[[], None]:
    """One training step of a small GPT-2 with random weights: 6 layers of width 128, 4 heads, a batch of 2x64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 1000}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).to(device)
    model.loss_type = "ForCausalLM"  # what it falls back to, said aloud
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (2, 64)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def small_operators_step() -> Callable[[], None]:
    """One training step of some milliseconds with 1,700 operators, all of them small: where a recorder costs most."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(16, 128)

    def step() -> None:
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer_step() -> Callable[[], None]:
    """One training step of 4 ms: 4 layers of width 64, 4 heads, a batch of 2x16."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(2, 16, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    return step


def small_model() -> Callable[[], torch.Tensor]:
    """The answer to a request by a model of 4 modules."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
    return functools.partial(model, torch.ones(1, 64))
