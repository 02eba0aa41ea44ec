"""Averages that are kept while events come and go."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Scope
from otel_torchprof._model.averages import MAX_NAMES, OTHER_NAMES, Average, RunningAverages
from otel_torchprof._profile.events import EventList, averages_list


def batch(*events: tuple[int, int, int, int], names: list[str], scopes: list[int] | None = None) -> Batch:
    """Events as (name, start, end, parent)."""
    name, start, end, parent = (list(column) for column in zip(*events, strict=True))
    columns = {"name": name, "start": start, "end": end, "parent": parent, "scope": scopes or [0] * len(events)}
    return Batch.of(columns, names)


def test_sums_of_batches_add_up():
    """Two batches give the sums that one batch of all their events would."""
    running = RunningAverages()
    running.add(batch((1, 0, 10, -1), (2, 2, 5, 0), names=["", "outer", "inner"]))
    running.add(batch((2, 20, 24, -1), (3, 30, 31, -1), names=["", "outer", "inner", "new"]))
    assert running.read() == [
        Average("outer", False, 1, 10, 7),
        Average("inner", False, 2, 7, 7),
        Average("new", False, 1, 1, 1),
    ]


def test_a_label_and_an_operator_of_one_name_stay_apart():
    """As in torch, a label does not add to the operator that has its name."""
    running = RunningAverages()
    scopes = [int(Scope.USER_SCOPE), int(Scope.FUNCTION)]
    running.add(batch((1, 0, 10, -1), (1, 20, 25, -1), names=["", "same"], scopes=scopes))
    assert running.read() == [Average("same", True, 1, 10, 10), Average("same", False, 1, 5, 5)]


def test_random_batches_sum_to_what_one_list_gives():
    """Whatever is cut into batches at its roots sums to the averages of the whole, name by name."""
    random = np.random.default_rng(7)
    running, whole = RunningAverages(), []
    for number in range(20):
        start = np.sort(random.integers(0, 1000, 50)) + number * 10_000
        whole += [(int(n), int(s), int(s) + 3, -1) for n, s in zip(random.integers(1, 6, 50), start, strict=True)]
        running.add(batch(*whole[-50:], names=["", *"abcde"]))
    expected = EventList.of(batch(*whole, names=["", *"abcde"]), origin_ns=0).key_averages()
    found = averages_list(running.read())
    assert {e.key: (e.count, e.cpu_time_total, e.self_cpu_time_total) for e in found} == {
        e.key: (e.count, pytest.approx(e.cpu_time_total), pytest.approx(e.self_cpu_time_total)) for e in expected
    }


def test_the_applications_spans_have_entries_and_a_bound():
    """Spans of the application are listed by name; beyond a fixed number of names they share one entry."""
    running = RunningAverages()
    for number in range(MAX_NAMES + 5):
        running.add_span(f"GET /{number}", 10, 4)
    running.add_span("GET /3", 10, 4)
    sums = {average.name: average for average in running.read()}
    assert len(sums) == MAX_NAMES + 1
    assert sums["GET /3"][2:5] == (2, 20, 8)
    assert sums[OTHER_NAMES][2:5] == (5, 50, 20)


def test_the_list_prints_as_torchs_averages_do():
    """What comes out is an EventList of averages in microseconds, which sorts and prints."""
    found = averages_list([Average("slow", False, 2, 8_000, 6_000), Average("forward", True, 1, 9_000, 1_000)])
    slow, forward = found
    assert (slow.key, slow.count, slow.cpu_time_total, slow.self_cpu_time_total, slow.cpu_time) == ("slow", 2, 8, 6, 4)
    assert (slow.is_user_annotation, forward.is_user_annotation) == (False, True)
    lines = [line.split()[0] for line in found.table(sort_by="self_cpu_time_total").splitlines() if "us" in line]
    assert lines[:2] == ["slow", "forward"]
