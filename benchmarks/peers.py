"""Builds ``peers.cc`` into a temporary folder and loads it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared")
"""Those of the package's own torch library: the two observers differ in what they do, not in how they were built."""


@functools.cache
def library() -> str:
    """Path of the built library, which lies in a temporary folder until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="otel-torchprof-bench-")
    atexit.register(folder.cleanup)
    path = str(Path(folder.name) / "peers.so")
    subprocess.run(_command(path), check=True)
    return path


@functools.cache
def load(path: str | None = None) -> Any:
    """The functions of ``peers.cc``, from a library that is already built or a new one.

    ctypes gives Python's lock up around each call.
    """
    loaded = ctypes.CDLL(path or library())
    loaded.peers_observe.restype = ctypes.c_uint64
    loaded.peers_unobserve.argtypes = [ctypes.c_uint64]
    loaded.peers_allocations.argtypes = [ctypes.c_uint64]
    loaded.peers_operators.argtypes = [ctypes.c_uint64]
    loaded.peers_additions.argtypes = [ctypes.c_uint64]
    loaded.peers_operators_counted.argtypes = [ctypes.c_uint64]
    loaded.peers_groups.argtypes = [ctypes.c_uint64]
    return loaded


def _command(output: str) -> list[str]:
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    source = Path(__file__).with_name("peers.cc")
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "c++")
    return [compiler, *_FLAGS, abi, f"-I{root / 'include'}", str(source), *libraries, "-o", output]
