"""The modules around events, on columns: against a walk up the tree, one event at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from examples import random_examples
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._model.modules import NO_MODULE, module_hierarchy, module_tree, sums_by_module
from otel_torchprof._model.tree import torch_view

NAMES = ["", "Net", "part", "part.inner", "Other", "aten::mm", "label"]
MODULE_NAMES, REST = (1, 2, 3, 4), (5, 6)


def batch(rows, **columns):
    """A batch of (kind, name, parent, is a root); each event lies inside its parent."""
    count = len(rows)
    return Batch.of(
        {
            "start": np.arange(count),
            "end": 3 * count - np.arange(count),
            "kind": [kind for kind, *_ in rows],
            "name": [name for _, name, *_ in rows],
            "parent": [parent for _, _, parent, _ in rows],
            "flags": [Flag.ROOT * root for *_, root in rows],
            **columns,
        },
        NAMES,
        (RecordedThread(1, 1, 1, "main"), RecordedThread(2, 2, 2, "autograd")),
    )


def texts(found):
    return [found.texts[index] for index in found.rows.tolist()]


@st.composite
def trees(draw):
    """Events of every kind, in any order inside one another."""
    rows = []
    for i in range(draw(st.integers(0, 25))):
        module = draw(st.booleans())
        kind = Kind.MODULE if module else draw(st.sampled_from([Kind.OPERATOR, Kind.LABEL]))
        name = draw(st.sampled_from(MODULE_NAMES if module else REST))
        rows.append((kind, name, draw(st.integers(-1, i - 1)), module and draw(st.booleans())))
    return rows


def walked(rows):
    """The same by walking: (around, root, text) of each module, from the outermost inwards."""
    places = []
    for kind, name, parent, root in rows:
        above = places[parent] if parent >= 0 else None
        if kind != Kind.MODULE:
            places.append(above)
        elif above is None or root:
            enclosing = above[2] if above else ""
            places.append((enclosing, NAMES[name], ".".join(filter(None, (enclosing, NAMES[name])))))
        else:
            enclosing, class_name, _ = above
            path = NAMES[name]
            own = path == class_name or path.startswith(f"{class_name}.")
            places.append((enclosing, class_name, ".".join(filter(None, (enclosing, "" if own else class_name, path)))))
    return [place[2] if place else "" for place in places]


@random_examples(300)
@given(trees())
def test_against_a_walk(rows):
    """Whatever is inside what, every event has the name that a walk up its parents gives."""
    found = module_hierarchy(batch(rows))
    assert texts(found) == walked(rows)
    assert len(set(found.texts)) == len(found.texts)
    assert found.texts[0] == ""


@random_examples(200)
@given(trees())
def test_lists_have_no_modules(rows):
    """A view without modules has all other events, each under the nearest one that is none."""
    tree = batch(rows, name=np.arange(len(rows)) % 5 + 1)
    view = torch_view(tree)
    parent = tree["parent"].tolist()

    def above(row):
        row = parent[row]
        while row >= 0 and rows[row][0] == Kind.MODULE:
            row = parent[row]
        return row

    alone = torch_view(batch([(Kind.OPERATOR, 1, -1, False)] * len(rows)), modules=True)
    assert len(alone) == len(rows)
    displayed = view.rows.tolist()
    assert all(rows[row][0] != Kind.MODULE for row in displayed)
    duplicates = {row for row, (kind, *_) in enumerate(rows) if kind != Kind.MODULE} - set(displayed)
    for at, row in enumerate(displayed):
        expected = above(row)
        while expected in duplicates:
            expected = above(expected)
        assert (displayed[view.parent[at]] if view.parent[at] >= 0 else -1) == expected
    assert len(torch_view(tree, modules=True)) >= len(view)


def test_no_modules_cost_nothing():
    """Without modules no event is looked at: all have the empty name, and the view keeps the parents as they are."""
    tree = batch([(Kind.OPERATOR, 5, -1, False), (Kind.LABEL, 6, 0, False)])
    assert module_hierarchy(tree).texts == [""]
    assert torch_view(tree).parent is tree["parent"]


def test_deep_modules():
    """A thousand modules inside one another end in one name, and the innermost operator has it."""
    rows = [
        (Kind.MODULE, 1, -1, True),
        *((Kind.MODULE, 2, i, False) for i in range(1000)),
        (Kind.OPERATOR, 5, 1000, False),
    ]
    assert texts(module_hierarchy(batch(rows)))[-1] == "Net.part"


def test_backward_functions():
    """A backward function has its forward operator's module by number and thread, and so have what is around and inside it."""
    operator = Kind.OPERATOR
    names = ["", "Net", "part", "aten::mm", "autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "label"]
    parents, scope = [-1, 0, 1, -1, 3, 4, -1, 6], [7, 7, 0, 0, Scope.BACKWARD_FUNCTION, 0, 7, Scope.BACKWARD_FUNCTION]
    tree = Batch.of(
        {
            "start": range(8),
            "end": range(20, 12, -1),
            "kind": [Kind.MODULE, Kind.MODULE, operator, operator, operator, operator, Kind.LABEL, operator],
            "name": [1, 2, 3, 4, 5, 3, 6, 5],
            "parent": parents,
            "scope": scope,
            "thread": [0, 0, 0, 1, 1, 1, 1, 1],
            "sequence_nr": [-1, -1, 4, -1, 4, -1, -1, 5],
            "fwd_thread": [0, 0, 0, 0, 1, 0, 0, 1],
            "flags": [Flag.ROOT, 0, 0, 0, 0, 0, 0, 0],
        },
        names,
        (RecordedThread(1, 1, 1, "main"), RecordedThread(2, 2, 2, "autograd")),
    )
    assert texts(module_hierarchy(tree)) == ["Net", *["Net.part"] * 5, "", ""]


@random_examples(200)
@given(trees())
def test_sums_by_module_against_a_walk(rows):
    """Whatever is inside what, an event counts for its module, and once for each module around it; calls are counted."""
    tree, of_row = batch(rows), walked(rows)
    modules, view = module_tree(tree), torch_view(tree, modules=True)
    if modules is None:
        assert Kind.MODULE not in {kind for kind, *_ in rows}
        return
    own, total, calls = Counter(), Counter(), Counter()
    for row, time in zip(view.rows.tolist(), view.self_time.tolist(), strict=True):
        around, above = {of_row[row]}, row
        while (above := tree["parent"].item(above)) >= 0:
            around.add(of_row[above])
        own[of_row[row]] += time
        for name in around - {""} or {""}:
            total[name] += time
    for (kind, *_), name in zip(rows, of_row, strict=True):
        calls[name] += kind == Kind.MODULE
    found = {sums.name: sums for sums in sums_by_module(modules, view, {"time": view.self_time}, {"peak": view.rows})}
    assert {name: (sums.own["time"], sums.total["time"], sums.calls) for name, sums in found.items()} == {
        name or NO_MODULE: (own[name], total[name], calls[name]) for name in set(of_row)
    }
