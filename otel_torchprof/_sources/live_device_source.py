"""The times and the energy of a device in a recording that is drained while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import DEVICE_COLUMNS
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._tree.devices import not_before

from .device_source import BYTES_OF_A_TIME, DeviceSource
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


class DeviceChoice(NamedTuple):
    """What is timed on a device by an instrumentation."""

    device: str
    """The type, as ``torch.device`` names it."""
    events: str
    """``ops``, ``leaves`` or ``labels``; ``off``: energy alone."""
    untimed: str = "device_events is 'off'"
    """Why, where it is ``off``."""

    @property
    def is_timed(self) -> bool:
        """Whether anything is."""
        return self.events != "off"


class LiveDeviceSource(Source):
    """Times of a session's events, from when the program first uses the device. For one thread at a time.

    A service may be instrumented long before it uses a device, and in a process that is forked before it does: nothing is
    initialised here.

    Args:
        library: of torch's operators; None where nothing is timed.
        choice: what is timed.
        budget_bytes: that times may take until they are drained.
        energy: whether the energy counters are read too.
    """

    def __init__(
        self, library: TorchLibrary | None, choice: DeviceChoice, budget_bytes: int, *, energy: bool = True
    ) -> None:
        self._device = choice.device
        self._untimed = choice.untimed
        self._reads_energy = energy
        self._source: DeviceSource | None = None
        if library is not None and choice.is_timed:
            self._source = DeviceSource(library, choice.device, choice.events, budget_bytes // BYTES_OF_A_TIME)
        self._energy: EnergySource | None = None
        self._early: list[tuple[int, Times]] = []
        self._session: Session | None = None
        self._begun = False

    def states(self) -> dict[str, str]:
        """State by source: ``on``, or ``off: `` and the reason."""
        unused = f"off: the program has not used torch.{self._device} yet"
        if not hasattr(torch_library.installed_torch(), self._device):
            unused = f"off: torch has no device named {self._device!r}"
        devices = f"off: {self._untimed}" if self._source is None else self._source.state if self._begun else unused
        if not self._reads_energy:
            return {"devices": devices}
        if self._device != "cuda":
            return {"devices": devices, "energy": f"off: NVIDIA's library knows no {self._device}"}
        return {"devices": devices, "energy": unused if self._energy is None else self._energy.state}

    def start(self, session: Session) -> None:
        """Times the session from now on, or from the drain at which the program has begun to use the device."""
        self._session = session
        self._begin(session)

    def _begin(self, session: Session) -> None:
        if self._begun or not _is_in_use(self._device):
            return
        self._begun = True
        if self._source is not None:
            self._source.start(session)
        if self._device == "cuda" and self._reads_energy:
            self._energy = EnergySource()
            self._energy.start()

    def decorate(self, batch: Batch) -> Batch:
        """With the times of its events, and what the devices consumed."""
        if self._session is not None:
            self._begin(self._session)
        if not self._begun:
            return batch
        times = self._of_batch(batch)
        energy = None if self._energy is None else self._energy.columns()
        if self._energy is not None:
            self._energy.forget(now_ns() - _ENERGY_KEPT_NS)
        return replace(batch, devices=not_before(batch, times), energy=energy)

    def stop(self) -> None:
        """Ends it; what there is can still be taken, once."""
        if self._source is not None:
            self._source.stop()
        if self._energy is not None:
            self._energy.stop()

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


def _is_in_use(device: str) -> bool:
    module = getattr(torch_library.installed_torch(), device, None)
    is_initialized = getattr(module, "is_initialized", None)
    return module is not None and (is_initialized is None or bool(is_initialized()))
