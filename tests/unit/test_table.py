"""The text table, against torch's own, to the character."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof import EventList, FunctionEvent
from otel_torchprof._encode.table import (
    TableArgumentError,
    TableOptions,
    build_table,
    format_memory,
    format_share,
    format_time,
)

util = pytest.importorskip("torch.autograd.profiler_util", reason="compares with torch's own table")

SIZES = st.integers(-(2**34), 2**34)


def _event(**values):
    defaults = {
        "key": "a",
        "overload_name": None,
        "input_shapes": None,
        "stack": None,
        "node_id": -1,
        "use_device": None,
        "count": 1,
        "flops": None,
        "is_async": False,
        "is_legacy": False,
        "is_user_annotation": False,
        "device_type": 0,
        "cpu_parent": None,
    }
    numbers = [
        f"{own}{device}{what}"
        for own in ("", "self_")
        for device in ("cpu", "device")
        for what in ("_time_total", "_memory_usage")
    ]
    times = {"cpu_time": 1.0, "device_time": 0.0}
    return SimpleNamespace(**{**defaults, **dict.fromkeys(numbers, 0), **times, **values})


def test_any_object_with_the_attributes_will_do():
    """Whatever is None counts as not there; a total of nothing gives NaN instead of torch's assertion."""
    text = build_table([_event(cpu_time_total=5)], TableOptions(with_flops=True))
    assert "NaN" in text
    assert "5.000us" in text


def test_unknown_sort_key_names_the_allowed_ones():
    """The error is a ValueError that names the key and the usual keys, and an AttributeError for who expects torch's."""
    with pytest.raises(TableArgumentError, match=r"sort_by='nonsense'.*cpu_time_total") as caught:
        build_table([_event()], TableOptions(), sort_by="nonsense")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AttributeError)


def test_sort_key_without_an_order():
    """Values that cannot be compared are reported under the name of the key."""
    with pytest.raises(ValueError, match="sort_by='stack'"):
        build_table([_event(), _event(stack=["f"])], TableOptions(), sort_by="stack")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_name_column_width", "55", "max_name_column_width is '55'; .*None for no limit"),
        ("row_limit", "10", "row_limit is '10'; .*None for all rows"),
        ("header", 3, "header is 3; it must be a str"),
    ],
)
def test_arguments_of_a_wrong_type(name, value, text):
    """A limit that is no number and a header that is no text are named."""
    events = EventList([FunctionEvent(1, "a", thread=1, start_us=0, end_us=1)])
    with pytest.raises(TypeError, match=text):
        events.table(**{name: value})


def test_unknown_time_unit():
    """A unit that torch would silently ignore is refused, with what is allowed."""
    with pytest.raises(ValueError, match="time_unit='hours': allowed are 's', 'ms', 'us'"):
        TableOptions(time_unit="hours")


def test_device_times_without_a_device():
    """Device times of events that name no device are a RuntimeError in torch, and here."""
    with pytest.raises(RuntimeError, match="use_device"):
        build_table([_event(self_device_time_total=3)], TableOptions())


def test_no_events_no_text():
    """The table of nothing is the empty text."""
    assert build_table([], TableOptions()) == ""


@given(st.floats(0, 1e9), SIZES)
def test_units_as_torch(microseconds, size):
    """Single times and sizes read as torch writes them."""
    assert format_time(microseconds) == util._format_time(microseconds)
    assert format_memory(size) == util._format_memory(size)


def test_what_floats_leave_is_no_difference():
    """Times that only differ in what adding up left on them have one text, and keep their places when sorted."""
    noisy = 16.1 - 16.0
    assert noisy != 0.1
    assert format_share(noisy, 32.0) == format_share(0.1, 32.0)
    assert format_time((12.3455 - 1.0 + 1.0) * 1000) == format_time(12345.5)
    events = [_event(key=key, cpu_time_total=time, flops=None) for key, time in (("first", noisy), ("second", 0.1))]
    for sort_by in ("cpu_time_total", "flops"):
        for ordered in (events, events[::-1]):
            text = build_table(ordered, TableOptions(), sort_by=sort_by)
            assert text.index(ordered[0].key) < text.index(ordered[1].key)
