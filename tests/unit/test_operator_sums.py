"""Sums by operator, of which a bounded number is told apart."""

from __future__ import annotations

from live_batches import Event, Recorder

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._model.averages import OTHER, Average, OperatorSums


def batch(*own: tuple[str, int]) -> Batch:
    """Operators beside each other, with this much time each."""
    names = ["", *dict.fromkeys(name for name, _ in own)]
    columns = {
        "name": [names.index(name) for name, _ in own],
        "start": [1000 * at for at in range(len(own))],
        "end": [1000 * at + time for at, (_, time) in enumerate(own)],
    }
    return Batch.of(columns, names)


def by_name(sums: OperatorSums) -> dict[str, Average]:
    return {each.name: each for each in sums.read()}


def test_batches_add_up():
    """Calls, time and self time of an operator are those of all batches; without devices there is no time of these."""
    sums = OperatorSums(50)
    columns = {"name": [1, 2], "start": [0, 2], "end": [10, 5], "parent": [-1, 0]}
    sums.add(Batch.of(columns, ["", "aten::linear", "aten::addmm"]))
    sums.add(batch(("aten::addmm", 4)))
    assert sums.read() == [
        Average("aten::linear", False, 1, 10, 7, 0, 0),
        Average("aten::addmm", False, 2, 7, 7, 0, 0),
    ]
    assert not sums.has_devices


def test_children_that_came_earlier():
    """An operator that ends in a later batch than what ran in it has that taken from its self time, once."""
    recorder, sums = Recorder(), OperatorSums(50)
    sums.add(recorder.drain(Event("child", 1, 4, "parent"), Event("parent", 0)))
    sums.add(recorder.drain(Event("other child", 4, 6, "parent"), Event("parent", 0)))
    sums.add(recorder.drain(Event("last child", 7, 8, "parent"), Event("parent", 0, 10)))
    assert by_name(sums)["parent"] == Average("parent", False, 1, 10, 4, 0, 0)
    sums.add(recorder.drain(Event("unknown's child", 12, 13, "gone")))
    assert not len(sums._child_times)


def test_labels_are_not_counted():
    """A label is no operator, and its time is not that of the operator around it."""
    sums = OperatorSums(50)
    columns = {"name": [1, 2, 1], "start": [0, 2, 3], "end": [10, 8, 5], "parent": [-1, 0, 1]}
    scopes = [int(Scope.FUNCTION), int(Scope.USER_SCOPE), int(Scope.FUNCTION)]
    sums.add(Batch.of({**columns, "scope": scopes}, ["", "op", "label"]))
    assert sums.read() == [Average("op", False, 2, 12, 6, 0, 0)]


def test_phases_are_not_counted():
    """Nor is a phase an operator, whatever its scope."""
    sums = OperatorSums(50)
    columns = {"name": [1, 2], "start": [0, 2], "end": [10, 8], "parent": [-1, 0], "kind": [Kind.PHASE, Kind.OPERATOR]}
    sums.add(Batch.of(columns, ["", "torch.phase.forward", "op"]))
    assert sums.read() == [Average("op", False, 1, 6, 6, 0, 0)]


def test_times_of_devices():
    """Where devices were timed, each operator has its total and its own."""
    devices = {
        "event": [1, 2],
        "duration": [50, 20],
        "stream": [0, 0],
        "start": [0, 0],
        "device_type": [1, 1],
        "device_index": [0, 0],
    }
    columns = {"name": [1, 2], "start": [0, 2], "end": [10, 5], "parent": [-1, 0]}
    sums = OperatorSums(50)
    sums.add(Batch.of(columns, ["", "outer", "inner"], devices=devices))
    assert sums.has_devices
    assert [each[5:] for each in sums.read()] == [(50, 30), (20, 20)]


def test_no_more_than_so_many_are_told_apart():
    """However many operators there are, those with the most self time have entries and the rest is one, with nothing lost."""
    sums = OperatorSums(10)
    sums.add(batch(*[(f"op{number}", 1 + number % 997) for number in range(2000)]))
    for number in range(20):
        sums.add(batch(*[(f"late{number}-{each}", 5) for each in range(50)]))
    found = by_name(sums)
    assert len(found) <= 11
    assert {"op996", "op1993"} <= set(found)
    assert sum(each.calls for each in found.values()) == 3000


def test_who_has_an_entry_keeps_it():
    """Sums never shrink, and an operator that others have overtaken stays."""
    sums, before = OperatorSums(5), {}
    for round_ in range(10):
        sums.add(batch(*[(f"op{number}", 900 if number // 5 == round_ else 1) for number in range(50)]))
        now = by_name(sums)
        assert set(before) <= set(now)
        assert all(
            now[name].self_time >= each.self_time and now[name].calls > each.calls for name, each in before.items()
        )
        before = now
    assert len(now) == 6


def test_places_are_kept_for_late_comers():
    """An operator that comes after all others gets an entry once it has a per cent of the time, and only then."""
    sums = OperatorSums(5)
    sums.add(batch(*[(f"op{number}", 50) for number in range(200)]))
    assert len(by_name(sums)) == 5  # of which one is the rest
    sums.add(batch(("late", 50)))
    assert "late" not in by_name(sums)
    sums.add(batch(("late", 60)))
    assert by_name(sums)["late"].self_time == 60
    assert by_name(sums)[OTHER].self_time == 9800 + 50


def test_an_operator_named_other():
    """It is one of the rest, which has that name."""
    sums = OperatorSums(5)
    sums.add(batch((OTHER, 10), ("op", 5)))
    assert [(each.name, each.self_time) for each in sums.read()] == [("op", 5), (OTHER, 10)]


def test_nothing():
    """An empty batch adds nothing, and is no error."""
    sums = OperatorSums(5)
    sums.add(Batch.of({"start": []}, [""]))
    assert sums.read() == []
