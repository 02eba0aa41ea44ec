"""What events say of facts that were not recorded, or that all have; and events and averages as data frames."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
from torch_forests import Event, as_batch

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Kind
from otel_torchprof._profile.events import EventList


@pytest.mark.parametrize(
    "info_field", ["stack", "overload_name", "cpu_memory_usage", "self_device_memory_usage", "flops"]
)
def test_what_was_not_recorded_is_neutral(info_field):
    """Without facts an event has an empty stack, no overload name, no bytes and no operations."""
    found = EventList.of(as_batch([Event(1, "a", 1, 0, 10)]), origin_ns=0)
    assert not getattr(found[0], info_field)
    assert found._source.info.amounts() == {}


def test_an_overload_that_all_events_have():
    """It is told and grouped by where no event is without it."""
    batch = Batch.of(
        {"start": [1, 3], "end": [2, 4], "name": [1, 1], "inputs": [0, 0]},
        ["", "aten::add_", "Tensor"],
        inputs=np.array([1 << 32, 10 | 2 << 32]),
    )
    events = EventList.of(batch, origin_ns=0)
    assert [event.overload_name for event in events] == ["Tensor", "Tensor"]
    assert [average.overload_name for average in events.key_averages(group_by_overload_name=True)] == ["Tensor"]


# ---- data frames ----

REASON = "tries what is made with pandas"


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
    for each in (events, copy.deepcopy(events)):
        assert each.to_pandas()["is_python_function"].tolist() == [True, False]


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
