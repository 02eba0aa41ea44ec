"""Lists of events that were made by hand: tree, averages, totals, tables and files as torch's lists of the same events."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch_forests import as_batch, as_torch, forests

from examples import random_examples
from otel_torchprof import EventList
from otel_torchprof import profiler_util as ours
from otel_torchprof._encode.table import SORT_KEYS, brief_time, format_share, format_time

theirs = pytest.importorskip("torch.autograd.profiler_util", reason="compares with torch's lists")

DEVICES = ("CPU", "CPU", "CPU", "CUDA", "XPU")


@st.composite
def arguments(draw):
    """What the constructor of an event takes, for a few events of two threads that may nest and overlap."""
    device, node = draw(st.sampled_from(("cuda", None))), draw(st.sampled_from((-1, -1, 0, 1)))
    made = []
    for number in range(draw(st.integers(1, 10))):
        start = draw(st.integers(0, 12))
        made.append(
            {
                "id": number,
                "name": draw(st.sampled_from(("a", "b", "aten::mm", "ProfilerStep*", "a_long_name_" * 7))),
                "trace_name": draw(st.sampled_from(("a", "ProfilerStep#1", "ünï", None))),
                "thread": draw(st.integers(1, 2)),
                "start_us": start * 1.0,
                "end_us": start + draw(st.integers(1, 9)) * 1.5 + draw(st.sampled_from((0, 0, 1_500, 2_500_000))),
                "overload_name": draw(st.sampled_from(("", "out", "out_" * 15))),
                "input_shapes": draw(st.sampled_from(([], [[2, 3], []], [[5] * 40]))),
                "stack": draw(st.lists(st.sampled_from(("f.py(1): f", "g h;i", "a/long/path" * 9)), max_size=2)),
                "node_id": node,
                "is_legacy": draw(st.booleans()),
                "scope": draw(st.sampled_from((0, 0, 1, 7))),
                "use_device": device,
                "cpu_memory_usage": draw(st.integers(-(2**32), 2**32)),
                "device_memory_usage": draw(st.integers(0, 2**22)),
                "is_async": draw(st.booleans()),
                "is_remote": draw(st.sampled_from((False, False, True))),
                "sequence_nr": draw(st.integers(-1, 1)),
                "fwd_thread": draw(st.integers(0, 2)),
                "device_type": draw(st.sampled_from(DEVICES)) if device else "CPU",
                "is_user_annotation": draw(st.booleans()),
                "flops": draw(st.sampled_from((0, 12, 10**7, 10**20))),
                "kernels": draw(st.lists(st.integers(1, 9), max_size=2)) if device else [],
            }
        )
    return made


def listed(util, made, **options):
    """The events as the list of ``util``, with its tree."""
    events = []
    for entry in made:
        values = {name: value for name, value in entry.items() if name not in {"kernels", "device_type"}}
        event = util.FunctionEvent(**values, device_type=util.DeviceType.__members__[entry["device_type"]])
        if entry["device_type"] == "CPU":
            for duration in entry["kernels"]:
                event.append_kernel("kernel", 0, duration)
        events.append(event)
    found = util.EventList(events, use_device=made[0]["use_device"], **options)
    found._build_tree()
    return found


def tree(events):
    """Who stands where, with which stack and how many kernels."""
    return [
        (
            event.id,
            event.cpu_parent and event.cpu_parent.id,
            [child.id for child in event.cpu_children],
            event.stack,
            len(event.kernels),
        )
        for event in events
    ]


def sums(averages):
    """The public attributes of averages, without those that torch does not have."""
    hidden = {"_first", "cpu_parent", "cpu_children", "device_type", "cpu_memory_peak", "device_memory_peak"}
    return [
        {name: value for name, value in vars(row).items() if name not in hidden} | {"device": str(row.device_type)}
        for row in averages
    ]


@given(arguments())
def test_the_tree_is_torchs(made):
    """Parents, children, merged namesakes, lifted kernels, the stacks of backward events, and what an event says of itself."""
    mine, torchs = (listed(util, made) for util in (ours, theirs))
    assert tree(mine) == tree(torchs)
    assert [repr(event) for event in mine] == [repr(event) for event in torchs]


@given(forests(threads=3))
def test_the_tree_is_torchs_also_where_ends_are_misnested(events):
    """Events of several threads whose ends do not nest; a list out of a recording needs no building."""
    torchs = as_torch(events)
    mine = EventList(
        ours.FunctionEvent(e.id, e.name, e.thread, e.time_range.start, e.time_range.end, is_async=e.is_async)
        for e in sorted(torchs, key=lambda event: event.id)
    )
    mine._build_tree()
    recorded = EventList.of(as_batch(events), origin_ns=0)
    recorded._build_tree()
    assert recorded._source is not None
    assert recorded._tree_built
    by_id = {event.id: event.cpu_parent and event.cpu_parent.id for event in mine}
    assert by_id == {event.id: event.cpu_parent and event.cpu_parent.id for event in torchs}


@given(arguments(), st.booleans(), st.integers(-1, 2), st.booleans())
def test_averages_are_torchs(made, by_shapes, stack_n, by_overload):
    """Every grouping gives the same averages in the same order, and the same total."""
    mine, torchs = (listed(util, made).key_averages(by_shapes, stack_n, by_overload) for util in (ours, theirs))
    assert sums(mine) == sums(torchs)
    assert [repr(row) for row in mine] == [repr(row) for row in torchs]
    assert sums([listed(ours, made).total_average()]) == sums([listed(theirs, made).total_average()])
    assert listed(ours, made).self_cpu_time_total == listed(theirs, made).self_cpu_time_total


TABLES = st.fixed_dictionaries(
    {},
    optional={
        "sort_by": st.sampled_from((*SORT_KEYS, "cuda_time_total", "self_xpu_memory_usage", "flops", "key")),
        "row_limit": st.sampled_from((-1, 0, 2, None)),
        "max_src_column_width": st.sampled_from((None, 6, 2)),
        "max_name_column_width": st.sampled_from((None, 8)),
        "max_shapes_column_width": st.sampled_from((None, 9)),
        "header": st.just("A header"),
        "top_level_events_only": st.booleans(),
        "time_unit": st.sampled_from(("s", "ms", "us")),
    },
)


@random_examples(300)
@given(arguments(), TABLES, st.booleans(), st.booleans(), st.booleans())
def test_tables_are_torchs(made, options, averaged, profile_memory, with_flops):
    """Any arguments give the same text to the character, of events and of averages, also of torch's own."""
    mine, torchs = (listed(util, made, profile_memory=profile_memory, with_flops=with_flops) for util in (ours, theirs))
    if averaged:
        mine, torchs = (events.key_averages(True, 2, True) for events in (mine, torchs))
    with contextlib.suppress(AssertionError):  # torch refuses a share of a total of nothing, which is NaN here
        expected = torchs.table(**options)
        assert_same(mine.table(**options), expected)
        kept = {"profile_memory": profile_memory, "with_flops": with_flops}
        assert_same(ours._build_table(torchs, **kept, **options), expected)


