"""Calls of threads that wait, put into batches."""

from __future__ import annotations

import pytest

from otel_torchprof._columns.batch import Batch, RecordedThread, WaitingStack
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._model.waiting import with_waiting

FIRST, SECOND, THIRD = (
    RecordedThread(11, 1, 5, "first"),
    RecordedThread(12, 2, 6, "second"),
    RecordedThread(13, 3, 0, "third"),
)
NAMES = ["", "outer", "inner", "op", "part", "gc.collect: generation 2", "other"]
TIMES = 100, 200


def batch_of(**columns):
    """Two threads, each with an operator and its part: of the first the calls are known."""
    rows = {
        "id": [1 << 40, (1 << 40) + 1, 2 << 40, (2 << 40) + 1, (2 << 40) + 2],
        "start": [110, 111, 120, 121, 130],
        "end": [119, 112, 129, 122, 140],
        "name": [6, 3, 3, 4, 5],
        "parent": [-1, 0, -1, 2, -1],
        "thread": [0, 0, 1, 1, 1],
        "kind": [Kind.FRAME, Kind.OPERATOR, Kind.OPERATOR, Kind.OPERATOR, Kind.FRAME],
        **columns,
    }
    memory = {
        "time": [112, 113, 121, 122],
        "event": [0, 1 << 40, 0, 2 << 40],
        "thread": [0, 0, 1, 1],
        **{name: [0] * 4 for name in ("bytes", "address", "total_allocated", "total_reserved", "device_type")},
        **{name: [0] * 4 for name in ("device_index", "flags")},
    }
    return Batch.of(rows, NAMES, [FIRST, SECOND], memory=memory)


def stack_of(thread, *names):
    """A stack whose calls are of nothing in particular."""
    return WaitingStack(thread, names, (0,) * len(names))


def lines_of(batch):
    """Each row: its thread, how deep it is, and its name."""
    lines, depths = [], []
    for name, parent, thread in zip(*(batch[column].tolist() for column in ("name", "parent", "thread")), strict=True):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        lines.append(f"{batch.threads[thread].name}: {'.' * depths[-1]}{batch.names[name]}")
    return lines


def test_nothing_waits():
    """The batch is itself where no thread waits, or one has calls of its own: it went on in the last moment, and they are all."""
    batch = batch_of()
    assert with_waiting(batch, [], TIMES) is batch
    assert with_waiting(batch, [stack_of(FIRST, 1, 2)], TIMES) is batch


def test_thread_of_which_nothing_was_recorded():
    """Such a thread comes behind the others, which keep their places and all that they have."""
    batch = batch_of()
    whole = with_waiting(batch, [stack_of(THIRD, 1, 2)], TIMES)
    assert list(whole.threads) == [FIRST, SECOND, THIRD]
    assert lines_of(whole) == [*lines_of(batch), "third: outer", "third: .inner"]
    for name, column in batch.columns.items():
        assert whole[name].tolist()[: len(batch)] == column.tolist()
    added = [whole[name].tolist()[-2:] for name in ("start", "end", "kind", "flags", "error_type", "fwd_thread")]
    assert added == [[100] * 2, [200] * 2, [Kind.FRAME] * 2, [Flag.UNFINISHED] * 2, [0] * 2, [0] * 2]
    assert whole.memory["event"].tolist() == batch.memory["event"].tolist()


def test_thread_that_recorded_without_calls():
    """What a thread recorded while it waited for a C function is inside its calls, pauses and memory too; parts stay where they are."""
    whole = with_waiting(batch_of(), [stack_of(SECOND, 1, 2)], TIMES)
    assert lines_of(whole) == [
        "first: other",
        "first: .op",
        "second: outer",
        "second: .inner",
        "second: ..op",
        "second: ...part",
        "second: ..gc.collect: generation 2",
    ]
    assert whole.memory["event"].tolist() == [0, 1 << 40, whole["id"][3], 2 << 40]
    ids = whole["id"].tolist()
    assert (len(set(ids)), ids[2:]) == (len(ids), sorted(ids[2:]))


def test_several():
    """Each thread gets its own stack, whatever is known of it before."""
    stacks = [
        stack_of(THIRD, 2),
        stack_of(FIRST, 1),
        stack_of(SECOND, 1),
        stack_of(RecordedThread(14, 4, 0, "fourth"), 6),
    ]
    whole = with_waiting(batch_of(), stacks, TIMES)
    lines = lines_of(whole)
    assert (lines[2], lines[3], lines[-2:]) == ("second: outer", "second: .op", ["third: inner", "fourth: other"])
    assert len(set(whole["id"].tolist())) == len(whole)


@pytest.mark.parametrize("thread", [SECOND, THIRD])
def test_events_need_nothing_else(thread):
    """An empty recording takes stacks too."""
    whole = with_waiting(Batch.of({"start": []}, NAMES, [SECOND]), [stack_of(thread, 1, 2)], TIMES)
    assert lines_of(whole) == [f"{thread.name}: outer", f"{thread.name}: .inner"]
