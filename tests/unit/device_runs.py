"""What a made-up device does for a made-up program: streams that run what they are given in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import DEVICE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable

WEEK_NS = 7 * 24 * 3600 * 10**9
MAIN, AUTOGRAD = RecordedThread(111, 1, 1, "main"), RecordedThread(112, 2, 2, "autograd")


class Pair(NamedTuple):
    """The marks of the event with this id."""

    event: int
    start: int
    duration: int
    stream: int = 0
    device_index: int = 0
    device_type: int = 1


def device_columns(pairs: Iterable[Pair]) -> dict[str, list[int]]:
    """The columns of :attr:`Batch.devices`; times count from a week's begin."""
    rows = [pair._replace(start=pair.start + WEEK_NS) for pair in pairs]
    return {name: [getattr(row, name) for row in rows] for name in Pair._fields}


def cuda_pairs(*rows: tuple[int, int, int, int]) -> dict[str, Any]:
    """Columns of pairs (event, stream, duration in us, device index) that begin at 7 us."""
    event, stream, duration, index = np.array(rows, np.int64).T
    found = {"event": event, "stream": stream, "duration": duration * 1000, "device_index": index}
    found |= {"start": np.full(len(rows), 7000), "device_type": np.ones(len(rows))}
    return {column.name: found[column.name].astype(column.dtype) for column in DEVICE_COLUMNS}


def batch_of(times: list[tuple[int, int]], pairs: Iterable[Pair] = (), **columns: Any) -> Batch:
    """Events with these begins and ends, ids from 1 and names ``op1``, ``op2``, ..."""
    given = {"start": [a + WEEK_NS for a, _ in times], "end": [b + WEEK_NS for _, b in times]}
    given |= {"name": range(1, len(times) + 1), "parent": [-1] * len(times)}
    if "thread" in columns:
        columns.setdefault("end_thread", columns["thread"])
    names = ["", *(f"op{number}" for number in range(1, len(times) + 1))]
    return Batch.of(given | columns, names, (MAIN, AUTOGRAD), devices=device_columns(pairs))


class Program:
    """Random nested events of one thread, each with marks on one of some streams, run in the order of the marks."""

    def __init__(self, seed: int, events: int, streams: int) -> None:
        self._random = np.random.default_rng(seed)
        self._now = 0
        self._clock = [0] * streams
        self.times: list[list[int]] = []
        self.parents: list[int] = []
        self.pairs: list[Pair] = []
        while len(self.times) < events:
            self._event(-1, events)

    def batch(self, *, behind: int = 0, rounding: int = 1) -> Batch:
        """With begins on the device that are told too early by so much, and rounded to multiples of ``rounding`` ns."""
        pairs = [pair._replace(start=(pair.start - behind) // rounding * rounding) for pair in self.pairs]
        shuffled = self._random.permutation(len(pairs)).tolist()
        return batch_of([(a, b) for a, b in self.times], [pairs[at] for at in shuffled], parent=self.parents)

    def _mark(self, stream: int) -> int:
        """The device comes to a mark when it is told to, and has done what was given before."""
        self._clock[stream] = max(self._clock[stream], self._now)
        return self._clock[stream]

    def _event(self, parent: int, events: int) -> None:
        row, stream = len(self.times), int(self._random.integers(len(self._clock)))
        self.times.append([self._step(), 0])
        self.parents.append(parent)
        begin = self._mark(stream)
        while len(self.times) < events and self._random.random() < 0.45:
            self._event(row, events)
        self._step()
        self._clock[stream] += int(self._random.integers(3000))
        self.pairs.append(Pair(row + 1, begin, self._mark(stream) - begin, stream))
        self.times[row][1] = self._step()

    def _step(self) -> int:
        self._now += int(self._random.integers(1, 1500))
        return self._now
