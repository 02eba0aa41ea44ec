"""What the commands write: nothing in it moves a cursor, and where it goes may be closed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from typing import TextIO

from otel_torchprof._process.printable import printable_lines

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
                write(self._stream, text)  # type: ignore[arg-type]
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
