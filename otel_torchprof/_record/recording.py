"""A recording: starts and stops a source of batches, safely with respect to interrupts.

Profiles, streams, the instrumentation, metrics and the black box have one each, with different sessions, sources and
drains. A profile has a segment for each cycle of steps and for each restart; every segment is bounded and
drained as a whole, and they are joined at the end.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

from otel_torchprof import config
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.joined import joined
from otel_torchprof._model.frames import ShortFrames, with_info
from otel_torchprof._model.inputs import InputKept, kept
from otel_torchprof._model.waiting import with_waiting
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import CHUNK_BYTES, Session, notes_on_names, now_ns, recorder_stats
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.after_import import when_imported
from otel_torchprof._process.cleanup import CleanupStack, close_due, without_waiting
from otel_torchprof._process.profiler_flag import profiler_flag
from otel_torchprof.errors import NativeError, TorchProfError
from otel_torchprof.health import ON, Health

from .catalog import SourceRequest, requested
from .device_source import DeviceSource
from .energy_source import EnergySource
from .frame_filter import ALL_FRAMES
from .function_labels import label_by_environment, notes_of_environment
from .source import Calls, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from otel_torchprof._columns.batch import WaitingStack
    from otel_torchprof._native.recorder import SessionStats

    from .source import RecordingOptions

_logger = logging.getLogger("otel_torchprof")
_S = TypeVar("_S", bound=Source)

_OFF_BY_SWITCH = f"off: {config.ENABLED} is false"


class Batches(Protocol):
    """Source of events: a session of the recorder, or a file written by one."""

    def start(self) -> None:
        """Starts."""

    def stop(self) -> None:
        """Stops; repeated calls have no effect."""

    def drain(self, max_bytes: int = 0) -> Batch:
        """Returns the next events, the oldest first; 0: all."""

    def discard(self) -> None:
        """Drops the events that were not drained before the stop."""

    def stats(self) -> SessionStats:
        """Returns the counts so far."""

    def reserve(self, reserved: bool) -> None:
        """Keeps the session's bit from other sessions until its sources have stopped, even if it was drained."""

    def after_fork_in_child(self) -> None:
        """Renews locks in a forked child, where their holder may not exist."""


class State(Enum):
    """State of a recording. After an interrupted start it is NEW, after an interrupted stop STOPPING: the next stop does the rest."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Recording:
    """Runs a source of batches, and the sources that feed it and decorate its batches. Thread-safe.

    Stops everything in :meth:`stop`, when it is freed, and at exit: first the source of batches, so that stopping is not
    recorded, then the others in reverse order. In a forked child it does not run and cannot be read, but may be started again.

    Args:
        dropped: called if it is freed while running.
        raises: whether a stop raises errors of sources; else they are logged.
    """

    batches: Batches
    """The source of batches of the latest start."""

    def __init__(self, *, dropped: Callable[[], object] | None = None, raises: bool = False) -> None:
        self.state = State.NEW
        self.lock = threads.RLock()  # a signal handler may stop it in the middle
        """Held during start and stop, and while a source is added."""
        self.cleanup = CleanupStack(self, dropped)
        """Functions that the stop calls."""
        self._raises = raises
        self._pid = os.getpid()
        self._started: list[Source] = []
        self._call_off: Callable[[], None] | None = None
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
            ordered = sorted(sources, key=lambda source: not source.starts_before_session)  # stable
            early = sum(source.starts_before_session for source in ordered)
            self.state = State.RUNNING
            try:
                self.cleanup.push(
                    functools.partial(batches.reserve, False)
                )  # called last, when the sources have stopped
                for source in ordered[:early]:
                    self._add(source)
                self.stop_batches_first()
                batches.start()
                batches.reserve(True)
                for source in ordered[early:]:
                    self._add(source)
                self.stop_batches_first()
            except BaseException:  # including KeyboardInterrupt
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
        """Makes the source of batches stop before everything on the cleanup stack."""
        self.cleanup.push(self.batches.stop)

    def when_torch(self, function: Callable[[Any], object]) -> None:
        """Calls a function with the lock once torch is imported, unless the recording has stopped by then."""

        def on_import(torch: Any) -> None:
            with self.lock:
                if self.state is State.RUNNING:
                    function(torch)

        self._call_off = when_imported("torch", on_import)

    def leave(self) -> None:
        """Stops it in a forked child in which it is not restarted: calls the cleanup functions that were pushed in the child."""
        self.cleanup.close()
        if self._call_off is not None:
            self._call_off()
        self.state = State.STOPPED

    @property
    def running(self) -> bool:
        """Whether it was started and has not completely stopped."""
        return self.state is State.RUNNING or self.state is State.STOPPING

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that started it."""
        return self._pid != os.getpid()

    def stop(self) -> None:
        """Stops recording. A repeated call only completes an interrupted stop.

        Raises:
            NativeError: this process was forked while the parent recorded.
        """
        with self.lock:
            if self.running or not self.cleanup.is_empty:
                self.state = State.STOPPING
                try:
                    if self._call_off is not None:
                        self._call_off()
                    if self.is_parents and self._raises:
                        self.batches.stop()  # raises the error
                    if self._raises:
                        self.cleanup.close()
                    else:
                        self.cleanup.close_and_log()
                except Exception:
                    self.state = State.STOPPED
                    raise
                self.state = State.STOPPED  # last: an interrupted stop must be repeated
        close_due()

    def drain(self, max_bytes: int = 0) -> Batch:
        """Returns the next events, decorated by the sources."""
        return self.decorated(self.batches.drain(max_bytes))

    def decorated(self, batch: Batch) -> Batch:
        """Returns a batch decorated by the sources; call it once per batch."""
        for source in self._started:
            batch = source.decorate(batch)
        return batch

    def states(self) -> dict[str, str]:
        """Returns the states of all sources."""
        return {name: state for source in self._started for name, state in source.states().items()}

    def notes(self) -> list[str]:
        """Returns the notes of all sources."""
        return [note for source in self._started for note in source.notes()]

    def after_fork_in_child(self) -> None:
        """Renews locks in a forked child; called automatically."""
        self.lock = threads.RLock()
        if self.state is not State.NEW:
            self.batches.after_fork_in_child()


