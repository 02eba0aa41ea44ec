"""Inputs of operators, decoded and as torch's profiler shows them: shapes, strides, types, values, keywords, overloads."""

from __future__ import annotations

import enum
import functools
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import INPUTS
from otel_torchprof._native.torch_library import STORAGE, InputWords, input_type_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

# ---- Reading the words that encode inputs (``otp_input_kind`` in ``record_format.h``), by row and by column ----

Array = npt.NDArray[Any]


class InputKind(enum.IntEnum):
    """Low byte of a header."""

    OTHER = 0
    TENSOR = 1
    TENSOR_LIST = 2
    INT = 3
    DOUBLE = 4
    BOOL = 5
    COMPLEX = 6
    SCALAR_LIST = 7
    STRING = 8
    KEYWORD = 9
    OVERLOAD = 10
    CALL_STACK = 11
    MODULE_HIERARCHY = 12


class InputPart(enum.IntFlag):
    """Parts of inputs by which events are compared: ``otp_input_part``."""

    SHAPES = 1
    DTYPES = 2
    VALUES = 4


class InputKept(enum.IntFlag):
    """Parts of inputs that :func:`kept` keeps: ``otp_input_kept``."""

    INPUTS = 1
    OVERLOADS = 2
    CALL_STACKS = 4
    MODULE_HIERARCHY = 8
    STORAGES = 16


_KEPT = {
    InputKind.OVERLOAD: InputKept.OVERLOADS,
    InputKind.CALL_STACK: InputKept.CALL_STACKS,
    InputKind.MODULE_HIERARCHY: InputKept.MODULE_HIERARCHY,
}
_STRIDED, _NO_STRIDES, _STORED = 1, 2, 8
_STORAGE_WORDS = 2
_UNSIGNED = (1 << 64) - 1
_DTYPE_AND_KIND = 0xFFFF
_KINDS = tuple(InputKind)
_LISTS = frozenset((InputKind.TENSOR_LIST, InputKind.SCALAR_LIST))


class InputStorage(NamedTuple):
    """The storage of a tensor."""

    address: int
    """Address of the first byte; 0 if the storage has no memory."""
    bytes: int
    """Size of the whole storage."""
    device_type: int
    """``c10::DeviceType``."""
    device_index: int
    """0 for one without."""

    @classmethod
    def of(cls, address: int, rest: int) -> InputStorage:
        """Decodes the two recorded words."""
        return cls(address & _UNSIGNED, rest & (1 << 48) - 1, rest >> 48 & 0xFF, rest >> 56 & 0xFF)


@dataclass
class Input:
    """One input of an operator.

    Do not modify. Not frozen, because reading a row would take 21 us instead of 13 (measured).
    """

    kind: InputKind
    type: str = ""
    """Torch's name of its type: ``float`` for a tensor of floats, ``Scalar``, ``TensorList``."""
    shape: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)
    elements: list[Input] = field(default_factory=list)
    """Elements of a list."""
    value: Any = None
    """Value of a scalar or string."""
    storage: InputStorage | None = None
    """Storage of a tensor, if it has one and storages were recorded."""


@dataclass(frozen=True)
class Inputs:
    """The recorded inputs of one event."""

    inputs: list[Input] = field(default_factory=list)
    keywords: dict[str, Input] = field(default_factory=dict)
    texts: dict[InputKind, str] = field(default_factory=dict)
    """Overload, call stack and module hierarchy."""


_NOTHING = Inputs()


def decoded(batch: Batch, row: int) -> Inputs:
    """The inputs of a row; empty where none were recorded. Costs some microseconds."""
    if batch.inputs is None or INPUTS.name not in batch.columns:
        return _NOTHING
    at = batch[INPUTS.name].item(row)
    return _NOTHING if at < 0 else _InputReader(batch, at).read()


class _InputReader:
    """Reads the words of one row."""

    def __init__(self, batch: Batch, at: int) -> None:
        self._words: Array = batch.inputs  # type: ignore[assignment]  # checked by callers
        self._names = batch.names
        self._at = at

    def _word(self) -> int:
        self._at += 1
        word: int = self._words.item(self._at - 1)
        return word

    def _several(self, count: int) -> list[int]:
        self._at += count
        words: list[int] = self._words[self._at - count : self._at].tolist()
        return words

    def read(self) -> Inputs:
        counts = self._word()
        inputs = [self._input() for _ in range(counts & 0xFFFFFFFF)]
        keywords: dict[str, Input] = {}
        texts: dict[InputKind, str] = {}
        for _ in range(counts >> 32):
            header = self._word()
            kind, text = InputKind(header & 0xFF), self._names[header >> 32]
            if kind is InputKind.KEYWORD:
                keywords[text] = self._input()
            else:
                texts[kind] = text
        return Inputs(inputs, keywords, texts)

    def _input(self) -> Input:
        header = self._word()
        kind, flags, n = _KINDS[header & 0xFF], header >> 16 & 0xFFFF, header >> 32
        if kind is InputKind.TENSOR:
            shape = self._several(n)
            strides = self._strides(shape, flags)
            storage = InputStorage.of(*self._several(_STORAGE_WORDS)) if flags & _STORED else None
            return Input(kind, _type_name(header & _DTYPE_AND_KIND), shape, strides, storage=storage)
        if kind in _LISTS:
            return Input(kind, _type_name(kind), elements=[self._input() for _ in range(n)])
        return Input(kind, _type_name(header & 0xFFFFFF), value=self._value(kind, n))

    def _strides(self, shape: list[int], flags: int) -> list[int]:
        if flags & _STRIDED:
            return self._several(len(shape))
        return [] if flags & _NO_STRIDES else contiguous_strides(shape)

    def _value(self, kind: InputKind, n: int) -> Any:
        if kind is InputKind.INT:
            return self._word()
        if kind is InputKind.DOUBLE:
            return _double(self._word())
        if kind is InputKind.BOOL:
            return n != 0
        if kind is InputKind.COMPLEX:
            return complex(_double(self._word()), _double(self._word()))
        return self._names[n] if kind is InputKind.STRING else None


