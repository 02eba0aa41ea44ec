"""The words of inputs: what was written is read, whatever it is, row by row and over whole columns."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof._columns.batch import Batch
from otel_torchprof._model import inputs as inputs_module
from otel_torchprof._model.inputs import (
    DistinctInputs,
    Input,
    InputKept,
    InputKind,
    InputPart,
    concrete_inputs,
    contiguous_strides,
    decoded,
    input_dtypes,
    input_shapes,
    kept,
    kwinputs,
    numbered,
    shape_keys,
    shapes_in,
    storages,
    text_ids,
    types_in,
    values_in,
)
from otel_torchprof._native.torch_library import InputWords

NAMES = ["", "aten::f", "k", "Tensor", "a: b\nc: d", "TOP.m", "text"]
INT64 = st.integers(-(2**63), 2**63 - 1)
ADDRESS, PLACE = 0x7F00_1234_5678, 640 | 1 << 48 | 3 << 56
"""640 bytes on the fourth device of type 1."""
TYPES = {7: "float", 8: "double", 0: ""}

SCALARS = (
    INT64.map(lambda value: Input(InputKind.INT, "Scalar", value=value))
    | st.floats(allow_nan=False).map(lambda value: Input(InputKind.DOUBLE, "Scalar", value=value))
    | st.booleans().map(lambda value: Input(InputKind.BOOL, "Scalar", value=value))
    | st.complex_numbers(allow_nan=False).map(lambda value: Input(InputKind.COMPLEX, "Scalar", value=value))
)


@st.composite
def tensors(draw):
    """Of any sizes: contiguous, laid out in another way, or without a layout."""
    shape = draw(st.lists(st.integers(0, 2**40), max_size=4))
    plain = contiguous_strides(shape)
    strides = draw(st.sampled_from((plain, [])) | st.lists(INT64, min_size=len(shape), max_size=len(shape)))
    return Input(InputKind.TENSOR, draw(st.sampled_from(sorted(TYPES.values()))), shape, strides)


def lists(kind, name, elements):
    """A list of inputs as one input."""
    return st.lists(elements, max_size=4).map(lambda found: Input(kind, name, elements=found))


TEXTS = st.just(Input(InputKind.STRING, value="text"))
INPUTS = (
    tensors()
    | SCALARS
    | lists(InputKind.TENSOR_LIST, "TensorList", tensors())
    | lists(InputKind.SCALAR_LIST, "ScalarList", SCALARS | TEXTS)
    | TEXTS
    | st.just(Input(InputKind.OTHER))
)
ROWS = st.lists(st.none() | st.tuples(st.lists(INPUTS, max_size=4), st.none() | INPUTS, st.booleans()), max_size=12)


def words_of(one: Input, stored: bool = False) -> list[int]:
    """As the recorder writes it; ``stored``: with the storages of tensors."""
    if one.kind is InputKind.TENSOR:
        dtype = {name: number for number, name in TYPES.items()}[one.type]
        plain = one.strides == contiguous_strides(one.shape)
        flag = 0 if plain else 1 if one.strides or not one.shape else 2
        strided = one.strides if flag == 1 else []
        flag, place = (flag | 8, [ADDRESS, PLACE]) if stored else (flag, [])
        return [1 | dtype << 8 | flag << 16 | len(one.shape) << 32, *one.shape, *strided, *place]
    if one.kind in {InputKind.TENSOR_LIST, InputKind.SCALAR_LIST}:
        return [
            one.kind | len(one.elements) << 32,
            *(word for element in one.elements for word in words_of(element, stored)),
        ]
    if one.kind is InputKind.BOOL:
        return [one.kind | int(one.value) << 32]
    if one.kind is InputKind.STRING:
        return [one.kind | NAMES.index(one.value) << 32]
    return [one.kind, *_payload(one.value)]


def _payload(value: Any) -> list[int]:
    if isinstance(value, complex):
        return [*_payload(value.real), *_payload(value.imag)]
    if isinstance(value, float):
        return list(struct.unpack("q", struct.pack("d", value)))
    return [] if value is None else [value]


def batch_of(rows, stored: bool = False) -> Batch:
    """A batch with these inputs, keyword and overload by row; None: none were recorded."""
    words: list[int] = []
    offsets = []
    for row in rows:
        offsets.append(-1 if row is None else len(words))
        if row is None:
            continue
        inputs, keyword, overload = row
        words.append(len(inputs) | (int(keyword is not None) + int(overload)) << 32)
        words += [word for one in inputs for word in words_of(one, stored)]
        words += [9 | 2 << 32, *words_of(keyword, stored)] if keyword is not None else []
        words += [10 | 3 << 32] if overload else []
    columns = {"start": range(len(rows)), "end": range(len(rows)), "name": [1] * len(rows), "inputs": offsets}
    return Batch.of(columns, NAMES, inputs=np.array(words, dtype=np.int64))


@given(ROWS)
def test_what_was_written_is_read(rows):
    """Every input, keyword and overload of every row."""
    batch = batch_of(rows)
    for index, row in enumerate(rows):
        found = decoded(batch, index)
        inputs, keyword, overload = row or ([], None, False)
        assert found.inputs == inputs
        assert found.keywords == ({} if keyword is None else {"k": keyword})
        assert found.texts == ({InputKind.OVERLOAD: "Tensor"} if overload else {})
    assert text_ids(batch, InputKind.OVERLOAD).tolist() == [3 if row and row[2] else 0 for row in rows]


@given(ROWS)
def test_equal_numbers_mean_equal_texts(rows):
    """Rows have one number exactly where shapes, types or values read the same."""
    batch = batch_of(rows)
    distinct = DistinctInputs(batch)
    for parts, read_again, make in (
        (InputPart.SHAPES, input_shapes, shapes_in),
        (InputPart.DTYPES, input_dtypes, types_in),
        (InputPart.VALUES, concrete_inputs, values_in),
    ):
        codes, texts = distinct.texts(parts, make)
        assert [texts[code] for code in codes[distinct.numbers]] == [
            str(read_again(batch, row)) for row in range(len(rows))
        ]
        assert len(set(texts)) == len(texts)
    strings = distinct.text_ids(InputKind.STRING)[distinct.numbers]
    assert strings.tolist() == text_ids(batch, InputKind.STRING).tolist()
    keys, texts = shape_keys(batch)
    assert [texts[key] for key in keys] == [str(input_shapes(batch, row)) for row in range(len(rows))]


@given(ROWS)
def test_equal_inputs_are_read_once(rows):
    """Whatever is made of inputs, each that differ are read back once."""
    with mock.patch.object(inputs_module, "decoded", wraps=decoded) as read:
        distinct = DistinctInputs(batch_of(rows))
        for parts in (InputPart.SHAPES, InputPart.DTYPES, InputPart.VALUES):
            distinct.texts(parts, lambda _: [])
    assert read.call_count <= len(set(distinct.numbers.tolist()))


@given(ROWS)
def test_the_first_row_of_each_number(rows):
    """Numbers rise as they come, and each knows its first row; with names, rows of other names have other numbers."""
    batch = batch_of(rows)
    numbers, first = numbered(batch, InputPart.SHAPES)
    assert first.tolist() == [numbers.tolist().index(number) for number in range(len(first))]
    apart, _ = numbered(batch, InputPart.SHAPES, names=np.arange(len(rows)))
    assert apart.tolist() == list(range(len(rows)))


@pytest.mark.parametrize(
    ("what", "written", "is_searched"),
    [
        (InputKept.INPUTS, InputKept.INPUTS, False),
        (InputKept.INPUTS | InputKept.OVERLOADS, InputKept.INPUTS, False),
        (InputKept.INPUTS, InputKept.INPUTS | InputKept.OVERLOADS, True),
        (InputKept.OVERLOADS, InputKept.OVERLOADS, True),
    ],
)
def test_rows_are_not_searched_for_what_nobody_wanted(what, written, is_searched):
    """The words are looked through where somebody wanted more, and where inputs are not wanted, which labels have anyway."""
    batch = batch_of([None, ([], None, True)])
    with mock.patch.object(InputWords, "kept", return_value=None) as search:
        left = kept(batch, what, written)
    assert (search.call_count, left.kept, left.inputs is batch.inputs) == (is_searched, what, True)


@given(ROWS, st.integers(0, 3).map(InputKept))
def test_what_is_not_wanted_is_taken_away(rows, what):
    """Inputs with their keywords, overloads, both or nothing stay; the given batch is not changed."""
    batch = batch_of(rows)
    before = [decoded(batch, row) for row in range(len(rows))]
    left = kept(batch, what)
    for row, old in enumerate(before):
        found = decoded(left, row)
        assert (found.inputs, found.keywords) == ((old.inputs, old.keywords) if InputKept.INPUTS in what else ([], {}))
        assert found.texts == (old.texts if InputKept.OVERLOADS in what else {})
        assert decoded(batch, row) == old
    assert (left.inputs is None) == (not what)


@given(ROWS, st.integers(0, 3).map(InputKept))
def test_rows_that_share_words_still_do(rows, what):
    """Of rows that have the same words, so much is left as of the same rows with words of their own."""
    batch = batch_of(rows)
    twice = Batch.of(
        {name: np.tile(batch[name], 2) for name in ("start", "end", "inputs")}, list(batch.names), inputs=batch.inputs
    )
    left, single = kept(twice, what), kept(batch, what)
    for row in range(len(rows)):
        assert decoded(left, row) == decoded(left, row + len(rows)) == decoded(single, row)
    assert left.inputs is None or len(left.inputs) == len(single.inputs)


def bare(one):
    """An input without its storages, which are as they were written."""
    if one.kind is InputKind.TENSOR:
        assert one.storage == (ADDRESS, 640, 1, 3)
    return replace(one, storage=None, elements=[bare(element) for element in one.elements])


@given(ROWS)
def test_storages_stand_beside_all_else(rows):
    """Where tensors lie can be told, changes nothing of what else is read, and is taken away without a trace."""
    plain, stored = batch_of(rows), batch_of(rows, stored=True)
    for row in range(len(rows)):
        found, without = decoded(stored, row), decoded(plain, row)
        assert [bare(one) for one in found.inputs] == without.inputs
        assert {name: bare(one) for name, one in found.keywords.items()} == without.keywords
        assert found.texts == without.texts
    assert text_ids(stored, InputKind.OVERLOAD).tolist() == text_ids(plain, InputKind.OVERLOAD).tolist()
    for part in (*InputPart, InputPart(7)):
        assert numbered(stored, part)[0].tolist() == numbered(plain, part)[0].tolist()
    expected = [
        (index, place)
        for index, row in enumerate(rows)
        for place, one in enumerate(row[0] if row else ())
        for tensor in (one.elements if one.kind is InputKind.TENSOR_LIST else (one,))
        if tensor.kind is InputKind.TENSOR
    ]
    found = storages(stored)
    assert list(zip(found["row"].tolist(), found["input"].tolist(), strict=True)) == expected
    for column, value in (("address", ADDRESS), ("bytes", 640), ("device_type", 1), ("device_index", 3)):
        assert (found[column] == value).all()
    everything = InputKept.INPUTS | InputKept.OVERLOADS
    without, all_of_plain = kept(stored, everything), kept(plain, everything)
    assert [decoded(without, row) for row in range(len(rows))] == [
        decoded(all_of_plain, row) for row in range(len(rows))
    ]
    assert not len(storages(without))
    assert kept(stored, everything | InputKept.STORAGES).inputs.tolist() == kept(stored, InputKept(31)).inputs.tolist()


WORD = (
    st.integers(-3, 3)
    | INT64
    | st.builds(
        lambda kind, flags, n: kind | flags << 16 | n << 32, st.integers(0, 12), st.integers(0, 15), st.integers(0, 9)
    )
)


@given(st.lists(WORD, max_size=20), st.integers(0, 31))
def test_words_that_lie_are_no_error_over_columns(words, what):
    """Words that promise more than there is give numbers and texts all the same."""
    columns = {"start": [0], "end": [1], "inputs": [0]}
    batch = Batch.of(columns, NAMES, inputs=np.array(words, dtype=np.int64))
    assert numbered(batch, InputPart(what & 7))[0].tolist() == [0]
    for kind in InputKind:
        text_ids(batch, kind)
    kept(batch, InputKept(what))
    storages(batch)


def test_values_of_keywords():
    """Numbers, texts and lists of them as themselves; a tensor has no value."""
    tensor = Input(InputKind.TENSOR, "float", [2], [1])
    pair = Input(InputKind.SCALAR_LIST, "ScalarList", elements=[Input(InputKind.INT, "Scalar", value=1)] * 2)
    rows = [([], one, False) for one in (tensor, pair, Input(InputKind.STRING, value="text"))]
    assert [kwinputs(batch_of(rows), row) for row in range(3)] == [{"k": None}, {"k": [1, 1]}, {"k": "text"}]


@pytest.mark.parametrize("inputs", [None, np.zeros(0, np.int64)])
def test_batches_without_inputs(inputs):
    """No words and no column: nothing to read, to number or to take away."""
    batch = Batch.of({"start": [0], "end": [1]}, NAMES, inputs=inputs)
    assert decoded(batch, 0).inputs == []
    assert text_ids(batch, InputKind.OVERLOAD).tolist() == [0]
    assert shape_keys(batch)[1] == ["[]"]
    assert kept(batch, InputKept.INPUTS) is batch