# ---- The recording of a profile: one per segment ----


class ProfileSegment:
    """One bounded recording. Starts once, stops once, can be read repeatedly. Any thread may stop or read it.

    Raises:
        TypeError, ValueError: the memory limit is not a whole number, or less than one chunk.
        TorchLibraryError: operators are requested and cannot be recorded; the message names the fix.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self._limit = checked_memory_limit(options.memory_limit)
        self.options = options
        self._clock_steps = 0
        self._names_refused: Mapping[str, int] = {}
        self._times = (0, 0)
        self._batch: Batch | None = None
        self._waiting: list[WaitingStack] = []
        self.recording = Recording(dropped=say_dropped, raises=True)
        """Starts and stops the segment."""
        self._session: Session | None = None
        self._operators = self._state_of_operators(options.operators)
        self._library: torch_library.TorchLibrary | None = None
        if self._operators == ON or self._can_record_more():
            self._library = torch_library.load()
        self._short_frames = ShortFrames(options.frame_filter.min_duration)
        self._requested: list[Source] = []
        if config.ENABLED.read():
            self._requested = list(requested(SourceRequest(options, self._library, self._limit)))
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

    def start(self) -> None:
        """Starts recording on the calling thread (or all).

        Raises:
            NativeError: 16 recordings run already.
            TorchProfError: memory is wanted, and a profiler of torch's is running on the thread; nothing is recorded then.
        """
        if not config.ENABLED.read():
            self._times = now_ns(), 0
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
        self._session = session
        try:
            self.recording.start(session, self._requested)
        except BaseException:  # including KeyboardInterrupt
            self._session = None
            raise

    @property
    def running(self) -> bool:
        """Whether it was started and has not completely stopped."""
        return self.recording.running or (self._session is None and self._times[0] > self._times[1])

    def time_devices(self, *, on: bool) -> None:
        """Continues with the times of devices, or leaves them out."""
        if self._devices is not None:
            self._devices.pause(paused=not on)

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that made the recording."""
        return self.recording.is_parents

    def stop(self) -> None:
        """Stops recording. A repeated call only completes an interrupted stop.

        Raises:
            NativeError: this process was forked while the parent recorded.
        """
        try:
            if not self.running or self.is_parents:
                return
            if self._session is None:
                self._times = self._times[0], now_ns()
            elif self._calls is not None:
                self._waiting = self._waiting or self._calls.waiting()
        finally:
            self.recording.stop()

    def batch(self) -> Batch:
        """Returns all events; empty if nothing was recorded. Always the same object.

        Raises:
            TorchProfError: it has not stopped yet.
        """
        if self.running:
            raise TorchProfError("the profile is still recording: read it after its `with` block, or after stop()")
        if self._session is None:
            return Batch.of({"start": []}, [""])
        with self.recording.lock:
            if self._batch is None:
                drained = self.recording.decorated(self._session.final_batch())
                whole = with_waiting(drained, self._waiting, self.times())
                own_events = kept(whole, InputKept(int(self.options.info())), torch_library.Observation.ever_requested)
                self._batch = self._with_own_info(own_events)
            return self._batch

    def _with_own_info(self, batch: Batch) -> Batch:
        """Returns the batch without short Python calls, with the info of the remaining ones."""
        left = self._short_frames.without(batch)
        info = left.frame_info
        return left if info is None else with_info(left, replace(info, since=self.times()[0]))

    def drain(self) -> Batch:
        """Returns the events that ended since the last drain, also while recording; open events follow in a later drain.

        Do not read the recording in another way as well. Threads that only wait have no calls in it.

        Raises:
            NativeError: another thread is draining it, or this process was forked from the recording one.
        """
        if self._session is None:
            return Batch.of({"start": []}, [""])
        return self._with_own_info(self.recording.drain())

    def times(self) -> tuple[int, int]:
        """Times of start and stop, Unix ns; now if it has not stopped. In a forked child the last values read in the parent."""
        if self._session is not None and not self.is_parents:
            stats = self._session.stats()
            self._times = stats.start_ns, stats.stop_ns
        start, stop = self._times
        return start or now_ns(), stop or now_ns()

    def health(self) -> Health:
        """State and figures so far."""
        labels = ON if config.ENABLED.read() else _OFF_BY_SWITCH
        notes = [*self._notes(), *notes_of_environment()]
        devices, energy = self._state_of_devices(), "off: not asked for" if self._energy is None else self._energy.state
        if not config.ENABLED.read():
            devices = _OFF_BY_SWITCH if self.options.times_device else devices
            energy = _OFF_BY_SWITCH if self.options.reads_energy else energy
        state = Health(self._operators, labels, 0, {}, 0, self._limit, devices=devices, energy=energy)
        if self._session is None:
            return state
        try:
            stats = self._session.stats()
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
        """Returns notes on sources that are off, and notes of the sources; empty before the start."""
        if self._session is None:
            return []
        notes = []
        if self.options.memory and self._library is None:
            notes.append("memory is not recorded: torch is not installed")
        if self._calls is None and self.options.frame_filter != ALL_FRAMES:
            notes.append("frames off: a filter of calls was given without with_stack=True")
        in_own_fields = ("devices", "energy")  # states that are fields of Health
        notes += [
            f"{name} {state}"
            for name, state in self.recording.states().items()
            if state != ON and name not in in_own_fields
        ]
        return notes + self.recording.notes()


