"""The list of events: torch's answers from columns, and a real list all the same."""

import copy
import gc
import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_forests import Event, as_batch, as_torch, forests

from examples import random_examples
from otel_torchprof import EventList, FunctionEvent
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Kind
from otel_torchprof._profile.recorded_events import RecordedEvent

FOREST = [
    Event(1, "ProfilerStep#7", 1, 0, 100, scope=7),
    Event(2, "aten::linear", 1, 10, 50, 0, shapes=[[2, 3], []]),
    Event(3, "aten::mm", 1, 20, 40, 1, shapes=[[[1], [4, 5]], [7]]),
    Event(4, "aten::relu", 1, 60, 70, 0),
    Event(5, "aten::wait", 1, 80, 300, 0, is_async=True),
]
COMPARED = [
    "id",
    "name",
    "trace_name",
    "key",
    "thread",
    "fwd_thread",
    "scope",
    "is_async",
    "is_remote",
    "sequence_nr",
    "node_id",
    "count",
    "input_shapes",
    "structured_input_shapes",
    "stack",
    "kernels",
    "overload_name",
    "concrete_inputs",
    "kwinputs",
    "use_device",
    "cpu_memory_usage",
    "device_memory_usage",
    "is_legacy",
    "is_user_annotation",
    "is_python_function",
    "flops",
    "cpu_time_total",
    "self_cpu_time_total",
    "cpu_time",
    "device_time_total",
    "self_device_time_total",
    "self_cpu_memory_usage",
    "self_device_memory_usage",
    "cpu_time_str",
    "self_cpu_time_total_str",
]
SUMMED = [
    "key",
    "count",
    "cpu_time_total",
    "self_cpu_time_total",
    "device_time_total",
    "self_device_time_total",
    "cpu_memory_usage",
    "self_cpu_memory_usage",
    "input_shapes",
    "stack",
    "overload_name",
    "scope",
    "node_id",
    "is_async",
    "is_remote",
    "is_legacy",
    "use_device",
    "flops",
    "cpu_time",
]


def _listed(events=FOREST, **options):
    return EventList.of(as_batch(events), origin_ns=0, **options)


def _made(events: EventList) -> int:
    """How many events exist, counted among all objects of the process."""
    return sum(type(thing) is RecordedEvent and thing._source is events._source for thing in gc.get_objects())


def _values(thing, names):
    return {name: getattr(thing, name) for name in names}


@random_examples(400)
@given(forests(threads=3), st.booleans())
def test_events_have_torchs_attributes(events, with_shapes):
    """Whatever is nested, misnested, hidden, merged or asynchronous, events have torch's attributes, parents and children."""
    pytest.importorskip("torch", reason="compares with torch's own events")
    ours, torchs = EventList.of(as_batch(events, with_shapes), origin_ns=0), as_torch(events, with_shapes)
    assert len(ours) == len(torchs)
    for mine, theirs in zip(ours, torchs, strict=True):
        assert _values(mine, COMPARED) == _values(theirs, COMPARED)
        assert str(mine.device_type) == str(theirs.device_type)
        assert mine.device_type == theirs.device_type
        assert (mine.time_range.start, mine.time_range.end) == (theirs.time_range.start, theirs.time_range.end)
        assert [child.id for child in mine.cpu_children] == [child.id for child in theirs.cpu_children]
        assert (mine.cpu_parent and mine.cpu_parent.id) == (theirs.cpu_parent and theirs.cpu_parent.id)
        assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("touched", [False, True])
