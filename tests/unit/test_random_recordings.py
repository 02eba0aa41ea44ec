"""Everything that a recording can hold at once, made by chance: columns against objects, wholes against parts."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from random_recordings import recordings, with_devices
from recorded_tables import recorded_table

from otel_torchprof import EventList
from otel_torchprof._columns.joined import joined
from otel_torchprof._columns.schema import Kind
from otel_torchprof._encode import chrome, otlp
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._encode.table import SORT_KEYS
from otel_torchprof._model.frames import without_frames
from otel_torchprof._model.memory import CPU_TYPES, moved_memory

SEEDS = st.integers(0, 1 << 32)
MOVES = st.integers(0, 60)
SEGMENTS = st.integers(1, 3)
BEGIN = 1_000_000_000_000_000_000


def listed(batch):
    """The events as a profile with all options lists them."""
    return EventList.of(batch, origin_ns=BEGIN, use_device="cuda", profile_memory=True, with_flops=True)


def rows(averages):
    """All that averages say, with times that floats may be added up to in another order."""
    return [
        {
            name: pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
            for name, value in vars(average).items()
            if name != "_first"
        }
        for average in averages
    ]


@given(SEEDS, MOVES, SEGMENTS, st.sampled_from(list(itertools.product((False, True), (0, 1, 3), (False, True)))))
def test_averages_are_those_of_the_objects(seed, moves, segments, grouping):
    """Any grouping, and the total, are from columns what they are from the events one by one."""
    columns = listed(with_devices(joined(recordings(seed, moves, segments=segments)), seed))
    objects = copy.deepcopy(columns)
    assert rows(columns.key_averages(*grouping)) == rows(objects.key_averages(*grouping))
    assert rows([columns.total_average()]) == rows([objects.total_average()])
    assert columns._source is not None


@given(
    SEEDS,
    MOVES,
    st.sampled_from(
        (None, *SORT_KEYS, "flops", "id", "name", "cuda_time", "self_cuda_time_total", "cuda_memory_usage")
    ),
    st.booleans(),
)
def test_texts_are_those_of_the_objects(seed, moves, sort_by, top_level_only):
    """A table has the same rows in the same order from columns, copies and pickles, whatever it is sorted by."""
    columns = listed(with_devices(joined(recordings(seed, moves)), seed))
    options = {"sort_by": sort_by, "top_level_events_only": top_level_only, "time_unit": "us"}
    text = columns.table(**options)
    assert copy.deepcopy(columns).table(**options) == text
    assert pickle.loads(pickle.dumps(columns)).table(**options) == text  # noqa: S301 - our own


@given(SEEDS, MOVES)
def test_files_are_those_of_the_objects(tmp_path_factory, seed, moves):
    """The simple trace, the stacks and the frame say the same from columns and from copies."""
    pandas = pytest.importorskip("pandas", reason="tries what is made with pandas")
    columns = listed(with_devices(joined(recordings(seed, moves)), seed))
    folder = tmp_path_factory.mktemp("files")
    objects = copy.deepcopy(columns)
    for events, name in ((columns, "columns"), (objects, "objects")):
        events.export_chrome_trace(folder / f"{name}.json")
        for metric in ("self_cpu_time_total", "self_cuda_time_total"):
            events.export_stacks(folder / f"{name}-{metric}", metric)
            events.export_stacks(folder / f"{name}-{metric}-merged", metric, merged=True)
    traces = [json.loads((folder / f"{name}.json").read_text()) for name in ("columns", "objects")]
    assert traces[0] == traces[1]
    assert sum(slice_["ph"] == "s" for slice_ in traces[0]) == sum(event.device_time_total != 0 for event in columns)
    for path in folder.glob("columns-*"):
        assert path.read_text() == (folder / path.name.replace("columns", "objects")).read_text()
    if len(columns):
        frames = [events.to_pandas().astype({"name": "object"}) for events in (columns, objects)]
        for frame in frames:
            for name in {"input_shapes", "overload_name", "stack"} & set(frame):
                frame[name] = frame[name].astype("object")
        pandas.testing.assert_frame_equal(*frames, check_like=True, check_dtype=False, atol=1e-3)


@given(SEEDS, MOVES, SEGMENTS)
def test_sums(seed, moves, segments):
    """What an event has is its own and its children's, and own times add up to those of the outermost events of each thread."""
    events = listed(joined(recordings(seed, moves, segments=segments)))
    own, top_level = defaultdict(float), defaultdict(float)
    for event in events:
        if event.is_async:
            assert event.cpu_parent is None
            assert not event.cpu_children
            continue
        inside = event.cpu_children
        assert all(child.cpu_parent is event for child in inside)
        assert event.cpu_memory_usage == event.self_cpu_memory_usage + sum(c.cpu_memory_usage for c in inside)
        assert event.device_memory_usage == event.self_device_memory_usage + sum(c.device_memory_usage for c in inside)
        own[event.thread] += event.self_cpu_time_total
        top_level[event.thread] += event.cpu_time_total if event.cpu_parent is None else 0
    assert own == {thread: pytest.approx(time, abs=1e-2) for thread, time in top_level.items()}


