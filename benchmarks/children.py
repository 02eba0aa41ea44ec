"""Processes that benchmarks start: one line in, one line of JSON out."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


PROCESSES = 3
"""Where memory lies, and so what of it is in a cache, is drawn once per process."""


class Child:
    """Runs one of the benchmarks' files as a program until ``with`` ends it.

    Args:
        arguments: the file, and what is on its command line.
    """

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def ask(self, line: str) -> Any:
        """What it answers to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.said()

    def said(self) -> Any:
        """The next thing it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} has ended, with status {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that are always busy, until the ``with`` block ends."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def in_processes(file: str, rounds: int) -> Any:
    """What a benchmark's file says as a program that is told how many rounds to measure; :data:`PROCESSES` of them, one after another.

    Lists inside of what they say are joined, so that it is as if one process had said it.
    """
    each = max(-(-rounds // PROCESSES), 2)
    found = None
    for _ in range(PROCESSES):
        with Child(file, str(each)) as child:
            found = _joined(found, child.said())
    return found


def _joined(before: Any, new: Any) -> Any:
    if isinstance(new, list) and before is not None:
        return before + new
    if isinstance(new, dict) and before is not None:
        return {key: _joined(before[key], value) for key, value in new.items()}
    return new


def once(file: str, *arguments: str) -> dict[str, float]:
    """What a benchmark's file says, in one line, as a program with these arguments: so nobody profits from memory that another has left."""
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment() -> dict[str, str]:
    """The folders that this process imports from, for the next one too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def answer(found: Any) -> None:
    """Says something to the process that asked."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def memory(field: str) -> int:
    """Bytes of this process, by their name in ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def memory_without_garbage() -> int:
    """As :func:`memory_at_a_new_peak`, once what is free is the system's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_at_a_new_peak()


def memory_at_a_new_peak() -> int:
    """Resident bytes, from which the peak (``VmHWM``) begins anew (proc(5)); that of the process that started this one is forgotten."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def unused_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
