"""Calls of modules, recorded and written as text."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.recorder import Session
from otel_torchprof._sources.torch_hooks import ModuleHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def installed() -> Iterator[ModuleHooks]:
    """The hooks, for as long as the block."""
    hooks = ModuleHooks()
    hooks.install()
    try:
        yield hooks
    finally:
        hooks.remove()


def recorded(body: Callable[[], Any]) -> list[str]:
    """The modules that ran in ``body``, of all threads: a line each, indented by depth, with error and ``...`` if unfinished."""
    session = Session(1 << 24, all_threads=True, kinds=[Kind.MODULE])
    session.start()
    try:
        body()
    finally:
        session.stop()
    return lines(session.final_batch())


def lines(batch: Any) -> list[str]:
    """The modules of a batch; operators and labels between them are left out."""
    depth: list[int] = []
    found = []
    columns = (batch[name].tolist() for name in ("kind", "name", "parent", "error_type", "flags"))
    for kind, name, parent, error, flags in zip(*columns, strict=True):
        outer = depth[parent] if parent >= 0 else 0
        depth.append(outer + (kind == Kind.MODULE))
        if kind == Kind.MODULE:
            line = "  " * outer + batch.names[name]
            line += f" !{batch.names[error]}" if flags & Flag.ERROR else ""
            found.append(line + (" ..." if flags & Flag.UNFINISHED else ""))
    return found


class Block(nn.Module):
    """Two layers, one of them in a list, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    """A model with blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.head = nn.Sequential(nn.Linear(4, 2), nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


NET = """\
Net
  encoder
    encoder.layers.0
    encoder.layers.1
  head
    head.0
    head.1
""".splitlines()
"""What one call of a :class:`Net` is recorded as."""
