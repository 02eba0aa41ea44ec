"""A stand-in for NVIDIA's management library, for tests that need one and have no GPU.

``nvml_stand_in.c`` is built once per session and put where ``pynvml`` keeps the library that it has loaded. All above the C
functions is the real thing: ``pynvml``, its structures and its errors.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

HERE = Path(__file__).resolve().parent
SONAME = "libnvidia-ml.so.1"
NO_COMPILER = "no C compiler here (cc) to build the stand-in for NVML with"

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, VERSION_MISMATCH = 3, 4, 9, 15, 18


class StandIn:
    """The library under a test's control."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.nvmlErrorString.restype = ctypes.c_char_p

    def read(self, recording: str) -> None:
        """Forgets all and answers from a recording, a file's name without its ending."""
        path = HERE / "recordings" / f"{recording}.txt"
        assert self.library.stand_in_read(str(path).encode()) == 0

    def set(self, key: str, value: object) -> None:
        """Changes one entry; None takes it out."""
        self.library.stand_in_set(key.encode(), None if value is None else str(value).encode())

    def fail(self, function: str, code: int | None) -> None:
        """Lets every call of a function return an error; None ends that."""
        self.set(f"call.{function}", None if code is None else f"!{code}")

    def calls(self, function: str) -> int:
        """How often a function was called since :meth:`read`."""
        return self.library.stand_in_calls(function.encode())

    @property
    def users(self) -> int:
        """How many have initialised it and not shut it down."""
        return self.library.stand_in_users()

    def block(self, function: str) -> None:
        """Lets calls of a function wait until :meth:`release`."""
        self.library.stand_in_block(function.encode())

    def wait_until_blocked(self) -> None:
        """Returns when a call waits."""
        self.library.stand_in_wait()

    def release(self) -> None:
        """Lets the calls go that wait."""
        self.library.stand_in_block(b"")


def build(folder: Path) -> Path:
    """Compiles the stand-in, under the name that ``pynvml`` looks for."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(NO_COMPILER)
    path = folder / SONAME
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-Wl,-soname,{SONAME}"]
    subprocess.run([*command, str(HERE / "nvml_stand_in.c"), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory):
    """The stand-in's file."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(stand_in_library, monkeypatch):
    """The stand-in, answering for a data-centre card, in place of the library for one test."""
    stand_in = StandIn(stand_in_library)
    stand_in.read("data_centre")
    monkeypatch.setattr(pynvml, "nvmlLib", stand_in.library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return stand_in
