"""The stacks of a process that hangs: Python's by faulthandler, which it has registered for SIGUSR1, the native ones by what is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from typing import Any


def write_stacks(pid: int, log: Any) -> None:
    """Writes the stacks of all its threads to a file; Python's go to its own standard error."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(2)
    for name, *arguments in (
        ("py-spy", "dump", "--native", "--pid", str(pid)),
        ("gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 40"),
    ):
        if shutil.which(name):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([name, *arguments], stdout=log, stderr=subprocess.DEVNULL, timeout=120, check=False)
