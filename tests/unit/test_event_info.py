"""Stacks, overloads, memory, FLOPs and times of devices on columns: the same answers as from the objects, lists and frames."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_forests import Event, as_batch, timed

from otel_torchprof._columns.batch import Batch, Names
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.schema import Kind
from otel_torchprof._encode.table import SORT_KEYS
from otel_torchprof._model.frames import Stacks
from otel_torchprof._profile.event_info import CodedStacks, CodedValues, EventInfo
from otel_torchprof._profile.events import EventList

# The empty one; g; h; f called by g, by h, and by nobody.
STACKS = Stacks(
    np.array([0, 0, 0, 1, 2, 0]), np.array([0, 2, 3, 1, 1, 1]), Names.of(["", "f.py(1): f", "g.py(2): g", "h.py(3): h"])
)
OVERLOADS = ("", "Tensor", "out")


class Known(EventInfo):
    """Facts as a test gives them: one number per event for each."""

    def __init__(self, view, numbers):
        super().__init__(view)
        self._numbers = np.resize(np.array(numbers, dtype=np.int64), len(view))

    @cached_property
    def stack_codes(self):
        """One of the stacks for each event."""
        return CodedStacks(self._numbers % len(STACKS), STACKS)

    @cached_property
    def overload_codes(self):
        """One of the overloads for each event."""
        return CodedValues(self._numbers // 7 % len(OVERLOADS), OVERLOADS)

    @cached_property
    def cpu_memory(self):
        """Allocations and releases."""
        return self._numbers * 100 - 5_000

    @cached_property
    def device_memory(self):
        """Allocations."""
        return self._numbers * 1_000_000

    @cached_property
    def flops(self):
        """Some zero."""
        return self._numbers // 3 % 5 * 1_000


def listed(batch, numbers):
    """The events as a list that is backed by columns, with facts."""
    found = EventList.of(batch, origin_ns=0, use_device="cuda", profile_memory=True, with_flops=True)
    found._source.info = Known(found._source.view, numbers)
    return found


def rows(averages):
    """All that an average says, but for whom it comes from."""
    return [
        {name: value for name, value in vars(average).items() if name != "_first"}
        | {"parent": average.cpu_parent is None}
        for average in averages
    ]


NUMBERS = st.lists(st.integers(0, 100), min_size=1, max_size=12)
GROUPINGS = st.tuples(st.booleans(), st.integers(-1, 2), st.booleans())


@given(timed(), NUMBERS, GROUPINGS)
def test_averages_are_those_of_the_objects(batch, numbers, grouping):
    """Any grouping gives from columns what adding up copies of the events gives: groups, order, sums, descriptions."""
    columns = listed(batch, numbers)
    objects = copy.deepcopy(columns)
    assert objects._source is None
    assert rows(columns.key_averages(*grouping)) == rows(objects.key_averages(*grouping))
    assert rows([columns.total_average()]) == rows([objects.total_average()])
    assert columns._source is not None


@given(
    timed(),
    NUMBERS,
    st.sampled_from((None, *SORT_KEYS, "flops", "cuda_memory_usage", "id", "self_cuda_time_total", "cuda_time")),
    st.booleans(),
    st.sampled_from((None, "us", "ms", "s")),
)
def test_tables_are_those_of_the_objects(batch, numbers, sort_by, top_level_only, unit):
    """Any sort key and unit give from columns the text that it gives from copies of the events."""
    columns = listed(batch, numbers)
    options = {"sort_by": sort_by, "top_level_events_only": top_level_only, "time_unit": unit}
    assert columns.table(**options) == copy.deepcopy(columns).table(**options)


@given(timed(), NUMBERS, st.sampled_from(("self_cpu_time_total", "self_cuda_time_total")))
def test_stacks_are_written_as_from_the_objects(tmp_path_factory, batch, numbers, metric):
    """The lines of export_stacks are those that copies of the events give."""
    columns = listed(batch, numbers)
    paths = [tmp_path_factory.mktemp("stacks") / name for name in ("columns", "objects")]
    columns.export_stacks(paths[0], metric)
    copy.deepcopy(columns).export_stacks(paths[1], metric)
    assert paths[0].read_text() == paths[1].read_text()


def test_self_memory_is_without_the_children():
    """An event's own bytes are its bytes without its children's, once they are changed also by a user."""
    events = [Event(1, "a", 1, 0, 10), Event(2, "b", 1, 2, 4, 0), Event(3, "c", 1, 5, 9, is_async=True)]
    found = listed(as_batch(events), [80, 60, 90])
    assert [event.cpu_memory_usage for event in found] == [3_000, 1_000, 4_000]
    assert [event.self_cpu_memory_usage for event in found] == [2_000, 1_000, 0]
    assert [event.self_device_memory_usage for event in found] == [20_000_000, 60_000_000, 0]
    found[1].cpu_memory_usage = 1
    assert found[0].self_cpu_memory_usage == 2_999


@pytest.mark.parametrize(
    "info_field", ["stack", "overload_name", "cpu_memory_usage", "self_device_memory_usage", "flops"]
)
def test_what_was_not_recorded_is_neutral(info_field):
    """Without facts an event has an empty stack, no overload name, no bytes and no operations."""
    found = EventList.of(as_batch([Event(1, "a", 1, 0, 10)]), origin_ns=0)
    assert not getattr(found[0], info_field)
    assert found._source.info.amounts() == {}


def test_many_splits_at_once():
    """Splits whose product does not fit into 64 bits are numbered anew in between."""
    from otel_torchprof._model.averages import Averages
    from otel_torchprof._model.tree import torch_view

    events = [Event(i + 1, "a", 1, 2 * i, 2 * i + 1) for i in range(4)]
    huge = np.array([0, 2**40, 2**40, 0])
    sums = Averages.of(torch_view(as_batch(events)), [huge, huge, np.array([0, 0, 1, 0])])
    assert sums.count.tolist() == [2, 1, 1]


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


@given(timed(), NUMBERS)
def test_columns_and_objects_give_the_same_frame(batch, numbers):
    """The frame of untouched columns, which makes no event, is the frame of copies of the events."""
    pytest.importorskip("pandas", reason=REASON)
    from pandas.testing import assert_frame_equal

    columns = listed(batch, numbers)
    frame = columns.to_pandas()
    assert all(event is None for event in list.__iter__(columns))
    expected = copy.deepcopy(columns).to_pandas()
    options = {"check_dtype": False, "check_categorical": False, "check_column_type": False}
    if len(columns) == 0:
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