def assert_same(text, expected):
    """An AssertionError of this is one; the caller only suppresses torch's."""
    if text != expected:
        pytest.fail(f"{text}\n is not\n{expected}")


@given(arguments())
def test_chrome_traces_are_torchs(tmp_path_factory, made):
    """The simple Chrome JSON of a list is torch's, to the character, and can be read."""
    lists = [listed(util, made) for util in (ours, theirs)]
    # Torch fails where no event is to be written; the tree may have left out the one that was.
    assume(any(event.trace_name is not None for event in lists[1]))
    texts = []
    for events in lists:
        path = tmp_path_factory.mktemp("traces") / "trace.json"
        events.export_chrome_trace(str(path))
        texts.append(path.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    json.loads(texts[0])


@given(forests())
def test_chrome_traces_of_recorded_events(tmp_path_factory, events):
    """The same from columns, without making an event."""
    folder = tmp_path_factory.mktemp("traces")
    recorded = EventList.of(as_batch(events), origin_ns=0)
    recorded.export_chrome_trace(folder / "ours.json")
    assert all(event is None for event in list.__iter__(recorded))
    as_torch(events).export_chrome_trace(str(folder / "torchs.json"))
    assert (folder / "ours.json").read_text() == (folder / "torchs.json").read_text()


def test_a_chrome_trace_with_odd_names(tmp_path):
    """Quotes, line ends and lone surrogates in a name do not break the file, where torch's would be no JSON."""
    name = 'say "hi"\n\\ \ud800'
    events = EventList([ours.FunctionEvent(1, "a", 1, 0, 1, trace_name=name)])
    events.export_chrome_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())[0]["name"] == 'say "hi"\n\\ ?'


@given(arguments(), st.sampled_from(theirs.EventList().supported_export_stacks_metrics()))
def test_stacks_are_torchs(tmp_path_factory, made, metric):
    """export_stacks writes torch's lines for every metric."""
    texts = []
    for util in (ours, theirs):
        path = tmp_path_factory.mktemp("stacks") / "stacks.txt"
        listed(util, made).export_stacks(str(path), metric)
        texts.append(path.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]


