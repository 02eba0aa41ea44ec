"""Profiles and batches with made-up samples of Python stacks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.samples import Call, Samples

if TYPE_CHECKING:
    from collections.abc import Sequence

MS = 1_000_000
LOG, MAIN = Call("train.py", 5, "log_metrics"), Call("train.py", 22, "main")
DEEP = Call("/usr/lib/python3/site-packages/torch/optim/adam.py", 200, "Adam.step")
STACKS = [(LOG, MAIN), (DEEP, Call("train.py", 30, "main")), (Call("a dir/x:3.py", 9, "f.<locals>.<lambda>"),)]
THREADS = (RecordedThread(7, 70, 1, "main"), RecordedThread(8, 80, 0, "other"))


def samples(
    times: Sequence[int], stack: Sequence[int], thread: Sequence[int] | None = None, stacks: Sequence = STACKS
) -> Samples:
    """Samples at some times (ns), 10 ms each."""
    columns = (times, [10 * MS] * len(times), thread or [0] * len(times), stack)
    return Samples(*(np.array(column, np.int64) for column in columns), stacks)


def batch(taken: Samples | None, *events: tuple[int, int, int]) -> Batch:
    """A batch with samples, and events of a start, an end and a thread."""
    start, end, thread = zip(*events, strict=True) if events else ((), (), ())
    columns = {"start": start, "end": end, "thread": thread, "name": [1] * len(start)}
    return Batch.of(columns, ["", "work"], THREADS, samples=taken)


def profile_with(taken: Samples, *, steps: bool = True, start: int = 10**18) -> otp.profile:
    """A finished profile of two steps of 30 ms with events on their thread, or of none; samples from its start on."""
    with otp.profile() as prof:
        pass
    moved = replace(taken, time=taken.time + start)
    events = [(start + at, start + at + 5 * MS, 0) for at in range(MS, 60 * MS, 10 * MS)]
    recorded = batch(moved, *events, (start + MS, start + 2 * MS, 1))
    prof._segments.batch = lambda: recorded
    prof._segments.times = lambda: (start, start + 60 * MS)
    if steps:
        from otel_torchprof._model.step_spans import RecordedStep

        prof._steps = lambda: [
            RecordedStep(number, start + number * 30 * MS, start + (number + 1) * 30 * MS, 70) for number in range(2)
        ]
    return prof


def written(found: Samples) -> list[tuple[int, int, tuple[Call, ...]]]:
    """Time in us, duration in us, and stack of each sample."""
    return [
        (round(time / 1000), round(duration / 1000), tuple(found.stacks[stack]))
        for time, duration, stack in zip(
            found.time.tolist(), found.duration.tolist(), found.stack.tolist(), strict=True
        )
    ]


def sampled_drains(processor):
    """Returns a list: times in it become samples of the main thread, with the first stack, with the next drain of the processor."""
    recording = processor._attached._recording
    drain, given = recording.drain, []

    def sampled(most):
        drained, times = drain(most), [given.pop(0) for _ in tuple(given)]
        thread = [number for number, known in enumerate(drained.threads) if known.name == "MainThread"]
        return replace(drained, samples=samples(times, [0] * len(times), thread * len(times)))

    recording.drain = sampled
    return given
