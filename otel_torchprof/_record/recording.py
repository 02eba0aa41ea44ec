"""A recording: what comes from a source of batches between a start and a stop, whatever interrupts either.

Profiles, streams, the instrumentation, metrics and the black box have one each. What differs is given: the session, the sources that feed
it, and who drains it.
"""

from __future__ import annotations

import functools
import os
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from otel_torchprof import config
from otel_torchprof._native.recorder import CHUNK_BYTES
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.after_import import when_imported
from otel_torchprof._process.cleanup import CleanupStack, close_due, without_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.recorder import SessionStats
    from otel_torchprof._sources.source import Source


def checked_memory_limit(given: int | None) -> int:
    """Bytes that a recording may hold: as given, else as the environment says, else 512 MiB.

    Raises:
        TypeError, ValueError: no whole number, or under one chunk.
    """
    limit = config.MEMORY_LIMIT.read() if given is None else given
    if not isinstance(limit, int):
        raise TypeError(f"memory_limit is {limit!r}; it must be a whole number of bytes, or None")
    if not CHUNK_BYTES <= limit < 1 << 63:
        raise ValueError(
            f"memory_limit is {limit} bytes; it must be at least {CHUNK_BYTES}, one chunk, and below 2**63"
        )
    return limit


class Batches(Protocol):
    """Where the events come from: a session of the recorder, or a file that one wrote."""

    def start(self) -> None:
        """Begins."""

    def stop(self) -> None:
        """Ends; again without effect."""

    def drain(self, max_bytes: int = 0) -> Batch:
        """The next events, the oldest first; 0: all there are."""

    def discard(self) -> None:
        """Throws away what was not drained before the stop."""

    def stats(self) -> SessionStats:
        """Figures so far."""

    def reserve(self, reserved: bool) -> None:
        """Keeps what sources know it by from others, until they have stopped, however far it has been read."""

    def after_fork_in_child(self) -> None:
        """In a forked child: whoever held its locks is not in this process."""


class State(Enum):
    """Of a recording. An interrupted start leaves it new, an interrupted stop stopping: the next stop does the rest."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Recording:
    """A source of batches with what feeds it and decorates its batches, from start to stop. Any thread may call any method.

    What it starts it owns: it is stopped in reverse order by :meth:`stop`, when the recording is freed, and at exit, but first of all
    the source of batches, since what stops the others is not recorded. In a forked child it is the parent's: nothing of it runs there,
    it cannot be read, and it may be started anew.

    Args:
        dropped: called where it is freed while it runs.
        raises: whether a stop raises what a source raised; else that is logged.
    """

    batches: Batches
    """Of the latest start."""

    def __init__(self, *, dropped: Callable[[], object] | None = None, raises: bool = False) -> None:
        self.state = State.NEW
        self.lock = threads.RLock()  # a signal handler may stop it in the middle
        """Held while it starts and stops, and while a source is added."""
        self.cleanup = CleanupStack(self, dropped)
        """What stops it, and what else is to be undone then."""
        self._raises = raises
        self._pid = os.getpid()
        self._started: list[Source] = []
        self._call_off: Callable[[], None] = _nothing
        process_changes.watch(self)

    @without_waiting
    def start(self, batches: Batches, sources: Iterable[Source] = ()) -> None:
        """Starts a source of batches, and sources in this order, but first those that start before it.

        Raises:
            NativeError: 16 recordings run already.
            TorchProfError: as :meth:`Source.start`. Nothing is recorded then.
        """
        close_due()
        with self.lock:
            self.batches, self._started, self._pid = batches, [], os.getpid()
            ordered = sorted(sources, key=lambda source: not source.starts_before_session)  # else the order stays
            early = sum(source.starts_before_session for source in ordered)
            self.state = State.RUNNING
            try:
                self.cleanup.push(functools.partial(batches.reserve, False))  # last: the sources have stopped
                for source in ordered[:early]:
                    self._add(source)
                self.stop_batches_first()
                batches.start()
                batches.reserve(True)
                for source in ordered[early:]:
                    self._add(source)
                self.stop_batches_first()
            except BaseException:  # a KeyboardInterrupt too
                self.state = State.NEW
                self.cleanup.close()
                raise

    def add(self, source: Source) -> None:
        """Starts one more source. Raises as :meth:`Source.start`."""
        with self.lock:
            self._add(source)
            self.stop_batches_first()

    def _add(self, source: Source) -> None:
        self.cleanup.push(source.stop)
        source.start(self.batches)  # type: ignore[arg-type]  # a file has no sources
        self._started.append(source)

    def stop_batches_first(self) -> None:
        """Before all that is on the cleanup stack by now."""
        self.cleanup.push(self.batches.stop)

    def when_torch(self, function: Callable[[Any], object]) -> None:
        """Calls a function with the lock once torch is imported, unless the recording has stopped by then."""

        def there(torch: Any) -> None:
            with self.lock:
                if self.state is State.RUNNING:
                    function(torch)

        self._call_off = when_imported("torch", there)

    def leave(self) -> None:
        """In a forked child in which it is not started anew: undoes what came along with the memory, as far as that was pushed there."""
        self.cleanup.close()
        self._call_off()
        self.state = State.STOPPED

    @property
    def running(self) -> bool:
        """Whether it was started, and no stop of it has come to its end."""
        return self.state is State.RUNNING or self.state is State.STOPPING

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that started it."""
        return self._pid != os.getpid()

    def stop(self) -> None:
        """Stops recording; again without effect, but for the rest of a stop that was interrupted.

        Raises:
            NativeError: this process was forked while the parent recorded.
        """
        with self.lock:
            if self.running or not self.cleanup.is_empty:
                self.state = State.STOPPING
                try:
                    self._call_off()
                    if self.is_parents and self._raises:
                        self.batches.stop()  # says so
                    if self._raises:
                        self.cleanup.close()
                    else:
                        self.cleanup.close_and_log()
                except Exception:
                    self.state = State.STOPPED
                    raise
                self.state = State.STOPPED  # only now: a stop that was interrupted is to be called again
        close_due()

    def drain(self, max_bytes: int = 0) -> Batch:
        """The next events, with what the sources know of them."""
        return self.decorated(self.batches.drain(max_bytes))

    def decorated(self, batch: Batch) -> Batch:
        """A batch with what the sources know of its events; once for each batch."""
        for source in self._started:
            batch = source.decorate(batch)
        return batch

    def states(self) -> dict[str, str]:
        """The states of all sources."""
        return {name: state for source in self._started for name, state in source.states().items()}

    def notes(self) -> list[str]:
        """The notes of all sources."""
        return [note for source in self._started for note in source.notes()]

    def after_fork_in_child(self) -> None:
        """In a forked child: whoever held the locks is not in this process. Called by itself."""
        self.lock = threads.RLock()
        if self.state is not State.NEW:
            self.batches.after_fork_in_child()


def _nothing() -> None:
    """What there is to call off where torch is not waited for."""
