"""Samples of Python stacks as a source of a recording."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.batch import RecordedThread
from otel_torchprof._columns.samples import SAMPLES, Samples
from otel_torchprof._native.recorder import thread_known_by
from otel_torchprof._native.stacks import STACKS, Sampling, sample_loop
from otel_torchprof.errors import NativeError
from otel_torchprof.health import ON

from .source import Source

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.recorder import Session


class StackSamples(Source):
    """Samples of the stacks of threads with loops: those with phases or steps, and the thread that starts a profile.

    Args:
        rate: samples a second of each thread.
        all_threads: whether the recording has all threads; otherwise only the thread that starts this source is sampled.
        is_live: whether this is no profile.
    """

    def __init__(self, rate: float, *, all_threads: bool, is_live: bool) -> None:
        self._rate = rate
        self._is_live = is_live
        self._all_threads = all_threads
        self._sampling: Sampling | None = None
        self.state = "off: not started"
        """``on``, or ``off: `` and the reason."""

    def start(self, _session: Session) -> None:
        """Begins; where stacks cannot be read, :attr:`state` says why."""
        hidden = config.HIDDEN_ATTRIBUTES.read() & (config.CODE | {SAMPLES})
        if hidden:
            self.state = f"off: {config.HIDDEN_ATTRIBUTES} has {min(hidden)}"
            return
        try:
            if not self._is_live:
                sample_loop()
            self._sampling = Sampling(self._rate, here=not self._all_threads)
        except NativeError as error:
            self.state = f"off: {error}"
            return
        self.state = ON

    def stop(self) -> None:
        """Ends it."""
        if self._sampling is not None:
            self._sampling.stop()

    def decorate(self, batch: Batch) -> Batch:
        """Returns the batch with the samples before its watermark that no earlier batch had."""
        taken = None if self._sampling is None else self._sampling.take(batch.watermark)
        if taken is None or not len(taken):
            return batch
        threads = list(batch.threads)
        pairs, of_row = np.unique(taken[["ident", "os_tid"]], return_inverse=True)
        known = {(thread.ident, thread.os_tid): at for at, thread in enumerate(threads)}
        indices = []
        for ident, os_tid in pairs.tolist():
            at = known.get((ident, os_tid))
            if at is None:
                at = len(threads)
                threads.append(thread_known_by(ident, os_tid) or RecordedThread(os_tid, ident, 0, ""))
            indices.append(at)
        samples = Samples(
            taken["time"].copy(),
            taken["duration"].copy(),
            np.array(indices, np.int64)[of_row],
            taken["stack"].astype(np.int64),
            STACKS,
        )
        return replace(batch, threads=tuple(threads), samples=samples)

    def states(self) -> dict[str, str]:
        """Under ``samples``."""
        return {"samples": self.state}

    def notes(self) -> list[str]:
        """Notes if samples were lost, or if some name callers only; else none."""
        lost, cut = (0, 0) if self._sampling is None else (self._sampling.lost, self._sampling.cut)
        return [
            *([f"{lost} samples of Python stacks were dropped: they were not read in time"] if lost else []),
            *(
                [f"{cut} samples of Python stacks name callers only: the process has too many different calls"]
                if cut
                else []
            ),
        ]
