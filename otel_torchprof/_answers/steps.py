"""The steps of one rank as columns; in traces without phases, phases are derived from names of events."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX, PHASES, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.arrays import Flags, Floats, Integers
    from otel_torchprof._files.collectives import Collectives

    from .lines import Lines

PLACE_OF = {phase: place for place, phase in enumerate(PHASES)}
"""Column of each phase."""
COUNTERS = ("minor page faults", "major page faults", "voluntary context switches", "involuntary context switches")
"""Counters of the operating system, in the order of columns."""
SMALL_OPERATOR = 30e-6
"""Most seconds of a short operator, as a median or a mean."""
TOP_OPERATORS = 8
"""Number of operators per step that are stored, those with the most self time."""


class Pause(NamedTuple):
    """A checkpoint, evaluation or the like between two steps; times in ns."""

    kind: str
    start: int
    duration: int


class OperatorTime(NamedTuple):
    """The self time of the operators of one name in one step."""

    name: str
    seconds: float
    in_data: bool
    """Whether they are in the phase in which the loop waits for data."""


class KeptMemory(NamedTuple):
    """Blocks that were not seen to be freed."""

    phase: str
    """Empty if it is not known, as are the others."""
    module: str
    operator: str
    """The outermost in which they were allocated."""
    bytes: int
    blocks: int
    line: str = ""
    """The innermost call of the program, as ``train.py(12): forward``, if calls were recorded."""


def after_warm_up(is_training: Flags, number: Integers, warm_up_steps: int) -> Flags:
    """Selects the training steps after the first ones of the program; all of them if the first recorded one has a later number."""
    is_warm = bool((number[is_training][:1] >= warm_up_steps).any())
    return is_training & (is_warm | (np.cumsum(is_training) > warm_up_steps))


@dataclass
class Rank:
    """The steps of one process, in order; unknown values are NaN."""

    name: str
    """``rank 3``, or the name of its file."""
    number: Integers
    start: Integers
    """Starts, ns."""
    seconds: Floats
    """Durations."""
    is_training: Flags
    """Whether it is a complete training step, or may be one."""
    phases: Floats
    """Seconds by step and phase; 0 without the phase."""
    is_derived: bool
    """Whether phases are derived from names of operators; the rest of a step is then unknown."""
    revision: Integers
    """Revision of the rule that began the step; 0 for none."""
    runnable: Floats
    """Seconds in which the loop's thread was ready to run without a processor."""
    blocked: Floats
    """Seconds in which it neither ran nor was ready to run."""
    other_threads: Floats
    """Seconds in which other threads of the process ran and it did not."""
    counters: Floats
    """Counts by step and :data:`COUNTERS`."""
    memory: Floats
    """Bytes by step and :data:`~otel_torchprof._files.attribute_keys.MEMORY`."""
    amounts: Floats
    """Tokens, samples, operations and the share of the peak by step: :data:`~otel_torchprof._files.attribute_keys.RATES`."""
    gap: Floats
    """Seconds of the loop's thread outside of operators."""
    operating: Floats
    """Seconds of the loop's thread in operators, without waits for data."""
    device: Floats
    """Seconds of work of the busiest stream of a device, or in which devices had queued work."""
    drained: Floats
    """Seconds in which devices had no work."""
    operators: list[list[OperatorTime]]
    """The longest operators of each step."""
    operations: Floats
    """Number of operators of each step, without waits for data."""
    collectives: Collectives
    pauses: list[Pause] = field(default_factory=list)
    communicates: bool = False
    """Whether it takes part in collectives, so that a gap may be a wait for other ranks."""
    events: int = 0
    dropped: int = 0
    lacks_device_times: bool = False
    """Whether work was launched on a device whose duration is unknown."""
    lines: tuple[Lines, ...] = ()
    """The lines that its loop's thread was in: those of samples, and those of recorded calls."""
    collected: float = 0.0
    """Part of the time of the garbage collector in which the loop makes its batches, if that takes enough time by itself."""
    needed: float = 0.0
    """Part of the optimizer's time that an update needs, at least: one pass over the parameters."""
    rest_has_lines: bool = False
    """Whether the lines of the time in no phase are known."""
    gap_is_rest: bool = False
    """Whether gaps are the time in no phase, since operators are not known."""
    gap_has_operators: bool = False
    """Whether short operators in no phase are a part of gaps."""
    gap_is_own: bool = False
    """Whether gaps are known to be no waits for other ranks."""
    step_rule: str = ""
    """Where steps begin and end, if the file marks none."""
    kept: Callable[[int, int, int], list[KeptMemory]] | None = None
    """Returns the memory that was allocated between two times and is in use at a third, Unix ns; None if it is not known."""
    left_out: int = 0
    """Number of further steps in its file, of all ranks, which are in none of the columns."""
    has_twin_steps: bool = False
    """Whether several steps have the same number."""

    @property
    def unattributed(self) -> Floats:
        """Seconds of each step outside of all phases."""
        rest: Floats = np.maximum(self.seconds - self.phases.sum(axis=1), 0)
        return rest

    def seconds_of(self, phase: str) -> Floats:
        """Seconds of each step in a phase, of which a collection of garbage while the loop makes a batch is a part."""
        seconds: Floats = self.phases[:, PLACE_OF[phase]]
        if phase not in ("data", "gc") or not self.collected:
            return seconds
        part = self.collected * self.phases[:, PLACE_OF["gc"]]
        return seconds + part if phase == "data" else seconds - part

    def share(self, seconds: Floats) -> Floats:
        """Converts seconds to fractions of the steps' durations."""
        return seconds / self.seconds


