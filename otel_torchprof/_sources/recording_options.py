"""Options of a recording: of profiles, of live recordings and of metrics alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.schema import Kind
from otel_torchprof._native.torch_library import Requested
from otel_torchprof.health import NO_DEVICE

from .frame_filter import ALL_FRAMES, FrameFilter

if TYPE_CHECKING:
    from collections.abc import Mapping


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
