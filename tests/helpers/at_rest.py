"""Waits until the threads of a pool have nothing left to do."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

LONG = 60.0


def wait_until_at_rest() -> None:
    """Until no other thread of the process runs.

    After ``torch.jit.fork``, inside of torch's profiler: torch tells who waits before the event of the function has ended. Where the
    profiler stops in between, and another one begins, torch writes that end into memory that it has freed (2.13): the process dies at
    some later time, in whatever frees what lies there then.
    """
    deadline, own = time.monotonic() + LONG, str(threading.get_native_id())
    while any(_runs(task) for task in Path("/proc/self/task").iterdir() if task.name != own):
        assert time.monotonic() < deadline, "a thread of the process never rests"
        os.sched_yield()


def _runs(task: Path) -> bool:
    try:
        line = (task / "stat").read_text()
    except OSError:  # it has ended
        return False
    return line.rpartition(") ")[2].startswith("R")
