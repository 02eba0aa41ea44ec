"""What is known of the steps of one rank, as columns; in traces without phases, what the names of slices prove."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, Segment

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Flags, Floats, Integers
    from otel_torchprof._files.collectives import Collectives

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


_PREFIXES = (
    ("enumerate(DataLoader)#", "data"),
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("autograd::engine::evaluate_function", "backward"),
    ("_compile.compile_inner (dynamo_timed)", "compile"),
    ("Python GC", "gc"),  # torch's, and this package's, with record_python_gc_info
    ("gc.collect: generation", "gc"),
)
LOADERS = {
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "num_workers=0: the loop makes its batches itself",
    "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": "the loader has workers, and they do not keep up",
}
"""What names of torch's loaders say of them."""
_ANY = (PHASE_PREFIX, *(prefix for prefix, _ in _PREFIXES))
_OF_ANY_THREAD = frozenset(("backward",))
_DERIVED = frozenset(phase for _, phase in _PREFIXES)
DERIVED = tuple(phase for phase in PLACE_OF if phase in _DERIVED)
"""The phases that names prove."""
_OF_MODELS = re.compile(
    r"(mm|conv|attention|linear|matmul|einsum|lstm|gru|rnn|embedding|(layer|batch|group|instance|rms)_norm|softmax|pool|cross_entropy|loss)",
    re.IGNORECASE,
)
_BACKWARD = re.compile(r"Backward\d*$")
_NOT_COUNTED = ("autograd::engine::", "c10d::")
"""What is around other operators, and what waits for other ranks."""


def phase_of(name: str) -> str | None:
    """The phase that a slice of this name is a part of."""
    if not name.startswith(_ANY):
        return None
    if name.startswith(PHASE_PREFIX):
        phase = name.removeprefix(PHASE_PREFIX)
        return phase if phase in PLACE_OF else None
    return next((phase for prefix, phase in _PREFIXES if name.startswith(prefix)), None)


def is_of_any_thread(phase: str) -> bool:
    """Whether it counts on whichever thread it is; others count on the loop's thread."""
    return phase in _OF_ANY_THREAD


def is_operator(name: str) -> bool:
    """Whether it is one that computes, and not a label, a module, a call, a collective or the engine around others."""
    return not name.startswith(_NOT_COUNTED) and ("::" in name or bool(_BACKWARD.search(name)))


def is_what_models_do(name: str) -> bool:
    """Whether a model is expected to spend its time there: products of matrices, convolutions, attention, normalization, losses."""
    return bool(_OF_MODELS.search(name.rpartition("::")[2]))
