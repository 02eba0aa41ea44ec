"""The times and the energy of a device in a recording that is drained while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import DEVICE_COLUMNS
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._tree.devices import not_before

from .device_source import DeviceSource
from .energy_source import EnergySource
from .source import Source

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.device_timing import Times
    from otel_torchprof._native.recorder import Session
    from otel_torchprof._native.torch_library import TorchLibrary

WAIT_SECONDS = 2.0
"""A drain waits so long, on its own thread, for what the device has under way; an event that it has not come to by then has no
time."""

_ENERGY_KEPT_NS = 600 * 10**9
"""Steps and labels that began longer ago than this have no joules."""


class LiveDeviceSource(Source):
    """Times of a session's events, from when the program first uses the device. For one thread at a time.

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
        """What a reader of the times should know, a sentence each."""
        return [] if self._source is None else self._source.notes()

    def _of_batch(self, batch: Batch) -> Times | None:
        """Those of its events; those of events that have ended since are kept for the drain that brings these."""
        asked = now_ns()
        new = None if self._source is None else self._source.take(WAIT_SECONDS)
        if new is None:
            return None
        here, kept = [], []
        for since, times in [*self._early, (asked, new)]:
            known = rows_of(batch, times["event"]) >= 0
            here.append({name: column[known] for name, column in times.items()})
            if since > batch.watermark or times is new:
                kept.append((since, {name: column[~known] for name, column in times.items()}))
        self._early = [entry for entry in kept if len(entry[1]["event"])]
        return {c.name: np.concatenate([times[c.name] for times in here]) for c in DEVICE_COLUMNS}


class LiveEnergySource(Source):
    """What devices consume, from when the program first uses the device. For one thread at a time.

    Args:
        device: the type, as ``torch.device`` names it; None: the counters are read from the start.
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
        """With the readings of the last ten minutes."""
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
