"""Attributes of phases, and what segments of a training job have of them, for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.phases import (
    BATCHES,
    EPOCH,
    LEARNING_RATE,
    LOSS,
    OF_MODULES,
    PHASE_PREFIX,
    PHASES,
    UNATTRIBUTED,
    USAGE,
    Part,
    Segment,
)
from otel_torchprof._columns.schema import Kind
from otel_torchprof._tree.span_table import STEP_KIND, STEP_NAME, AttributeType

from . import frame_attributes as frames

if TYPE_CHECKING:
    from .attribute_source import Source, Values

_DOUBLE, _NAME = AttributeType.DOUBLE, AttributeType.NAME
_ON_SEGMENTS = "on steps and the other segments of a job"
_ON_MARKED = "on steps, where a [framework](frameworks.md) says where they end"
_ON_ASKED = f"{_ON_SEGMENTS}, on Linux, where both ends are on one thread that trains"


PLACES = {
    key: place
    for place, key in enumerate(
        (
            STEP_NAME,
            STEP_KIND,
            *(f"{PHASE_PREFIX}{phase}.duration" for phase in (*PHASES, UNATTRIBUTED)),
            *(f"{PHASE_PREFIX}{phase}.overlap" for phase in PHASES),
        )
    )
}
"""Where the attributes stand by which steps are told apart."""


def name(source: Source) -> Values | None:
    """Which phase it is."""
    if not (source.batch["kind"] == Kind.PHASE).any():
        return None
    spans = np.flatnonzero((source.kind == Kind.PHASE) & source.is_event)
    names = source.add(PHASES)
    of_part = np.zeros(max(Part) + 1, dtype=np.uint32)
    for part in Part:
        of_part[part] = names[PHASES.index(part.phase)]
    values, present = np.zeros(len(source.table), dtype=np.uint32), np.zeros(len(source.table), dtype=np.bool_)
    values[spans], present[spans] = of_part[source.batch["fwd_thread"][source.table.row[spans]]], True
    return values, present


def module(source: Source) -> Values | None:
    """Of a root module's phase the name of that, else of modules and calls theirs."""
    found = frames.module(source)
    if not source.batch.roots:
        return found
    spans = np.flatnonzero((source.kind == Kind.PHASE) & source.is_event)
    rows = source.table.row[spans]
    of_roots = np.isin(source.batch["fwd_thread"][rows], OF_MODULES)
    spans, rows = spans[of_roots], rows[of_roots]
    used, which = np.unique(source.batch["sequence_nr"][rows], return_inverse=True)
    names = [source.batch.roots.get(key, "") for key in used.tolist()]
    values, present = found or (np.zeros(len(source.table), np.uint32), np.zeros(len(source.table), np.bool_))
    values[spans] = source.add(names)[which]
    present[spans] = np.array([bool(name) for name in names], dtype=np.bool_)[which]
    return values, present


SEGMENTS: tuple[tuple[str, AttributeType, str, str], ...] = (
    (
        STEP_KIND,
        _NAME,
        f"{_ON_SEGMENTS}, where phases are recorded",
        f"what the segment is: {', '.join(f'`{segment.value}`' for segment in Segment)}",
    ),
    (
        "torch.step.rule.revision",
        AttributeType.INT64,
        "on steps, where it is learned when they end",
        "which rule it began by, from 1: it rises where the loop is found to be another one",
    ),
    (
        LOSS,
        _DOUBLE,
        f"{_ON_MARKED} and logs it with the step",
        "the loss, as it was logged",
    ),
    (
        LEARNING_RATE,
        _DOUBLE,
        f"{_ON_MARKED} and it is a number of Python's",
        "the learning rate of the first group of parameters in the step",
    ),
    (
        EPOCH,
        _DOUBLE,
        _ON_MARKED,
        "how many times the loop has run over the data; of Hugging Face's Trainer with the fraction of the current epoch",
    ),
    (
        BATCHES,
        AttributeType.INT64,
        _ON_MARKED,
        "batches whose gradients were accumulated",
    ),
    (
        "torch.phase.<name>.duration",
        _DOUBLE,
        f"{_ON_SEGMENTS}, for each [phase](#phases) that its loop's thread was in",
        "seconds that the thread spent in the phase and in no other one inside of it",
    ),
    (
        "torch.phase.unattributed.duration",
        _DOUBLE,
        f"{_ON_SEGMENTS}, where phases are recorded",
        "its duration less the sum of these",
    ),
    (
        "torch.phase.<name>.overlap",
        _DOUBLE,
        f"{_ON_SEGMENTS}, for each phase that other threads were in",
        "the same on other threads, all together; not part of that sum",
    ),
    (
        USAGE[0],
        _DOUBLE,
        f"{_ON_ASKED} and the kernel has `/proc/thread-self/schedstat`",
        "seconds that the loop's thread was ready to run while others had the processors",
    ),
    (
        "`, `".join(USAGE[1:3]),
        AttributeType.INT64,
        _ON_ASKED,
        "page faults of that thread, without and with input (`getrusage`)",
    ),
    (
        "`, `".join(USAGE[3:5]),
        AttributeType.INT64,
        _ON_ASKED,
        "how often that thread waited for something, and how often the system took the processor from it",
    ),
    (
        USAGE[5],
        _DOUBLE,
        f"{_ON_ASKED} and the kernel has `/proc/thread-self/schedstat`",
        "seconds that it neither ran nor was ready to: it waited for a lock, Python's among them, a file, a device or another thread",
    ),
    (
        USAGE[6],
        _DOUBLE,
        f"{_ON_ASKED} and the kernel has `/proc/thread-self/schedstat`",
        "seconds of processors that other threads of the process had while it did not run; of several together",
    ),
    (
        "torch.recomputed_duration",
        _DOUBLE,
        f"{_ON_SEGMENTS}, where activation checkpointing ran a part of the forward pass again",
        "seconds of that, with all that it called but backward passes, on all threads; they are in the `backward` phase too",
    ),
)
"""Key, type, when it is there and what it means; :class:`~otel_torchprof._tree.phases.PhaseTimes` gives them."""
