"""Runs of two commands by turns, for ``diff --interleave``: each run is recorded as ``run`` does, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof.errors import TorchProfError

from .terminal import display_progress, duration, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from typing import Any

    from otel_torchprof._answers.difference import Difference
    from otel_torchprof._answers.pairs import RunTimes

FEWEST_ROUNDS = 6
"""Fewest rounds that can be compared, as ``_answers.pairs`` has it, which is imported late."""
_SIDES = "AB"
_PYTHON = re.compile(r"python[\d.]*t?(\.exe)?")
_WITH_VALUE = frozenset(("-W", "-X", "--check-hash-based-pycs"))
"""Options of Python with a value of their own."""
_PROGRAM = frozenset(("-", "-c", "-m"))
"""What ends the options of Python."""
_GRACE = 5.0
"""Seconds in which an interrupted command may end by itself."""
_LAST_LINES = 20
_REPETITIONS = 30
"""How often the fixed calculation is done beside a run: 0.2 s."""
_RECORD = "comparison.json"
"""File of a named folder: what is compared, and the times of the fixed calculation beside the runs of each complete round."""


class CommandError(TorchProfError):
    """A command failed.

    Args:
        text: which, how, and its last lines.
        status: its exit status, as a shell has it.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def recorded(command: str, output: str, detail: str) -> list[str]:
    """The words of a command with ``otel-torchprof run`` before its script.

    Of ``env X=1 python -X dev train.py`` the interpreter and its options stay; ``train.py`` and ``-m module`` are run by this one.

    Raises:
        TorchProfError: there is no command, or it records by itself.
    """
    words = shlex.split(command)
    if not words or Path(words[0]).name == "otel-torchprof":
        raise TorchProfError(
            f"cannot record {command!r}: name a script, -m MODULE or python SCRIPT; it is recorded by this command"
        )
    run = ["-m", "otel_torchprof", "run", "--quiet", f"--output={output}", f"--detail={detail}"]
    for place, word in enumerate(words):
        if word.endswith(".py") or word in _PROGRAM:
            break
        if _PYTHON.fullmatch(Path(word).name):
            at = place + 1
            while at < len(words) and words[at].startswith("-") and words[at] not in _PROGRAM:
                at += 2 if words[at] in _WITH_VALUE else 1
            return [*words[:at], *run, *words[at:]]
    return [sys.executable, *run, *words]


class InterleavedRuns:
    """Two commands that run by turns: A, B, B, A, and so on, so that a steady drift of the machine cancels.

    Ctrl-C ends the running command; the complete rounds remain. In a folder that the user named they are not run again.

    Args:
        commands: the two.
        options: of ``diff``: how many rounds, the level of detail, the folder of the files.
    """

    def __init__(self, commands: Sequence[str], options: argparse.Namespace) -> None:
        self._commands, self._detail, self._folder = commands, options.detail, options.output
        self._rounds: int = options.interleave
        self._quiet: bool = options.quiet
        self._begin = self._begin_of_run = time.monotonic()
        self._place = "measuring the machine"
        self._done = self._kept = 0
        """Runs of this call, and rounds of earlier ones."""
        self._speed = 0.0
        """Seconds of the fixed calculation after the latest run."""

    def difference(self) -> Difference:
        """Runs and compares them.

        Raises:
            CommandError: a command failed.
            TorchProfError: a recording cannot be compared, or too few rounds are complete.
        """
        from otel_torchprof._answers.pairs import judged_pairs

        pairs: list[tuple[RunTimes, RunTimes]] = []
        speeds: list[list[float]] = []
        try:
            with (
                _folder(self._folder) as folder,
                _ended_by_signals(),
                display_progress(self._line, quiet=self._quiet),
                contextlib.suppress(KeyboardInterrupt),
            ):
                self._run_all(folder, pairs, speeds)
        except SystemExit:
            say(self._complete(len(pairs)))
            raise
        if len(pairs) < FEWEST_ROUNDS:
            raise TorchProfError(
                f"{self._complete(len(pairs))}; {FEWEST_ROUNDS} are needed: with fewer, any difference may be chance"
            )
        import numpy as np

        return judged_pairs(pairs, np.diff(np.log(speeds[: len(pairs)]))[:, 0])

    def _run_all(self, folder: Path, pairs: list[tuple[RunTimes, RunTimes]], speeds: list[list[float]]) -> None:
        """Reads the complete rounds of a folder, and runs the others; appends the times of each, and those of the fixed calculation."""
        compared = {"commands": list(self._commands), "detail": self._detail, "directory": str(Path.cwd())}
        speeds += _complete_rounds(folder, compared)[: self._rounds]
        self._kept = len(speeds)
        for number in range(self._kept):
            self._place = f"reading round {number + 1} of {self._kept}"
            pairs.append((self._times(folder, number, 0), self._times(folder, number, 1)))
        self._begin, self._speed = time.monotonic(), _calibration()
        for number in range(self._kept, self._rounds):
            runs = {side: self._run(folder, number, side) for side in ((0, 1) if number % 2 == 0 else (1, 0))}
            speeds.append([runs[0][1], runs[1][1]])
            pairs.append((runs[0][0], runs[1][0]))
            if self._folder:
                _write(folder, {**compared, "speeds": speeds})

    def _complete(self, count: int) -> str:
        """How many rounds are complete, and how the others follow."""
        rest = f" in {self._folder!r}: the same command runs the others" if self._folder else ""
        return f"{count} of {self._rounds} rounds are complete{rest}"

    def _run(self, folder: Path, number: int, side: int) -> tuple[RunTimes, float]:
        """Runs a command to its end, reads what was recorded, and deletes it unless the user named the folder.

        Returns:
            Its times, and those of the fixed calculation before and after it, as a mean.
        """
        self._place, self._begin_of_run = f"round {number + 1} of {self._rounds}, {_SIDES[side]}", time.monotonic()
        stem, suffix = _stem(number, side), ".json.gz" if self._folder else ".json"
        command = self._commands[side]
        for path in _traces(folder, stem):  # of a round that was interrupted
            path.unlink()
        _execute(recorded(command, str(folder / (stem + suffix)), self._detail), command, folder / f"{stem}.log")
        before, self._speed = self._speed, _calibration()
        times = self._times(folder, number, side)
        if not self._folder:
            for path in _traces(folder, stem):
                path.unlink()
        self._done += 1
        return times, (before + self._speed) / 2

    def _times(self, folder: Path, number: int, side: int) -> RunTimes:
        """Reads what was recorded of a run."""
        from otel_torchprof._answers.diff import read_side
        from otel_torchprof._answers.pairs import run_times

        command, files = self._commands[side], _traces(folder, _stem(number, side))
        if not files and number < self._kept:
            raise TorchProfError(
                f"{str(folder)!r} has no trace {_stem(number, side)!r} of its complete rounds: name a new folder"
            )
        if not files:
            raise TorchProfError(
                f"{command!r} wrote no trace: it did not run to its end in the process that was started"
            )
        times = run_times(read_side([str(path) for path in files]))
        return times._replace(recording=times.recording._replace(path=command))

    def _line(self) -> str:
        now = time.monotonic()
        runs = 2 * (self._rounds - self._kept)
        left = (self._begin_of_run - self._begin) / self._done * (runs - self._done) if self._done else 0.0
        about = f", about {duration(max(left - (now - self._begin_of_run), 0.0))} left" if self._done else ""
        return (
            f"otel-torchprof: {self._place}: {duration(now - self._begin_of_run)}{about} (Ctrl-C compares what is complete, from "
            f"{FEWEST_ROUNDS} rounds on)"
        )


