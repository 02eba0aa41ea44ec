"""Device times of a session's events: pairs of timing events, recorded and read by the torch library."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.schema import DEVICE_COLUMNS
from otel_torchprof.errors import NativeError, TorchProfError

if TYPE_CHECKING:
    import numpy.typing as npt

    from .recorder import Session
    from .torch_functions import TorchFunctions

DEVICE_EVENTS = {"ops": 1, "all": 2, "labels": 3}
"""Events that can be timed: ``otp_device_events``."""

STOP_WAIT = 5.0
"""Seconds that a stop waits for the device's remaining work, which usually is finished by then."""

_TEXT = 512

Times = dict[str, "npt.NDArray[Any]"]


class DeviceCounts(NamedTuple):
    """Numbers of one session's pairs by outcome."""

    timed: int = 0
    waiting: int = 0
    """Pairs that the device has not reached yet."""
    late: int = 0
    """Pairs discarded because the device had not reached them when the session was stopped."""
    captured: int = 0
    """Pairs omitted because their stream was being captured into a graph."""
    lost: int = 0
    """Pairs whose times were dropped for lack of room."""
    failed: int = 0
    """Pairs refused by the library of the device."""


class DeviceStats(NamedTuple):
    """State of the timing, of all sessions together."""

    events_alive: int
    """Existing events of the device's library."""
    events_made: int
    waiting: int
    """Pairs that the device has not reached yet."""
    calibrations: int
    uncertainty_ns: int
    """Maximum error of device times according to the last calibration; -1 without one."""


class DeviceTiming:
    """Times the events of a session on a device, until :meth:`stop` or until this object is freed. Thread-safe.

    Args:
        functions: functions of the torch library.
        session: a running session, created with ``devices``.
        device: type of device, as in ``torch.device``.
        events: a key of :data:`DEVICE_EVENTS`.
        most: limit of buffered times; further ones are dropped, and counted.

    Raises:
        TorchProfError: the device cannot be timed; the message has the reason.
    """

    def __init__(self, functions: TorchFunctions, session: Session, device: str, events: str, most: int) -> None:
        self._ffi, self._native = functions.ffi, functions.lib
        why = self._ffi.new("char[]", _TEXT)
        which = DEVICE_EVENTS[events]
        self._pid = os.getpid()
        self._last: tuple[Times, DeviceCounts] | None = None
        # Allocated first, as start and stop may be interrupted: their results are then in here.
        token, self._ended = self._ffi.new("int64_t *"), (self._new_times(), self._ffi.new("otp_device_counts *"))
        self._finalizer = weakref.finalize(self, _abandon, functions, token, self._pid)
        self._finalizer.atexit = False
        status = self._native.otp_torch_devices_start(session.consumer, device.encode(), which, most, token, why, _TEXT)
        if status != 0:
            raise TorchProfError(self._text(why))
        self._token = int(token[0])

    def pause(self, *, paused: bool) -> None:
        """Pauses or resumes timing. Costs microseconds."""
        self._native.otp_torch_devices_pause(self._token, paused)

    def collect(self, wait: float) -> int:
        """Reads the pairs that the device has reached; waits up to ``wait`` seconds for those of ended events.

        Returns the number of pairs of ended events that it has not reached.
        """
        return int(self._native.otp_torch_devices_collect(int(wait * 1e9)))

    def take(self) -> Times:
        """Returns new times since the last call; see ``DEVICE_COLUMNS``."""
        times = self._new_times()
        _check(self._native.otp_torch_devices_take(self._token, times))
        return self._columns(times)

    def stop(self, wait: float = STOP_WAIT) -> Times:
        """Stops timing and returns the remaining times; repeated calls return the same, also after an interrupt.

        Returns no times in a forked child.
        """
        if self._last is None:
            self._last = self._stopped(wait)
        return self._last[0]

    def _stopped(self, wait: float) -> tuple[Times, DeviceCounts]:
        times, counts = self._ended
        if self._finalizer.alive and self._pid == os.getpid():
            _check(self._native.otp_torch_devices_stop(self._token, int(wait * 1e9), times, counts))
        self._finalizer.detach()
        return self._columns(times), _counts(counts)

    def counts(self) -> DeviceCounts:
        """Returns the outcomes of the pairs so far, or until the stop."""
        if self._last is not None:
            return self._last[1]
        counts = self._ffi.new("otp_device_counts *")
        self._native.otp_torch_devices_counts(self._token, counts)
        return _counts(counts)

    def failure(self) -> str:
        """Returns why timing has failed; empty if it has not."""
        why = self._ffi.new("char[]", _TEXT)
        self._native.otp_torch_devices_failure(why, _TEXT)
        return self._text(why)

    def stats(self) -> DeviceStats:
        """Returns the state of the timing, of all sessions together."""
        stats = self._ffi.new("otp_device_stats *")
        self._native.otp_torch_devices_stats(stats)
        return DeviceStats(*(int(getattr(stats, name)) for name in DeviceStats._fields))

    def _new_times(self) -> Any:
        return self._ffi.gc(self._ffi.new("otp_device_times *"), self._native.otp_torch_devices_free)

    def _columns(self, times: Any) -> Times:
        count, buffer = int(times.count), self._ffi.buffer
        return {
            c.name: np.frombuffer(buffer(getattr(times, c.name), count * c.dtype.itemsize), c.dtype).copy()
            if count
            else np.empty(0, c.dtype)
            for c in DEVICE_COLUMNS
        }

    def _text(self, text: Any) -> str:
        message: bytes = self._ffi.string(text)
        return message.decode(errors="replace").strip().partition("\n")[0]


def _counts(counts: Any) -> DeviceCounts:
    return DeviceCounts(*(int(getattr(counts, name)) for name in DeviceCounts._fields))


def _check(status: int) -> None:
    if status != 0:
        raise NativeError("the times of devices were lost: there is no memory for them")


def _abandon(functions: TorchFunctions, token: Any, pid: int) -> None:
    # Freed without a stop: its times are dropped.
    if token[0] > 0 and os.getpid() == pid:
        ffi, native = functions.ffi, functions.lib
        times, counts = ffi.new("otp_device_times *"), ffi.new("otp_device_counts *")
        native.otp_torch_devices_stop(token[0], 0, times, counts)
        native.otp_torch_devices_free(times)