TRAINING = Segment.STEP.value
PAUSES = {
    segment.span_name: segment.value
    for segment in Segment
    if segment is not Segment.STEP and segment is not Segment.SETUP
}
"""Segments between steps, by the name of their span."""


_PREFIXES = (
    ("enumerate(DataLoader)#", "data"),
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("autograd::engine::evaluate_function", "backward"),
    ("_compile.compile_inner (dynamo_timed)", "compile"),
    ("Python GC", "gc"),  # of torch and of this package, with record_python_gc_info
    ("gc.collect: generation", "gc"),
)
LOADERS = {
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "num_workers=0: the loop makes its batches itself",
    "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": "the loader has workers, and they do not keep up",
}
"""Explanations for the labels of torch's loaders."""
_ANY = (PHASE_PREFIX, *(prefix for prefix, _ in _PREFIXES))
_OF_ANY_THREAD = frozenset(("backward",))
_DERIVED = frozenset(phase for _, phase in _PREFIXES)
DERIVED = tuple(phase for phase in PLACE_OF if phase in _DERIVED)
"""Phases that can be derived from names."""
_OF_MODELS = re.compile(
    r"(mm|conv|attention|linear|matmul|einsum|lstm|gru|rnn|embedding|(layer|batch|group|instance|rms)_norm|softmax|pool|cross_entropy|loss)",
    re.IGNORECASE,
)
_BACKWARD = re.compile(r"Backward\d*$")
_NOT_COUNTED = ("autograd::engine::", "c10d::")
"""Prefixes of events that enclose operators, or that wait for other ranks."""


def phase_of(name: str) -> str | None:
    """The phase of an event, by its name; None for no phase."""
    if not name.startswith(_ANY):
        return None
    if name.startswith(PHASE_PREFIX):
        phase = name.removeprefix(PHASE_PREFIX)
        return phase if phase in PLACE_OF else None
    return next((phase for prefix, phase in _PREFIXES if name.startswith(prefix)), None)


def is_of_any_thread(phase: str) -> bool:
    """Whether a phase counts on all threads; others count only on the loop's thread."""
    return phase in _OF_ANY_THREAD


def is_operator(name: str) -> bool:
    """Whether a name is that of an operator, and not of a label, a module, a call, a collective or the autograd engine."""
    return not name.startswith(_NOT_COUNTED) and ("::" in name or bool(_BACKWARD.search(name)))


def is_what_models_do(name: str) -> bool:
    """Whether a model is expected to spend its time there: products of matrices, convolutions, attention, normalization, losses."""
    return bool(_OF_MODELS.search(name.rpartition("::")[2]))
