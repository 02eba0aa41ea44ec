"""Handles SIGTERM if the program does not (``sigterm.h``). Thread-safe; not active in forked children."""

from __future__ import annotations

from .ffi import lib
from .recorder import check


def watch(milliseconds: int) -> bool:
    """Handles SIGTERM from now on, with that much time for a flush; False where the program handles or ignores it.

    Raises:
        NativeError: it is handled already, or the system gave no thread.
    """
    status = int(lib.otp_sigterm_watch(milliseconds))
    check(status, "watching SIGTERM")
    return status > 0


def unwatch() -> bool:
    """Stops handling SIGTERM; returns whether it was received, so that the process is about to end."""
    return bool(lib.otp_sigterm_unwatch())


def wait() -> bool:
    """Waits for SIGTERM; returns True once it is received, False once it is no longer handled."""
    return bool(lib.otp_sigterm_wait())


def flushed() -> None:
    """Ends the process of the signal: the flush is done."""
    lib.otp_sigterm_flushed()
