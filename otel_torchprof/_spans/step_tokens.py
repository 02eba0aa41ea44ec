"""What the cycle of a training loop is learned from, and what it gives: tokens and boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Part
from otel_torchprof._native.untracked import untracked

if TYPE_CHECKING:
    from otel_torchprof._columns.phases import Segment

OPTIMIZERS = frozenset({Part.STEP, Part.SCALER_STEP, Part.SCALER_UPDATE})
"""Parts that can end a step of training."""

RELEVANT = OPTIMIZERS | {
    Part.NEXT,
    Part.FORWARD,
    Part.INFERENCE,
    Part.EVALUATION,
    Part.BACKWARD,
    Part.ZEROING,
    Part.SAVE,
}
"""Parts that say something about the cycle; the others may come anywhere."""


@untracked
@dataclass
class Token:
    """A phase event that is in no other phase of its thread."""

    id: int
    """Of the event."""
    part: Part
    key: int
    """Address of its dataset, root module, optimizer or scaler; 0 where it is unknown."""
    start: int
    """Unix ns."""
    end: int
    """Unix ns; NEVER while it is open."""
    thread: int
    """``threading.get_ident()``."""
    context: int
    """Number of the OpenTelemetry span, 0 for none."""
    holds_backward: bool = False
    """A backward pass ran in it: an optimizer was given a closure."""
    is_cut: bool = False
    """It never ended by itself: an exception left it."""


@untracked
@dataclass
class Boundary:
    """A segment begins, and the one before ends."""

    time: int
    """Unix ns."""
    thread: int
    token: int
    """Id of the phase that begins it; 0 where it begins with none."""
    segment: Segment | None
    """None: nothing follows."""