@contextlib.contextmanager
def _folder(name: str | None) -> Iterator[Path]:
    """The folder of the recordings: the named one, or one that is deleted afterwards."""
    if name is not None:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="otel-torchprof-") as made:
        yield Path(made)


def _complete_rounds(folder: Path, compared: dict[str, Any]) -> list[list[float]]:
    """The times of the fixed calculation beside both runs of each complete round in a folder, in order.

    Args:
        folder: the folder; one that has none is made the folder of this comparison.
        compared: what is compared: commands, their level of detail and their working directory.

    Raises:
        TorchProfError: it has traces of another comparison, which would be taken for those of this one.
    """
    speeds: list[list[float]] = []
    try:
        found = json.loads((folder / _RECORD).read_bytes())
        speeds = [[float(first), float(second)] for first, second in found.pop("speeds")]
    except FileNotFoundError:
        found = None
    except (ValueError, TypeError, KeyError, AttributeError):
        found = {}
    other = folder / _RECORD if found not in (None, compared) else None
    if found is None:
        other = min(folder.glob("[ab]-[0-9][0-9][0-9]*.json*"), default=None)
    if other is not None:
        raise TorchProfError(
            f"{str(other)!r} is of an earlier comparison, of other commands, detail or working directory: name an empty or a new "
            "folder, or delete its files"
        )
    _write(folder, {**compared, "speeds": speeds})
    return speeds


def _write(folder: Path, record: dict[str, Any]) -> None:
    """Replaces the record of a folder in one piece."""
    part = folder / f"{_RECORD}.part"
    part.write_text(json.dumps(record))
    part.replace(folder / _RECORD)


def _stem(number: int, side: int) -> str:
    return f"{_SIDES[side].lower()}-{number + 1:03}"


def _traces(folder: Path, stem: str) -> list[Path]:
    """The files of a run: one, or one of each rank."""
    return sorted(folder.glob(f"{stem}*.json*"))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exit that ends the running command and deletes the files."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    replaced = {}
    with contextlib.suppress(ValueError):  # not the main thread
        replaced = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _execute(words: list[str], command: str, log: Path) -> None:
    """Runs a program and all that it starts, in a session of its own, to its end.

    Raises:
        CommandError: it cannot be started, or fails.
        TorchProfError: it is to end, and cannot be ended.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise CommandError(f"cannot start {words[0]!r} of {command!r}: {error.strerror}", 127) from error
    try:
        status = process.wait()
    finally:
        _end(process, command)
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        lines = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        raise CommandError(f"{command!r} {how}; its last lines:\n{lines}", 128 - status if status < 0 else status)


def _end(process: subprocess.Popen[bytes], command: str) -> None:
    """Ends what is left of a session: interrupted, and killed if it does not end."""
    try:
        if process.poll() is None and _signal(process, signal.SIGINT):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        if not _signal(process, signal.SIGKILL) and process.poll() is None:
            raise TorchProfError(
                f"process {process.pid} of {command!r} cannot be ended, as it is another user's: run `sudo kill -9 -- -{process.pid}`"
            )
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Sends a signal to a session; False if that is not allowed, as with one that ``sudo`` made another user's."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def _calibration() -> float:
    """Processor seconds of a fixed calculation in Python and in memory, typical of its fastest repetitions."""
    import numpy as np

    numbers, memory, times = np.linspace(0, 1, 1 << 16), np.zeros(1 << 19), []
    for _ in range(_REPETITIONS):
        begin = time.thread_time()
        sum(number * number for number in range(12_000))
        for _ in range(6):
            np.tanh(numbers)
        memory.copy().sum()
        times.append(time.thread_time() - begin)
    return float(np.quantile(times, 0.25))