@given(SEEDS, MOVES)
def test_memory_stack_and_modules_by_hand(seed, moves):
    """Where all is well nested: bytes, stacks and modules of each event are those of a walk from the rows, one by one."""
    batch = recordings(seed, moves, nested=True)[0]
    parents = batch["parent"].tolist()
    kinds, names = batch["kind"].tolist(), [batch.names[name] for name in batch["name"].tolist()]
    row_of = {number: row for row, number in enumerate(batch["id"].tolist())}
    bytes_of = Counter()
    for size, number, device, flags in zip(
        *(batch.memory[name].tolist() for name in ("bytes", "event", "device_type", "flags")), strict=True
    ):
        for row in walk(parents, row_of.get(number, -1)):
            bytes_of[row] += size if device == 0 and not flags else 0
    for event in listed(batch):
        if event.name in {"[memory]", "[OutOfMemory]"}:
            continue
        above = list(walk(parents, row_of[event.id]))
        assert event.cpu_memory_usage == bytes_of[above[0]]
        calls = [names[row] for row in above[1:] if kinds[row] == Kind.FRAME]
        assert event.stack == [name for name in calls if "autograd/__init__" not in name]
        assert bool(event.module_hierarchy) == any(kinds[row] == Kind.MODULE for row in above)


def walk(parents, row):
    """A row and all that is around it."""
    while row >= 0:
        yield row
        row = parents[row]


@given(SEEDS, MOVES)
def test_segments_joined_are_the_segments(seed, moves):
    """Every event of two segments says in the whole what it says in its own; only forward operators are looked for in all."""
    parts = recordings(seed, moves, segments=3)
    whole = Counter(map(reported, listed(joined(parts))))
    assert whole == sum((Counter(map(reported, listed(part))) for part in parts), Counter())


@given(SEEDS, MOVES)
def test_memory_of_rows_without_the_calls_between(seed, moves):
    """Without the calls every other row has the bytes that it had with them, allocated and freed."""
    batch = recordings(seed, moves)[0]
    whole, rest = moved_memory(batch, CPU_TYPES), moved_memory(without_frames(batch), CPU_TYPES)
    assert (whole is None) == (rest is None)
    if whole is not None:
        kept = batch["kind"] != Kind.FRAME
        assert rest.allocated.tolist() == whole.allocated[kept].tolist()
        assert rest.released.tolist() == whole.released[kept].tolist()


def reported(event):
    """What is known of an event without its forward operator."""
    parent = event.cpu_parent
    info = (event.name, event.thread, event.time_range.start, event.time_range.end, event.is_async, event.scope)
    info += (event.cpu_memory_usage, event.self_cpu_memory_usage, event.device_memory_usage, event.overload_name)
    info += (event.self_cpu_time_total, str(event.input_shapes), parent and parent.time_range.start)
    return info


@given(SEEDS, MOVES, SEGMENTS)
def test_everything_is_written(seed, moves, segments):
    """Chrome JSON has a slice per event, and spans and messages have one per row that no call is; nothing raises."""
    batch = joined(recordings(seed, moves, segments=segments))
    trace = json.loads(b"".join(chrome.encode(batch)))
    displayed = [event for event in trace["traceEvents"] if event["ph"] in {"X", "b"}]
    assert len(displayed) == len(batch)
    ids, plain = RandomIdGenerator(), without_frames(batch)
    table = recorded_table(
        plain,
        start=BEGIN,
        end=BEGIN + 10**9,
        steps=[],
        parent=None,
        new_trace_id=ids.generate_trace_id,
        new_span_id=ids.generate_span_id,
    )
    resource, scope = Resource({}), InstrumentationScope("test")
    table = add_attributes(table, plain, with_flops=True)
    assert len([span.to_json() for span in SpanList(table, resource=resource, scope=scope)]) == len(table)
    assert b"".join(otlp.encode(table, resource=resource, scope=scope))
