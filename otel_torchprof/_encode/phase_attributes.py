"""Attributes of phases and of calls of transformers' ``generate``; those of segments of a training job, for the documentation.

Attributes of ``generate`` follow OpenTelemetry's conventions for generative AI, with some of this package's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns import generation
from otel_torchprof._columns.phases import (
    BATCHES,
    DEVICE_ALLOCATED,
    DEVICE_FREE,
    DEVICE_PEAK,
    DEVICE_RESERVED,
    EPOCH,
    FLOPS,
    FREE,
    LEARNING_RATE,
    LOADED,
    LOSS,
    MFU,
    OF_MODULES,
    PEAK,
    PHASE_PREFIX,
    PHASES,
    RESIDENT,
    UNATTRIBUTED,
    USAGE,
    Part,
    Segment,
)
from otel_torchprof._columns.samples import SAMPLES
from otel_torchprof._model.span_table import STEP_KIND, STEP_NUMBER, AttributeType

from .attribute_source import Attribute, chosen
from .event_attributes import module as module_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from otel_torchprof._columns.batch import Array

    from .attribute_source import AttributeSource, Values


_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME
_ON_SEGMENTS = "on steps and other segments of a job"
_ON_MARKED = "on steps whose end a [framework](training.md) reports"
_ON_ASKED = f"{_ON_SEGMENTS}, on Linux, if they begin and end on one training thread"


PLACES = {
    key: place
    for place, key in enumerate(
        (
            STEP_NUMBER,
            STEP_KIND,
            *(f"{PHASE_PREFIX}{phase}.duration" for phase in (*PHASES, UNATTRIBUTED)),
            *(f"{PHASE_PREFIX}{phase}.overlap" for phase in PHASES),
        )
    )
}
"""Sort keys of the attributes that tell steps apart."""


def name(source: AttributeSource) -> Values | None:
    """The phase's name."""
    spans, rows = source.phases
    if not spans.size:
        return None
    names = source.add(PHASES)
    of_part = np.zeros(max(Part) + 1, dtype=np.uint32)
    for part in Part:
        of_part[part] = names[PHASES.index(part.phase)]
    return of_part[source.batch["fwd_thread"][rows]], spans


def module(source: AttributeSource) -> Values:
    """The name of the root module for its phases; else the name of a module, for modules and calls of modules."""
    modules = module_name(source)
    if not source.batch.roots:
        return modules
    spans, rows = source.phases
    of_roots = np.isin(source.batch["fwd_thread"][rows], OF_MODULES)
    used, which = np.unique(source.batch["sequence_nr"][rows[of_roots]], return_inverse=True)
    names = [source.batch.roots.get(key, "") for key in used.tolist()]
    is_known = np.array([bool(name) for name in names], dtype=np.bool_)[which]
    return source.joined(modules, chosen((source.add(names)[which], spans[of_roots]), is_known))


