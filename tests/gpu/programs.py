"""What is measured on a GPU: each program is made once, for a device, and then called as often as wanted.

They are large enough that the device takes longer for them than the host for asking, so that a stream that is full once
stays full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Program = Callable[[], Any]


def products(device: str, size: int = 2048) -> Program:
    """Three ways of multiplying matrices."""
    import torch

    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    batch = torch.randn(8, size // 4, size // 4, device=device)

    def run() -> None:
        torch.mm(a, b)
        torch.bmm(batch, batch)
        torch.addmm(a, a, b)

    return run


def convolutions(device: str, size: int = 128) -> Program:
    """One of two and one of one dimension, without gradients."""
    import torch

    two = torch.nn.Conv2d(32, 64, 3, padding=1).to(device)
    one = torch.nn.Conv1d(64, 64, 5, padding=2).to(device)
    image, line = torch.randn(16, 32, size, size, device=device), torch.randn(16, 64, size * 64, device=device)

    def run() -> None:
        with torch.no_grad():
            two(image)
            one(line)

    return run


def copies(device: str, megabytes: int = 64) -> Program:
    """To the device, on it, and back, from and to pinned memory, so that the host waits for none of them."""
    import torch

    pinned = torch.device(device).type == "cuda"
    host = torch.randn(megabytes << 18, pin_memory=pinned)
    back = torch.empty(megabytes << 18, pin_memory=pinned)
    there, other = host.to(device), host.to(device)

    def run() -> None:
        there.copy_(host, non_blocking=True)
        other.copy_(there)
        back.copy_(other, non_blocking=True)

    return run


def transformer_step(device: str, width: int = 1024, tokens: int = 512, batch: int = 16) -> Program:
    """A training step of two layers: forward, backward and SGD."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = torch.randn(batch, tokens, width, device=device)

    def run() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return run
