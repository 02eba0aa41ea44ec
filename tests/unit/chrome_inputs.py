"""Inputs of events for tests of Chrome JSON: as words, and as the arguments that they become."""

from __future__ import annotations

import math
from typing import Any


def words(inputs: list[Any]) -> list[int]:
    """Inputs in the format of Batch.inputs: None, dimensions, or a list of dimensions."""
    encoded = [len(inputs)]
    for value in inputs:
        if value is None:
            encoded.append(7 << 8)
        elif isinstance(value, tuple):
            encoded += [1 | len(value) << 32, *value]
        else:
            encoded.append(2 | len(value) << 32)
            for tensor in value:
                encoded += [1 | 7 << 8 | len(tensor) << 32, *tensor]
    return encoded


def strides(shape: tuple[int, ...]) -> list[int]:
    """Those of a contiguous tensor."""
    return [math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]


def per_input(inputs: list[Any], of_tensor: Any) -> list[Any]:
    """What is made of each tensor, by input; Kineto leaves long lists empty."""
    found = []
    for value in inputs:
        if isinstance(value, list):
            found.append([of_tensor(tensor) for tensor in value] if len(value) <= 30 else [])
        else:
            found.append([] if value is None else of_tensor(value))
    return found


def as_json(inputs: list[Any]) -> dict[str, Any]:
    """The arguments that tell of inputs; none where there are none."""
    if not inputs:
        return {}
    return {
        "Input Dims": per_input(inputs, list),
        "Input Strides": per_input(inputs, strides),
        "Input type": ["TensorList" if isinstance(value, list) else "" for value in inputs],
        "Concrete Inputs": [""] * len(inputs),
    }
