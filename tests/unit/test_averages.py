"""Averages on columns of any length; that they are torch's, test_events.py says."""

import numpy as np

from otel_torchprof._columns.batch import Batch
from otel_torchprof._model.averages import Averages
from otel_torchprof._model.inputs import shape_keys
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


def test_shape_keys_over_many_blocks():
    """The blocked hash gives equal inputs equal keys wherever in the batch they stand."""
    rows = 150_000
    words = np.stack([np.ones(rows), np.full(rows, 1 | 1 << 32), np.arange(rows) % 7], axis=1).astype(np.int64).ravel()
    batch = Batch.of({"start": np.zeros(rows), "end": np.ones(rows), "inputs": np.arange(rows) * 3}, [""], inputs=words)
    keys, texts = shape_keys(batch)
    assert len(texts) == 8
    assert [texts[key] for key in keys[-7:]] == [f"[[{(rows - 7 + i) % 7}]]" for i in range(7)]


def test_many_splits_at_once():
    """Splits whose product does not fit into 64 bits are numbered anew in between."""
    batch = Batch.of({"start": np.arange(4), "end": np.arange(4) + 1, "name": np.ones(4)}, ["", "a"])
    huge = np.array([0, 2**40, 2**40, 0])
    sums = Averages.of(torch_view(batch), [huge, huge, np.array([0, 0, 1, 0])])
    assert sums.count.tolist() == [2, 1, 1]
