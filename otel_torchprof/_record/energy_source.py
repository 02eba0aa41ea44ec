"""Energy counters as a source of a recording, read at its start, at its stop, and by a thread in between."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from bisect import bisect_right, insort
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import ENERGY_COLUMNS
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads
from otel_torchprof.health import ON

from .nvml import Gpu, Nvml, RefusedError, visible
from .source import Source

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.recorder import Session


# ---- Energy counters of GPUs, read cheaply ----
# From a series of readings the energy of any segment of time is computed.

_OF_THE_CARD = "its card's counter is of all its MIG devices together"


class EnergyCounters:
    """The energy counters of the GPUs that CUDA shows to this process.

    Opened when made, and never an error: :attr:`health` says what could not be had. :meth:`read` may be called on any thread and at
    step boundaries: it waits for no other call.
    """

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._gpus: tuple[Gpu, ...] = ()
        self._ordered = False
        self._lock = threads.Lock()
        self._last: dict[str, tuple[float, float]] = {}
        self._refused: dict[str, str] = {}
        self._off = ""
        try:
            self._nvml.open()
            cards, silent = self._nvml.cards({})
        except RefusedError as refusal:
            self._off = str(refusal)
            return
        displayed = visible(cards, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
        self._gpus, self._ordered = displayed.gpus, displayed.ordered
        if not displayed.gpus:
            self._off = displayed.reason or "; ".join(silent) or "there is no GPU"
        self.read()

    @property
    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that CUDA shows."""
        return tuple(gpu.uuid for gpu in self._gpus)

    def of_device(self, index: int) -> str | None:
        """UUID of the device with this index in CUDA and torch.

        None if there is no such device, or if CUDA orders different cards by speed, which NVML does not report.
        """
        return self._gpus[index].uuid if self._ordered and 0 <= index < len(self._gpus) else None

    @property
    def health(self) -> str:
        """``"on"``, or ``"off: "`` and the reason, where no GPU has a counter."""
        if self._off:
            return f"off: {self._off}"
        if not self._nvml.is_open:
            return "off: closed, or opened in the process that this one was forked from"
        reasons = dict(self._refused)
        return "on" if len(reasons) < len(self._gpus) else f"off: {next(iter(reasons.values()))}"

    def read(self) -> dict[str, float]:
        """Joules by UUID since an arbitrary time; never decreases. Omits GPUs without a counter.

        A counter that restarts, for example after a driver reload, continues from its last value. Costs one call of the driver per
        GPU with a counter.
        """
        joules_by_uuid: dict[str, float] = {}
        if not self._nvml.is_open:
            return joules_by_uuid
        for gpu in self._gpus:
            try:
                joules = self._joules(gpu)
            except RefusedError as refusal:
                self._refused[gpu.uuid] = str(refusal)
                continue
            self._refused.pop(gpu.uuid, None)
            joules_by_uuid[gpu.uuid] = self._continued(gpu.uuid, joules)
        return joules_by_uuid

    def _joules(self, gpu: Gpu) -> float:
        if gpu.mig or gpu.parent:
            raise RefusedError(_OF_THE_CARD)
        return self._nvml.energy(gpu)

    def _continued(self, uuid: str, joules: float) -> float:
        """Returns the reading, made continuous over restarts of the counter; never below an earlier one."""
        with self._lock:
            last, base = self._last.get(uuid, (joules, 0.0))
            if joules < last * _BEGAN_ANEW:
                base += last
            elif joules < last:
                joules = last  # another thread read later but got here first
            self._last[uuid] = (joules, base)
            return base + joules

    def close(self) -> None:
        """Closes NVML; :meth:`read` then returns nothing."""
        self._nvml.close()


_BEGAN_ANEW = 0.5
"""A reading below this share of the last one means a restarted counter; readings of two threads lie closer together."""


