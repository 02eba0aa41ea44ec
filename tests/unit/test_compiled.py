"""Which operators ran in compiled regions, on columns: against a walk up the tree, one event at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_tables import recorded_table

from examples import random_examples
from otel_torchprof._columns.batch import Batch, OpenEvents
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.compiled import captured, shares, shares_of_roots
from otel_torchprof._model.step_spans import RecordedStep

REGIONS = ("Torch-Compiled Region: 0/0", "CompiledFunction", "CompiledFunctionBackward", "TORCHDYNAMO")
COMPILATION, LOOKUP, HIDDEN, OPERATOR = "TorchDynamo Compile: 0/0", "TorchDynamo Cache Lookup", "[memory]", "aten::mm"
NAMES = ["", OPERATOR, LOOKUP, HIDDEN, COMPILATION, *REGIONS]


def batch(rows):
    """A batch of (kind, scope, name, parent); each event lies inside its parent."""
    count = len(rows)
    columns = {"start": np.arange(count), "end": 3 * count - np.arange(count)}
    columns |= {name: [row[i] for row in rows] for i, name in enumerate(("kind", "scope", "name", "parent"))}
    return Batch.of(columns, NAMES)


@st.composite
def trees(draw):
    """Events of every sort, in any order inside one another."""
    sorts = [(Kind.OPERATOR, 0), (Kind.OPERATOR, Scope.USER_SCOPE), (Kind.LABEL, 7), (Kind.MODULE, 7)]
    name = st.one_of(st.just(1), st.integers(1, len(NAMES) - 1))
    return [
        (*draw(st.sampled_from(sorts)), draw(name), draw(st.integers(max(i - 4, -1), i - 1)))
        for i in range(draw(st.integers(0, 25)))
    ]


def walked(rows, regions):
    """The same by walking: rows that count, and rows that are captured."""

    def is_operator(row):
        kind, scope, name, _ = rows[row]
        return kind == Kind.OPERATOR and scope != Scope.USER_SCOPE and NAMES[name] == OPERATOR

    counts, found = [], []
    for row in range(len(rows)):
        above, at = [], rows[row][3]
        while at >= 0:
            above.append(at)
            at = rows[at][3]
        names = {NAMES[rows[i][2]] for i in above}
        if is_operator(row) and not any(map(is_operator, above)) and COMPILATION not in names:
            counts.append(row)
            found += [row] * bool(names & set(regions))
    return counts, found


@random_examples(400)
@given(trees(), st.booleans())
def test_against_a_walk(rows, graph_labels_only):
    """Whatever is inside what, the operators that count and those that were captured are those that a walk finds."""
    found = captured(batch(rows), graph_labels_only=graph_labels_only)
    regions = REGIONS[-1:] if graph_labels_only else REGIONS
    assert (np.flatnonzero(found.counts).tolist(), np.flatnonzero(found.captured).tolist()) == walked(rows, regions)
    assert found.region.sum() == sum(NAMES[name] in regions for _, _, name, _ in rows)


def test_a_region_that_is_still_open():
    """In a drain, what is inside a region that has not ended is captured."""
    drained = batch([(Kind.OPERATOR, 0, 1, -1), (Kind.OPERATOR, 0, 1, -1)])
    number = {
        "id": np.uint64,
        "parent": np.uint64,
        "start": np.int64,
        "context": np.uint32,
        "name": np.uint32,
        "kind": np.uint8,
        "thread": np.uint32,
        "scope": np.uint8,
    }
    opens = OpenEvents(**{key: np.array([5 if key == "name" else 0], kind) for key, kind in number.items()})
    drained = Batch(drained.columns, drained.names, drained.threads, opens=opens)
    found = captured(drained, parent=np.array([-1, 2, -1]))
    assert found.captured.tolist() == [False, True]
    assert len(found.counts) == len(found.region) == 2


def test_shares_are_sums_by_group():
    """Operators and their times are added up by group, and rows of no group are left out."""
    region, operator = (Kind.OPERATOR, 0, 5, -1), (Kind.OPERATOR, 0, 1)
    tree = batch([region, (*operator, 0), (*operator, -1), (*operator, -1)])
    found = shares(tree, np.array([1, 1, 1, -1]), 2)
    assert found.regions.tolist() == [0, 1]
    assert found.operators.tolist() == [0, 2]
    assert found.captured.tolist() == [0, 1]
    duration = tree["end"] - tree["start"]
    assert found.duration.tolist() == [0, duration[1] + duration[2]]
    assert found.captured_duration.tolist() == [0, duration[1]]
    doubled = found.chosen(1).plus(found.chosen(1))
    assert doubled.operators.tolist() == [4]
    assert doubled.attributes()["torch.compile.captured_share"].tolist() == [0.5]


def test_a_program_without_regions_is_not_looked_at():
    """Where nothing was ever compiled there are no shares."""
    tree = Batch.of({"start": [1], "end": [2], "name": [1]}, ["", OPERATOR])
    assert shares(tree, np.zeros(1, np.int64), 1) is None


def attributes_of(tree, steps):
    ids = itertools.count(1)
    table = recorded_table(
        tree, start=0, end=1000, steps=steps, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids)
    )
    table = add_attributes(table, tree)
    found = {column.key: column for column in table.attributes if column.key.startswith("torch.compile.")}
    return table, found


def test_attributes_are_on_steps_with_regions():
    """The step in which a region ran has the three attributes; no other span has any."""
    columns = {
        "start": [0, 1, 10, 11, 12],
        "end": [5, 5, 20, 12, 19],
        "name": [1, 1, 5, 1, 1],
        "parent": [-1, 0, -1, 2, 2],
    }
    tree = Batch.of(columns, NAMES)
    table, found = attributes_of(tree, [RecordedStep(0, 0, 9), RecordedStep(1, 9, 30)])
    assert len(found) == 3
    for column in found.values():
        assert table.step[column.rows].tolist() == [1]
    assert found["torch.compile.captured_operators"].values.tolist() == [2]
    assert found["torch.compile.captured_share"].values.tolist() == [1.0]
    assert found["torch.compile.captured_duration_share"].values.tolist() == [1.0]


@pytest.mark.parametrize("steps", [[], [RecordedStep(0, 0, 30)]])
def test_no_attributes_without_regions(steps):
    """Where no region ran no span has an attribute of them, though the program knows the names."""
    tree = Batch.of({"start": [0], "end": [5], "name": [1]}, NAMES)
    _, found = attributes_of(tree, steps)
    assert not found


def test_events_of_other_roots():
    """Events whose root is not in the table count for none."""
    tree = Batch.of({"start": [0, 1], "end": [5, 2], "name": [5, 1], "parent": [-1, 0]}, NAMES)
    table, _ = attributes_of(tree, [])
    elsewhere = type(table)(**{**table.__dict__, "parent_span_id": table.parent_span_id + np.uint64(1)})
    found = shares_of_roots(tree, elsewhere)
    assert not found.regions.any()
