"""What a recording is to hold: of profiles, of live recordings and of metrics alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from otel_torchprof._columns.schema import Kind
from otel_torchprof._native.torch_library import Requested
from otel_torchprof.health import NO_DEVICE

from .frame_filter import ALL_FRAMES, FrameFilter


class SourceOptions(TypedDict, total=False):
    """Arguments of ``profile``, ``stream`` and ``instrument()`` that a single source understands.

    A source that brings one adds it here, for type checkers, and its check to its entry in the catalog.
    """

    energy: bool | None
    """Whether the energy counters of NVIDIA's GPUs are read; None: where the device is ``cuda``."""


@dataclass(frozen=True)
class RecordingOptions:
    """What a recording is to hold."""

    operators: bool | None = None
    """True: torch's operators must be recorded, else an error; None: if the program has torch; False: not."""
    compilations: bool = True
    """What ``torch.compile`` does, as labels."""
    inputs: bool = False
    """Shapes, dtypes, strides and values of the operators' inputs."""
    overloads: bool = False
    """Names of the operators' overloads."""
    memory: bool = False
    """What is allocated and freed."""
    frames: bool = False
    """Calls of Python and C functions."""
    frame_filter: FrameFilter = ALL_FRAMES
    """Which of them."""
    collections: bool = False
    """Pauses of Python's garbage collector, where calls are not recorded, among which they are anyway."""
    modules: bool = False
    """Calls of modules."""
    phases: str = ""
    """Phases of a training loop: ``"roots"``, or ``"modules"`` where the hooks of all modules report root modules; empty for none."""
    device: str | None = None
    """The type of device, as ``torch.device`` names it; None for none."""
    untimed: str = NO_DEVICE
    """Where no device is timed, why."""
    device_events: str = "ops"
    """Which events are timed on it: a key of ``DEVICE_EVENTS``."""
    all_threads: bool = False
    """Every thread."""
    memory_limit: int | None = None
    """Bytes that may be held in the recorder; None: as the environment says, else 512 MiB."""
    is_live: bool = False
    """It is drained while it runs, and may have begun long before torch and the device are used."""
    sources: SourceOptions = field(default_factory=SourceOptions)
    """What single sources were told, checked."""

    @property
    def times_device(self) -> bool:
        """Whether events are timed on a device."""
        return self.device is not None and self.device_events != "off"

    @property
    def reads_energy(self) -> bool:
        """Whether the energy counters are to be read; of a live recording, on any device: its health says where there are none."""
        energy = self.sources.get("energy")
        if energy is not None:
            return energy
        return self.device is not None if self.is_live else self.device == "cuda"

    @property
    def has_collections(self) -> bool:
        """Whether pauses of the garbage collector are recorded, asked for or among the calls."""
        return self.collections or (self.frames and not self.frame_filter.modules_only)

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of events."""
        found = [Kind.OPERATOR, Kind.LABEL]
        if self.modules:
            found.append(Kind.MODULE)
        if self.frames or self.has_collections:
            found.append(Kind.FRAME)
        return tuple(found)

    def info(self) -> Requested:
        """What is to be known of each operator: with frames and modules, also TorchScript's own stack and modules.

        With inputs, memory and frames, which is when a memory timeline can be asked for, also where the inputs lie.
        """
        found = Requested.INPUTS if self.inputs else Requested(0)
        if self.overloads:
            found |= Requested.OVERLOADS
        if self.frames and not self.is_live:
            found |= Requested.CALL_STACKS
        if self.modules:
            found |= Requested.MODULE_HIERARCHY
        if self.inputs and self.memory and self.frames:
            found |= Requested.STORAGES
        return found

    def asks(self) -> Requested:
        """What torch is asked for with each operator: those facts, and what tells on which device it works."""
        return self.info() | (
            Requested.DEVICES if self.times_device and self.device_events != "labels" else Requested(0)
        )
