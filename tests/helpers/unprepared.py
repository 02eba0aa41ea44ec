"""A program that does not know this package, and a way into it: Python's own, or one like it before Python 3.14.

With the argument ``train`` it trains; without, it has no installed packages.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Unprepared:
    """The program in a process of its own. Its main thread runs Python all the time."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        alone = [] if arguments else ["-S"]
        environment = {**os.environ, **environment, **({} if arguments else {"PYTHONPATH": ""})}
        command = [sys.executable, *alone, __file__, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.stdout.readline() == b"begun\n"

    def execute(self, pid: int, path: str) -> None:
        """Has the main thread run a script."""
        assert pid == self.process.pid
        if hasattr(sys, "remote_exec"):
            sys.remote_exec(pid, path)
        else:
            self.stdin.write(path.encode() + b"\n")
            self.stdin.flush()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ends the program; returns what could be seen in it at first and at last."""
        self.stdin.close()
        before, after = json.loads(self.stdout.readline())
        assert self.process.wait() == 0
        return before, after


@contextmanager
def unprepared(*arguments: str, **environment: str) -> Iterator[Unprepared]:
    """Runs the program; it is ended with the block."""
    program = Unprepared(*arguments, **environment)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait()
        program.stdin.close()
        program.stdout.close()


def _state() -> dict[str, Any]:
    """What could be seen of this package; ``foreign`` are threads that a program finds and cannot join."""
    optimizers = sys.modules.get("torch.optim.optimizer")
    for thread in threading.enumerate():
        if thread.name == "otel-torchprof-client":  # it may be about to end
            thread.join()
    threads = [thread.name for thread in threading.enumerate() if "otel" in thread.name]
    return {
        "path": list(sys.path),
        "foreign": [],
        "profile": str(sys.getprofile()),
        "threads": threads,
        "hooks": len(getattr(optimizers, "_global_optimizer_post_hooks", ())),
    }


def _trainer() -> Callable[[], None]:
    import torch

    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        (parameter @ parameter).sum().backward()
        optimizer.step()

    return step


def _main() -> None:
    step = _trainer() if "train" in sys.argv else lambda: None
    step()
    before = _state()
    foreign = set()
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    while True:
        step()
        foreign |= {each.name for each in threading.enumerate() if type(each).__name__ == "_DummyThread"}
        if select.select([0], [], [], 0 if "train" in sys.argv else 0.02)[0]:
            paths = os.read(0, 4096).decode().splitlines()
            if not paths:
                break
            for path in paths:
                with open(path) as file:  # noqa: PTH123 - nothing more is imported
                    exec(file.read(), {})  # noqa: S102 - as Python 3.14 does
    sys.stdout.write(json.dumps([before, {**_state(), "foreign": sorted(foreign)}]) + "\n")


if __name__ == "__main__":
    sys.path.pop(0)
    _main()
