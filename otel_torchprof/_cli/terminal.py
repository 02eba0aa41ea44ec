"""Output of commands: results, messages and progress."""

from __future__ import annotations

import contextlib
import fcntl
import math
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
"""Seconds between plain lines: the pause doubles from the first to the longest."""
_BAR = 20
_LARGE = 100_000_000
_PREFIXES = "kMGTPE"
"""Bytes of files whose reading is displayed at once."""
_LINE = "\r\x1b[2K{}\r"
"""Overwrites the line, and returns the cursor, so that the program's own output begins at the beginning of a line."""


class Progress:
    """Displays progress: on a terminal one line that changes every second, elsewhere new lines at growing intervals.

    Args:
        describe: returns the text to display now.
        stream: where to write it; by default stderr.
        clock: returns seconds.
        at_once: on a terminal, display it without waiting for a second.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        stream: TextIO | OwnStderr | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        at_once: bool = False,
    ) -> None:
        self._describe = describe
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._on_terminal = self._stream is not None and self._stream.isatty()
        self._pause = _EVERY_SECOND if self._on_terminal else _FIRST
        self._due = clock() + (0 if at_once and self._on_terminal else self._pause)
        self._has_shown = False
        self._over = threads.Event()
        self._thread = threads.Thread(target=self._run, name="otel-torchprof-progress", daemon=True)

    def start(self) -> None:
        """Starts the display; without effect while Python is ending, when no thread can be started."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        """Ends the display and erases its line."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._on_terminal and self._has_shown:
            self._write(_LINE.format(""))

    def report_if_due(self) -> float:
        """Writes the text if it is due; returns the seconds until it is due again."""
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
        except (OSError, ValueError):  # closed by the program or by the reader
            self._over.set()


@contextlib.contextmanager
def reading(paths: Sequence[str], *, quiet: bool, times: int = 1) -> Iterator[Callable[[str, ByteStream], None]]:
    """Displays how much of the files has been read; yields the function to call with each file that is opened.

    Args:
        paths: the files.
        quiet: display nothing.
        times: how often each file is read.
    """
    read = ReadingProgress(paths, times)
    with display_progress(read.line, quiet=quiet, at_once=read.is_large):
        yield read.watch


@contextlib.contextmanager
def display_progress(describe: Callable[[], str], *, quiet: bool = False, at_once: bool = False) -> Iterator[None]:
    """Displays progress until the block ends; ``at_once``: on a terminal without waiting for a second."""
    progress = Progress(describe, at_once=at_once)
    if not quiet:
        progress.start()
    try:
        yield
    finally:
        progress.stop()


class ReadingProgress:
    """Progress of reading files, each of them ``times`` times."""

    def __init__(self, paths: Sequence[str], times: int) -> None:
        self._sizes = {path: _size_of(path) for path in paths}
        self._whole = times * sum(self._sizes.values())
        self._times = times
        self._before = 0
        self._stream: ByteStream | None = None
        self._path = ""

    @property
    def is_large(self) -> bool:
        """Whether reading takes a while."""
        return self._whole > _LARGE

    def watch(self, path: str, stream: ByteStream) -> None:
        """Follows a file that was opened and is read from its beginning."""
        self._before += self._sizes.get(self._path, 0)
        self._path, self._stream = path, stream

    def line(self) -> str:
        """The line to display."""
        read = self._before + (self._stream.read_bytes if self._stream else 0)
        if not self._whole:  # a pipe
            return f"otel-torchprof: reading: {size(read)}"
        share = min(read / self._whole, 1.0)
        bar = "#" * round(share * _BAR)
        return f"otel-torchprof: reading [{bar:<{_BAR}}] {share:.0%} of {size(self._whole // self._times)}"


def _size_of(path: str) -> int:
    """Bytes of a file; 0 if not known."""
    try:
        return Path(path).stat().st_size
    except (OSError, ValueError):  # opening it raises the error with its reason
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


def brief(number: float) -> str:
    """``1.5T``: three digits, and thousands as a letter."""
    power = min(max(int(math.log10(max(number, 1))) // 3, 0), len(_PREFIXES))
    return f"{number / 1000**power:.3g}{('', *_PREFIXES)[power]}"


def percent(share: float) -> str:
    """``38.4%``, and ``0.043%``: a small model reaches a thousandth of a device's peak."""
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"  # noqa: PLR2004 - one percent


# ---- Results and messages: control characters are escaped, and the stream may be closed ----


_OWN_DESCRIPTOR = 200


def say(text: str) -> None:
    """Writes a message of this package to stderr; without effect if stderr is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        write(sys.stderr, f"otel-torchprof: {printable_lines(text)}\n")


def show(text: str) -> None:
    """Writes a result to stdout, if there is one. Raises OSError if that cannot be written."""
    if sys.stdout is not None:
        write(sys.stdout, printable_lines(text))


def write(stream: TextIO, text: str) -> None:
    """Writes a text, with escapes for characters that the stream's encoding does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


class OwnStderr:
    """Stderr as it is at construction, whatever a script later does to ``sys.stderr`` or its descriptor.

    Text that cannot be written is discarded. Nothing is buffered: text left in ``sys.stderr`` when its descriptor is closed
    would change the exit status.
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
        """Without effect: nothing is buffered."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()


def _identity(fd: int) -> tuple[int, int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino, info.st_rdev
