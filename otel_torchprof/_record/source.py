"""Sources, which feed a session: the same for profiles, live recordings and metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.schema import Kind
from otel_torchprof._native import frames, module_names, object_notes, record_function_fast
from otel_torchprof._native.python_sources import GcPauses, no_pauses_in_child
from otel_torchprof._native.torch_library import Requested
from otel_torchprof.health import NO_DEVICE, ON

from . import frame_filter, module_calls, torch_hooks
from .compiled_code import leave_uncompiled
from .frame_filter import ALL_FRAMES, FrameFilter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Batch, WaitingStack
    from otel_torchprof._native.recorder import Session
    from otel_torchprof._native.torch_library import MemoryObservation, Observation, TorchLibrary

_logger = logging.getLogger("otel_torchprof")

_UNCOMPILED = (torch_hooks, module_names, object_notes, frame_filter, record_function_fast)
leave_uncompiled(*(m.__name__ for m in _UNCOMPILED))


class Source:
    """Base class of sources of events; by default its methods do nothing."""

    starts_before_session = False
    """Whether it starts before the session and stops after it; it then does not use the session."""

    def start(self, session: Session) -> None:
        """Starts recording into a running session. Call :meth:`stop` even if this fails or is interrupted.

        Raises:
            TorchProfError: the source is required and cannot record.
        """

    def stop(self) -> None:
        """Stops, on any thread, finalizers included. Repeated calls have no effect, except to complete an interrupted stop."""

    @classmethod
    def forked(cls) -> None:
        """Resets this kind of source in a forked child: renews its locks, removes its hooks and wrappers.

        Called once per kind, in the catalog's order, before any recording continues in the child; instances belong to the
        parent and do not start again. Must not wait for other threads.
        """

    def decorate(self, batch: Batch) -> Batch:
        """Returns a drained batch with the source's data about its events. Not thread-safe."""
        return batch

    def states(self) -> dict[str, str]:
        """``on``, or ``off: `` and the reason, by the names under which health shows them: that of a profile where one is off."""
        return {}

    def notes(self) -> list[str]:
        """Notes for readers of the recording, one sentence each; complete after the stop."""
        return []


class Operators(Source):
    """Torch's operators, and the regions that compiled code labels like operators. Can be restarted after a stop.

    Args:
        library: observes the operators.
        requested: facts to record of each operator.
    """

    def __init__(self, library: TorchLibrary, requested: Requested) -> None:
        self._library = library
        self._requested = requested
        self._observation: Observation | None = None

    def start(self, session: Session) -> None:
        """Registers an observer with torch, 3 us (measured).

        Raises:
            TorchLibraryError: torch refuses.
        """
        self._observation = self._library.observe(session, self._requested)

    def stop(self) -> None:
        """Removes the callback; 2 us (measured)."""
        observation = self._observation
        if observation is not None:
            observation.stop()
            if self._observation is observation:
                self._observation = None


class Memory(Source):
    """Torch's allocations and releases on the thread that starts this source.

    Args:
        library: observes the allocations.
        all_threads: whether the recording contains all threads.
    """

    def __init__(self, library: TorchLibrary, *, all_threads: bool) -> None:
        self._library = library
        self._all_threads = all_threads
        self._observation: MemoryObservation | None = None

    def start(self, session: Session) -> None:
        """Occupies torch's slot for a memory profiler on this thread.

        Raises:
            TorchProfError: a torch profiler is running on the thread.
        """
        self._observation = self._library.observe_memory(session)

    def stop(self) -> None:
        """Releases torch's slot."""
        if self._observation is not None:
            self._observation.stop()

    def notes(self) -> list[str]:
        """A note if nothing was recorded; else none."""
        notes = []
        if self._all_threads:
            notes.append(
                "memory is recorded on the thread that started the profile and where torch carries its state, not on others"
            )
        if self._observation is not None and self._observation.was_cut:
            notes.append(
                "memory was recorded in part only: torch's profiler was started meanwhile, refused, and started again, and "
                "then torch takes its slot away from whoever is in it"
            )
        return notes


class Modules(Source):
    """Calls of modules, on every thread; not in a forked child."""

    def start(self, _session: Session) -> None:
        """Follows the calls, for every session that wants modules."""
        module_calls.shared.install(self, as_events=True)

    def stop(self) -> None:
        """Ends it."""
        module_calls.shared.remove(self)

    @classmethod
    def forked(cls) -> None:
        """Ends it for all users but those that continue in a child."""
        module_calls.shared.after_fork_in_child()

    def notes(self) -> list[str]:
        """A note if they cannot be observed; else none."""
        return module_calls.shared.notes()


class Collections(Source):
    """Pauses of Python's garbage collector, on every thread."""

    def __init__(self) -> None:
        self._pauses: GcPauses | None = None

    def start(self, session: Session) -> None:
        """Begins."""
        self._pauses = GcPauses(session)
        self._pauses.start()

    def stop(self) -> None:
        """Ends it."""
        if self._pauses is not None:
            self._pauses.stop()

    @classmethod
    def forked(cls) -> None:
        """Ends it."""
        no_pauses_in_child()