SEGMENTS: tuple[tuple[str, AttributeType, str, str], ...] = (
    (
        STEP_KIND,
        _NAME,
        f"{_ON_SEGMENTS}, if phases are recorded",
        f"kind of the segment: {', '.join(f'`{segment.value}`' for segment in Segment)}",
    ),
    (
        "torch.step.rule.revision",
        AttributeType.INT64,
        "on steps whose end is learned",
        "number of the learned rule, from 1; increases when the loop turns out to be another one",
    ),
    (
        LOSS,
        _DOUBLE,
        f"{_ON_MARKED}, if it logs the loss with the step",
        "loss, as logged",
    ),
    (
        LEARNING_RATE,
        _DOUBLE,
        f"{_ON_MARKED}, if it is a Python number",
        "learning rate of the first parameter group",
    ),
    (
        EPOCH,
        _DOUBLE,
        _ON_MARKED,
        "number of completed passes over the data; with Hugging Face's Trainer, including the fraction of the current epoch",
    ),
    (
        BATCHES,
        AttributeType.INT64,
        _ON_MARKED,
        "number of batches whose gradients were accumulated",
    ),
    (
        "`, `".join(LOADED),
        AttributeType.INT64,
        (
            'on steps and other segments of a job, if `step()` says it; else, from `detail="steps"` on, if the loop takes '
            "batches from `DataLoader` on its own thread, mostly not on the first and last step"
        ),
        "of the batches taken meanwhile: tokens in `input_ids`, with padding; samples, by the first dimension of the first tensor",
    ),
    (
        FLOPS,
        AttributeType.INT64,
        "on steps and other segments of a job, and profiles, if operators were recorded with shapes",
        "floating-point operations of matrix products, convolutions and attention",
    ),
    (
        MFU,
        _DOUBLE,
        "the same, if the peak of the device is [given](settings.md) or known by its name",
        "share of that peak that these operations reach",
    ),
    (
        "torch.phase.<name>.duration",
        _DOUBLE,
        f"{_ON_SEGMENTS}, for each [phase](#phases) of the loop's thread",
        "seconds of the loop's thread in the phase, without phases inside it",
    ),
    (
        "torch.phase.unattributed.duration",
        _DOUBLE,
        f"{_ON_SEGMENTS}, if phases are recorded",
        "seconds of the loop's thread in no phase: the duration minus the sum of the phase durations",
    ),
    (
        "torch.phase.<name>.overlap",
        _DOUBLE,
        f"{_ON_SEGMENTS}, for each phase of other threads",
        "seconds of all other threads in the phase, without phases inside it; not part of that sum",
    ),
    (
        USAGE[0],
        _DOUBLE,
        f"{_ON_ASKED} and the kernel has `/proc/thread-self/schedstat`",
        "seconds in which the loop's thread was ready to run but had no processor",
    ),
    (
        "`, `".join(USAGE[1:3]),
        AttributeType.INT64,
        _ON_ASKED,
        "number of page faults of the loop's thread, without and with I/O (`getrusage`)",
    ),
    (
        "`, `".join(USAGE[3:5]),
        AttributeType.INT64,
        _ON_ASKED,
        "number of context switches of the loop's thread, because it waited and because it was preempted",
    ),
    (
        USAGE[5],
        _DOUBLE,
        f"{_ON_ASKED} and the kernel has `/proc/thread-self/schedstat`",
        (
            "seconds in which the loop's thread neither ran nor was ready to run: it waited for a lock (such as the "
            "GIL), a file, a device or another thread"
        ),
    ),
    (
        USAGE[6],
        _DOUBLE,
        f"{_ON_ASKED} and the kernel has `/proc/thread-self/schedstat`",
        "processor time in seconds of the process's other threads, all together, while the loop's thread did not run",
    ),
    (
        RESIDENT,
        _INT64,
        f"{_ON_SEGMENTS} and profiles, on Linux, if their end was seen on a training thread",
        "bytes of the process's resident memory at the end, up to 10 ms old; in a profile without its own buffers",
    ),
    (PEAK, _INT64, "with that", "the most of it so far"),
    (
        FREE,
        _INT64,
        "on the last step of a drain, once a second",
        "bytes that the machine, or the process's control groups, could still give to it",
    ),
    (
        f"{DEVICE_ALLOCATED}`, `{DEVICE_RESERVED}`, `{DEVICE_PEAK}",
        _INT64,
        "on the last step of a drain, if the program uses CUDA",
        "bytes of torch's allocator at the drain, on the device where it has allocated most",
    ),
    (DEVICE_FREE, _INT64, "with these", "bytes of that device that are not allocated"),
    (
        "torch.recomputed_duration",
        _DOUBLE,
        f"{_ON_SEGMENTS}, if activation checkpointing ran a part of the forward pass again",
        (
            "seconds of recomputation on all threads, including nested events except backward passes; also part of the "
            "`backward` phase"
        ),
    ),
    (
        SAMPLES,
        _NAME,
        f"{_ON_SEGMENTS}, profiles and roots of requests, if their thread was sampled; not if a `code.*` attribute is hidden",
        (
            'samples of the Python stack: `{"stacks":[["train.py:5 log","train.py:22 main"]],"samples":[[0.004,0.01,0]]}`: '
            "calls, the innermost first, at most 64, a number for as many outer calls of the stack before; of each sample the "
            "seconds since the span began, the seconds that it stands for, and its stack; at most 15,000 bytes"
        ),
    ),
)
"""Key, type, when a segment has it, and meaning. Times are from :class:`~otel_torchprof._model.phases.PhaseTimes`, samples from
:mod:`~.sampled`."""


