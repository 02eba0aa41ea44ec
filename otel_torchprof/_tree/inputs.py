"""Inputs of operators as torch's profiler shows them: shapes, strides, types, values, keywords, overloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .input_words import Input, InputKind, InputPart, Inputs, decoded, has_inputs, may_have, numbered, text_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Shape = list[int]


def input_shapes(batch: Batch, row: int) -> list[Shape]:
    """One entry per input: the dimensions of a tensor; empty for a list of tensors, as for whatever has no dimensions.

    The same as torch's ``FunctionEvent.input_shapes``; empty where no inputs were recorded.
    """
    return shapes_in(decoded(batch, row))


def shapes_in(inputs: Inputs) -> list[Shape]:
    """As :func:`input_shapes`."""
    return [one.shape for one in inputs.inputs]


def structured_input_shapes(batch: Batch, row: int) -> list[Shape | list[Shape]]:
    """Like :func:`input_shapes`, with a list of tensors as the list of their dimensions."""
    return [_nested(one, lambda tensor: tensor.shape) for one in decoded(batch, row).inputs]


def structured_input_strides(batch: Batch, row: int) -> list[Shape | list[Shape]]:
    """One entry per input: the strides of a tensor, or of each in a list; empty for whatever has none."""
    return [_nested(one, lambda tensor: tensor.strides) for one in decoded(batch, row).inputs]


def _nested(one: Input, get: Callable[[Input], Shape]) -> Any:
    return [get(tensor) for tensor in one.elements] if one.kind is InputKind.TENSOR_LIST else get(one)


def input_dtypes(batch: Batch, row: int) -> list[str]:
    """One entry per input: ``float`` for a tensor, ``Scalar``, ``ScalarList``, ``TensorList``, or nothing."""
    return types_in(decoded(batch, row))


def types_in(inputs: Inputs) -> list[str]:
    """As :func:`input_dtypes`."""
    return [one.type for one in inputs.inputs]


def concrete_inputs(batch: Batch, row: int) -> list[Any]:
    """One entry per input: the value of a scalar or of a list of scalars; None for all else."""
    return values_in(decoded(batch, row))


def values_in(inputs: Inputs) -> list[Any]:
    """As :func:`concrete_inputs`."""
    return [None if one.kind is InputKind.STRING else value_of(one) for one in inputs.inputs]


def kwinputs(batch: Batch, row: int) -> dict[str, Any]:
    """The values of keyword inputs; None for those that are tensors."""
    return {keyword: value_of(one) for keyword, one in decoded(batch, row).keywords.items()}


def value_of(one: Input) -> Any:
    """The value of an input; None where it has none."""
    return [element.value for element in one.elements] if one.kind is InputKind.SCALAR_LIST else one.value


def overload_name(batch: Batch, row: int) -> str:
    """The operator's overload; empty for the default one, and where overloads were not recorded."""
    return decoded(batch, row).texts.get(InputKind.OVERLOAD, "")


def script_stack(batch: Batch, row: int) -> list[str]:
    """TorchScript's call stack, innermost first; empty outside of TorchScript, and where it was not recorded."""
    text = decoded(batch, row).texts.get(InputKind.CALL_STACK, "")
    return text.split("\n") if text else []


def overload_codes(view: TreeView) -> tuple[npt.NDArray[np.int64], list[str]]:
    """For grouping: a small number per event of the view, equal for equal overload names, and the name of each number."""
    if not may_have(view.batch, InputKind.OVERLOAD):
        return np.zeros(len(view), dtype=np.int64), [""]
    used, codes = np.unique(text_ids(view.batch, InputKind.OVERLOAD)[view.rows], return_inverse=True)
    return codes.astype(np.int64, copy=False), [view.batch.names[name] for name in used.tolist()]


def shape_keys(batch: Batch) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A number per row of the batch that is equal where ``str(input_shapes)`` is, and that text for every number.

    Costs about 50 ns per event; events without inputs cost nothing.
    """
    distinct = DistinctInputs(batch, InputPart.SHAPES)
    codes, texts = distinct.texts(InputPart.SHAPES, shapes_in)
    return codes[distinct.numbers], texts


class DistinctInputs:
    """The rows of a batch by their inputs: each that differ are read back once, whatever is then made of them.

    ``parts``: what of the inputs counts.
    """

    def __init__(self, batch: Batch, parts: InputPart = InputPart.SHAPES | InputPart.DTYPES | InputPart.VALUES) -> None:
        self._batch = batch
        if has_inputs(batch):
            self.numbers, self._first = numbered(batch, parts)
        else:
            self.numbers, self._first = np.zeros(len(batch), dtype=np.int32), np.zeros(1, dtype=np.int64)
        """A number per row, equal where these parts are."""
        self._read: dict[int, Inputs] = {}

    def texts(self, parts: InputPart, make: Callable[[Inputs], Any]) -> tuple[npt.NDArray[np.int32], list[str]]:
        """By number a code that is equal where ``str`` of what is made is, and that text for every code; code 0: the empty list.

        ``parts`` says of what ``make`` makes it: of numbers that are equal in these only one is asked.
        """
        texts = {"[]": 0}
        if not has_inputs(self._batch):
            return np.zeros(1, dtype=np.int32), list(texts)
        codes, first = numbered(self._batch, parts, rows=self._first)
        made = [texts.setdefault(str(make(self._inputs(row))), len(texts)) for row in first.tolist()]
        return np.array(made or [0], dtype=np.int32)[codes], list(texts)

    def text_ids(self, kind: InputKind) -> npt.NDArray[np.uint32]:
        """By number, as the function of that name."""
        return text_ids(self._batch, kind, self._first)

    def _inputs(self, row: int) -> Inputs:
        found = self._read.get(row)
        if found is None:
            found = self._read[row] = decoded(self._batch, row)
        return found
