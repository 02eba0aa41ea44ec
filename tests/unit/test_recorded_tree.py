"""The tree of everything recorded, and the numbers of the tensors in it."""

from __future__ import annotations

import random

import pytest
from memory_runs import Run, parameter

from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Kind
from otel_torchprof._model.recorded_tree import recorded_tree, tensor_ids

FORWARD, BACKWARD = RecordedThread(11, 101, 1, "forward"), RecordedThread(12, 102, 2, "backward")


def parents(batch):
    """For each node its name, and that of the node around it."""
    tree = recorded_tree(batch)
    memory = [] if batch.memory is None else ["[memory]"] * len(batch.memory["time"])
    names = [batch.names[name] for name in batch["name"].tolist()] + memory
    found = [names[row] for row in tree.row.tolist()]
    return [
        (name, found[parent] if parent >= 0 else None) for name, parent in zip(found, tree.parent.tolist(), strict=True)
    ]


def test_backward_functions_of_another_thread():
    """They hang under what was open on their forward thread at that time, and under nothing once that has ended."""
    batch = Batch.of(
        {
            "start": [0, 10, 20, 30, 50, 95],
            "end": [90, 40, 25, 35, 60, 99],
            "name": [1, 2, 3, 4, 5, 4],
            "parent": [-1, 0, 1, -1, -1, -1],
            "thread": [0, 0, 0, 1, 1, 1],
            "fwd_thread": [0, 0, 0, 1, 1, 1],
            "kind": [Kind.LABEL, Kind.FRAME, Kind.FRAME, Kind.OPERATOR, Kind.OPERATOR, Kind.OPERATOR],
        },
        ["", "step", "backward", "run", "Mul", "Add"],
        (FORWARD, BACKWARD),
    )
    assert parents(batch) == [
        ("step", None),
        ("backward", "step"),
        ("run", "backward"),
        ("Mul", "backward"),
        ("Add", "step"),
        ("Mul", None),
    ]


def test_modules_and_pauses_are_left_out():
    """What was in them is in what is around them: operators, calls and memory."""
    run = Run()
    run.begin("call", kind=Kind.FRAME)
    run.begin("model.layer", kind=Kind.MODULE)
    run.allocate(0x10)
    run.operator("relu", 0x10, makes=0x20)
    run.end()
    run.begin("gc.collect: generation 2", kind=Kind.FRAME)
    run.begin("__del__", kind=Kind.FRAME)
    run.end()
    run.end()
    run.end()
    batch = run.batch()
    batch.columns["end"] = batch["start"] + 100_000
    assert parents(batch) == [
        ("call", None),
        ("[memory]", "call"),
        ("aten::relu", "call"),
        ("[memory]", "aten::relu"),
        ("__del__", "call"),
    ]


def numbers(batch, happened):
    """(tensor, storage) of each tensor and record, in the order of ``happened``, which has a row or record for each."""
    ids = tensor_ids(recorded_tree(batch), {"cpu": 0}.__getitem__)
    return [tuple(ids.of_input(*where) if what == "input" else ids.of_memory(*where)) for what, *where in happened]


def by_torchs_rules(happened):
    """The same by torch's algorithm, one after the other. Args: (is it a tensor, is it freed, address)."""
    versions, storages, found = {}, set(), []
    count = 0
    for is_tensor, is_freed, address in happened:
        if address not in versions:
            count += 1
            versions[address] = count
        found.append(versions[address])
        if is_tensor:
            storages.add(versions[address])
        if is_freed:
            del versions[address]
    tensors = {storage: number for number, storage in enumerate(sorted(storages))}
    return [(tensors.get(storage), storage) for storage in found]


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_tensors(seed):
    """Whatever is allocated, freed and used, at addresses that come again, has torch's numbers."""
    some, run = random.Random(seed), Run()
    plain, where = [], []
    for _ in range(200):
        address = some.randrange(1, 12) << 8
        action = some.randrange(4)
        if action < 2:
            run.allocate(address, 8 if action else -8)
            plain.append((False, not action, address))
            where.append(("memory", len(run.records) - 1))
        else:
            others = [address, *(some.randrange(1, 12) << 8 for _ in range(some.randrange(3)))]
            run.operator("cat", *others)
            for number, each in enumerate(others):
                plain.append((True, False, each))
                where.append(("input", len(run.columns["start"]) - 1, number))
    assert numbers(run.batch(), where) == by_torchs_rules(plain)


def test_tensors_without_memory_are_none():
    """All that have none share a storage's number, as in torch, and have no number of a tensor."""
    run = Run()
    run.operator("arange", 0, 0x10)
    run.operator("arange", 0)
    assert numbers(run.batch(), [("input", 0, 0), ("input", 0, 1), ("input", 1, 0)]) == [(None, 1), (0, 2), (None, 1)]


def test_tensors_of_modules_count_at_the_first_call():
    """A parameter is the tensor that operators see in its storage; what came later to it is not looked at, as in torch."""
    run = Run()
    weight = parameter(0x100, gradient=0x200, late=True)
    run.module("Linear_0", weight)
    run.operator("linear", 0x100, 0x200)
    run.module("Linear_0", weight)
    ids = tensor_ids(recorded_tree(run.batch()), {"cpu": 0}.__getitem__)
    assert ids.of_known[id(weight.tensor)] == ids.of_input(1, 0) == (0, 1)
    assert ids.of_input(1, 1) == (1, 2)
    assert list(ids.of_known) == [id(weight.tensor)]
    assert list(ids.first_calls.values()) == [0]