@random_examples(150)
@given(events=forests(threads=3), by_shapes=st.booleans())
def test_averages_and_totals_as_torch(touched, events, by_shapes):
    """Averages and totals are torch's, whether they come from the columns or from the events of a changed list."""
    pytest.importorskip("torch", reason="compares with torch's own averages")
    ours, torchs = _listed(events), as_torch(events)
    if touched:
        ours.reverse()
        ours.reverse()
    mine, theirs = (
        ours.key_averages(group_by_input_shapes=by_shapes),
        torchs.key_averages(group_by_input_shapes=by_shapes),
    )
    assert [_values(average, SUMMED) for average in mine] == [_values(average, SUMMED) for average in theirs]
    assert [repr(average) for average in mine] == [repr(average) for average in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert [child.id for child in one.cpu_children] == [child.id for child in other.cpu_children]
        assert (one.cpu_parent and one.cpu_parent.id) == (other.cpu_parent and other.cpu_parent.id)
    assert _values(ours.total_average(), SUMMED) == _values(torchs.total_average(), SUMMED)
    assert ours.self_cpu_time_total == torchs.self_cpu_time_total


ARGUMENTS = st.fixed_dictionaries(
    {
        "sort_by": st.sampled_from(
            (
                None,
                "cpu_time_total",
                "self_cpu_time_total",
                "cpu_time",
                "count",
                "cuda_time_total",
                "cpu_memory_usage",
                "key",
            )
        ),
        "row_limit": st.sampled_from((-1, 0, 1, 3, 100)),
        "max_name_column_width": st.sampled_from((None, 55, 12)),
        "max_shapes_column_width": st.sampled_from((None, 80, 8)),
        "header": st.sampled_from((None, "Header")),
        "top_level_events_only": st.booleans(),
        "time_unit": st.sampled_from((None, "s", "ms", "us")),
    }
)


@random_examples(400)
@given(forests(), ARGUMENTS, st.booleans(), st.sampled_from(("events", "averages", "averages by shape")))
def test_tables_as_torch(events, arguments, with_shapes, of_what):
    """The text of a table out of columns is torch's for the same events, whatever the arguments."""
    pytest.importorskip("torch", reason="compares with torch's own table")
    ours, torchs = EventList.of(as_batch(events, with_shapes), origin_ns=0), as_torch(events, with_shapes)
    if of_what != "events":
        ours, torchs = (each.key_averages(group_by_input_shapes="shape" in of_what) for each in (ours, torchs))
    try:
        expected = torchs.table(**arguments)
    except AssertionError:
        return  # torch refuses a share of a total of nothing, which we print as NaN
    assert ours.table(**arguments) == expected


def test_an_event_is_made_when_touched_and_only_then():
    """Length, averages, totals and tables make no more events than they show; touching one makes that one."""
    events = _listed([Event(i + 1, f"op{i % 3}", 1, 2 * i, 2 * i + 1) for i in range(500)])
    assert len(events) == 500
    assert events.self_cpu_time_total == 500
    assert _made(events) == 0
    event = events[400]
    assert event.name == "op1"
    assert _made(events) == 1
    assert events.total_average().count == 500
    assert [row.count for row in events.key_averages()] == [167, 167, 166]
    events.table(sort_by="self_cpu_time_total", row_limit=10)
    assert _made(events) < 20


def test_identity_through_every_way_to_an_event():
    """Index, iteration, slice, parent and child lead to one object."""
    events = _listed()
    step, linear, mm = events[0], events[1], events[2]
    assert events[0] is step
    assert events[-5] is step
    assert linear.cpu_parent is step
    assert mm.cpu_parent is linear
    assert linear.cpu_children == [mm]
    assert linear.cpu_children is linear.cpu_children
    assert step.cpu_children[0].cpu_parent is step
    assert list(events)[1] is linear
    assert events[1:3] == [linear, mm]
    assert [event is again for event, again in zip(events, events, strict=True)] == [True] * 5


def test_threads_that_touch_together_get_one_object():
    """Whoever comes first makes the event; the others get the same."""
    events = _listed([Event(i + 1, "a", 1, i, i + 1) for i in range(3000)])
    found = [[] for _ in range(4)]
    barrier = threading.Barrier(4)

    def touch(mine):
        barrier.wait()
        mine.extend(events[i] for i in range(3000))

    workers = [threading.Thread(target=touch, args=(mine,)) for mine in found]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(one is other for mine in found for one, other in zip(mine, found[0], strict=True))


def _extending(events):
    (longer := ["z"]).extend(events)
    return longer


READS = {
    "list": list,
    "tuple": tuple,
    "sorted": lambda x: sorted(x, key=lambda event: -event.id),
    "reversed": lambda x: list(reversed(x)),
    "slice": lambda x: x[::-2],
    "add": lambda x: x + [1],  # noqa: RUF005 - the operator is what is tried
    "radd": lambda x: [1] + x,  # noqa: RUF005
    "multiply": lambda x: x * 2,
    "rmul": lambda x: 2 * x,
    "copy": lambda x: x.copy(),
    "unpack": lambda x: [*x],
    "starred call": lambda x: max(*x, key=lambda event: event.id),
    "extend another": _extending,
    "index": lambda x: x.index(x[3]),
    "count": lambda x: x.count(x[3]),
    "contains": lambda x: (x[2] in x, None in x),
    "equal": lambda x: (x == list(x), list(x) == x, x != [], x == []),
    "array": lambda x: np.array(x, dtype=object).tolist(),
    "repr": repr,
}


@pytest.mark.parametrize("read", READS)
def test_reads_like_a_list(read):
    """Each way to read a list gives what a plain list of the same events gives, also on an untouched list."""
    events = _listed()
    result = READS[read](events)
    assert result == READS[read](list(events))
    assert events._source is not None
    assert type(events[1:2]) is list


CHANGES = {
    "append": lambda x: x.append(1),
    "extend": lambda x: x.extend([1, 2]),
    "insert": lambda x: x.insert(0, 1),
    "pop": lambda x: x.pop(1),
    "remove": lambda x: x.remove(x[2]),
    "clear": lambda x: x.clear(),
    "sort": lambda x: x.sort(key=lambda event: -event.id),
    "reverse": lambda x: x.reverse(),
    "set item": lambda x: x.__setitem__(0, 1),
    "set slice": lambda x: x.__setitem__(slice(0, 2), []),
    "delete": lambda x: x.__delitem__(0),
    "add to": lambda x: x.__iadd__([1]),
    "multiply by": lambda x: x.__imul__(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_like_a_list(change):
    """Each way to change a list does to an untouched one what it does to a plain list; parents stay who they were."""
    events = _listed()
    plain, mm = list(events), events[2]
    CHANGES[change](events)
    CHANGES[change](plain)
    assert list(events) == plain
    assert len(events) == len(plain)
    assert mm.cpu_parent.name == "aten::linear"
    assert mm.cpu_parent.cpu_children[0] is mm


def test_a_changed_list_is_added_up_from_its_objects():
    """After a change by the user, averages, totals and the table speak of what is in the list."""
    events = _listed()
    del events[1:]
    assert [row.key for row in events.key_averages()] == ["ProfilerStep*"]
    assert events.total_average().count == 1
    assert events.self_cpu_time_total == 50
    assert "aten::mm" not in events.table()


def test_a_changed_event_is_added_up_as_it_is_now():
    """An attribute that a user sets, or a child that he adds, shows in averages and tables."""
    events = _listed([Event(1, "a", 1, 0, 1), Event(2, "a", 1, 2, 3)])
    events[1].name = "mine"
    assert [(row.key, row.count) for row in events.key_averages()] == [("a", 1), ("mine", 1)]
    assert "mine" in events.table()
    events = _listed()
    extra = FunctionEvent(99, "extra", 1, 62, 65)
    assert events[3].self_cpu_time_total == 10
    events[3].append_cpu_child(extra)
    assert events[3].self_cpu_time_total == 7
    assert events.self_cpu_time_total == 97


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301 - our own bytes
def test_copies_and_pickles_are_plain_events(how):
    """A deep copy and a pickle hold plain events with the same values and a tree of their own."""
    events = _listed(use_device="cuda", profile_memory=True, with_flops=True)
    other = how(events)
    assert type(other) is EventList
    assert {type(event) for event in other} == {FunctionEvent}
    assert [_values(event, COMPARED) for event in other] == [_values(event, COMPARED) for event in events]
    assert other[2].cpu_parent is other[1]
    assert other[1].cpu_children[0] is other[2]
    assert other.table() == events.table()
    assert repr(how(events.key_averages())) == repr(events.key_averages())
    assert how(events[2]).cpu_parent.name == "aten::linear"


def test_shallow_copy_shares_the_events():
    """copy.copy() makes another list of the same objects."""
    events = _listed()
    other = copy.copy(events)
    assert type(other) is EventList
    assert all(one is same for one, same in zip(other, events, strict=True))


def test_index_outside_the_list():
    """An index outside raises IndexError, as for any list."""
    events = _listed()
    for index in (5, -6):
        with pytest.raises(IndexError):
            events[index]
    with pytest.raises(TypeError):
        events["a"]


def test_a_thread_without_torch_is_known_by_its_ident():
    """Where torch never ran, the thread is its ident; the system's id is the resource."""
    batch = Batch.of(
        {"start": [0, 5], "end": [1, 6], "thread": [0, 1]},
        [""],
        [RecordedThread(70, 700, 3), RecordedThread(80, 800, 0)],
    )
    events = EventList.of(batch, origin_ns=-2_000)
    assert [(event.thread, event.device_resource_id) for event in events] == [(3, 70), (800, 80)]
    assert events[0].time_range.start == 2.0


def test_empty_list():
    """No events: empty text, no averages, a total of nothing."""
    events = _listed([])
    assert (len(events), list(events), events.table(), list(events.key_averages())) == (0, [], "", [])
    assert (events.total_average().key, events.total_average().count, events.self_cpu_time_total) == ("Total", 0, 0)


# ---- facts, and data frames ----


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
