"""What the threads of a process were doing at the end of its black box."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.blackbox import THREAD_AT
from otel_torchprof._native.recorder import SLICE_BYTES
from otel_torchprof._process.threads import NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._columns.batch import Array, Batch, Thread
    from otel_torchprof._native.blackbox import Contents


class OpenEvent(NamedTuple):
    """An event that had not ended."""

    name: str
    kind: Kind
    seconds: float
    """How long it had been open."""


class LastMoment(NamedTuple):
    """A thread at the end."""

    name: str
    os_tid: int
    open: Sequence[OpenEvent]
    """The root first; none where nothing was open."""
    last_ended: str
    """The event that ended last; empty where none did."""
    idle_seconds: float
    """Since the thread last began or ended anything."""


def last_moments(contents: Contents) -> tuple[list[LastMoment], int]:
    """By thread, without those of this package, those first that did something last; and how many events there are."""
    threads: dict[int, _Seen] = {}
    count = 0
    for batch in contents.events(SLICE_BYTES):
        count += len(batch)
        for index in distinct_values(batch["thread"]).tolist():
            rows = np.flatnonzero(batch["thread"] == index)
            thread = int(batch["id"][rows[0]]) >> THREAD_AT  # the system gives a number again
            threads.setdefault(thread, _Seen(batch.threads[index])).add(batch, rows, contents)
    moments = [seen.moment(contents) for seen in threads.values() if not seen.is_own]
    return sorted(moments, key=lambda moment: moment.idle_seconds), count


class _Seen:
    """A thread, as far as its events have been read."""

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._open: list[OpenEvent] = []
        self._last_ended = ""
        self._ended, self._active = -1, 0

    @property
    def is_own(self) -> bool:
        """Whether it is one of this package's."""
        return self._thread.name.startswith(NAME)

    def add(self, batch: Batch, rows: Array, contents: Contents) -> None:
        is_open = (batch["flags"][rows] & Flag.UNFINISHED) != 0
        ended, opened = rows[~is_open], rows[is_open]
        if len(ended):
            last = int(ended[np.argmax(batch["end"][ended])])
            if (end := int(batch["end"][last])) > self._ended:
                self._ended, self._last_ended = end, batch.names[batch["name"][last]]
        self._active = max(self._active, self._ended, int(batch["start"][opened].max(initial=0)))
        self._open += (
            OpenEvent(
                batch.names[batch["name"][row]], Kind(batch["kind"][row]), _seconds(contents, batch["start"][row])
            )
            for row in opened.tolist()
        )

    def moment(self, contents: Contents) -> LastMoment:
        name = "main" if self._thread.os_tid == contents.pid else self._thread.name
        idle = _seconds(contents, self._active)
        return LastMoment(name, self._thread.os_tid, self._open, self._last_ended, idle)


def python_line(contents: Contents, os_tid: int) -> str:
    """Where Python was on a thread when the watch saw a thread hang: ``train.py:41 load_batch``; empty where that is not known."""
    parts = re.split(r"^Thread ", contents.stacks, flags=re.MULTILINE)[1:]
    own = [part for part in parts if part.startswith(f"{os_tid} ")]
    for path, line, function in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own[0] if own else "", re.MULTILINE):
        if not path.startswith("<") and "/site-packages/" not in path and "/lib/python" not in path:
            return f"{PurePath(path).name}:{line} {function}"
    return ""


def stacks_of_program(stacks: str) -> list[str]:
    """Lines of Python's stacks, without the threads in which only this package runs."""
    parts = re.split(r"^(?=(?:Current t|T)hread )", stacks, flags=re.MULTILINE)
    return [line for part in parts if not _is_own(part) for line in part.splitlines()]


def _is_own(stack: str) -> bool:
    paths = re.findall(r'^  File "(.*?)", line', stack, re.MULTILINE)
    others = [
        path
        for path in paths
        if not path.startswith("<") and not re.search(r"/lib/python[\d.]+/(?!site-packages)", path)
    ]
    return bool(others) and all("/otel_torchprof/" in path for path in others)


def _seconds(contents: Contents, since: int) -> float:
    return max(contents.last_ns - int(since), 0) / 1e9
