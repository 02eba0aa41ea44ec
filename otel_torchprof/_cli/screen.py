"""The whole terminal as a page that changes, with keys; however the command ends, the terminal is as it was before."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""To the alternate screen without a cursor and without wrapping of lines, and back."""
_TOP, _NEW_LINE, _BELOW = "\x1b[H", "\x1b[0m\x1b[K", "\r\n\x1b[J"
_MOST_KEYS = 64
_LAST_SECONDS = 0.5
"""Time that a terminal has to take what leaves the alternate screen."""


def is_terminal() -> bool:
    """Whether this command can display a page: it reads from a terminal and writes to one that moves its cursor."""
    with contextlib.suppress(ValueError, AttributeError):  # closed, or there is none
        return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return False


class Screen:
    """The page, inside the context. Use it on the main thread: SIGTERM, SIGHUP and SIGTSTP leave the alternate screen first.

    A terminal that takes no output, since its user or its connection has stopped, holds up :meth:`draw` only until a signal comes.
    """

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._encoding = sys.stdout.encoding or "utf-8"
        self._before: list[Any] = []
        self._wakes, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._in)
        self._handlers = [
            (number, signal.signal(number, handler))
            for number, handler in (
                (signal.SIGTERM, _exit),
                (signal.SIGHUP, _exit),
                (signal.SIGTSTP, self._suspend),
                (signal.SIGCONT, self._show),  # also after SIGSTOP, which leaves the terminal as it is
                (signal.SIGWINCH, lambda *_: None),  # only wakes the wait
            )
        ]
        self._wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers:
            signal.signal(number, handler)
        os.close(self._wakes)
        os.close(self._woken)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        size = os.get_terminal_size(self._out)
        if not size.columns or not size.lines:  # a terminal that does not know it
            size = shutil.get_terminal_size()
        return max(size.columns, 1), max(size.lines, 1)

    def draw(self, lines: Sequence[str]) -> None:
        """Draws lines that may have escapes for colours; those that do not fit are left out."""
        shown = lines[: self.size[1]]
        below = _BELOW if len(shown) < self.size[1] else ""
        self._write(_TOP + "\r\n".join(f"{_NEW_LINE}{line}" for line in shown) + below)

    def keys(self, seconds: float) -> str:
        """Waits for keys; empty after the time, and after a change of the size. Keys that send escapes (arrows) count as none.

        Raises:
            EOFError: the terminal was closed.
        """
        ready, _, _ = select.select([self._in, self._wakes], [], [], max(seconds, 0.0))
        if self._wakes in ready:
            os.read(self._wakes, _MOST_KEYS)
        if self._in not in ready:
            return ""
        data = os.read(self._in, _MOST_KEYS)
        if not data:
            raise EOFError
        text = data.decode(errors="replace")
        return "" if text.startswith("\x1b") and len(text) > 1 else text

    def _show(self, *_: object) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            tty.setcbreak(self._in, termios.TCSANOW)
            self._write(_ENTER)

    def _hide(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            if select.select([], [self._out], [], _LAST_SECONDS)[1]:
                self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSANOW, self._before)

    def _suspend(self, *_: object) -> None:
        self._hide()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _write(self, text: str) -> None:
        """Writes a text, with escapes for characters that the encoding does not have.

        Not through ``sys.stdout``, which a signal's handler must not use in the middle of a write.
        """
        data = text.encode(self._encoding, "backslashreplace")
        while data:
            data = data[os.write(self._out, data) :]


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def screen() -> Iterator[Screen | None]:
    """The screen; None without a terminal."""
    if is_terminal():
        with Screen() as found:
            yield found
    else:
        yield None
