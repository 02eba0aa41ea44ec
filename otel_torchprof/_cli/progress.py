"""What commands say on stderr while they record, read or write."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._export.byte_stream import ByteStream

    from .terminal import OwnStderr

_EVERY_SECOND = 1.0
_FIRST, _LONGEST = 10.0, 600.0
"""Seconds between plain lines: twice as many each time."""
_BAR = 20
_LINE = "\r\x1b[2K{}\r"
"""Written over at every turn. The cursor goes back, so that what the program writes stands at the beginning of a line."""


class Progress:
    """Tells how a recording goes: on a terminal in one line that changes every second, elsewhere in a line now and then.

    Args:
        describe: what to say now.
        stream: where; by default stderr.
        clock: seconds.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        stream: TextIO | OwnStderr | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._describe = describe
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._stream is not None and self._stream.isatty()
        self._pause = _EVERY_SECOND if self._on_terminal else _FIRST
        self._due = clock() + self._pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otel-torchprof-progress", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, and leaves a clean line."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._on_terminal:
            self._write(_LINE.format(""))

    def report_if_due(self) -> float:
        """Says what there is to say, if it is time; returns the seconds until the next time."""
        now = self._clock()
        if now >= self._due:
            text = self._describe()
            self._write(_LINE.format(text) if self._on_terminal else f"{text}\n")
            if not self._on_terminal:
                self._pause = min(self._pause * 2, _LONGEST)
            self._due = now + self._pause
        return self._due - now

    def _run(self) -> None:
        while not self._over.wait(self.report_if_due()):
            pass

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # closed by the program, or by whoever read it
            self._over.set()


@contextlib.contextmanager
def reading_twice(paths: list[str], *, quiet: bool) -> Iterator[Callable[[str, ByteStream], None]]:
    """Shows how far files have been read, each twice: gives what is to be called when one is opened."""
    reading = ReadingTwice(paths)
    progress = Progress(reading.line)
    if not quiet:
        progress.start()
    try:
        yield reading.watch
    finally:
        progress.stop()


class ReadingTwice:
    """How far the files have been read: each is read twice."""

    def __init__(self, paths: list[str]) -> None:
        self._sizes = {path: Path(path).stat().st_size if Path(path).is_file() else 0 for path in paths}
        self._whole = 2 * sum(self._sizes.values())
        self._before = 0
        self._stream: ByteStream | None = None
        self._path = ""

    def watch(self, path: str, stream: ByteStream) -> None:
        """A file is read from its begin."""
        self._before += self._sizes.get(self._path, 0)
        self._path, self._stream = path, stream

    def line(self) -> str:
        """For the progress."""
        read = self._before + (self._stream.read_bytes if self._stream else 0)
        share = min(read / self._whole, 1.0) if self._whole else 0.0
        bar = "#" * round(share * _BAR)
        return f"otel-torchprof: reading [{bar:<{_BAR}}] {share:.0%} of {size(self._whole // 2)}"


def duration(seconds: float) -> str:
    """``0:01:05``; below a minute with a tenth, ``5.2 s``."""
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def size(count: int) -> str:
    """``1.5 MB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
