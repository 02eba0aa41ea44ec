"""Attributes of calls of transformers' ``generate``: those of OpenTelemetry's conventions for generative AI, and ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns import generation
from otel_torchprof._tree.span_table import AttributeType

from .attribute_source import Attribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from .attribute_source import Source, Values

_INT64, _DOUBLE, _BOOL, _NAME = AttributeType.INT64, AttributeType.DOUBLE, AttributeType.BOOL, AttributeType.NAME
_ON = "on calls of [`generate`](services.md#text-generation)"
_ON_REQUESTS = f"{_ON} that have no span of another instrumentation"


def _of(key: str, kind: AttributeType) -> Callable[[Source], Values | None]:
    """What is known of calls under that key."""

    def compute(source: Source) -> Values | None:
        found = [(span, attributes[key]) for span, attributes in source.generations if key in attributes]
        if not found:
            return None
        spans = [span for span, _ in found]
        values = np.zeros(len(source.table), dtype=kind.dtype)
        present = np.zeros(len(source.table), dtype=np.bool_)
        values[spans] = source.add([str(text) for _, text in found]) if kind is _NAME else [value for _, value in found]
        present[spans] = True
        return values, present

    return compute


def _attribute(key: str, kind: AttributeType, meaning: str, present: str) -> Attribute:
    return Attribute(key, kind, meaning, present, _of(key, kind))


ATTRIBUTES: tuple[Attribute, ...] = (
    _attribute(
        generation.OPERATION,
        _NAME,
        f"`{generation.TEXT_COMPLETION}`; this and the next six follow OpenTelemetry's semantic conventions",
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
"""In the order in which spans carry them."""
