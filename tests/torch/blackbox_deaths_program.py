"""Threads that execute operators and count them in a file that outlives the process, until it is killed: test_blackbox_deaths.py.

``blackbox_deaths_program.py COUNTS THREADS KILLER OPERATORS``: thread ``KILLER`` kills the process once it has executed so many
operators; where it is -1 the main thread does so once all threads together have. ``COUNTS`` has two numbers of eight bytes for each
thread: its id as the system has it, and how many of its operators have returned.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from pathlib import Path

import torch


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(counts: memoryview, thread: int, last: int, begin: threading.Barrier, *tensors: torch.Tensor) -> None:
    counts[2 * thread] = threading.get_native_id()
    x, y = tensors
    begin.wait()
    done = 0
    while True:
        x.add_(y)
        done += 1
        counts[2 * thread + 1] = done
        if done == last:
            kill()


def main() -> None:
    threads, killer, operators = map(int, sys.argv[2:])
    sys.setswitchinterval(1e-5)  # the threads interrupt one another in more places
    with Path(sys.argv[1]).open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), 16 * threads)).cast("Q")
    begin = threading.Barrier(threads + 1)
    for thread in range(threads):
        last = operators if thread == killer else -1
        tensors = torch.zeros(8), torch.ones(8)  # the thread itself executes only what it counts
        threading.Thread(target=work, args=(counts, thread, last, begin, *tensors)).start()
    begin.wait()
    if killer >= 0:
        signal.pause()
    while sum(counts[1::2]) < operators:
        pass
    kill()


main()