def test_an_unknown_metric_is_torchs_error(tmp_path):
    """A metric that is none is the ValueError of torch, which names those that are."""
    for util in (ours, theirs):
        with pytest.raises(
            ValueError, match=r"^metric should be one of: \['self_cpu_time_total', 'self_cuda_time_total'"
        ):
            util.EventList().export_stacks(str(tmp_path / "x"), "time")


@given(arguments())
def test_averages_added_to_themselves(made):
    """An average that is added to itself doubles every sum, as torch's; the rest stays."""
    averages, torchs = (listed(util, made).key_averages() for util in (ours, theirs))
    counts = [row.count for row in averages]
    for index in range(len(averages)):
        averages[index] += averages[index]
        torchs[index] += torchs[index]
    assert [row.count for row in averages] == [2 * count for count in counts]
    assert sums(averages) == sums(torchs)


def test_a_tree_is_built_once():
    """Building again changes nothing; building other lists of events that have parents is an error that says so."""
    events = EventList([ours.FunctionEvent(1, "a", 1, 0, 9), ours.FunctionEvent(2, "b", 1, 1, 2)])
    events._build_tree()
    events._build_tree()
    assert [child.id for child in events[0].cpu_children] == [2]
    with pytest.raises(ValueError, match="'b' has a parent already"):
        EventList(events)._build_tree()


# ---- tables ----


def of_two(**second):
    """Two events without a device, the second with other arguments."""
    return EventList(
        [ours.FunctionEvent(1, "a", 1, 0, 0), ours.FunctionEvent(2, "b", 1, **{"start_us": 0, "end_us": 0} | second)]
    )


def test_a_share_of_nothing():
    """What is None counts as not there; a total of nothing gives NaN instead of torch's assertion."""
    text = of_two(flops=None, overload_name=None, input_shapes=None, stack=None).table()
    assert "NaN" in text
    assert "0.000us" in text
    assert ours._build_table([]) == theirs._build_table([]) == ""


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"sort_by": "nonsense"}, ValueError, r"sort_by='nonsense'.*cpu_time_total"),
        ({"sort_by": "nonsense"}, AttributeError, "nonsense"),
        ({"sort_by": "concrete_inputs"}, ValueError, "sort_by='concrete_inputs'"),
        ({"time_unit": "hours"}, ValueError, "time_unit='hours': allowed are 's', 'ms', 'us'"),
        ({"max_name_column_width": "55"}, TypeError, "max_name_column_width is '55'; .*None for no limit"),
        ({"row_limit": "10"}, TypeError, "row_limit is '10'; .*None for all rows"),
        ({"header": 3}, TypeError, "header is 3; it must be a str"),
    ],
)
def test_bad_arguments_of_a_table(arguments, error, text):
    """A key that is none (an AttributeError too, as in torch), values without an order, and limits of a wrong type are named."""
    with pytest.raises(error, match=text):
        of_two(concrete_inputs=["x"]).table(**arguments)


def test_what_floats_leave_is_no_difference():
    """Times that only differ in what adding up left on them have one text, and keep their places when sorted."""
    noisy = ours.FunctionEvent(1, "first", 1, 16.0, 16.1)
    exact = ours.FunctionEvent(2, "second", 1, 0, 0.1)
    assert noisy.cpu_time_total != exact.cpu_time_total
    assert format_share(noisy.cpu_time_total, 32.0) == format_share(0.1, 32.0)
    assert format_time((12.3455 - 1.0 + 1.0) * 1000) == format_time(12345.5)
    assert format_time(0.1 + 0.2 - 0.3) == format_time(0.3 - (0.1 + 0.2)) == "0.000us"
    assert format_share(0.3 - (0.1 + 0.2), 32.0) == "0.00%"
    for ordered in ([noisy, exact], [exact, noisy]):
        text = EventList(ordered).table(sort_by="cpu_time_total")
        assert text.index(ordered[0].name) < text.index(ordered[1].name)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.0, "0.00us"),
        (9.994, "9.99us"),
        (9.996, "10.0us"),
        (99.96, "100us"),
        (999.4, "999us"),
        (999.6, "1.00ms"),
        (12_345.6, "12.3ms"),
        (999_600, "1.00s"),
        (12_345_678_900, "12346s"),
    ],
)
def test_times_with_three_digits(microseconds, text):
    """A time that is read has three digits, also where rounding makes one more."""
    assert brief_time(microseconds) == text
