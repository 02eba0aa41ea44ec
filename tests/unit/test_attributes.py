"""The attribute table: what becomes an attribute, when, and with which value."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from recorded_tables import recorded_table
from span_tables import span_rows

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._encode.attributes import ATTRIBUTES, REDUCTIONS, add_attributes, attributes_markdown
from otel_torchprof._encode.phase_attributes import SEGMENTS
from otel_torchprof._model.request_spans import REQUESTS
from otel_torchprof._model.span_table import AttributeColumn, AttributeType, extend_names
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native.ffi import lib

TENSOR, LIST = 1, 2
FLOAT = 7 << 8


def attributes(batch, steps=(), **options):
    """The attributes of every span as dicts, roots included, in the order of the table."""
    ids = itertools.count(1)
    table = recorded_table(
        batch, start=0, end=100, steps=steps, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids)
    )
    return shown_by(add_attributes(table, batch, **options))


def shown_by(table):
    """The attributes of every span of a table as dicts."""
    found = [{} for _ in range(len(table))]
    for column in table.attributes:
        assert column.values.dtype == column.type.dtype
        rows = range(len(table)) if column.rows is None else column.rows.tolist()
        for row, value in zip(rows, column.values.tolist(), strict=True):
            found[row][column.key] = table.names[value] if column.type == AttributeType.NAME else value
    return found


def test_a_plain_operator():
    """What an operator has that torch gave nothing special: scope, self time and thread; the root has nothing."""
    batch = Batch.of({"start": [1_000], "end": [3_000]}, [""], (RecordedThread(5, 140001, 1, "trainer"),))
    assert attributes(batch) == [
        {},
        {"torch.op.scope": "function", "torch.self_duration": 2e-6, "thread.id": 140001, "thread.name": "trainer"},
    ]


def test_what_is_hidden_is_hidden_on_steps_too(monkeypatch):
    """An attribute that OTEL_TORCHPROF_HIDDEN_ATTRIBUTES names is on no span of a step either; the others stay."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", "thread.id")
    batch = Batch.of({"start": [1], "end": [3]}, [""], (RecordedThread(5, 140001, 1, "trainer"),))
    step, operator = attributes(batch, steps=[RecordedStep(4, 0, 9, 140001)])
    assert step == {"torch.step.number": 4, "thread.name": "trainer"}
    assert "thread.id" not in operator


def test_number_of_a_step_under_another_name(monkeypatch):
    """With OTEL_TORCHPROF_RANKS=aliases=nemo_lens a step has its number as dl.iteration too, as the roots of its parts have; without it none has."""
    batch = Batch.of({"start": [1], "end": [3]}, [""], (RecordedThread(5, 140001, 1, "trainer"),))
    steps = [RecordedStep(4, 0, 9, 140001)]
    assert "dl.iteration" not in attributes(batch, steps=steps)[0]
    monkeypatch.setenv("OTEL_TORCHPROF_RANKS", "aliases=nemo_lens")
    step, operator = attributes(batch, steps=steps)
    assert (step["torch.step.number"], step["dl.iteration"]) == (4, 4)
    assert "dl.iteration" not in operator


def test_a_module():
    """A call of a module has its full name as an attribute and no operator's scope; nothing else has a module's name."""
    columns = {
        "start": [1, 1, 1],
        "end": [2, 2, 2],
        "name": [1, 2, 2],
        "kind": [Kind.MODULE, Kind.OPERATOR, Kind.LABEL],
    }
    root, module, *others = attributes(Batch.of(columns, ["", "encoder.layers.2", "op"]))
    assert not root
    assert module["torch.module"] == "encoder.layers.2"
    assert "torch.op.scope" not in module
    assert all("torch.module" not in event and event["torch.op.scope"] == "function" for event in others)
    assert module.keys() - {"torch.module"} == others[0].keys() - {"torch.op.scope"}


def test_a_backward_function():
    """Sequence number and forward thread are there where torch gave them, 0 being a number like any other."""
    columns = {"start": [1, 1], "end": [1, 1], "sequence_nr": [0, -1], "fwd_thread": [3, 0], "scope": [1, 0]}
    _, backward, forward = attributes(Batch.of(columns, [""]))
    assert backward["torch.op.scope"] == "backward_function"
    assert (backward["torch.op.sequence_nr"], backward["torch.op.forward_thread"]) == (0, 3)
    assert not {"torch.op.sequence_nr", "torch.op.forward_thread"} & forward.keys()


@pytest.mark.parametrize("scope", [*Scope, 200])
def test_scopes_are_the_names_of_torch(scope):
    """Each scope is torch's own name in lower case; one that a newer torch added is left out rather than guessed."""
    [_, event] = attributes(Batch.of({"start": [1], "end": [2], "scope": [scope]}, [""]))
    assert event.get("torch.op.scope") == (scope.name.lower() if isinstance(scope, Scope) else None)