def contiguous_strides(shape: list[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        strides[i] = step
        step *= max(shape[i], 1)
    return strides


def _double(word: int) -> float:
    value: float = struct.unpack("d", struct.pack("q", word))[0]
    return value


_type_name = functools.cache(input_type_name)
"""Torch's name for the type of an input, by its header without the upper half."""


# ---- Whole columns ----


def _words(batch: Batch, rows: Array | None = None) -> InputWords:
    """The inputs of some rows, or of all, as native code takes them."""
    words: Array = batch.inputs  # type: ignore[assignment]  # checked by callers
    return InputWords(words, batch[INPUTS.name] if rows is None else batch[INPUTS.name][rows])


def has_inputs(batch: Batch) -> bool:
    """Whether any words were recorded."""
    return batch.inputs is not None and INPUTS.name in batch.columns


def numbered(
    batch: Batch, parts: InputPart, *, names: Array | None = None, rows: Array | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """A small number per row that is equal where the asked parts are, and the first row with each number.

    ``names`` (one per row) keeps rows apart as well; ``rows`` are asked instead of all. Parts are compared by hashes of 64
    bits: among a million different ones the chance that any two fall together is 3e-8. Costs some 30 ns per row.

    Raises MemoryError when memory is short.
    """
    numbers, count = _words(batch, rows).numbers(int(parts), names)
    first = np.empty(count, dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return numbers, first if rows is None else rows[first]


def storages(batch: Batch) -> Array:
    """The storages of all rows' inputs, as an array of ``STORAGE``, by row; keyword inputs have none.

    Empty where they were not recorded. Costs some 10 ns per row and per storage.
    """
    if not has_inputs(batch) or not batch.kept & InputKept.STORAGES:
        return np.empty(0, dtype=STORAGE)
    return _words(batch).storages()


def may_have(batch: Batch, kind: InputKind) -> bool:
    """Whether any row can have a text of that kind: without a look at the rows."""
    return has_inputs(batch) and batch.kept & _KEPT.get(kind, InputKept.INPUTS) != 0


def text_ids(batch: Batch, kind: InputKind, rows: Array | None = None) -> npt.NDArray[np.uint32]:
    """Per row, or of some, the index into ``batch.names`` of its overload, call stack, module hierarchy or first string; 0 for none."""
    if not may_have(batch, kind):
        return np.zeros(len(batch) if rows is None else len(rows), dtype=np.uint32)
    return _words(batch, rows).text_ids(int(kind))


def kept(batch: Batch, what: InputKept, written: int = -1) -> Batch:
    """Removes parts of the inputs that were recorded only for other recordings.

    ``written``: all properties that any recording requested. Returns the same arrays if there is nothing to remove; if other recordings
    requested more, this check takes 30 ns per event.
    """
    if not has_inputs(batch):
        return batch
    is_all = InputKept.INPUTS in what and not written & ~int(what)
    thinned = None if is_all else _words(batch).kept(int(what))
    if thinned is None:
        return replace(batch, kept=int(what))
    words, offsets = thinned
    for array in (words, offsets):
        array.flags.writeable = False
    columns = {**batch.columns, INPUTS.name: offsets}
    if not what:
        del columns[INPUTS.name]
    return replace(batch, columns=columns, inputs=words if what else None, kept=int(what))


# ---- Inputs as torch's profiler displays them ----


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
    """Groups the rows of a batch by their inputs, so that equal inputs are read only once.

    ``parts``: the parts of inputs to compare.
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
        """Returns by number a code, equal for equal ``str(make(inputs))``, and the text of each code; code 0: the empty list.

        ``parts``: the parts of the inputs that ``make`` reads; it is called once for numbers that are equal in these.
        """
        texts = {"[]": 0}
        if not has_inputs(self._batch):
            return np.zeros(1, dtype=np.int32), list(texts)
        codes, first = numbered(self._batch, parts, rows=self._first)
        made = [texts.setdefault(str(make(self._inputs(row))), len(texts)) for row in first.tolist()]
        return np.array(made or [0], dtype=np.int32)[codes], list(texts)

    def text_ids(self, kind: InputKind) -> npt.NDArray[np.uint32]:
        """Text ids by group number, as the function of that name."""
        return text_ids(self._batch, kind, self._first)

    def _inputs(self, row: int) -> Inputs:
        inputs = self._read.get(row)
        if inputs is None:
            inputs = self._read[row] = decoded(self._batch, row)
        return inputs
