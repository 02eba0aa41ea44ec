"""Energy counters as a source of a recording: read by a thread of ours, at the start, at the stop, and in between."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import ENERGY_COLUMNS
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import threads
from otel_torchprof.health import ON

from .energy import EnergyCounters, EnergySeries
from .source import Source

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.recorder import Session

READ_SECONDS = 0.1
"""Between two readings. A card brings its counter up to date about as often."""

STOP_SECONDS = 2.0
"""How long a stop waits for a driver that does not answer."""

_UNORDERED = (
    "off: which number a GPU has in torch is not known, since they are unlike: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
)

_logger = logging.getLogger("otel_torchprof")


def checked_energy(energy: bool | None) -> bool | None:
    """Whether the energy counters are read; None: where the device is CUDA's.

    Raises:
        TypeError: neither yes nor no nor None.
    """
    if energy is not None and not isinstance(energy, bool):
        raise TypeError(f"energy is {energy!r}; it must be True, False, or None: where the device is cuda")
    return energy


class EnergySource(Source):
    """Reads the counters of the GPUs that CUDA shows to this process, from :meth:`start` to :meth:`stop`.

    The loop's thread reads nothing: a driver may take its time to answer. Made ready when made; never an error.
    """

    starts_before_session = True  # its readings reach around all else

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
        # Many are made and never started, by a profile for its next segment for one.
        self._close = weakref.finalize(self, self._counters.close)
        self._close.atexit = False
        if self.state != ON:
            self._close()

    def start(self, _session: Session | None = None) -> None:
        """Reads from now on, on a thread of its own; the first time at once, on the caller's. No session gets anything of it."""
        if self.state != ON:
            return
        self._read()
        self._thread = threads.Thread(target=self._run, name="otel-torchprof-energy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Reads a last time and ends it; a second call does nothing, nor does one in a forked child."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        self._stopping.set()
        # Where garbage is collected, a recording that was dropped is stopped: on that thread, too.
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
        """All readings so far (``ENERGY_COLUMNS``); None where nothing was read."""
        parts = [(*series.readings(), index) for index, series in enumerate(self._series.values()) if len(series)]
        if not parts:
            return None
        times, joules, indices = zip(*parts, strict=True)
        of_device = [np.full(len(time), index) for time, index in zip(times, indices, strict=True)]
        columns = (np.concatenate(column) for column in (times, joules, of_device))
        return {c.name: column.astype(c.dtype) for c, column in zip(ENERGY_COLUMNS, columns, strict=True)}

    def decorate(self, batch: Batch) -> Batch:
        """With all readings so far."""
        return replace(batch, energy=self.columns())

    def states(self) -> dict[str, str]:
        """Under ``energy``."""
        return {"energy": self.state}

    def forget(self, before_ns: int) -> None:
        """Drops what nothing needs that begins at or after this time."""
        for series in self._series.values():
            series.forget(before_ns)

    def _run(self) -> None:
        while not self._stopping.wait(READ_SECONDS):
            self._read()

    def _read(self) -> None:
        before = now_ns()
        found = self._counters.read()
        at = (before + now_ns()) // 2
        for uuid, joules in found.items():
            if uuid in self._series:
                self._series[uuid].add(at, joules)
