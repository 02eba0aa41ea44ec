"""What events are in a tree of calls, and what they add to its sums."""

from __future__ import annotations

import json

import numpy as np
from kineto_events import cuda_trace

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import WORK_KIND, Kind
from otel_torchprof._model.call_tree import call_tree
from otel_torchprof._model.event_info import EventInfo
from otel_torchprof._model.paths import event_amounts, event_parents
from otel_torchprof._model.tree import torch_view

NAMES = ["", "f", "g", "h"]


def info(columns, **rest):
    """The columns of a view of some events with modules."""
    return EventInfo(torch_view(Batch.of(columns, NAMES, **rest), modules=True), with_flops=True, with_devices=True)


def tree_of(events):
    """The calls by path, by the displayed names of a view."""
    view = events.view
    return call_tree(event_parents(events), view.display_name[view.rows].astype(np.int64), event_amounts(events))


def texts(tree, names):
    """By path as text: calls and self time."""
    found, paths = {}, []
    for number, (parent, name) in enumerate(zip(tree.parent.tolist(), tree.key.tolist(), strict=True)):
        paths.append(f"{paths[parent]};{names[name]}" if parent >= 0 else names[name])
        found[paths[-1]] = tree.own["calls"].item(number), tree.own["time"].item(number)
    return found


def test_calls_with_equal_stacks_are_one_path():
    """Self times and calls are added up by stack, on all threads."""
    events = {
        "start": [0, 1, 20, 21, 22, 40],
        "end": [10, 5, 30, 26, 24, 41],
        "name": [1, 2, 1, 2, 3, 2],
        "parent": [-1, 0, -1, 2, 3, -1],
        "kind": [Kind.LABEL, Kind.OPERATOR, Kind.LABEL, Kind.OPERATOR, Kind.LABEL, Kind.OPERATOR],
    }
    tree = tree_of(info(events))
    assert texts(tree, NAMES) == {"f": (2, 11), "f;g": (2, 7), "f;g;h": (1, 2), "g": (1, 1)}


def test_kernels_are_below_what_launched_them(tmp_path):
    """Device time is that of kernels, once, and they have no time of the processor."""
    (tmp_path / "t.json").write_text(json.dumps(cuda_trace()))
    prof = otp.load(tmp_path / "t.json")
    found = prof.events()._source.with_modules()
    parent, amounts = event_parents(found), event_amounts(found)
    is_work = found.view.batch["kind"][found.view.rows] == WORK_KIND
    assert amounts["device"][~is_work].sum() == amounts["time"][is_work].sum() == 0
    kernels = {average.key: average.self_device_time_total for average in prof.key_averages()}
    launched = np.flatnonzero(is_work & (parent >= 0))
    assert launched.size
    assert not is_work[parent[launched]].any()
    names = found.view.batch.names
    for row in launched.tolist():
        assert amounts["device"][row] / 1000 <= kernels[names[found.view.display_name[found.view.rows[row]]]]


def test_no_events():
    """Nothing was recorded: there are no paths."""
    assert len(tree_of(info({"start": [], "end": []}))) == 0
