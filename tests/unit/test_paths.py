"""Call paths and their sums: what a flame graph draws."""

from __future__ import annotations

import json

import numpy as np
from kineto_events import cuda_trace

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import WORK_KIND, Kind
from otel_torchprof._model.event_info import EventInfo
from otel_torchprof._model.paths import path_sums
from otel_torchprof._model.tree import torch_view

NAMES = ["", "f", "g", "h"]


def info(columns, **rest):
    """The columns of a view of some events with modules."""
    return EventInfo(torch_view(Batch.of(columns, NAMES, **rest), modules=True), with_flops=True, with_devices=True)


def texts(sums, names):
    """By path as text: the sums, in the order of their fields."""
    found, paths = {}, []
    for number, (parent, name) in enumerate(zip(sums.parent.tolist(), sums.name.tolist(), strict=True)):
        paths.append(f"{paths[parent]};{names[name]}" if parent >= 0 else names[name])
        columns = (sums.count, sums.total, sums.self_time, sums.allocated, sums.flops, sums.device)
        found[paths[-1]] = tuple(int(column[number]) for column in columns)
    return found


def test_calls_with_equal_stacks_are_one_path():
    """Times, calls and allocations are added up by stack, on all threads."""
    memory = {"time": [3, 4, 5], "bytes": [64, -64, 8], "event": [2, 2, 4], "address": [1, 1, 2]}
    memory |= {name: [0] * 3 for name in ("total_allocated", "total_reserved", "thread", "device_type", "flags")}
    memory["device_index"] = [-1] * 3
    events = {
        "start": [0, 1, 20, 21, 22, 40],
        "end": [10, 5, 30, 26, 24, 41],
        "name": [1, 2, 1, 2, 3, 2],
        "parent": [-1, 0, -1, 2, 3, -1],
        "kind": [Kind.LABEL, Kind.OPERATOR, Kind.LABEL, Kind.OPERATOR, Kind.LABEL, Kind.OPERATOR],
    }
    sums = path_sums(info(events, memory=memory))
    assert texts(sums, NAMES) == {
        "f": (2, 20, 11, 0, 0, 0),
        "f;g": (2, 9, 7, 72, 0, 0),
        "f;g;h": (1, 2, 2, 0, 0, 0),
        "g": (1, 1, 1, 0, 0, 0),
    }
    assert sums.path.tolist() == [0, 2, 0, 2, 3, 1]
    assert (sums.parent < np.arange(len(sums))).all()


def test_an_operator_and_a_label_of_one_name_are_two_paths():
    """As in averages, the kind is a part of the name."""
    sums = path_sums(info({"start": [0, 5], "end": [1, 9], "name": [1, 1], "kind": [Kind.OPERATOR, Kind.LABEL]}))
    assert sorted(zip(sums.kind.tolist(), sums.total.tolist(), strict=True)) == [(Kind.OPERATOR, 1), (Kind.LABEL, 4)]


def test_kernels_are_below_what_launched_them(tmp_path):
    """Device time is that of kernels, once, and they have no time of the processor."""
    (tmp_path / "t.json").write_text(json.dumps(cuda_trace()))
    prof = otp.load(tmp_path / "t.json")
    found = prof.events()._source.with_modules()
    sums = path_sums(found)
    is_work = sums.kind == WORK_KIND
    assert sums.device[~is_work].sum() == sums.total[is_work].sum() == 0
    kernels = {average.key: average.self_device_time_total for average in prof.key_averages()}
    names = found.view.batch.names
    launched = [number for number in np.flatnonzero(is_work).tolist() if sums.parent[number] >= 0]
    assert launched
    for number in launched:
        assert sums.device[number] / 1000 <= kernels[names[sums.name[number]]]


def test_no_events():
    """Nothing was recorded: there are no paths."""
    assert len(path_sums(info({"start": [], "end": []}))) == 0