_ON = "on calls of [`generate`](services.md#text-generation)"
_ON_REQUESTS = f"{_ON} that have no span of another instrumentation"


def span_names(source: AttributeSource, hidden: Collection[str]) -> Array:
    """Index of each span's name. Calls of ``generate`` with the conventions' attributes have the conventions' name, from those not hidden."""
    names = {
        span: " ".join(str(attributes[key]) for key in (generation.OPERATION, generation.MODEL) if key not in hidden)
        for span, attributes in source.generations
        if generation.OPERATION in attributes and generation.OPERATION not in hidden
    }
    if not names:
        return source.table.name
    name = source.table.name.copy()
    name[list(names)] = source.add(list(names.values()))
    return name


def _of(key: str, kind: AttributeType) -> Callable[[AttributeSource], Values | None]:
    """The attribute of a key, of calls of ``generate``."""

    def compute(source: AttributeSource) -> Values | None:
        attribute_values = [(span, attributes[key]) for span, attributes in source.generations if key in attributes]
        if not attribute_values:
            return None
        spans, values = zip(*attribute_values, strict=True)
        own = source.add([str(text) for text in values]) if kind is _NAME else np.array(values, dtype=kind.dtype)
        return own, np.array(spans)

    return compute


def _attribute(key: str, kind: AttributeType, meaning: str, present: str) -> Attribute:
    return Attribute(key, kind, meaning, present, _of(key, kind))


GENERATE_ATTRIBUTES: tuple[Attribute, ...] = (
    _attribute(
        generation.OPERATION,
        _NAME,
        f"`{generation.TEXT_COMPLETION}`; this and the next seven follow OpenTelemetry's semantic conventions",
        _ON_REQUESTS,
    ),
    _attribute(generation.PROVIDER, _NAME, f"`{generation.TRANSFORMERS}`", _ON_REQUESTS),
    _attribute(
        generation.MODEL,
        _NAME,
        "name that the model was loaded by (the last part of a path), else its class",
        _ON_REQUESTS,
    ),
    _attribute(
        generation.CHOICES,
        _INT64,
        "number of sequences generated per prompt",
        f"{_ON_REQUESTS}, if more than one",
    ),
    _attribute(generation.STREAM, _BOOL, "true: a streamer was passed", f"{_ON_REQUESTS}, if true"),
    _attribute(
        generation.FIRST_CHUNK,
        _DOUBLE,
        "seconds to the first token, which the streamer gets then",
        f"{_ON_REQUESTS}, if a streamer was passed and it is known",
    ),
    _attribute(
        generation.INPUT_TOKENS,
        _INT64,
        "number of tokens of all prompts together, including padding",
        f"{_ON_REQUESTS}, if the input is tokens or their embeddings",
    ),
    _attribute(
        generation.OUTPUT_TOKENS,
        _INT64,
        "number of generated tokens of all sequences together, including the padding of sequences that ended early",
        f"{_ON_REQUESTS}, if it returned",
    ),
    _attribute(generation.BATCH_SIZE, _INT64, "number of prompts", _ON),
    _attribute(
        generation.TIME_TO_FIRST_TOKEN,
        _DOUBLE,
        "seconds to the first token of each sequence, measured until the model is called for the next token",
        f"{_ON}, if known",
    ),
    _attribute(
        generation.TIME_PER_OUTPUT_TOKEN,
        _DOUBLE,
        "seconds per further token of a sequence after the first",
        f"{_ON} that returned, if there are further tokens",
    ),
)
"""In the order in which spans have them."""
