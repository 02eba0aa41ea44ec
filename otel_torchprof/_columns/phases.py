"""Phases of a training loop: a closed set of names."""

from __future__ import annotations

import enum
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

PHASE_PREFIX = "torch.phase."
"""Names of the events of phases begin with it, and of their spans, but for calls of ``generate``, which the conventions name."""
PHASE_NAME = "torch.phase.name"
"""Attribute of those spans: the phase."""


class Part(enum.IntEnum):
    """The call that a phase is (column ``fwd_thread`` of events of kind PHASE; ``sequence_nr`` is the called object)."""

    NEXT = 1
    """Request of a batch from a loader; the object is its dataset."""
    FORWARD = 2
    """A root module was called with gradients enabled; the object is that module."""
    INFERENCE = 3
    """A root module was called without gradients."""
    EVALUATION = 4
    """The same in ``eval()`` mode, of a module that was called with gradients before."""
    BACKWARD = 5
    """The autograd engine ran."""
    RECOMPUTATION = 6
    """Activation checkpointing ran a part of the forward pass again, inside a backward pass."""
    STEP = 7
    """A step of an optimizer; the object is that optimizer."""
    SCALER_STEP = 8
    """``GradScaler.step``, which may skip its optimizer; the object is the scaler."""
    SCALER_UPDATE = 9
    """``GradScaler.update``; the object is the scaler."""
    UNSCALE = 10
    """``GradScaler.unscale_``; the object is the scaler."""
    CLIPPING = 11
    """Gradients were clipped, or their norm was computed."""
    ZEROING = 12
    """``Optimizer.zero_grad``; the object is the optimizer."""
    SAVE = 13
    """A file was written by ``torch.save`` and the like."""
    COLLECTIVE = 14
    """The thread waited for other ranks."""
    COMPILATION = 15
    """``torch.compile`` compiled."""
    COLLECTION = 16
    """Python's garbage collector ran."""
    DEVICE_WAIT = 17
    """The thread waited for a device."""
    AVERAGING = 18
    """Update of an averaged model from the trained one."""
    GENERATE = 19
    """``generate`` of transformers ran; the object is the model."""
    PREFILL = 20
    """A root module was called inside of that, up to the call of the model that gave the first token; the object is that module."""
    DECODE = 21
    """A root module was called after that: for one token more, as a rule."""
    EVALUATING_GENERATE = 22
    """``generate`` of a model that is trained, in ``eval()``."""

    @property
    def phase(self) -> str:
        """The phase that it is a part of: one of :data:`PHASES`."""
        return _PHASE_OF[self]

    @property
    def event_name(self) -> str:
        """The name of its events."""
        return PHASE_PREFIX + _PHASE_OF[self]


PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "inference",
    "generate",
    "prefill",
    "decode",
    "evaluation",
    "checkpoint",
    "collective",
    "compile",
    "gc",
    "device_wait",
)
"""The closed set, in the order in which they are listed."""

USAGE = (
    "torch.step.runnable_duration",
    "torch.step.page_faults.minor",
    "torch.step.page_faults.major",
    "torch.step.context_switches.voluntary",
    "torch.step.context_switches.involuntary",
    "torch.step.blocked_duration",
    "torch.step.other_threads_duration",
)
"""Attributes of a step: the operating system's counters of its thread, the first and the last two in seconds."""
LOSS = "torch.step.loss"
LEARNING_RATE = "torch.step.learning_rate"
EPOCH = "torch.step.epoch"
BATCHES = "torch.step.batches"
RESIDENT, PEAK, FREE = (f"torch.step.memory.{name}" for name in ("resident", "peak", "free"))
DEVICE_ALLOCATED, DEVICE_RESERVED, DEVICE_PEAK, DEVICE_FREE = (
    f"torch.step.device.memory.{name}" for name in ("allocated", "reserved", "peak", "free")
)
"""Attributes of a step: bytes of the process at its end, and those of torch's allocator on a device; what is free, and what
devices have, as of a drain, on its last step."""
LOADED = TOKENS, SAMPLES = ("torch.step.tokens", "torch.step.samples")
"""Attributes of a step: how many its batches have."""
FLOPS, MFU = "torch.step.flops", "torch.step.mfu"
Usage = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
"""The system's number of a thread, and its counts of the first five of :data:`USAGE` since it began, the first in ns, -1 where it is
unknown; ns that it ran, and ns that all threads ran; :data:`RESIDENT`, -1 where it is unknown, and :data:`PEAK`; :data:`LOADED`, of
all batches that the thread has taken from loaders."""


