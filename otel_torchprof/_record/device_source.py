"""The times and the energy of a device as sources of a recording: makes the device ready, keeps graphs apart, says what became of it."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import DEVICE_COLUMNS
from otel_torchprof._model.devices import not_before
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads
from otel_torchprof.errors import TorchProfError, checked
from otel_torchprof.health import ON

from .energy_source import EnergySource
from .labels import record_function
from .source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.device_timing import DeviceTiming, Times
    from otel_torchprof._native.recorder import Session
    from otel_torchprof._native.torch_library import TorchLibrary

REPLAY_NAME = "torch.cuda.CUDAGraph.replay"
"""The label around the replay of a graph, whose kernels no operator launches."""

BYTES_OF_A_TIME = 48
"""Memory of a device time until it is taken."""

_logger = logging.getLogger("otel_torchprof")


def checked_device_events(events: str | None, every: int) -> str:
    """Checks the options of device times; returns ``events``, by default operators, labels and modules.

    Raises:
        TypeError, ValueError: ``events`` cannot be timed, or ``every`` is not a whole number above 0.
    """
    if events is not None:
        checked("device_events", events, config.DEVICE_EVENTS.check)
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"device_events_every is {every!r}; it must be a whole number of steps")
    if every < 1:
        raise ValueError(f"device_events_every is {every}; it must be at least 1: every step")
    return events or "ops"


def make_ready(device: str) -> None:
    """Initialises the library of a device, as its first use would.

    Raises:
        TorchProfError: there is no such device.
    """
    torch = torch_library.installed_torch()
    module = getattr(torch, device, None)
    if module is None:
        raise TorchProfError(f"torch has no module torch.{device}")
    is_ready, begin = getattr(module, "is_initialized", None), getattr(module, "init", None)
    if begin is not None and not (is_ready is not None and is_ready()):
        try:
            begin()
        except (AssertionError, RuntimeError) as error:  # torch was built without it, or finds no device
            raise TorchProfError(f"torch.{device} cannot be initialised: {error}") from error


def is_capturing(device: str) -> bool:
    """Whether a graph is being captured by this thread, or by another one in a capture that began while devices are timed."""
    module = getattr(torch_library.installed_torch(), device, None)
    is_ready, ask = (getattr(module, name, None) for name in ("is_initialized", "is_current_stream_capturing"))
    if graph_hooks.is_capturing:
        return True
    return ask is not None and is_ready is not None and is_ready() and bool(ask())


class TimedSteps:
    """Selects the steps of a loop with device times: one in ``every``, from the first recorded one on."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._first = 0

    def begin(self, step: int) -> None:
        """Sets the first recorded step."""
        self._first = step

    def choose(self, step: int, time_devices: Callable[..., None]) -> None:
        """Turns timing on or off for this step, when it begins or continues."""
        if self._every > 1:
            time_devices(on=(step - self._first) % self._every == 0)


class DeviceSource(Source):
    """Times the events of a session that was made with ``devices``; started once, stopped once, from any thread.

    Args:
        library: the library that records torch's operators.
        device: type of device, as in ``torch.device``.
        events: ``ops``, ``all`` or ``labels``.
        most: limit of buffered times.
    """

    def __init__(self, library: TorchLibrary, device: str, events: str, most: int) -> None:
        self._library = library
        self._device = device
        self._events = events
        self._most = most
        self._timing: DeviceTiming | None = None
        self.state = "off: not started"
        """``on``, or ``off: `` and the reason."""
        self.last_times: Times | None = None
        """Remaining times after the stop; None if nothing was timed."""

    @property
    def timing(self) -> DeviceTiming | None:
        """The running device timing, or None."""
        return self._timing

    def start(self, session: Session) -> None:
        """Times from now on; where that cannot be, :attr:`state` says why, and it is logged."""
        try:
            make_ready(self._device)
            self._timing = self._library.time_devices(session, self._device, self._events, self._most)
        except TorchProfError as error:
            self.state = f"off: {error}"
            _logger.warning("the times of %s are not recorded: %s", self._device, error)
            return
        self.state = ON
        graph_hooks.install(self, self._library)

    def pause(self, *, paused: bool) -> None:
        """Pauses timing, or continues it."""
        if self._timing is not None:
            self._timing.pause(paused=paused)

    @classmethod
    def forked(cls) -> None:
        """Leaves captures of graphs alone."""
        graph_hooks.after_fork_in_child()

    def stop(self) -> None:
        """Stops timing; repeated calls have no effect. Waits some seconds at most for running work of the device."""
        if self._timing is None or self.last_times is not None:
            return
        graph_hooks.remove(self)
        self.last_times = self._timing.stop()
        failure = self._timing.failure()
        if failure:
            self.state = f"off since the device's library failed: {failure}"
            _logger.warning("the times of %s end early: %s", self._device, failure)

    def take(self, wait: float = 0.0) -> Times | None:
        """Returns new times, after waiting up to ``wait`` seconds for events that have ended; None if nothing is timed.

        After the stop, returns :attr:`last_times`.
        """
        if self._timing is None or self.last_times is not None:
            return self.last_times
        self._timing.collect(wait)
        return self._timing.take()

    def decorate(self, batch: Batch) -> Batch:
        """With the times of its events."""
        return replace(batch, devices=not_before(batch, self.take()))

    def states(self) -> dict[str, str]:
        """Under ``devices``."""
        return {"devices": self.state}

    def notes(self) -> list[str]:
        """Notes for readers of the times, one sentence each."""
        if self._timing is None:
            return []
        counts = self._timing.counts()
        said = {
            "late": "the device had not come to them when the recording stopped",
            "captured": "their stream was being captured into a graph",
            "lost": "there was no room for their times",
            "failed": "the device's library refused",
        }
        return [
            f"events without a time of the device: {count}; {why}"
            for name, why in said.items()
            if (count := getattr(counts, name))
        ]


