"""Whether the threads of a training loop still begin and end anything (``hang_watch.h``). Any thread; not in a forked child."""

from __future__ import annotations

from .ffi import lib
from .recorder import check


def start(seconds: float, long_seconds: float, write_stacks: int) -> None:
    """Begins; ``write_stacks`` is what :func:`.stacks.writer` returns, or 0.

    Raises:
        NativeError: it is watched already, or the system gave no thread.
    """
    check(lib.otp_hang_watch_start(round(seconds * 1e9), round(long_seconds * 1e9), write_stacks), "watching for hangs")


def wait() -> int:
    """Waits, without Python's lock; the system's id of a thread that hangs, whose stacks are in the box, or 0 once nothing is watched."""
    return int(lib.otp_hang_watch_wait())


def stop() -> None:
    """Ends; again without effect."""
    lib.otp_hang_watch_stop()
