"""One bounded recording: the session, the observer of torch's operators, and what came of it.

What ``profile`` does between its start and its stop, without torch's names around it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from . import config
from ._columns.batch import Batch
from ._native import torch_library
from ._native.recorder import CHUNK_BYTES, Session, now_ns, recorder_stats
from .errors import NativeError, TorchProfError
from .health import ON, Health

if TYPE_CHECKING:
    from ._native.torch_library import Observation


def checked_memory_limit(given: int | None) -> int:
    """Bytes that a recording may hold: as given, else as the environment says, else 512 MiB.

    Raises:
        TypeError, ValueError: no whole number, or under one chunk.
    """
    limit = config.memory_limit() if given is None else given
    if not isinstance(limit, int):
        raise TypeError(f"memory_limit is {limit!r}; it must be a whole number of bytes, or None")
    if not CHUNK_BYTES <= limit < 1 << 63:
        raise ValueError(
            f"memory_limit is {limit} bytes; it must be at least {CHUNK_BYTES}, one chunk, and below 2**63"
        )
    return limit


_OFF_BY_SWITCH = f"off: {config.OTEL_TORCHPROF_ENABLED} is false"


class Recording:
    """Starts once, stops once, is read as often as wanted. Any thread may stop or read it.

    Args:
        operators: True: torch's operators must be recorded, else an error; None: if the program has torch; False: labels only.
        inputs: record shapes.
        all_threads: every thread.
        memory_limit: bytes that may be held in the recorder; None: as the environment says, else 512 MiB.

    Raises:
        TypeError, ValueError: a memory limit that is no whole number, or under one chunk.
        TorchLibraryError: operators are wanted and cannot be recorded; the message names the fix.
    """

    def __init__(self, *, operators: bool | None, inputs: bool, all_threads: bool, memory_limit: int | None) -> None:
        self._limit = checked_memory_limit(memory_limit)
        self._inputs = inputs
        self._all_threads = all_threads
        self._session: Session | None = None
        self._observation: Observation | None = None
        self._clock_steps = 0
        self._times = (0, 0)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.running = False
        self._library, self._operators = self._find_library(operators)

    @staticmethod
    def _find_library(operators: bool | None) -> tuple[torch_library.TorchLibrary | None, str]:
        if not config.enabled():
            return None, _OFF_BY_SWITCH
        if operators is False:
            return None, "off: operators=False"
        if operators is None and torch_library.installed_torch() is None:
            return None, "off: torch is not installed"
        return torch_library.load(), ON

    def start(self) -> None:
        """Starts recording on the calling thread (or all).

        Raises:
            NativeError: 16 recordings run already.
        """
        if not config.enabled():
            self._times = now_ns(), 0
            self.running = True
            return
        self._clock_steps = recorder_stats().clock_steps
        self._session = Session(self._limit, all_threads=self._all_threads, inputs=self._inputs)
        self._session.start()
        if self._library is not None:
            try:
                self._observation = self._library.observe(self._session)
            except TorchProfError:
                self._session.stop()
                raise
        self.running = True

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that made the recording."""
        return self._pid != os.getpid()

    def stop(self) -> None:
        """Stops recording.

        Raises:
            NativeError: this process was forked while the parent recorded.
        """
        with self._lock:
            running, self.running = self.running, False
        if not running:
            return
        if self._session is None:
            self._times = self._times[0], now_ns()
            return
        if self._observation is not None:
            self._observation.stop()
        self._session.stop()

    def batch(self) -> Batch:
        """All events; empty when nothing was recorded. The same object every time.

        Raises:
            TorchProfError: it has not stopped yet.
        """
        if self.running:
            raise TorchProfError("the profile is still recording: read it after its `with` block, or after stop()")
        if self._session is None:
            return Batch.of({"start": []}, [""])
        return self._session.final_batch()

    def times(self) -> tuple[int, int]:
        """When it started and stopped, Unix ns; now where it has not. In a forked child as last asked in the parent."""
        if self._session is not None and not self.is_parents:
            stats = self._session.stats()
            self._times = stats.start_ns, stats.stop_ns
        start, stop = self._times
        return start or now_ns(), stop or now_ns()

    def health(self) -> Health:
        """State and figures so far."""
        labels = ON if config.enabled() else _OFF_BY_SWITCH
        notes: list[str] = []
        state = Health(self._operators, labels, 0, {}, 0, self._limit)
        if self._session is None:
            return state
        try:
            stats = self._session.stats()
        except NativeError as error:
            forked = f"off: {error}"
            return Health(forked, forked, 0, {}, 0, self._limit)
        recorder = recorder_stats()
        if recorder.clock_steps > self._clock_steps:
            notes.append(f"the wall clock was set {recorder.clock_steps - self._clock_steps} times meanwhile")
        if recorder.names_refused:
            notes.append(f"{recorder.names_refused} names came after the table of 1048576 names was full")
        recorded = 0 if self.running else len(self.batch())
        return Health(
            self._operators,
            labels,
            recorded,
            stats.dropped,
            stats.bytes_held_max,
            self._limit,
            stats.start_ns,
            stats.stop_ns,
            tuple(notes),
        )
