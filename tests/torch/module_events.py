"""Calls of modules, recorded and written as text."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._record import module_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def installed() -> Iterator[module_calls.ModuleCalls]:
    """Calls of modules are followed, for as long as the block."""
    user = object()
    module_calls.shared.install(user, as_events=True)
    try:
        yield module_calls.shared
    finally:
        module_calls.shared.remove(user)


def way_to_call() -> int | None:
    """What the interpreter calls a module by: another one while calls are followed."""
    find = ctypes.pythonapi.PyVectorcall_Function
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object]
    return find(nn.Module._call_impl)


def recorded(body: Callable[[], Any]) -> list[str]:
    """The modules that ran in ``body``, of all threads: a line each, indented by depth, with error and ``...`` if unfinished."""
    with otp.profile(with_modules=True, operators=False, all_threads=True) as prof:
        body()
    return lines(prof)


def lines(found: Any) -> list[str]:
    """The modules of a profile or a batch; operators and labels between them are left out."""
    depth: list[int] = []
    modules = []
    columns = (found.columns[name].tolist() for name in ("kind", "name", "parent", "error_type", "flags"))
    for kind, name, parent, error, flags in zip(*columns, strict=True):
        outer = depth[parent] if parent >= 0 else 0
        depth.append(outer + (kind == Kind.MODULE))
        if kind == Kind.MODULE:
            line = "  " * outer + found.names[name]
            line += f" !{found.names[error]}" if flags & Flag.ERROR else ""
            modules.append(line + (" ..." if flags & Flag.UNFINISHED else ""))
    return modules


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