class _GraphHooks:
    """Hooks of torch's CUDA graphs: no timing events are recorded or queried during a capture, and a replay is an event.

    In place while any source is running. Thread-safe. An interrupted change is completed by the next call.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler, or a finalizer of a dropped profile, may stop it in the middle.
        self._lock = threads.RLock()
        self._users: list[DeviceSource] = []
        self._originals: dict[str, Any] = {}
        self._of: Any = None
        self._library: TorchLibrary | None = None
        self._captured: set[int] = set()

    def install(self, source: DeviceSource, library: TorchLibrary) -> None:
        with self._lock:
            self._users.append(source)
            torch = torch_library.installed_torch()
            if self._originals:
                return
            self._of, self._library = getattr(getattr(torch, "cuda", None), "CUDAGraph", None), library
            for name, wrapper in (("capture_begin", _held_from), ("capture_end", _held_until), ("replay", _labelled)):
                original = getattr(self._of, "__dict__", {}).get(name)
                if original is not None:
                    self._originals[name] = original
                    setattr(self._of, name, wrapper(original))

    def remove(self, source: DeviceSource) -> None:
        with self._lock:
            if source in self._users:
                self._users.remove(source)
            if self._users:
                return
            self._unwrap()
            self._captured.clear()
            self._hold()

    def _unwrap(self) -> None:
        for name, original in self._originals.items():
            # If other code has wrapped it since, that stays, and the wrapper inside does nothing.
            if getattr(self._of.__dict__.get(name), "__wrapped__", None) is original:
                setattr(self._of, name, original)
        self._originals = {}

    @property
    def is_capturing(self) -> bool:
        """Whether a capture is running whose start was seen."""
        return bool(self._captured)

    def begun(self, graph: Any) -> None:
        """Reports that a capture begins."""
        with self._lock:
            if self._users:
                self._captured.add(id(graph))
                self._hold()

    def ended(self, graph: Any) -> None:
        """Reports that the capture has ended, or did not begin."""
        with self._lock:
            self._captured.discard(id(graph))
            self._hold()

    def after_fork_in_child(self) -> None:
        """Removes all sources and wrappers, and renews the lock, which another thread may have held."""
        self._lock = threads.RLock()
        self._users = []
        self._captured = set()
        self._unwrap()

    def _hold(self) -> None:
        if self._library is not None:
            self._library.hold_devices(len(self._captured))


graph_hooks = _GraphHooks()


def _held_from(original: Any) -> Any:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            graph_hooks.begun(self)
            return original(self, *args, **kwargs)
        except BaseException:
            graph_hooks.ended(self)
            raise

    return capture_begin


def _held_until(original: Any) -> Any:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            graph_hooks.ended(self)

    return capture_end


def _labelled(original: Any) -> Any:
    @functools.wraps(original)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(REPLAY_NAME):
            return original(self, *args, **kwargs)

    return replay


WAIT_SECONDS = 2.0
"""Seconds that a drain waits, on its own thread, for running work of the device; events that the device has not reached by then get no
time."""

_ENERGY_KEPT_NS = 600 * 10**9
"""Steps and labels that began longer ago than this have no joules."""


class LiveDeviceSource(Source):
    """Times of a session's events, from when the program first uses the device. Not thread-safe.

    A service may be instrumented long before it uses a device, and in a process that is forked before it does: nothing is
    initialised here.

    Args:
        library: of torch's operators; None where nothing is timed.
        device: the type, as ``torch.device`` names it.
        events: ``ops``, ``all`` or ``labels``.
        most: times that may wait until they are drained.
        untimed: where nothing is timed, why.
    """

    def __init__(self, library: TorchLibrary | None, device: str, events: str, most: int, *, untimed: str = "") -> None:
        self._device = device
        self._untimed = untimed
        self._source = None if library is None else DeviceSource(library, device, events, most)
        self._early: list[tuple[int, Times]] = []
        self._session: Session | None = None
        self._begun = False

    def states(self) -> dict[str, str]:
        """Under ``devices``."""
        if self._source is None:
            return {"devices": f"off: {self._untimed}"}
        return {"devices": self._source.state if self._begun else _unused(self._device)}

    def start(self, session: Session) -> None:
        """Times the session from now on, or from the drain at which the program has begun to use the device."""
        self._session = session
        self._begin(session)

    def _begin(self, session: Session) -> None:
        if self._source is None or self._begun or not _is_in_use(self._device):
            return
        self._begun = True
        self._source.start(session)

    def decorate(self, batch: Batch) -> Batch:
        """With the times of its events."""
        if self._session is not None:
            self._begin(self._session)
        return replace(batch, devices=not_before(batch, self._of_batch(batch))) if self._begun else batch

    def stop(self) -> None:
        """Ends it; what there is can still be taken, once."""
        self._session = None
        if self._source is not None:
            self._source.stop()

    def notes(self) -> list[str]:
        """Notes for readers of the times, one sentence each."""
        return [] if self._source is None else self._source.notes()

    def _of_batch(self, batch: Batch) -> Times | None:
        """Device times of the events of a batch. Stores those of later events for a later drain."""
        taken_at = now_ns()
        new = None if self._source is None else self._source.take(WAIT_SECONDS)
        if new is None:
            return None
        here, later = [], []
        for since, times in [*self._early, (taken_at, new)]:
            known = rows_of(batch, times["event"]) >= 0
            here.append({name: column[known] for name, column in times.items()})
            if since > batch.watermark or times is new:
                later.append((since, {name: column[~known] for name, column in times.items()}))
        self._early = [entry for entry in later if len(entry[1]["event"])]
        return {c.name: np.concatenate([times[c.name] for times in here]) for c in DEVICE_COLUMNS}


class LiveEnergySource(Source):
    """Energy counters of devices, read once the program uses the device. Not thread-safe.

    Args:
        device: type, as in ``torch.device``; None to read the counters from the start.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._source: EnergySource | None = None
        self._stopped = False

    def states(self) -> dict[str, str]:
        """Under ``energy``."""
        if self._device not in {None, "cuda"}:
            return {"energy": f"off: NVIDIA's library knows no {self._device}"}
        return {"energy": _unused(str(self._device)) if self._source is None else self._source.state}

    def start(self, _session: Session | None = None) -> None:
        """Reads from now on, or from the drain at which the program has begun to use the device."""
        if self._source is not None or self._stopped:
            return
        if self._device is None or (self._device == "cuda" and _is_in_use(self._device)):
            self._source = EnergySource()
            self._source.start()

    def decorate(self, batch: Batch) -> Batch:
        """Returns the batch with the readings of the last ten minutes."""
        self.start()
        if self._source is None:
            return batch
        energy = self._source.columns()
        self._source.forget(now_ns() - _ENERGY_KEPT_NS)
        return replace(batch, energy=energy)

    def stop(self) -> None:
        """Ends it."""
        self._stopped = True
        if self._source is not None:
            self._source.stop()


def _unused(device: str) -> str:
    if not hasattr(torch_library.installed_torch(), device):
        return f"off: torch has no device named {device!r}"
    return f"off: the program has not used torch.{device} yet"


def _is_in_use(device: str) -> bool:
    module = getattr(torch_library.installed_torch(), device, None)
    is_initialized = getattr(module, "is_initialized", None)
    return module is not None and (is_initialized is None or bool(is_initialized()))