class Calls(Source):
    """Calls of Python and C functions."""

    def __init__(self, filtering: FrameFilter) -> None:
        self._filter = filtering
        self._tracing: frames.Tracing | None = None
        self._stopped = False
        self.state = "off: not started"
        """``on``, or ``off: `` and the reason."""

    def start(self, session: Session) -> None:
        """Begins; where another tool is in the way, :attr:`state` names it, and it is logged."""
        tracing = self._tracing = frames.Tracing(session)
        try:
            tracing.start(session, self._filter)
        except frames.FramesError as error:
            tracing.stop()
            self._tracing = None
            self.state = f"off: {error}"
            _logger.warning("Python's calls are not recorded, all else is: %s", error)
            return
        self.state = ON

    def stop(self) -> None:
        """Ends it."""
        if self._tracing is not None:
            self._tracing.stop()
        self._stopped = True

    @classmethod
    def forked(cls) -> None:
        """Ends it."""
        frames.off_in_child()

    def waiting(self) -> list[WaitingStack]:
        """Stacks of threads that have made no call since the start; see :meth:`Tracing.waiting`."""
        return [] if self._tracing is None else self._tracing.waiting()

    def decorate(self, batch: Batch) -> Batch:
        """Returns the batch with facts about the functions, modules and optimizers called so far."""
        return batch if self._tracing is None else replace(batch, frame_info=self._tracing.info())

    def states(self) -> dict[str, str]:
        """Under ``frames``."""
        return {"frames": self.state}

    def notes(self) -> list[str]:
        """Returns notes on threads without calls, with the reason, and on an ``include`` that matched nothing."""
        tracing = self._tracing
        if tracing is None:
            return []
        notes = []
        if tracing.new_threads_tool:
            notes.append(f"frames off on threads that start later: {tracing.new_threads_tool} profiles them")
        if tracing.passed_over:
            notes.append(f"frames off on {tracing.passed_over} threads that another tool profiles")
        if self._stopped and self._filter.include and not self._filter.modules_only and not tracing.info().functions:
            notes.append(
                f"no function was called that include={list(self._filter.include)} names; those of the script itself are in "
                "the module __main__"
            )
        if tracing.displaced:
            notes.append(f"frames were cut short on {tracing.displaced} threads: another tool profiled them")
        return notes


# ---- Options of a recording: of profiles, live recordings and metrics ----


@dataclass(frozen=True)
class RecordingOptions:
    """Options of a recording."""

    operators: bool | None = None
    """Whether to record torch's operators: True raises if that is impossible; None records them if the program has
    torch."""
    compilations: bool = True
    """Whether to record the work of ``torch.compile``, as labels."""
    inputs: bool = False
    """Whether to record shapes, dtypes, strides and values of operators' inputs."""
    overloads: bool = False
    """Whether to record the names of operators' overloads."""
    memory: bool = False
    """Whether to record allocations and releases."""
    frames: bool = False
    """Whether to record calls of Python and C functions."""
    frame_filter: FrameFilter = ALL_FRAMES
    """Selects these calls."""
    collections: bool = False
    """Whether to record pauses of Python's garbage collector without calls; recorded calls include them."""
    modules: bool = False
    """Whether to record calls of modules."""
    phases: bool = False
    """Whether to record phases of a training loop."""
    device: str | None = None
    """Type of device to time, as ``torch.device`` names it; None for none."""
    untimed: str = NO_DEVICE
    """Reason why no device is timed."""
    device_events: str = "ops"
    """Events to time on it: a key of ``DEVICE_EVENTS``."""
    all_threads: bool = False
    """Whether to record every thread."""
    memory_limit: int | None = None
    """Limit of the recorder in bytes; None: the environment's, else 512 MiB."""
    is_live: bool = False
    """Whether it is drained while it runs; then it may begin long before torch and the device are used."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Values of the options of single sources, by argument."""

    @property
    def times_device(self) -> bool:
        """Whether events are timed on a device."""
        return self.device is not None and self.device_events != "off"

    @property
    def reads_energy(self) -> bool:
        """Whether the energy counters are to be read; of a live recording, on any device: its health says where there are none."""
        energy: bool | None = self.sources.get("energy")
        if energy is not None:
            return energy
        return self.device is not None if self.is_live else self.device == "cuda"

    @property
    def has_collections(self) -> bool:
        """Whether pauses of the garbage collector are recorded, by request or with the calls."""
        return self.collections or (self.frames and not self.frame_filter.modules_only)

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of events."""
        kinds = [Kind.OPERATOR, Kind.LABEL]
        if self.modules:
            kinds.append(Kind.MODULE)
        if self.phases:
            kinds.append(Kind.PHASE)
        if self.frames or self.has_collections:
            kinds.append(Kind.FRAME)
        return tuple(kinds)

    def info(self) -> Requested:
        """Data to record of each operator; with frames and modules, also TorchScript's own stack and modules.

        With inputs, memory and frames, which a memory timeline needs, also the storages of inputs.
        """
        requested = Requested.INPUTS if self.inputs else Requested(0)
        if self.overloads:
            requested |= Requested.OVERLOADS
        if self.frames and not self.is_live:
            requested |= Requested.CALL_STACKS
        if self.modules:
            requested |= Requested.MODULE_HIERARCHY
        if self.inputs and self.memory and self.frames:
            requested |= Requested.STORAGES
        return requested

    def asks(self) -> Requested:
        """Facts to request from torch for each operator: :attr:`info`, and those that reveal its device."""
        return self.info() | (
            Requested.DEVICES if self.times_device and self.device_events != "labels" else Requested(0)
        )
