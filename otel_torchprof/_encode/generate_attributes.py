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
_ON = "on calls of [`generate`](generation.md)"
_ON_REQUESTS = f"{_ON} that no span of another instrumentation stands for"


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
        f"`{generation.TEXT_COMPLETION}`; this and the next six are of OpenTelemetry's conventions",
        _ON_REQUESTS,
    ),
    _attribute(generation.PROVIDER, _NAME, f"`{generation.TRANSFORMERS}`", _ON_REQUESTS),
    _attribute(
        generation.MODEL,
        _NAME,
        "the name that the model was loaded by, of a path the last part; else its class",
        _ON_REQUESTS,
    ),
    _attribute(
        generation.CHOICES,
        _INT64,
        "sequences that were generated for each prompt",
        f"{_ON_REQUESTS}, where more than one",
    ),
    _attribute(generation.STREAM, _BOOL, "true: a streamer was given", f"{_ON_REQUESTS}, where true"),
    _attribute(
        generation.INPUT_TOKENS,
        _INT64,
        "tokens of all prompts together, padding included",
        f"{_ON_REQUESTS}, where the input is tokens or their embeddings",
    ),
    _attribute(
        generation.OUTPUT_TOKENS,
        _INT64,
        "tokens that were generated, of all sequences together, padding of those that ended early included",
        f"{_ON_REQUESTS}, where it returned",
    ),
    _attribute(generation.BATCH_SIZE, _INT64, "prompts", _ON),
    _attribute(
        generation.TIME_TO_FIRST_TOKEN,
        _DOUBLE,
        "seconds until the first token of each sequence was there: until the model was called for the next",
        f"{_ON}, where that is known",
    ),
    _attribute(
        generation.TIME_PER_OUTPUT_TOKEN,
        _DOUBLE,
        "seconds after that, per further token of a sequence",
        f"{_ON} that returned, where there are more",
    ),
)
"""In the order in which spans carry them."""
