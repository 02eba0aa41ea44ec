"""Whether the threads of a training loop still begin and end anything (``hang_watch.h``). Any thread; not in a forked child."""

from __future__ import annotations

from .ffi import lib
from .recorder import check


def start(seconds: float, long_seconds: float, dump: int) -> None:
    """Begins; ``dump`` is the address of CPython's ``_Py_DumpTracebackThreads``, or 0.

    Raises:
        NativeError: it is watched already, or the system gave no thread.
    """
    check(lib.otp_hang_watch_start(round(seconds * 1e9), round(long_seconds * 1e9), dump), "watching for hangs")


def wait() -> int:
    """Waits, without Python's lock; the system's id of a thread that hangs, or 0 once nothing is watched."""
    return int(lib.otp_hang_watch_wait())


def report(text: str) -> None:
    """Writes the stacks of all threads into the black box."""
    raw = text.encode("utf-8", "replace")
    lib.otp_hang_watch_report(raw, len(raw))


def stop() -> None:
    """Ends; again without effect."""
    lib.otp_hang_watch_stop()
