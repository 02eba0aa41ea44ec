"""Threads that wait where no call and no return is told of."""

from __future__ import annotations

import contextlib
import operator
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS = 30
_call = operator.methodcaller("__call__")


class Gate:
    """Where a thread waits until it is let on: in C functions called by C functions, which no tracer is told of."""

    def __init__(self) -> None:
        self._there, self._open, self._stay = threading.Lock(), threading.Lock(), False
        self._there.acquire()
        self._open.acquire()

    def calls(self, *after: Callable[[], object]) -> Iterator[object]:
        """What the thread has to run to the end: ``list(gate.calls())``. ``after``: what C functions call behind the gate."""
        return map(_call, [self._there.release, self._open.acquire, *after])

    def wait(self) -> None:
        """Waits, on the thread."""
        list(self.calls())

    def reached(self) -> None:
        """Waits until the thread is there, or nearly: it calls nothing more before."""
        assert self._there.acquire(timeout=_SECONDS)

    def open(self) -> None:
        """Lets the thread on."""
        self._open.release()


@contextlib.contextmanager
def waiting(program: Callable[[Gate], object], name: str = "waiter") -> Iterator[tuple[Gate, threading.Thread]]:
    """A thread that runs a program up to the gate; it goes on and ends in the end, if it has not before."""
    gate = Gate()
    thread = threading.Thread(target=program, args=(gate,), name=name)
    thread.start()
    gate.reached()
    try:
        yield gate, thread
    finally:
        if gate._open.locked():  # nobody has opened it
            gate.open()
        thread.join(_SECONDS)


def rows_of_thread(found: Any, name: str = "waiter") -> list[dict[str, Any]]:
    """The rows of a thread, each with its columns, its name as text."""
    columns = {column: values.tolist() for column, values in found.columns.items()}
    threads, names = found.threads, found.names
    return [
        {**{column: values[at] for column, values in columns.items()}, "row": at, "name": names[columns["name"][at]]}
        for at, thread in enumerate(columns["thread"])
        if threads[thread].name == name
    ]
