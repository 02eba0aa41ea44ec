"""The text table, against torch's own, to the character."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_torchprof import EventList, FunctionEvent
from otel_torchprof._encode.table import (
    SORT_KEYS,
    TableArgumentError,
    TableOptions,
    build_table,
    format_memory,
    format_share,
    format_time,
)

util = pytest.importorskip("torch.autograd.profiler_util", reason="compares with torch's own table")

WORDS = st.text(alphabet="abc:_/. ", min_size=1, max_size=90)
SIZES = st.integers(-(2**34), 2**34)


@st.composite
def torch_events(draw):
    """Torch events with every sort of data that a column can show."""
    from torch.autograd import DeviceType

    device = draw(st.sampled_from(("cuda", "xpu", None)))
    extras = {name: draw(st.booleans()) for name in ("shapes", "stack", "overload", "node")}
    made = []
    for number in range(draw(st.integers(1, 6))):
        event = util.FunctionEvent(
            id=number,
            name=draw(WORDS),
            thread=1,
            start_us=0,
            end_us=draw(st.sampled_from((0, 7, 1_500, 2_500_000))) + draw(st.integers(1, 999)),
            overload_name=draw(st.sampled_from(("", "Tensor", "out_" * 15))) if extras["overload"] else "",
            input_shapes=draw(st.sampled_from(([], [[2, 3], []], [[5] * 40]))) if extras["shapes"] else [],
            stack=draw(st.lists(WORDS, max_size=3)) if extras["stack"] else [],
            use_device=device,
            cpu_memory_usage=draw(SIZES),
            device_memory_usage=draw(SIZES),
            is_async=draw(st.sampled_from((False, False, True))),
            node_id=draw(st.integers(-1, 1)) if extras["node"] else -1,
            device_type=draw(st.sampled_from((DeviceType.CPU, DeviceType.CPU, DeviceType.CUDA)))
            if device
            else DeviceType.CPU,
            is_legacy=draw(st.booleans()),
            is_user_annotation=draw(st.booleans()),
            flops=draw(st.sampled_from((0, 0, 12, 900_000, 7 * 10**9, 10**20))),
        )
        if device and event.device_type == DeviceType.CPU and draw(st.booleans()):
            event.append_kernel("kernel", 0, draw(st.integers(1, 5_000)))
        made.append(event)
    if len(made) > 2 and made[0].device_type == made[1].device_type == DeviceType.CPU:
        made[1].set_cpu_parent(made[0])
        made[0].append_cpu_child(made[1])
    return made


OPTIONS = st.fixed_dictionaries(
    {
        "max_src_column_width": st.sampled_from((None, 75, 6, 2)),
        "max_name_column_width": st.sampled_from((None, 55, 10)),
        "max_shapes_column_width": st.sampled_from((None, 80, 9)),
        "header": st.sampled_from((None, "A header")),
        "top_level_events_only": st.booleans(),
        "time_unit": st.sampled_from((None, "s", "ms", "us")),
        "profile_memory": st.booleans(),
        "with_flops": st.booleans(),
    }
)
ROW_LIMITS = st.sampled_from((-1, 0, 1, 2, 100, None))
KEYS = (None, *SORT_KEYS, "cuda_time_total", "self_xpu_time_total", "self_cuda_memory_usage", "flops", "key")


@settings(max_examples=500, deadline=None)
@given(torch_events(), OPTIONS, st.sampled_from(KEYS), ROW_LIMITS, st.booleans())
def test_same_text_as_torch(events, options, sort_by, row_limit, averaged):
    """For torch's own events and averages, with any arguments, our text is torch's text."""
    events = util.EventList(events, use_device=events[0].use_device)
    events._tree_built = True
    if averaged:
        events = events.key_averages(group_by_input_shapes=True, group_by_stack_n=2, group_by_overload_name=True)
    try:
        expected = util._build_table(events, sort_by=sort_by, row_limit=row_limit, **options)
    except AssertionError:
        return  # torch refuses a share of a total of nothing, which we print as NaN
    assert build_table(events, TableOptions(**options), sort_by=sort_by, row_limit=row_limit) == expected


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
