"""What the threads of a process were doing at the end of its black box."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.schema import Flag, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def last_moments(contents: Contents) -> list[LastMoment]:
    """By thread, those first that did something last."""
    batch = contents.batch
    is_open = (batch["flags"] & Flag.UNFINISHED) != 0
    latest = np.where(is_open, batch["start"], batch["end"])
    found = []
    for index, thread in enumerate(batch.threads):
        rows = np.flatnonzero(batch["thread"] == index)
        if not len(rows):
            continue
        ended = rows[~is_open[rows]]
        last = int(ended[np.argmax(batch["end"][ended])]) if len(ended) else None
        opens = [
            OpenEvent(
                batch.names[batch["name"][row]], Kind(batch["kind"][row]), _seconds(contents, batch["start"][row])
            )
            for row in rows[is_open[rows]].tolist()
        ]
        found.append(
            LastMoment(
                "main" if thread.os_tid == contents.pid else thread.name,
                thread.os_tid,
                opens,
                "" if last is None else batch.names[batch["name"][last]],
                _seconds(contents, latest[rows].max()),
            )
        )
    return sorted(found, key=lambda moment: moment.idle_seconds)


def python_line(contents: Contents, os_tid: int) -> str:
    """Where Python was on a thread when the watch saw a thread hang: ``train.py:41 load_batch``; empty where that is not known."""
    parts = re.split(r"^Thread ", contents.stacks, flags=re.MULTILINE)[1:]
    own = [part for part in parts if part.startswith(f"{os_tid} ")]
    for path, line, function in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own[0] if own else "", re.MULTILINE):
        if not path.startswith("<") and "/site-packages/" not in path and "/lib/python" not in path:
            return f"{PurePath(path).name}:{line} {function}"
    return ""


def _seconds(contents: Contents, since: int) -> float:
    return max(contents.last_ns - int(since), 0) / 1e9