def test_self_duration_leaves_out_direct_children_and_is_never_negative():
    """Children count once, grandchildren through their parents; children longer than their parent leave 0."""
    columns = {"start": [0, 10, 20, 0, 0], "end": [100, 60, 30, 10, 15], "parent": [-1, 0, 1, -1, 3]}
    durations = [event["torch.self_duration"] for event in attributes(Batch.of(columns, [""]))[1:]]
    assert durations == [50e-9, 40e-9, 10e-9, 0.0, 15e-9]


def test_an_exception_and_flags():
    """The class of an exception and each flag become attributes of the flagged event only."""
    flags = [0, Flag.UNFINISHED, Flag.ASYNC, Flag.LOSS_BEFORE, Flag.ERROR]
    columns = {"start": [1] * 5, "end": [2] * 5, "flags": flags, "error_type": [0, 0, 0, 0, 1]}
    plain = {"torch.op.scope", "torch.self_duration", "thread.id", "thread.name"}
    special = [
        {key: value for key, value in event.items() if key not in plain}
        for event in attributes(Batch.of(columns, ["", "KeyError"]))
    ]
    assert special == [
        {},
        {},
        {"torch.unfinished": True},
        {"torch.async": True},
        {"torch.dropped_before": True},
        {"error.type": "KeyError"},
    ]


def test_roots_carry_step_and_loss():
    """A step's number and the sum of all losses stand on the roots; without loss there is no such attribute."""
    columns = {"start": [1], "end": [2]}
    steps = [RecordedStep(0, 0, 10), RecordedStep(1, 10, 20)]
    lossy = Batch.of(columns, [""], dropped={"budget": 2, "fork": 3})
    first, second, event = attributes(lossy, steps)
    assert first == {"torch.step.number": 0}
    assert second == {"torch.step.number": 1, "torch.dropped_events": 5}
    assert not {"torch.step.number", "torch.dropped_events"} & event.keys()
    assert attributes(Batch.of(columns, [""], dropped={"budget": 0})) == [{}, event]


def lossy_rows(*rows, steps=None):
    """Spans of a batch of two events of which some were lost, in any order; -1 for a synthetic one."""
    batch = Batch.of({"start": [1, 3], "end": [2, 5], "name": [1, 2]}, ["", "a", "b"], dropped={"evicted": 7})
    table = span_rows(
        [f"span {i}" for i in range(len(rows))],
        row=np.array(rows, dtype=np.int64),
        step=np.array(steps or [-1] * len(rows), dtype=np.int64),
    )
    return batch, replace(table, names=extend_names(batch.names, list(table.names)))


@pytest.mark.parametrize(
    ("rows", "dropped_on", "expected"),
    [
        ((0, 1), None, []),
        ((0, -1, 1, -1, -1, 0), None, [4]),
        ((-1, 0, 1), None, [0]),
        ((0, 1), 1, [1]),
        ((-1, 0, -1), 0, [0]),
        ((-1, 0, -1), 1, [1]),
    ],
)
def test_one_span_at_most_says_how_many_were_dropped(rows, dropped_on, expected):
    """The last synthetic span wherever it stands, none where there is none, or the one that was asked for."""
    batch, table = lossy_rows(*rows)
    found = shown_by(add_attributes(table, batch, dropped_on=dropped_on))
    assert {
        i: span["torch.dropped_events"] for i, span in enumerate(found) if "torch.dropped_events" in span
    } == dict.fromkeys(expected, 7)


@pytest.mark.parametrize("rows", [(0, 1), (-1, 0, 1), (1, -1, 0), (1,), (-1, 1, -1), (-1,), ()])
def test_synthetic_spans_may_stand_anywhere(rows):
    """Events have the attributes of their row of the batch in any order and selection, synthetic spans those of steps."""
    batch, table = lossy_rows(*rows, steps=[3 if row < 0 else -1 for row in rows])
    durations = {0: 1e-9, 1: 2e-9}
    for row, span in zip(rows, shown_by(add_attributes(table, batch)), strict=True):
        assert span.get("torch.self_duration") == durations.get(row)
        assert span.get("torch.step.number") == (3 if row < 0 else None)
        assert ("thread.id" in span) == (row >= 0)


def test_attributes_that_are_there_stay():
    """What a sampler set on roots is kept, and wins where it has the same key; each key has one column."""
    batch, table = lossy_rows(-1, 0, -1, steps=[4, -1, 5])
    names = extend_names(table.names, ["always"])
    given = (
        AttributeColumn("sampler", AttributeType.NAME, np.full(3, len(names) - 1, np.uint32)),
        AttributeColumn("torch.step.number", AttributeType.INT64, np.array([40]), np.array([0])),
        AttributeColumn("thread.id", AttributeType.INT64, np.array([9, 9, 9])),
    )
    table = add_attributes(replace(table, names=names, attributes=given), batch)
    assert any(column is given[0] for column in table.attributes)
    first, event, second = shown_by(table)
    assert list(first.items()) == [("torch.step.number", 40), ("sampler", "always"), ("thread.id", 9)]
    assert (event["sampler"], event["thread.id"]) == ("always", 9)
    assert (second["torch.step.number"], second["torch.dropped_events"]) == (5, 7)
    assert sum(len(column.values) for column in table.attributes) == sum(len(span) for span in (first, event, second))
    assert len({column.key for column in table.attributes}) == len(table.attributes)


