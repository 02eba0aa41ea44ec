"""Reads the inputs of operators, which a batch keeps as 64-bit words (the format stands at ``Batch.inputs``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .tree import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

_TENSOR, _TENSOR_LIST = 1, 2

Shape = list[int]


def input_shapes(batch: Batch, row: int) -> list[Shape]:
    """One entry per input: the dimensions of a tensor; empty for a list of tensors, as for whatever has no dimensions.

    The same as torch's ``FunctionEvent.input_shapes``; empty where no inputs were recorded.
    """
    return _inputs(batch, row, lambda _: [])


def structured_input_shapes(batch: Batch, row: int) -> list[Shape | list[Shape]]:
    """Like :func:`input_shapes`, with a list of tensors as the list of their dimensions."""
    return _inputs(batch, row, lambda tensors: tensors)


def _inputs(batch: Batch, row: int, of_list: Callable[[list[Shape]], Any]) -> list[Any]:
    if batch.inputs is None:
        return []
    at = batch["inputs"].item(row)
    if at < 0:
        return []
    words, shapes = batch.inputs, list[Any]()
    count, at = words.item(at), at + 1
    for _ in range(count):
        kind, dims, at = _one(words, at)
        if kind == _TENSOR_LIST:
            tensors = []
            for _ in range(dims):
                _, shape, at = _one(words, at)
                tensors.append(shape)
            shapes.append(of_list(tensors))
        else:
            shapes.append(dims)
    return shapes


def _one(words: npt.NDArray[np.int64], at: int) -> tuple[int, Any, int]:
    """Kind of the input at a word, its dimensions (of a list: how many tensors), and the word after."""
    header = words.item(at)
    kind, n = header & 0xFF, header >> 32
    if kind == _TENSOR_LIST:
        return kind, n, at + 1
    dims = words[at + 1 : at + 1 + n].tolist() if kind == _TENSOR else []
    return kind, dims, at + 1 + len(dims)


def shape_keys(batch: Batch) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A number per row of the batch that is equal where ``str(input_shapes)`` is, and that text for every number.

    Rows are first told apart by a 64-bit hash of their words, so that only one of each kind is decoded: among a million
    different inputs the chance that any two fall together is 3e-8.
    Costs about 270 ns per event, most of it in a sort; events without inputs cost nothing.
    """
    texts = {"[]": 0}
    keys = np.zeros(len(batch), dtype=np.int32)
    if batch.inputs is None:
        return keys, list(texts)
    rows = np.flatnonzero(batch["inputs"] >= 0)
    starts, where = np.unique(batch["inputs"][rows], return_inverse=True)
    _, first, kind = np.unique(_hashes(batch.inputs, starts), return_index=True, return_inverse=True)
    sample = np.empty(len(starts), dtype=np.int64)
    sample[where] = rows
    distinct = [str(input_shapes(batch, row)) for row in sample[first].tolist()]
    numbers = np.array([texts.setdefault(text, len(texts)) for text in distinct], dtype=np.int32)
    keys[rows] = numbers[kind[where]]
    return keys, list(texts)


def _hashes(words: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A hash of the words from each start up to the next one."""
    hashes = np.empty(len(starts), dtype=np.uint64)
    limits = np.append(starts, len(words))
    for begin in range(0, len(starts), BLOCK):
        own = limits[begin : begin + BLOCK + 1]
        offsets = own[:-1] - own[0]
        place = np.arange(own[-1] - own[0], dtype=np.uint64) - np.repeat(offsets, np.diff(own)).astype(np.uint64)
        mixed = _scrambled(words[own[0] : own[-1]].view(np.uint64) ^ _scrambled(place))
        hashes[begin : begin + BLOCK] = np.add.reduceat(mixed, offsets)
    return hashes


def _scrambled(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The step and finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): every bit depends on every bit."""
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
