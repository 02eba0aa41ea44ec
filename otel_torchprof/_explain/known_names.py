"""What names of slices prove, in traces without phases: torch's own, and profiles of this package."""

from __future__ import annotations

import re

from otel_torchprof._columns.phases import PHASE_PREFIX

from .steps import PLACE_OF

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