def test_what_tells_steps_apart_comes_first():
    """A step's number, its kind and its phases are the first attributes of its span, in this order, whatever was there before."""
    batch = Batch.of({"start": [1], "end": [3]}, [""], (RecordedThread(5, 140001, 1, "trainer"),))
    ids = itertools.count(1)
    table = recorded_table(
        batch,
        start=0,
        end=9,
        steps=[RecordedStep(4, 0, 9, 140001)],
        new_trace_id=lambda: next(ids),
        new_span_id=lambda: next(ids),
    )
    ones = np.ones(len(table))
    later = ("torch.phase.gc.duration", "torch.step.kind", "torch.phase.data.duration")
    own = tuple(AttributeColumn(key, AttributeType.DOUBLE, ones) for key in later)
    step = shown_by(add_attributes(replace(table, attributes=(*table.attributes, *own)), batch))[0]
    assert list(step) == [
        "torch.step.number",
        "torch.step.kind",
        "torch.phase.data.duration",
        "torch.phase.gc.duration",
        "thread.id",
        "thread.name",
    ]


def test_self_time_that_is_known_from_elsewhere():
    """Given self times replace those of the batch's own parents, and are never shown below 0."""
    batch = Batch.of({"start": [0, 10], "end": [100, 60], "parent": [-1, 0]}, [""])
    _, *found = attributes(batch, self_time=lambda _: np.array([30, -5]))
    assert [event["torch.self_duration"] for event in found] == [30e-9, 0.0]


def test_a_batch_without_threads():
    """A drain in which nothing happened has no threads; its synthetic spans still get their attributes."""
    batch = replace(Batch.of({"start": [], "end": []}, [""]), threads=())
    assert attributes(batch, [RecordedStep(4, 0, 1)]) == [{"torch.step.number": 4}]


def test_a_thread_without_a_name_has_none():
    """thread.name is left out for a nameless thread and stays on the others; each event has its own thread's id."""
    threads = (RecordedThread(5, 1001, 1, ""), RecordedThread(6, 1002, 2, "worker"))
    columns = {"start": [1, 1], "end": [2, 2], "thread": [0, 1]}
    _, nameless, named = attributes(Batch.of(columns, [""], threads))
    assert "thread.name" not in nameless
    assert (nameless["thread.id"], named["thread.id"], named["thread.name"]) == (1001, 1002, "worker")


def test_memory_of_events():
    """Bytes allocated and freed, apart for the CPU and devices, with those of children; nothing where there are none."""
    size, event, device = [64, -32, 1 << 40, -8, 5], [2, 2, 2, 1, 0], [0, 0, 1, 1, 0]
    reported = {"time": [1] * 5, "bytes": size, "event": event, "device_type": device}
    rest = ("address", "total_allocated", "total_reserved", "thread", "device_index", "flags")
    memory = {**reported, **{name: [0] * 5 for name in rest}}
    columns = {"start": [0, 1, 2], "end": [9, 8, 3], "parent": [-1, 0, 1]}
    found = attributes(Batch.of(columns, [""], memory=memory))
    keys = [f"torch.{device}memory.{way}" for device in ("", "device.") for way in ("allocated", "released")]
    assert [[span.get(key) for key in keys] for span in found] == [
        [None] * 4,
        [64, 32, 1 << 40, 8],
        [64, 32, 1 << 40, None],
        [None] * 4,
    ]


def test_input_shapes_of_events():
    """Events show their own inputs, equal ones share a string, and events without recorded inputs have none."""
    one = [1, TENSOR | FLOAT | 2 << 32, 2, 3]
    inputs = [*one, 0, *one]
    batch = Batch.of(
        {"start": [1] * 4, "end": [2] * 4, "inputs": [5, -1, 4, 0]}, ["", "op"], inputs=inputs_array(inputs)
    )
    assert [event.get("torch.op.input_shapes") for event in attributes(batch)] == [
        None,
        "[[2, 3]]",
        None,
        None,
        "[[2, 3]]",
    ]


def inputs_array(words):
    """Words as a batch holds them."""
    return np.array(words, dtype=np.int64)


def test_types_are_those_of_the_c_header():
    """The numbers of the attribute types in Python are those of encode.h."""
    for kind in AttributeType:
        assert getattr(lib, f"OTP_ATTRIBUTE_{kind.name}") == kind


def test_the_documentation_lists_every_attribute_once():
    """One line per attribute, with the cells of its row; keys follow OpenTelemetry's naming."""
    lines = attributes_markdown().splitlines()
    keys = [a.key for a in ATTRIBUTES] + [key for key, *_ in (*SEGMENTS, *REDUCTIONS, *REQUESTS)]
    assert len(lines) == len(keys) + 2 == len(set(keys)) + 2
    for key, line in zip(keys, lines[2:], strict=True):
        assert line.startswith(f"| `{key}` | ")
        assert line.count("|") == 5
        assert key == key.lower()
