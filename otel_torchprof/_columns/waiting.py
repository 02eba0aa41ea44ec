"""Threads that wait: what is on their stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .batch import Thread


class WaitingStack(NamedTuple):
    """The calls in which a thread was all the time of a recording."""

    thread: Thread
    """The thread; where torch ran on it, a batch knows more of it."""
    names: tuple[int, ...]
    """By call, the top-level first, the index into ``Batch.names``."""
    identities: tuple[int, ...]
    """By call, which generator or coroutine it is of (as in the column ``fwd_thread``), 0 for none."""