def say_dropped() -> None:
    """Warns of a profile that was freed without being stopped."""
    _logger.warning(
        "a profile was dropped while it recorded, without stop(), and its events with it: use `with profile():`, or "
        "call stop() before it is collected or the program ends"
    )


def _entries(batch: Batch) -> int:
    """Rows, and records of memory, which a full memory leaves out alike."""
    return len(batch) + (0 if batch.memory is None else len(batch.memory["time"]))


class Segments:
    """Recordings one after another, read as one batch. Any thread may end or read them.

    Args:
        options: what each of them records.

    Raises:
        TypeError, ValueError, TorchLibraryError: as :class:`ProfileSegment`.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self._options = options
        self._next: ProfileSegment | None = ProfileSegment(options)
        self._recordings: list[ProfileSegment] = []
        self._running: ProfileSegment | None = None
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
        """Prepares the next segment, so that it starts quickly."""
        with self._lock:
            if self._next is None or self._next.is_parents:
                self._next = ProfileSegment(self._options)

    @without_waiting
    def begin(self) -> int:
        """Starts a segment on the calling thread; returns when it began, Unix ns.

        Raises:
            NativeError: 16 recordings run already.
        """
        with self._lock:
            self.prepare()
            recording = self._next or ProfileSegment(self._options)
            flag = object()
            recording.recording.cleanup.push(functools.partial(profiler_flag.down, flag))
            recording.recording.cleanup.at_exit = say_dropped
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
        """Drops all recorded events."""
        with self._lock:
            self._kept, self._times = None, None
            self._recordings = [] if self._running is None else [self._running]
            self._figures = []

    def batch(self) -> Batch:
        """Returns all events; the same object until another segment begins.

        Raises:
            TorchProfError: a segment is running.
        """
        with self._lock:
            if self._running is not None:
                raise TorchProfError("the profile is still recording: read it after its `with` block, or after stop()")
            if self._kept is None or self._recordings:
                self._keep()
            return joined([]) if self._kept is None else self._kept  # not ``or``: an empty batch is false

    def _keep(self) -> None:
        """Joins new events to the stored ones, so that nothing is stored twice."""
        fresh = [recording.batch() for recording in self._recordings]
        self._figures += [recording.health() for recording in self._recordings]
        if self._recordings:
            self._times = self.times()
        self._kept = joined(fresh if self._kept is None else [self._kept, *fresh])
        self._recordings = []

    def after_fork_in_child(self) -> None:
        """Renews locks in a forked child; called automatically."""
        self._lock = threads.RLock()
        self.stopping = threads.RLock()
        """Held while the profile stops; reentrant, since the callback for a ready trace may stop it."""
        self.reading = threads.Lock()
        """Held while the profile computes its results."""

    def times(self) -> tuple[int, int]:
        """Returns start of the first and end of the last segment, Unix ns; the current time if there is none yet."""
        with self._lock:
            known = [] if self._times is None else [self._times]
            known += [recording.times() for recording in self._recordings]
            if not known:
                known = [(self._next or ProfileSegment(self._options)).times()]
            return known[0][0], known[-1][1]

    def health(self) -> Health:
        """State and figures of all segments."""
        with self._lock:
            states = [*self._figures, *(recording.health() for recording in self._recordings)]
            if not states:
                return (self._next or ProfileSegment(self._options)).health()
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
