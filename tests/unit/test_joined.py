"""Batches as one, and batches without some of their rows."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torchprof._columns.batch import Batch, Names, RecordedThread
from otel_torchprof._columns.joined import joined, without

MAIN, OTHER = RecordedThread(1, 11, 1, "main"), RecordedThread(2, 22, 0, "")
NAMES = ["", "a", "b", "c"]


def memory(**columns):
    """Allocations of some columns; the others are 0."""
    rows = len(columns["time"])
    neutral = dict.fromkeys(
        [
            "bytes",
            "address",
            "total_allocated",
            "total_reserved",
            "event",
            "thread",
            "device_type",
            "device_index",
            "flags",
        ],
        [0] * rows,
    )
    return {**neutral, **columns}


def one():
    """Two threads: a with b inside, and c."""
    return Batch.of(
        {"start": [10, 11, 10], "end": [20, 12, 15], "name": [1, 2, 3], "parent": [-1, 0, -1], "thread": [0, 0, 1]},
        NAMES,
        (MAIN, OTHER),
        dropped={"budget": 1},
    )


def two():
    """The same threads in the other order, one of which torch has come to know: c with a inside, and b."""
    return Batch.of(
        {
            "id": [7, 8, 9],
            "start": [30, 31, 30],
            "end": [40, 32, 35],
            "name": [3, 1, 2],
            "parent": [-1, 0, -1],
            "thread": [0, 0, 1],
            "inputs": [0, -1, 3],
        },
        NAMES,
        (RecordedThread(2, 22, 5, "pool"), MAIN),
        inputs=np.arange(6, dtype=np.int64),
        dropped={"budget": 2, "depth": 1},
        memory=memory(time=[33, 34], thread=[0, 1], event=[8, 0]),
    )


def test_two_batches():
    """Rows stand by thread, parents, threads and inputs are those of before, and what was dropped is added up."""
    whole = joined([one(), two()])
    names = [whole.names[name] for name in whole["name"].tolist()]
    assert names == ["a", "b", "b", "c", "c", "a"]
    assert whole["start"].tolist() == [10, 11, 30, 10, 30, 31]
    assert whole["parent"].tolist() == [-1, 0, -1, -1, -1, 4]
    assert whole["thread"].tolist() == whole["end_thread"].tolist() == [0, 0, 0, 1, 1, 1]
    assert whole["inputs"].tolist() == [-1, -1, 3, -1, 0, -1]
    assert list(whole.threads) == [MAIN, RecordedThread(2, 22, 5, "pool")]
    assert whole.dropped == {"budget": 3, "depth": 1}
    for name, column in one().columns.items():
        assert whole[name].dtype == column.dtype


def test_inputs_and_memory_of_several():
    """Offsets into the words of inputs, and the threads of allocations, are moved to where their batch went."""
    whole = joined([two(), one(), two()])
    assert whole["inputs"].tolist() == [0, -1, -1, 6, -1, 3, -1, -1, 9]
    assert len(whole.inputs) == 12
    assert whole.memory["thread"].tolist() == [0, 0, 1, 1]
    assert whole.memory["time"].tolist() == [33, 33, 34, 34]
    assert whole.memory["event"].dtype == np.uint64
    assert joined([one(), one()]).memory is None


def test_none_and_one():
    """No batches are an empty one; a single one is itself."""
    assert len(joined([])) == 0
    batch = one()
    assert joined([batch]) is batch
    assert len(joined([joined([]), batch])) == 3


def test_names_grow():
    """The longest table of names is taken, and one that does not go on from the others is refused."""
    longer = Batch.of({"start": [50], "name": [4]}, [*NAMES, "d"])
    whole = joined([one(), longer])
    assert sorted(whole.names[name] for name in whole["name"].tolist()) == ["a", "b", "c", "d"]
    foreign = Batch.of({"start": [50], "name": [1]}, ["", "x"])
    with pytest.raises(ValueError, match="not of one table"):
        joined([one(), foreign])
    assert isinstance(whole.names, Names)


def test_a_thread_that_got_the_ids_of_another():
    """Torch's own id tells apart two threads of which the second got the system's id of the first."""
    first = Batch.of({"start": [1]}, [""], (RecordedThread(9, 9, 3, "first"),))
    second = Batch.of({"start": [2]}, [""], (RecordedThread(9, 9, 4, "second"),))
    assert [thread.name for thread in joined([first, second]).threads] == ["first", "second"]


def test_without_rows():
    """What was inside of a row that goes hangs under the nearest that stays; a batch from which nothing goes is itself."""
    batch = Batch.of({"start": [1, 2, 3, 4], "end": [9, 8, 7, 6], "name": [1, 2, 3, 1], "parent": [-1, 0, 1, 2]}, NAMES)
    left = without(batch, np.array([False, True, True, False]))
    assert left["start"].tolist() == [1, 4]
    assert left["parent"].tolist() == [-1, 0]
    assert without(batch, np.array([True, False, False, False]))["parent"].tolist() == [-1, 0, 1]
    assert without(batch, np.zeros(4, dtype=np.bool_)) is batch


def test_memory_without_its_rows():
    """Memory of a row that goes belongs to the nearest around it that stays, else to none."""
    batch = Batch.of(
        {"start": [1, 2, 3], "end": [9, 8, 7], "parent": [-1, 0, 1]},
        NAMES,
        memory=memory(time=[4, 5, 6, 7], event=[3, 2, 1, 99]),
    )
    assert without(batch, np.array([False, True, True])).memory["event"].tolist() == [1, 1, 1, 99]
    assert without(batch, np.array([True, True, True])).memory["event"].tolist() == [0, 0, 0, 99]
    assert batch.memory["event"].tolist() == [3, 2, 1, 99]


def test_rows_without_others_keep_parents_outside():
    """A row whose parent is in an earlier batch keeps it, wherever it moves."""
    batch = Batch.of(
        {"start": [1, 2, 3]},
        NAMES,
        outer_rows=np.array([1, 2], dtype=np.uint64),
        outer_parents=np.array([70, 80], dtype=np.uint64),
    )
    left = without(batch, np.array([True, True, False]))
    assert (left.outer_rows.tolist(), left.outer_parents.tolist()) == ([0], [80])
