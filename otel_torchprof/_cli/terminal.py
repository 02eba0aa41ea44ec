"""What commands write: results, messages, and how far a recording, a reading or a writing has come."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from otel_torchprof._process import threads
from otel_torchprof.errors import printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

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
        self._has_shown = False
        self._over = threads.Event()
        self._thread = threads.Thread(target=self._run, name="otel-torchprof-progress", daemon=True)

    def start(self) -> None:
        """Begins. Shows nothing where Python is ending: it starts no threads then."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        """Ends, and leaves a clean line, if there was one of it."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._on_terminal and self._has_shown:
            self._write(_LINE.format(""))

    def report_if_due(self) -> float:
        """Says what there is to say, if it is time; returns the seconds until the next time."""
        now = self._clock()
        if now >= self._due:
            text = self._describe()
            self._write(_LINE.format(text) if self._on_terminal else f"{text}\n")
            self._has_shown = True
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
def reading(paths: Sequence[str], *, quiet: bool, times: int = 2) -> Iterator[Callable[[str, ByteStream], None]]:
    """Shows how far files have been read, each so many times: gives what is to be called when one is opened."""
    read = ReadingProgress(paths, times)
    with shown(read.line, quiet=quiet):
        yield read.watch


@contextlib.contextmanager
def shown(describe: Callable[[], str], *, quiet: bool = False) -> Iterator[None]:
    """Tells how it goes, until the block ends."""
    progress = Progress(describe)
    if not quiet:
        progress.start()
    try:
        yield
    finally:
        progress.stop()


class ReadingProgress:
    """How far files have been read, each of them so many times."""

    def __init__(self, paths: Sequence[str], times: int) -> None:
        self._sizes = {path: _size_of(path) for path in paths}
        self._whole = times * sum(self._sizes.values())
        self._times = times
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
        if not self._whole:  # a pipe
            return f"otel-torchprof: reading: {size(read)}"
        share = min(read / self._whole, 1.0)
        bar = "#" * round(share * _BAR)
        return f"otel-torchprof: reading [{bar:<{_BAR}}] {share:.0%} of {size(self._whole // self._times)}"


def _size_of(path: str) -> int:
    """Bytes of a file; 0 where that is not known."""
    try:
        return Path(path).stat().st_size
    except (OSError, ValueError):  # whoever reads it says why it cannot be read
        return 0


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


# ---- what the commands write: nothing in it moves a cursor, and where it goes may be closed ----


_OWN_DESCRIPTOR = 200


def say(text: str) -> None:
    """Writes a message of ours to stderr; without effect where that is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        write(sys.stderr, f"otel-torchprof: {printable_lines(text)}\n")


def show(text: str) -> None:
    """Writes a result to stdout, if there is one. Raises OSError where that cannot be written."""
    if sys.stdout is not None:
        write(sys.stdout, printable_lines(text))


def write(stream: TextIO, text: str) -> None:
    """Writes what the stream's encoding has, and escapes of the rest."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


class OwnStderr:
    """Stderr as it is now, whatever a script does to ``sys.stderr`` or to the descriptor; what cannot be written is lost.

    Nothing is buffered: text of ours that waits in ``sys.stderr`` where its descriptor is closed would change the exit status.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stderr
        self._fd = -1
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # A high number: scripts close 0 to 2, and count on the lowest ones for what they open.
            self._fd = fcntl.fcntl(sys.stderr.fileno(), fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTOR)
            self._file = _identity(self._fd)

    def write(self, text: str) -> None:
        """Writes at once."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._fd < 0:
                write(self._stream, text)  # type: ignore[arg-type]  # None has no write: suppressed above
            elif _identity(self._fd) == self._file:  # else it was closed, and the number may be another file's
                left = text.encode("utf-8", "backslashreplace")
                while left:
                    left = left[os.write(self._fd, left) :]

    def flush(self) -> None:
        """Without effect: nothing waits."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()


def _identity(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_rdev
