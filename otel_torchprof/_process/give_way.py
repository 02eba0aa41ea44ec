"""Background work that yields the GIL to the program's threads.

A Python thread that computes keeps the GIL for 5 ms at a time, and torch releases the GIL in every operator: each operator would wait
5 ms to get it back. So a step used to stall for as long as a drain took, 30 to 200 ms. With a pause after every millisecond of work a
drain takes longer, but the 99.9th percentile of steps of 4 ms is 12 ms instead of 23 (``benchmarks/run.py --only tails``).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from . import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_Item = TypeVar("_Item")

_WORK_NS = 1_000_000
"""CPU time of the thread between two pauses, ns."""
_REST = 9
"""Length of a pause, as a multiple of the work before it: the work gets a tenth of a core. With 4, the 99th percentile of these
steps was 10 ms instead of 8."""
_LONGEST_REST_SECONDS = 0.02
"""Limit of a pause, since a flush may begin to wait for the work meanwhile."""

_FEW = 64
"""Items of a few microseconds each that take less than a millisecond."""


class _YieldingThread(threads.local):
    urgency: Callable[[], float] | None = None
    rested = 0
    """CPU time of the thread at its last pause, ns."""
    due = 0
    """Monotonic time, ns, before which the thread cannot have worked for long enough since."""


_thread = _YieldingThread()


@contextmanager
def giving_way(urgency: Callable[[], float]) -> Iterator[None]:
    """Lets :func:`give_way` pause on this thread.

    ``urgency`` is called before each pause, and shortens it: not at all at 0, to nothing from 1 on.
    """
    _thread.urgency, _thread.rested, _thread.due = urgency, time.thread_time_ns(), 0
    try:
        yield
    finally:
        _thread.urgency = None


@contextmanager
def without_yielding() -> Iterator[None]:
    """Disables the pauses of a block that holds a lock for which the program's threads may wait."""
    urgency, _thread.urgency = _thread.urgency, None
    try:
        yield
    finally:
        _thread.urgency = urgency


def give_way() -> None:
    """Sleeps briefly if this thread is a yielding one and has worked for a millisecond. Call it at least once per millisecond of work.

    Costs 0.2 us; 0.9 us once a millisecond on a yielding thread.
    """
    # The CPU time is a call of the system, the monotonic time is none, and no thread works for longer than time passes.
    if (urgency := _thread.urgency) is None or (wall := time.monotonic_ns()) < _thread.due:
        return
    now = time.thread_time_ns()
    worked = now - _thread.rested
    if worked < _WORK_NS:
        _thread.due = wall + _WORK_NS - worked
        return
    _thread.rested, _thread.due = now, 0
    # At most once a millisecond: it calls the recorder, for which it releases the GIL.
    if (rest := _REST * (1 - urgency())) > 0:
        threads.sleep(min(rest * worked / 1e9, _LONGEST_REST_SECONDS))


def with_pauses(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yields items, and gives way once for some of them: for work of a few microseconds on each. Costs 0.02 us per item."""
    return chain.from_iterable(_in_few(iter(items)))


def _in_few(items: Iterator[_Item]) -> Iterator[tuple[_Item, ...]]:
    while few := tuple(islice(items, _FEW)):
        give_way()
        yield few
