"""The segments of a profile: it may be paused, entered again, and record one cycle of steps after another."""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._columns.joined import joined
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.cleanup import without_waiting
from otel_torchprof._process.profiler_flag import profiler_flag
from otel_torchprof.errors import TorchProfError

from .recording import Recording, say_dropped

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._sources.recording_options import RecordingOptions
    from otel_torchprof.health import Health


class Segments:
    """Recordings one after another, read as one batch. Any thread may end or read them.

    Args:
        options: what each of them records.

    Raises:
        TypeError, ValueError, TorchLibraryError: as :class:`Recording`.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self._options = options
        self._next: Recording | None = Recording(options)
        self._recordings: list[Recording] = []
        self._running: Recording | None = None
        self._kept: Batch | None = None
        self._figures: list[Health] = []
        self._times: tuple[int, int] | None = None
        self._pid = os.getpid()
        self.after_fork_in_child()
        process_changes.watch(self)

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that recorded."""
        return self._pid != os.getpid()

    @property
    def running(self) -> bool:
        """Whether a segment is being recorded."""
        return self._running is not None

    def prepare(self) -> None:
        """Makes the next segment ready, so that it begins quickly."""
        with self._lock:
            if self._next is None or self._next.is_parents:
                self._next = Recording(self._options)

    @without_waiting
    def begin(self) -> int:
        """Starts a segment on the calling thread; returns when it began, Unix ns.

        Raises:
            NativeError: 16 recordings run already.
        """
        with self._lock:
            self.prepare()
            recording = self._next or Recording(self._options)
            flag = object()
            recording.cleanup.push(functools.partial(profiler_flag.down, flag))
            recording.cleanup.at_exit = say_dropped
            recording.start()
            self._pid = os.getpid()
            self._next, self._running = None, recording
            self._recordings.append(recording)
        profiler_flag.up(flag)
        return recording.times()[0]

    def time_devices(self, *, on: bool) -> None:
        """Continues with the times of devices in the segment that is running, or leaves them out."""
        with self._lock:
            if self._running is not None:
                self._running.time_devices(on=on)

    def end(self) -> int:
        """Ends the segment that is running, if one is; returns when the last one ended, Unix ns.

        Raises:
            NativeError: this process was forked while the parent recorded.
        """
        with self._lock:
            running = self._running
            if running is not None:
                try:
                    running.stop()
                finally:
                    self._running = running if running.running else None
        return self.times()[1]

    def clear(self) -> None:
        """Forgets what was recorded."""
        with self._lock:
            self._kept, self._times = None, None
            self._recordings = [] if self._running is None else [self._running]
            self._figures = []

    def batch(self) -> Batch:
        """All events; the same object until another segment begins.

        Raises:
            TorchProfError: a segment is running.
        """
        with self._lock:
            if self._running is not None:
                raise TorchProfError("the profile is still recording: read it after its `with` block, or after stop()")
            if self._kept is None or self._recordings:
                self._keep()
            return joined([]) if self._kept is None else self._kept  # one without events is false too

    def _keep(self) -> None:
        """Joins what is new to what is kept, so that nothing is held twice."""
        fresh = [recording.batch() for recording in self._recordings]
        self._figures += [recording.health() for recording in self._recordings]
        if self._recordings:
            self._times = self.times()
        self._kept = joined(fresh if self._kept is None else [self._kept, *fresh])
        self._recordings = []

    def after_fork_in_child(self) -> None:
        """In a forked child: whoever held the locks is not in this process. Called by itself."""
        self._lock = threads.RLock()
        self.stopping = threads.RLock()
        """Held while the profile stops; reentrant, since what is called when a trace is ready may stop it."""
        self.reading = threads.Lock()
        """Held while the profile makes its results."""

    def times(self) -> tuple[int, int]:
        """When the first one started and the last one stopped, Unix ns; now where they have not."""
        with self._lock:
            known = [] if self._times is None else [self._times]
            known += [recording.times() for recording in self._recordings]
            if not known:
                known = [(self._next or Recording(self._options)).times()]
            return known[0][0], known[-1][1]

    def health(self) -> Health:
        """State and figures of all segments."""
        with self._lock:
            states = [*self._figures, *(recording.health() for recording in self._recordings)]
            if not states:
                return (self._next or Recording(self._options)).health()
        dropped: Counter[str] = Counter()
        for state in states:
            dropped.update(state.dropped)
        return replace(
            states[-1],
            recorded=sum(state.recorded for state in states),
            dropped=dict(dropped),
            memory_bytes=max(state.memory_bytes for state in states),
            start_ns=states[0].start_ns,
            notes=tuple(dict.fromkeys(note for state in states for note in state.notes)),
        )