def with_loaded(
    attributes: Mapping[str, Any] | None, tokens: int | None, samples: int | None
) -> Mapping[str, Any] | None:
    """Attributes of a step, with what the program says of :data:`LOADED`.

    Raises:
        TypeError, ValueError: that is no integer, or less than 0.
    """
    if tokens is None and samples is None:
        return attributes
    return {
        **(attributes or {}),
        **{key: _count(key, n) for key, n in zip(LOADED, (tokens, samples), strict=True) if n is not None},
    }


def _count(key: str, value: Any) -> int:
    name, kind = key.rpartition(".")[2], type(value)
    if kind is bool or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is of type {kind.__name__}; it must be an integer")
    count = int(value)
    if not 0 <= count < 1 << 63:
        raise ValueError(f"{name} is {count}; it must be from 0 to 2**63 - 1")
    return count


UNATTRIBUTED = "unattributed"
"""The part of a step that is in no phase."""
DURATIONS = {phase: f"{PHASE_PREFIX}{phase}.duration" for phase in (*PHASES, UNATTRIBUTED)}
"""By phase, the attribute of a step with its duration, s."""

_PHASE_OF = {
    Part.NEXT: "data",
    Part.FORWARD: "forward",
    Part.INFERENCE: "inference",
    Part.EVALUATION: "evaluation",
    Part.BACKWARD: "backward",
    Part.RECOMPUTATION: "backward",
    Part.STEP: "optimizer",
    Part.SCALER_STEP: "optimizer",
    Part.SCALER_UPDATE: "optimizer",
    Part.UNSCALE: "optimizer",
    Part.CLIPPING: "optimizer",
    Part.ZEROING: "optimizer",
    Part.AVERAGING: "optimizer",
    Part.GENERATE: "generate",
    Part.EVALUATING_GENERATE: "generate",
    Part.PREFILL: "prefill",
    Part.DECODE: "decode",
    Part.SAVE: "checkpoint",
    Part.COLLECTIVE: "collective",
    Part.COMPILATION: "compile",
    Part.COLLECTION: "gc",
    Part.DEVICE_WAIT: "device_wait",
}


GENERATES = (Part.GENERATE, Part.EVALUATING_GENERATE)
"""Parts that are calls of ``generate``."""
OF_MODULES = (Part.FORWARD, Part.INFERENCE, Part.EVALUATION, Part.PREFILL, Part.DECODE, *GENERATES)
"""Parts whose object is a root module."""


class Segment(enum.Enum):
    """Kind of a segment of a training job; steps are numbered, the others lie between them."""

    STEP = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    SETUP = "setup"

    __hash__ = object.__hash__  # an enum's own is a function in Python

    def __init__(self, value: str) -> None:
        self.span_name = "torch.step" if value == "training" else f"torch.{value}"
        """Name of the spans of such segments."""


class SegmentChange(NamedTuple):
    """End of a segment and begin of the next one, reported by the program or its framework."""

    begins: Segment | None = Segment.STEP
    """The new segment; None for none until the next change."""
    ends_step: bool = True
    """Whether a step ends here; if no segment is known yet, it is the first."""
    replaces_step: bool = False
    """Whether the current step is not a step but the new segment, from its start on."""
    attributes: Mapping[str, Any] | None = None
    """Attributes of the span that ends."""
    is_of_loop: bool = False
    """Whether a framework reports its own loop; steps are learned before that loop begins and after it has ended."""
    ends_loop: bool = False
    """Whether that loop ends here."""
    is_evaluation: bool = False
    """Whether that loop is only this evaluation, in a program whose own loop may be inside a step."""


NEXT_STEP = SegmentChange()
"""Ends a step and begins the next one."""
LOOP_END = SegmentChange(None, ends_step=False, is_of_loop=True, ends_loop=True)
"""Ends the loop of a framework and its current segment."""
