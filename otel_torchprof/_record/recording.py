"""One bounded recording: the session, the observer of torch's operators, and what came of it.

What ``profile`` does between its start and its stop, without torch's names around it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from otel_torchprof import config
from otel_torchprof._columns.batch import Batch
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import CHUNK_BYTES, Session, notes_on_names, now_ns, recorder_stats
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.cleanup import CleanupStack, close_due, without_waiting
from otel_torchprof._sources.catalog import Request, requested
from otel_torchprof._sources.device_source import DeviceSource
from otel_torchprof._sources.energy_source import EnergySource
from otel_torchprof._sources.frame_filter import ALL_FRAMES
from otel_torchprof._sources.function_labels import label_by_environment, notes_of_environment
from otel_torchprof._sources.source import Calls, Source, Sources
from otel_torchprof._tree.frames import ShortFrames, with_info
from otel_torchprof._tree.input_words import InputKept, kept
from otel_torchprof._tree.waiting import with_waiting
from otel_torchprof.errors import NativeError, TorchProfError
from otel_torchprof.health import ON, Health

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.waiting import WaitingStack
    from otel_torchprof._sources.recording_options import RecordingOptions


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


_logger = logging.getLogger("otel_torchprof")
_S = TypeVar("_S", bound=Source)

_OFF_BY_SWITCH = f"off: {config.ENABLED} is false"


class Recording:
    """Starts once, stops once, is read as often as wanted. Any thread may stop or read it.

    Raises:
        TypeError, ValueError: a memory limit that is no whole number, or under one chunk.
        TorchLibraryError: operators are wanted and cannot be recorded; the message names the fix.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self._limit = checked_memory_limit(options.memory_limit)
        self.options = options
        self._sources: Sources | None = None
        self._clock_steps = 0
        self._names_refused: Mapping[str, int] = {}
        self._times = (0, 0)
        self._pid = os.getpid()
        self._batch: Batch | None = None
        self._waiting: list[WaitingStack] = []
        self._lock = threads.Lock()
        self._started = self._stopped = False
        self.cleanup = CleanupStack(self, say_dropped)
        """What stops it, and what else is to be undone then."""
        self._operators = self._state_of_operators(options.operators)
        self._library: torch_library.TorchLibrary | None = None
        if self._operators == ON or self._can_record_more():
            self._library = torch_library.load()
        process_changes.watch(self)
        self._short_frames = ShortFrames(options.frame_filter.min_duration)
        self._requested: list[Source] = []
        if config.ENABLED.read():
            self._requested = list(requested(Request(options, self._library, self._limit)))
        self._calls = self._of(Calls)
        self._devices = self._of(DeviceSource)
        self._energy = self._of(EnergySource)

    def _of(self, kind: type[_S]) -> _S | None:
        return next((source for source in self._requested if isinstance(source, kind)), None)

    @staticmethod
    def _state_of_operators(operators: bool | None) -> str:
        if not config.ENABLED.read():
            return _OFF_BY_SWITCH
        if operators is False:
            return "off: operators=False"
        if operators is None and torch_library.installed_torch() is None:
            return "off: torch is not installed"
        return ON

    def _can_record_more(self) -> bool:
        return (
            (self.options.memory or self.options.times_device)
            and config.ENABLED.read()
            and torch_library.installed_torch() is not None
        )

    @without_waiting
    def start(self) -> None:
        """Starts recording on the calling thread (or all).

        Raises:
            NativeError: 16 recordings run already.
            TorchProfError: memory is wanted, and a profiler of torch's is running on the thread; nothing is recorded then.
        """
        close_due()
        if not config.ENABLED.read():
            self._times = now_ns(), 0
            self._started = True
            return
        label_by_environment()
        recorder = recorder_stats()
        self._clock_steps, self._names_refused = recorder.clock_steps, recorder.names_refused
        session = Session(
            self._limit,
            all_threads=self.options.all_threads,
            inputs=self.options.info() != 0,
            memory=self.options.memory,
            devices=self.options.times_device,
            kinds=self.options.kinds(),
        )
        self._sources = sources = Sources(session, self.cleanup)
        try:
            sources.start(self._requested)
        except BaseException:  # a KeyboardInterrupt too
            self._sources = None
            self.cleanup.close()
            raise
        self._started = True

    @property
    def running(self) -> bool:
        """Whether it was started, and no stop of it has come to its end."""
        return self._started and not self._stopped

    def time_devices(self, *, on: bool) -> None:
        """Continues with the times of devices, or leaves them out."""
        if self._devices is not None:
            self._devices.pause(paused=not on)

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that made the recording."""
        return self._pid != os.getpid()

    def stop(self) -> None:
        """Stops recording; again without effect, but for the rest of a stop that was interrupted.

        Raises:
            NativeError: this process was forked while the parent recorded.
        """
        if not self.running:
            close_due()
            return
        try:
            if self._sources is None:
                self._times = self._times[0], now_ns()
            elif self.is_parents:
                self._sources.session.stop()  # says so
            elif self._calls is not None:
                self._waiting = self._waiting or self._calls.waiting()
            self.cleanup.close()
        except Exception:
            self.cleanup.close()
            self._stopped = True
            raise
        self._stopped = True  # only now: a stop that was interrupted is to be called again
        close_due()

    def batch(self) -> Batch:
        """All events; empty when nothing was recorded. The same object every time.

        Raises:
            TorchProfError: it has not stopped yet.
        """
        if self.running:
            raise TorchProfError("the profile is still recording: read it after its `with` block, or after stop()")
        if self._sources is None:
            return Batch.of({"start": []}, [""])
        with self._lock:
            if self._batch is None:
                drained = self._sources.decorated(self._sources.session.final_batch())
                whole = with_waiting(drained, self._waiting, self.times())
                own = kept(whole, InputKept(int(self.options.info())), torch_library.Observation.ever_requested)
                self._batch = self._with_own_info(own)
            return self._batch

    def _with_own_info(self, batch: Batch) -> Batch:
        """Without short calls, and with the facts of those that are in it."""
        left = self._short_frames.without(batch)
        info = left.frame_info
        return left if info is None else with_info(left, replace(info, since=self.times()[0]))

    def drain(self) -> Batch:
        """The events that have ended since the last drain; may run meanwhile. What is open then comes with a later drain.

        For a recording that is only ever read like this. Threads that only wait have no calls in it.

        Raises:
            NativeError: another thread drains it, or this process was forked from the one that recorded.
        """
        if self._sources is None:
            return Batch.of({"start": []}, [""])
        return self._with_own_info(self._sources.drain())

    def times(self) -> tuple[int, int]:
        """When it started and stopped, Unix ns; now where it has not. In a forked child as last asked in the parent."""
        if self._sources is not None and not self.is_parents:
            stats = self._sources.session.stats()
            self._times = stats.start_ns, stats.stop_ns
        start, stop = self._times
        return start or now_ns(), stop or now_ns()

    def after_fork_in_child(self) -> None:
        """In a forked child: whoever held the locks is not in this process. Called by itself."""
        self._lock = threads.Lock()
        if self._sources is not None:
            self._sources.session.after_fork_in_child()

    def health(self) -> Health:
        """State and figures so far."""
        labels = ON if config.ENABLED.read() else _OFF_BY_SWITCH
        notes = [*self._notes(), *notes_of_environment()]
        devices, energy = self._state_of_devices(), "off: not asked for" if self._energy is None else self._energy.state
        if not config.ENABLED.read():
            devices = _OFF_BY_SWITCH if self.options.times_device else devices
            energy = _OFF_BY_SWITCH if self.options.reads_energy else energy
        state = Health(self._operators, labels, 0, {}, 0, self._limit, devices=devices, energy=energy)
        if self._sources is None:
            return state
        try:
            stats = self._sources.session.stats()
        except NativeError as error:
            forked = f"off: {error}"
            return Health(forked, forked, 0, {}, 0, self._limit, devices=forked, energy=forked)
        recorder = recorder_stats()
        if recorder.clock_steps > self._clock_steps:
            notes.append(f"the wall clock was set {recorder.clock_steps - self._clock_steps} times meanwhile")
        notes += notes_on_names(self._names_refused)
        recorded = 0 if self.running else _entries(self.batch())
        return Health(
            self._operators,
            labels,
            recorded,
            stats.dropped,
            stats.bytes_buffered_max,
            self._limit,
            stats.start_ns,
            stats.stop_ns,
            tuple(notes),
            devices=devices,
            energy=energy,
        )

    def _state_of_devices(self) -> str:
        if self._devices is not None:
            return self._devices.state
        if self.options.device_events == "off":
            return "off: device_events='off'"
        return f"off: {self.options.untimed}" if self.options.device is None else "off: torch is not installed"

    def _notes(self) -> list[str]:
        """What is off, and what the sources say; nothing before the start."""
        if self._sources is None:
            return []
        notes = []
        if self.options.memory and self._library is None:
            notes.append("memory is not recorded: torch is not installed")
        if self._calls is None and self.options.frame_filter != ALL_FRAMES:
            notes.append("frames off: a filter of calls was given without with_stack=True")
        told = ("devices", "energy")  # by fields of their own
        notes += [
            f"{name} {state}" for name, state in self._sources.states().items() if state != ON and name not in told
        ]
        return notes + self._sources.notes()


def say_dropped() -> None:
    """Warns of a profile that nobody has stopped, and never will."""
    _logger.warning(
        "a profile was dropped while it recorded, without stop(), and its events with it: use `with profile():`, or "
        "call stop() before it is collected or the program ends"
    )


def _entries(batch: Batch) -> int:
    """Rows, and records of memory, which a full memory leaves out alike."""
    return len(batch) + (0 if batch.memory is None else len(batch.memory["time"]))
