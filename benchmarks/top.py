"""What ``otel-torchprof top`` costs: itself, on 64 boxes that are written and four processes that train, and their steps while it runs.

The boxes are those of forked processes without torch, which record phases and labels through the native recorder; the command runs in a
pseudo-terminal, on everything that a user has. Processor times, since a machine with so many processes is not quiet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from children import Child, answer, environment
from harness import NONE, Budget, Row, Settings, rows

import otel_torchprof as otp
from otel_torchprof._cli.main import main
from otel_torchprof._columns.phases import Part
from otel_torchprof._files.box import BlackBox
from otel_torchprof._native.python_sources import follow_phases, phase_begin, phase_end
from otel_torchprof._process import private_folder
from otel_torchprof.parsers import BlackBoxOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_BOXES, _TRAININGS = 64, 4
_STEPS_A_SECOND, _LABELS = 10, 200
"""Of each of the boxes; labels per step."""
_COLUMNS, _LINES = 160, 80
_SECONDS, _SETTLING = 10.0, 5.0
"""Of a run, and before one that measures the command."""
_ROUNDS = 10
_LIMIT_PERCENT = 10.0
_PAUSE = 0.05
"""Seconds between the steps of a training: four of them leave room on two processors."""
_WHO = "`top`, 64 boxes and 4 trainings"


def measure(settings: Settings) -> list[Row]:
    """The command's share of a processor, then the steps of the trainings with it and without."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        children = [Child(__file__, train.__name__, folder) for train in [_write] + _TRAININGS * [_train]]
        for child in children:
            stack.enter_context(child)
            child.said()  # it is ready
        shares, added = _rounds(folder, children[1:], settings)
    found = rows("processor time of `top`, share of a core", "%", {_WHO: shares}, {_WHO: Budget(plus=_LIMIT_PERCENT)})
    for what, times in added.items():
        found += rows(f"training step beside `top`: {what}", "%", times)
    return found


def _rounds(
    folder: str, trainings: list[Child], settings: Settings
) -> tuple[list[float], dict[str, dict[str, list[float]]]]:
    """Shares in percent; what is added to steps, in percent, in rounds of four: without, with, with, without."""
    shares: list[float] = []
    added: dict[str, dict[str, list[float]]] = {what: {NONE: [], _WHO: []} for what in ("processor time", "wall time")}
    seconds = _SECONDS / (5 if settings.quick else 1)

    def run(*, is_watched: bool) -> list[dict[str, float]]:
        if not is_watched:
            return _asked(trainings, seconds)
        with _Command(folder) as command:
            time.sleep(_SETTLING)
            before = command.processor_seconds, time.monotonic()
            steps = _asked(trainings, seconds)
            shares.append((command.processor_seconds - before[0]) / (time.monotonic() - before[1]) * 100)
            return steps

    for _ in range(settings.rounds_or(_ROUNDS)):
        for who in (NONE, _WHO):
            four = [run(is_watched=who == _WHO and at in {1, 2}) for at in range(4)]
            for what, values in added.items():
                for before, first, second, after in zip(*four, strict=True):
                    base = before[what] + after[what]
                    values[who].append((first[what] + second[what] - base) / base * 100)
    return shares, added


def _asked(trainings: list[Child], seconds: float) -> list[dict[str, float]]:
    """The medians of the steps of so many seconds, by training; all at once."""
    threads = []
    found: list[Any] = [None] * len(trainings)

    def ask(at: int) -> None:
        found[at] = trainings[at].ask(str(seconds))

    for at in range(len(trainings)):
        threads.append(threading.Thread(target=ask, args=(at,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


class _Command:
    """The command in a pseudo-terminal, from the first page on until ``with`` ends it."""

    def __init__(self, folder: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, __file__, _top.__name__, folder],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.DEVNULL,
            env={**environment(), "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(slave)
        self._has_page = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._has_page.wait()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the command has ended
            while os.read(self._master, 1 << 16):
                self._has_page.set()
        self._has_page.set()

    @property
    def processor_seconds(self) -> float:
        """Processor time so far, of all threads."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._master, b"q")
        if self._process.wait():
            raise RuntimeError(f"the command has ended with status {self._process.returncode}")
        self._reader.join()
        os.close(self._master)


# ---- Programs of processes ----


def _top(*arguments: str) -> None:
    sys.exit(main(["top", *arguments]))


def _write() -> None:
    """Writes boxes, each in a process of its own, which ends with this one."""
    pids = []
    for rank in range(_BOXES):
        pid = os.fork()
        if not pid:
            _write_box(rank)
        pids.append(pid)
    answer("ready")
    sys.stdin.read()


def _write_box(rank: int) -> None:
    sys.stdin.close()
    box = BlackBox(BlackBoxOptions("ops"), {"rank": rank, "world_size": _BOXES, "torchelastic.run_id": "b"})
    box.start()
    numbers = {int(part): part.event_name for part in Part}
    names = tuple(numbers.get(number, "") for number in range(max(Part) + 1))
    follow_phases(names, lambda: True, lambda: -1, list, lambda _module: None)  # as torch's hooks do
    parts = Part.NEXT, Part.FORWARD, Part.BACKWARD, Part.STEP
    owner = object()
    parent, due = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        for part in parts:
            phase_begin(part, owner)
            for number in range(_LABELS // len(parts)):
                with otp.record_function(f"label_{number}"):
                    pass
            phase_end(part, owner, None)
        due += 1 / _STEPS_A_SECOND
        time.sleep(max(due - time.monotonic(), 0))
    os._exit(0)


def _train() -> None:
    import torch
    from opentelemetry.sdk.trace import TracerProvider
    from workloads import transformer_step

    torch.set_num_threads(1)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor())
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="steps", blackbox="ops")
    step = transformer_step()
    for _ in range(10):
        step()
    answer("ready")
    for line in sys.stdin:
        answer(_steps(step, float(line)))


def _steps(step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Processor time of the whole process per step, and the median wall time of a step."""
    walls, end, processor = [], time.monotonic() + seconds, time.process_time()
    while time.monotonic() < end:
        begin = time.perf_counter()
        step()
        walls.append(time.perf_counter() - begin)
        time.sleep(_PAUSE)
    return {
        "processor time": (time.process_time() - processor) / len(walls),
        "wall time": statistics.median(walls),
    }


if __name__ == "__main__":
    name, shared_memory, *rest = sys.argv[1:]
    private_folder._SHARED_MEMORY = shared_memory  # noqa: SLF001 - boxes and sockets of nobody else
    {program.__name__: program for program in (_top, _write, _train)}[name](*rest)
