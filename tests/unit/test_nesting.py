"""The rows that nest in time, by thread: against every pair of rows."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._model.tree import nested_rows, not_nested

THREADS = (RecordedThread(1, 11, 11, "main"), RecordedThread(2, 12, 12, "autograd"))


def batch_of(rows):
    """Of (thread, thread of the end, start, duration, kind, is asynchronous)."""
    columns = {
        "thread": [row[0] for row in rows],
        "end_thread": [row[1] for row in rows],
        "start": [row[2] for row in rows],
        "end": [row[2] + row[3] for row in rows],
        "kind": [row[4] for row in rows],
        "flags": [Flag.ASYNC * row[5] for row in rows],
        "parent": [-1] * len(rows),
    }
    return Batch.of(columns, [""], THREADS)


ROWS = st.lists(
    st.tuples(
        st.sampled_from((0, 1)),
        st.sampled_from((0, 0, 0, 1)),
        st.integers(0, 20),
        st.integers(1, 10),
        st.sampled_from((Kind.OPERATOR, Kind.FRAME)),
        st.sampled_from((0, 0, 0, 1)),
    ),
    max_size=12,
)


@given(ROWS)
def test_rows_nest(rows):
    """Of any two rows of a thread one is within the other or they do not overlap; all others are said not to nest."""
    batch = batch_of(rows)
    found = dict(nested_rows(batch))
    for tid, chosen in found.items():
        assert all(THREADS[batch["thread"][row]].os_tid == tid for row in chosen)
        times = [(batch["start"][row], -batch["end"][row]) for row in chosen]
        assert times == sorted(times)
        for first, second in itertools.combinations(chosen, 2):
            assert batch["start"][second] >= batch["end"][first] or batch["end"][second] <= batch["end"][first]
    missing = not_nested(batch)
    assert sorted(row for chosen in found.values() for row in chosen) == [
        row for row in range(len(rows)) if not missing[row]
    ]


def test_a_call_gives_way_to_a_label():
    """A label that is begun by one call and ended by the next is drawn, and the call that it outlives is not."""
    batch = batch_of([(0, 0, 0, 5, Kind.FRAME, 0), (0, 0, 2, 6, Kind.LABEL, 0), (0, 0, 20, 1, Kind.FRAME, 0)])
    batch["parent"][1] = 0
    assert not_nested(batch).tolist() == [True, False, False]
