"""Events and averages as data frames."""

from __future__ import annotations

import copy
import sys

import pytest
from hypothesis import given
from test_event_info import NUMBERS, listed
from torch_forests import Event, as_batch, forests

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Kind
from otel_torchprof._profile.events import EventList

REASON = "tries what is made with pandas"


@given(forests(), NUMBERS)
def test_columns_and_objects_give_the_same_frame(events, numbers):
    """The frame of untouched columns, which makes no event, is the frame of copies of the events."""
    pytest.importorskip("pandas", reason=REASON)
    from pandas.testing import assert_frame_equal

    columns = listed(events, numbers)
    frame = columns.to_pandas()
    assert all(event is None for event in list.__iter__(columns))
    expected = copy.deepcopy(columns).to_pandas()
    options = {"check_dtype": False, "check_categorical": False, "check_column_type": False}
    if len(events) == 0:
        assert len(frame) == len(expected) == 0
    else:
        assert_frame_equal(frame, expected[list(frame.columns)], **options)
        assert set(frame.columns) == set(expected.columns)


def test_units_and_parents():
    """Times are in us since the start, the parent is a row, names are categories."""
    pytest.importorskip("pandas", reason=REASON)
    events = [Event(1, "outer", 1, 10, 30), Event(2, "inner", 1, 12, 15, 0, shapes=[[2, 3]])]
    frame = EventList.of(as_batch(events), origin_ns=4_000).to_pandas()
    assert frame["start"].tolist() == [6.0, 8.0]
    assert frame["self_cpu_time_total"].tolist() == [17.0, 3.0]
    assert frame["parent"].tolist() == [-1, 0]
    assert frame["input_shapes"].tolist() == ["", "[[2, 3]]"]
    assert frame["name"].dtype == "category"
    assert "flops" not in frame.columns


def test_calls_can_be_told_from_operators():
    """Rows say whether they are calls of Python, from columns and from objects."""
    pytest.importorskip("pandas", reason=REASON)
    columns = {"name": [1, 2], "start": [0, 1], "end": [9, 8], "parent": [-1, 0], "kind": [Kind.FRAME, Kind.OPERATOR]}
    events = EventList.of(Batch.of(columns, ["", "a.py(1): f", "aten::add"]), origin_ns=0)
    for listed_events in (events, copy.deepcopy(events)):
        assert listed_events.to_pandas()["is_python_function"].tolist() == [True, False]


def test_averages_as_a_frame():
    """A row per average, with its count and its sums."""
    pytest.importorskip("pandas", reason=REASON)
    events = [Event(1, "a", 1, 0, 4), Event(2, "a", 1, 5, 7), Event(3, "b", 1, 8, 9)]
    frame = EventList.of(as_batch(events), origin_ns=0).key_averages().to_pandas()
    assert frame[["key", "count", "cpu_time_total", "cpu_time"]].to_dict("list") == {
        "key": ["a", "b"],
        "count": [2, 1],
        "cpu_time_total": [6.0, 1.0],
        "cpu_time": [3.0, 1.0],
    }


def test_without_pandas(monkeypatch):
    """Where pandas is missing the error says what to install."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'otel-torchprof\[pandas\]'"):
        EventList().to_pandas()