class EnergySeries:
    """Readings of one energy counter, to compute the energy of time segments. Thread-safe.

    Assumes constant power between two readings. A card updates its counter only at intervals: the joules of a shorter
    segment are an average over its surroundings.

    Args:
        limit: most stored readings; beyond it the oldest are dropped.
    """

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._samples: list[tuple[int, float]] = []
        self._lock = threads.Lock()
        self._arrays: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, time_ns: int, joules: float) -> None:
        """Adds a reading; they may come out of order.

        Args:
            time_ns: time of the reading, Unix ns.
            joules: value of the counter.
        """
        with self._lock:
            if not self._samples or self._samples[-1][0] <= time_ns:
                self._samples.append((time_ns, joules))
            else:
                insort(self._samples, (time_ns, joules))
            if len(self._samples) > self._limit:
                # A quarter at a time: each deletion moves all remaining readings.
                del self._samples[: max(1, self._limit // 4)]
            self._arrays = None

    def forget(self, before_ns: int) -> None:
        """Drops readings that no segment from this time on needs."""
        with self._lock:
            later = bisect_right(self._samples, (before_ns, float("inf")))
            del self._samples[: max(0, later - 1)]
            self._arrays = None

    def readings(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The stored readings, sorted by time, as (times in Unix ns, joules)."""
        with self._lock:
            if self._arrays is None:
                times = np.array([time for time, _ in self._samples], np.int64)
                # Energy never decreases: corrects readings whose time is too early.
                joules = np.maximum.accumulate(np.array([joules for _, joules in self._samples], np.float64))
                self._arrays = times, joules
            return self._arrays


READ_SECONDS = 0.1
"""Seconds between two readings. A card updates its counter about as often."""

STOP_SECONDS = 2.0
"""Seconds that a stop waits for a driver that does not respond."""

_UNORDERED = (
    "off: which number a GPU has in torch is not known, since they are unlike: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
)

_logger = logging.getLogger("otel_torchprof")


class EnergySource(Source):
    """Reads the counters of the GPUs that CUDA shows to this process, from :meth:`start` to :meth:`stop`.

    Reads on a thread of its own, since a driver may be slow. The constructor opens NVML; problems are in :attr:`state`, never raised.
    """

    starts_before_session = True  # so that its readings enclose all events

    def __init__(self) -> None:
        self._counters = EnergyCounters()
        self._stopping = threads.Event()
        self._thread: threads.Thread | None = None
        devices = self._counters.devices
        numbered = [self._counters.of_device(index) for index in range(len(devices))]
        self._series = {uuid: EnergySeries() for uuid in numbered if uuid is not None}
        self._pid = os.getpid()
        self.state = self._counters.health
        """``on``, or ``off: `` and the reason."""
        if devices and not self._series and self.state == ON:
            self.state = _UNORDERED
        # Many are created and never started, such as by a profile for its next segment.
        self._close = weakref.finalize(self, self._counters.close)
        self._close.atexit = False
        if self.state != ON:
            self._close()

    def start(self, _session: Session | None = None) -> None:
        """Reads once on the calling thread, then on a thread of its own. Does not use the session."""
        if self.state != ON:
            return
        self._read()
        self._thread = threads.Thread(target=self._run, name="otel-torchprof-energy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Reads a last time and stops; no effect for repeated calls and in a forked child."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        self._stopping.set()
        # A finalizer of a dropped recording may run on this source's own thread.
        is_own = thread.ident == threads.get_ident()
        with contextlib.suppress(RuntimeError):  # its start was interrupted
            thread.join(0 if is_own else STOP_SECONDS)
        if thread.is_alive() and not is_own:
            self.state = f"off: the driver has not answered within {STOP_SECONDS:g} s"
        else:
            self._read()
            self.state = self._counters.health
            self._counters.close()
            self._close.detach()
        self._thread = None

    def columns(self) -> dict[str, npt.NDArray[Any]] | None:
        """Returns all readings so far (``ENERGY_COLUMNS``); None if there are none."""
        parts = [(*series.readings(), index) for index, series in enumerate(self._series.values()) if len(series)]
        if not parts:
            return None
        times, joules, indices = zip(*parts, strict=True)
        of_device = [np.full(len(time), index) for time, index in zip(times, indices, strict=True)]
        columns = (np.concatenate(column) for column in (times, joules, of_device))
        return {c.name: column.astype(c.dtype) for c, column in zip(ENERGY_COLUMNS, columns, strict=True)}

    def decorate(self, batch: Batch) -> Batch:
        """Returns the batch with all readings so far."""
        return replace(batch, energy=self.columns())

    def states(self) -> dict[str, str]:
        """Returns the state under ``energy``."""
        return {"energy": self.state}

    def forget(self, before_ns: int) -> None:
        """Drops readings that no segment from this time on needs."""
        for series in self._series.values():
            series.forget(before_ns)

    def _run(self) -> None:
        while not self._stopping.wait(READ_SECONDS):
            self._read()

    def _read(self) -> None:
        before = now_ns()
        joules_by_uuid = self._counters.read()
        at = (before + now_ns()) // 2
        for uuid, joules in joules_by_uuid.items():
            if uuid in self._series:
                self._series[uuid].add(at, joules)
