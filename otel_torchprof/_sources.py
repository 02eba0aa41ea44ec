"""What feeds a recording's session beside the labels: torch's operators and memory, modules, compilations, Python's calls."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import _torch_hooks, config, frame_filter
from ._collective_source import CollectiveSource
from ._compile import leave_uncompiled
from ._compile_events import CompileEvents
from ._device_source import BYTES_OF_A_TIME, DeviceSource
from ._energy_source import EnergySource
from ._native import frame_book, frames, module_names, tensor_notes, torch_library
from ._native.gc_pauses import GcPauses
from ._torch_hooks import ModuleHooks
from .frame_filter import ALL_FRAMES

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._cleanup import CleanupStack
    from ._columns.batch import Batch
    from ._columns.frame_facts import FrameFacts
    from ._columns.waiting import WaitingStack
    from ._native.device_timing import Times
    from ._native.recorder import Session
    from ._recording import Wanted

_logger = logging.getLogger("otel_torchprof")

leave_uncompiled(*(m.__name__ for m in (_torch_hooks, module_names, frame_book, tensor_notes, frame_filter)))


class Sources:
    """Started once, with a session that runs; stopped by a cleanup stack, from any thread.

    Args:
        wanted: what the recording is to hold.
        cleanup: gets what stops them. Those of Python's calls come last, and so stop first: what stops the others is not recorded.
        library: what records torch's memory and operators; None where neither is recorded.
        operators: whether operators are recorded.
        memory_limit: bytes that the recording may hold; the times of devices may take as much beside it.
    """

    def __init__(
        self,
        wanted: Wanted,
        cleanup: CleanupStack,
        library: torch_library.TorchLibrary | None,
        *,
        operators: bool,
        memory_limit: int,
    ) -> None:
        self._wanted = wanted
        self._cleanup = cleanup
        self._library = library
        self._operators = operators
        self._frames: frames.Tracing | None = None
        self._memory: torch_library.MemoryObservation | None = None
        self._devices: DeviceSource | None = None
        self._collectives: CollectiveSource | None = None
        if library is not None and wanted.device is not None:
            most = memory_limit // BYTES_OF_A_TIME
            self._devices = DeviceSource(library, wanted.device, wanted.device_events, most)
        self._energy = EnergySource() if wanted.energy and config.enabled() else None
        self._notes: list[str] = []

    def start_before(self) -> None:
        """Starts what has to be there before the session begins: readings that reach around it."""
        if self._energy is not None:
            self._cleanup.push(self._energy.stop)
            self._energy.start()

    def start(self, session: Session) -> None:
        """Lets the session have what it wants. Where that fails, the cleanup stack has what was started.

        Raises:
            TorchProfError: something stands in the way.
        """
        self._start_library(session)
        self._start_hooks()
        if self._wanted.frames:
            self._start_frames(session)
        elif self._wanted.frame_filter != ALL_FRAMES:
            self._notes.append("frames off: a filter of calls was given without with_stack=True")

    def _start_library(self, session: Session) -> None:
        if self._library is None:
            if self._wanted.memory:
                self._notes.append("memory is not recorded: torch is not installed")
            return
        if self._wanted.memory:
            self._memory = self._library.observe_memory(session)
            self._cleanup.push(self._memory.stop)
            if self._wanted.all_threads:
                self._notes.append(
                    "memory is recorded on the thread that started the profile and where torch carries its state, not on others"
                )
        if self._operators:
            self._cleanup.push(self._library.observe(session, self._wanted.asks()).stop)
            self._collectives = CollectiveSource(self._library, session)
            self._cleanup.push(self._collectives.stop)
        if self._devices is not None:
            self._cleanup.push(self._devices.stop)
            self._devices.start(session)

    def _start_hooks(self) -> None:
        compilations = CompileEvents()
        self._cleanup.push(compilations.remove)
        compilations.install()
        if self._wanted.modules and torch_library.installed_torch() is not None:
            modules = ModuleHooks(survives_fork=False)
            self._cleanup.push(modules.remove)
            modules.install(outermost_only=False)

    def _start_frames(self, session: Session) -> None:
        tracing = frames.Tracing(session)
        self._cleanup.push(tracing.stop)
        try:
            tracing.start(session, self._wanted.frame_filter)
        except frames.FramesError as error:
            self._notes.append(f"frames off: {error}")
            _logger.warning("Python's calls are not recorded, and events have no stacks: %s", error)
            return
        self._frames = tracing
        self._notes += notes_on_calls(tracing)
        if not self._wanted.frame_filter.modules_only:
            pauses = GcPauses(session)
            self._cleanup.push(pauses.stop)
            pauses.start()

    def time_devices(self, *, on: bool) -> None:
        """Goes on with the times of devices, or leaves them out."""
        if self._devices is not None:
            self._devices.pause(paused=not on)

    def device_times(self) -> Times | None:
        """The times of devices, after the stop; None where none were recorded."""
        if self._devices is None:
            return None
        self._devices.stop()  # where the stop was interrupted
        return self._devices.last_times

    def take_device_times(self) -> Times | None:
        """The times of devices that were not taken before; None where none are recorded."""
        return None if self._devices is None else self._devices.take()

    def with_collectives(self, batch: Batch) -> Batch:
        """A batch that was just drained, with what is known of the collectives among its events."""
        return batch if self._collectives is None else self._collectives.added_to(batch)

    def state_of_devices(self) -> str:
        """``on``, or ``off: `` and the reason."""
        if self._devices is not None:
            return self._devices.state
        if self._wanted.device_events == "off":
            return "off: device_events='off'"
        if self._wanted.device is None:
            return f"off: {self._wanted.untimed}"
        return "off: torch is not installed"

    def energy(self) -> dict[str, npt.NDArray[Any]] | None:
        """Readings of energy counters; None where there are none."""
        return None if self._energy is None else self._energy.columns()

    def state_of_energy(self) -> str:
        """``on``, or ``off: `` and the reason."""
        return "off: not asked for" if self._energy is None else self._energy.state

    def waiting_stacks(self) -> list[WaitingStack]:
        """What is on the stacks of threads that have called nothing since the start; see :meth:`Tracing.waiting`."""
        return [] if self._frames is None else self._frames.waiting()

    def frame_facts(self) -> FrameFacts | None:
        """What is known of the functions, modules and optimizers of Python's calls so far; None where calls are not recorded."""
        return None if self._frames is None else self._frames.facts()

    def notes(self) -> list[str]:
        """What a reader of the recording should know of them, a sentence each; all of it after the stop."""
        notes = [*self._notes]
        if not self._cleanup.is_empty:
            return notes
        if self._frames is not None and self._has_nothing_included():
            notes.append(
                f"no function was called that include={list(self._wanted.frame_filter.include)} names; those of the script "
                "itself are in the module __main__"
            )
        if self._frames is not None and self._frames.displaced:
            notes.append(f"frames were cut short on {self._frames.displaced} threads: another tool profiled them")
        if self._memory is not None and self._memory.was_cut:
            notes.append(
                "memory was recorded in part only: torch's profiler was started meanwhile, refused, and started again, and "
                "then torch takes its slot away from whoever is in it"
            )
        if self._devices is not None:
            notes += self._devices.notes()
        if self._collectives is not None:
            notes += self._collectives.notes()
        return notes

    def _has_nothing_included(self) -> bool:
        wanted = self._wanted.frame_filter
        facts = self.frame_facts()
        return bool(wanted.include) and not wanted.modules_only and not (facts and facts.functions)


def notes_on_calls(tracing: frames.Tracing) -> list[str]:
    """On which threads calls are not recorded, and why."""
    notes = []
    if tracing.new_threads_tool:
        notes.append(f"frames off on threads that start later: {tracing.new_threads_tool} profiles them")
    if tracing.passed_over:
        notes.append(f"frames off on {tracing.passed_over} threads that another tool profiles")
    return notes
