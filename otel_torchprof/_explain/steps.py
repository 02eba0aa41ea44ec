"""What is known of the steps of one rank, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASES, Segment

if TYPE_CHECKING:
    from otel_torchprof._trace_files.collectives import Collectives

    from .arrays import Flags, Floats, Integers

PLACE_OF = {phase: place for place, phase in enumerate(PHASES)}
"""Of each phase, its column."""
COUNTERS = ("minor page faults", "major page faults", "voluntary context switches", "involuntary context switches")
"""What the system counts of a step, in the order of columns."""
TOP_OPERATORS = 8
"""Of each step, those with the most self time."""


class Pause(NamedTuple):
    """What the loop did between two steps; times in ns."""

    kind: str
    start: int
    duration: int


class OperatorTime(NamedTuple):
    """The self time of the operators of one name in one step."""

    name: str
    seconds: float
    in_data: bool
    """Whether the loop waited for data meanwhile."""


@dataclass
class Rank:
    """The steps of one process, in order; unknown values are NaN."""

    name: str
    """``rank 3``, or the name of its file."""
    number: Integers
    start: Integers
    """In ns."""
    seconds: Floats
    """Their durations."""
    is_training: Flags
    """Whether it is a whole step that trained, or may be one."""
    phases: Floats
    """Seconds, by step and phase; 0 where it was in none of that name."""
    is_derived: bool
    """Phases are those that names of operators prove; the rest of a step is not known."""
    revision: Integers
    """Of the rule by which the step began, 0 where there is none."""
    runnable: Floats
    """Seconds that the loop's thread was ready to run, and did not."""
    blocked: Floats
    """Seconds that it neither ran nor was ready to."""
    other_threads: Floats
    """Seconds that other threads of the process ran while it did not."""
    counters: Floats
    """By step and :data:`COUNTERS`."""
    gap: Floats
    """Seconds of the loop's thread in which no operator ran."""
    operating: Floats
    """Seconds of the loop's thread in operators, without waits for data."""
    device: Floats
    """Seconds that the busiest stream of a device worked, or that devices had work waiting."""
    drained: Floats
    """Seconds in which devices had none."""
    operators: list[list[OperatorTime]]
    """The longest of each step."""
    collectives: Collectives
    pauses: list[Pause] = field(default_factory=list)
    communicates: bool = False
    """It takes part in collectives: what looks like a gap may be a wait for other ranks."""
    events: int = 0
    dropped: int = 0
    lacks_device_times: bool = False
    """Work was launched on a device, and nothing says how long it took."""
    has_twin_steps: bool = False
    """Several steps have one number."""

    @property
    def unattributed(self) -> Floats:
        """Seconds of each step in no phase."""
        rest: Floats = np.maximum(self.seconds - self.phases.sum(axis=1), 0)
        return rest

    def share(self, seconds: Floats) -> Floats:
        """As fractions of the steps' durations."""
        return seconds / self.seconds


TRAINING = Segment.STEP.value
PAUSES = {each.span_name: each.value for each in Segment if each is not Segment.STEP and each is not Segment.SETUP}
"""By name of a span, what the loop does between steps."""
