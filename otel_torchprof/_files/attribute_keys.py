"""Keys of the span attributes that readers of trace files use, and the types of their values."""

from __future__ import annotations

from otel_torchprof._columns.phases import (
    DEVICE_ALLOCATED,
    DEVICE_FREE,
    FREE,
    LOADED,
    MFU,
    PHASE_NAME,
    PHASE_PREFIX,
    RESIDENT,
    USAGE,
)
from otel_torchprof._columns.phases import DURATIONS as PHASE_DURATIONS
from otel_torchprof._columns.phases import FLOPS as STEP_FLOPS
from otel_torchprof._model.span_table import STEP_NUMBER

AGGREGATED_COUNT, AGGREGATED_DURATION = "torch.aggregated.count", "torch.aggregated.duration"
COLLAPSED_COUNT, COLLAPSED_DURATION = "torch.collapsed.count", "torch.collapsed.duration"
FLOPS = "torch.op.flops"
AVERAGES, COLLECTIVES, SELF_DURATION = "torch.averages", "torch.collectives", "torch.self_duration"
STEP, UNFINISHED, IS_ASYNC = STEP_NUMBER, "torch.unfinished", "torch.async"
KIND, REVISION, PART = "torch.step.kind", "torch.step.rule.revision", "torch.part"
RUNNABLE, *COUNTERS, BLOCKED, OTHER_THREADS = USAGE
DRAINED = "torch.device.drained_duration"
MEMORY = (RESIDENT, FREE, DEVICE_ALLOCATED, DEVICE_FREE)
"""Attributes of a step: bytes of the process and of a device."""
AMOUNTS = (*LOADED, STEP_FLOPS)
"""Attributes of a step: tokens and samples of its batches, and floating-point operations."""
RATES = (*AMOUNTS, MFU)
"""The same, and the share of the peak of the device that it reaches."""
DROPPED = "torch.dropped_events"
THREAD = "thread.id"
FILE = "code.file.path"
LINKS = "link:spanID"
"""In the place of a key: the ids of the spans that a span links to."""
COLLECTIVE, GROUP, SEQUENCE = "torch.collective.name", "torch.collective.group", "torch.collective.sequence_nr"
RANK_IN_GROUP, ASYNC, BACKEND = "torch.collective.rank", "torch.collective.async", "torch.collective.backend"
DTYPE, REDUCE_OP, SIZE = "torch.collective.dtype", "torch.collective.reduce_op", "torch.collective.size"
GROUP_SIZE, ROOT, PEER = "torch.collective.group_size", "torch.collective.root", "torch.collective.peer"
DEFAULT_GROUP = "0"
"""The group of all ranks."""
TORCH_NAME, TORCH_GROUP, TORCH_RANKS, TORCH_NUMBER = (
    "Collective name",
    "Process Group Name",
    "Process Group Ranks",
    "Seq",
)
"""Arguments of the events of collectives in traces of torch.profiler."""
JOB = "distributedInfo"
"""Member of such a trace with the rank of its process and the groups of ranks."""
OTHER, MERGED_RANKS = "otherData", "merged_ranks"
"""Member of a trace of this package, and its key in a merged trace, with its processes and their ranks."""
RANK, INSTANCE, SERVICE = "torch.distributed.rank", "service.instance.id", "service.name"
"""Attributes of resources."""

PHASE_OF = {key: phase for phase, key in PHASE_DURATIONS.items()}
"""By attribute of a step, the phase whose duration it is."""
COLLECTIVE_PHASE = f"{PHASE_PREFIX}collective.duration"
"""Attribute of a step: how long it waited for other ranks."""
DURATIONS = frozenset(
    (AGGREGATED_DURATION, COLLAPSED_DURATION, SELF_DURATION, RUNNABLE, BLOCKED, OTHER_THREADS, DRAINED, *PHASE_OF)
)
"""Attributes in seconds."""
TEXTS = frozenset(
    (PHASE_NAME, KIND, FILE, COLLECTIVE, GROUP, BACKEND, DTYPE, REDUCE_OP, TORCH_NAME, TORCH_GROUP, TORCH_RANKS)
)
"""Attributes that are texts. :data:`AVERAGES` and :data:`COLLECTIVES` are JSON, all others integers from 0 on or booleans."""

USED = frozenset(
    (
        *(STEP, UNFINISHED, KIND, REVISION, PART, RUNNABLE, *COUNTERS, BLOCKED, OTHER_THREADS, DRAINED, DROPPED),
        *(IS_ASYNC, *MEMORY, *RATES),
        *(COLLECTIVE, GROUP, SEQUENCE, RANK_IN_GROUP, ASYNC, BACKEND, COLLECTIVES),
        *(AGGREGATED_COUNT, AGGREGATED_DURATION, COLLAPSED_COUNT, COLLAPSED_DURATION),
        *(AVERAGES, SELF_DURATION, FILE, *PHASE_OF),
    )
)
"""Attributes that answers are computed from, beside :data:`THREAD` and :data:`LINKS`."""
