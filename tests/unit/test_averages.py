"""Averages on columns, against torch's, and the reading of inputs that grouping by shapes rests on."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_forests import Event, as_batch

from otel_torchprof._columns.batch import Batch
from otel_torchprof._model.averages import Averages
from otel_torchprof._model.inputs import input_shapes, shape_keys, structured_input_shapes
from otel_torchprof._model.tree import torch_view


def test_sums_are_exact():
    """Sums over many blocks are sums of integers: no unit in the last place is lost where float64 would lose it."""
    rows = 200_000
    batch = Batch.of({"start": np.zeros(rows), "end": np.full(rows, 2**40 + 1), "name": np.ones(rows)}, ["", "a"])
    assert Averages.of(torch_view(batch)).cpu_time_total.tolist() == [rows * (2**40 + 1)]


def test_first_appearance_in_a_later_block():
    """A name first seen after the first 65,536 events gets the position of its first event."""
    names = np.ones(150_000, dtype=int)
    names[140_000:] = 2
    batch = Batch.of({"start": np.arange(150_000), "end": np.arange(150_000) + 1, "name": names}, ["", "a", "b"])
    assert Averages.of(torch_view(batch)).first.tolist() == [0, 140_000]


DIMS = st.lists(st.integers(0, 2**40), max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.one_of(DIMS, st.lists(DIMS, min_size=1, max_size=3)), max_size=3), max_size=12))
def test_inputs_are_read_back(shapes_of_events):
    """Any shapes come back as written; the plain form drops lists; equal keys mean equal text and nothing else does."""
    events = [Event(i + 1, "a", 0, i, i + 1, shapes=shapes) for i, shapes in enumerate(shapes_of_events)]
    batch = as_batch(events)
    keys, texts = shape_keys(batch)
    for row, shapes in enumerate(shapes_of_events):
        plain = [[] if shape and isinstance(shape[0], list) else shape for shape in shapes]
        assert structured_input_shapes(batch, row) == shapes
        assert input_shapes(batch, row) == plain
        assert texts[keys[row]] == str(plain)
    assert len(set(texts)) == len(texts)


def test_inputs_without_a_tensor_have_no_dimensions():
    """A scalar (kind 0) counts as an input with empty dimensions; a batch without inputs has none at all."""
    words = np.array([3, 0, 1 | 2 << 32, 5, 6, 0 | 4 << 8], dtype=np.int64)
    columns = {"start": [0], "end": [1], "inputs": [0]}
    assert input_shapes(Batch.of(columns, [""], inputs=words), 0) == [[], [5, 6], []]
    del columns["inputs"]
    assert input_shapes(Batch.of(columns, [""]), 0) == []
    assert shape_keys(Batch.of(columns, [""]))[1] == ["[]"]


def test_same_text_of_different_inputs_is_one_key():
    """Grouping is by what torch prints: a data type or a list's contents, which it does not print, split nothing."""
    words = np.array([1, 1 | 7 << 8 | 1 << 32, 5, 1, 1 | 8 << 8 | 1 << 32, 5, 1, 0, 1, 2 | 0 << 32], dtype=np.int64)
    batch = Batch.of({"start": [0] * 4, "end": [1] * 4, "inputs": [0, 3, 6, 8]}, [""], inputs=words)
    keys, texts = shape_keys(batch)
    assert [texts[key] for key in keys] == ["[[5]]", "[[5]]", "[[]]", "[[]]"]
    assert len(set(keys.tolist())) == 2


def test_shape_keys_over_many_blocks():
    """The blocked hash gives equal inputs equal keys wherever in the batch they stand."""
    rows = 150_000
    words = np.stack([np.ones(rows), np.full(rows, 1 | 1 << 32), np.arange(rows) % 7], axis=1).astype(np.int64).ravel()
    batch = Batch.of({"start": np.zeros(rows), "end": np.ones(rows), "inputs": np.arange(rows) * 3}, [""], inputs=words)
    keys, texts = shape_keys(batch)
    assert len(texts) == 8
    assert [texts[key] for key in keys[-7:]] == [f"[[{(rows - 7 + i) % 7}]]" for i in range(7)]
