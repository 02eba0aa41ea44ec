"""How long a rank waits in collectives, per step and group, from times that are given."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torchprof._columns.phases import Segment
from otel_torchprof._instrument import collective_waits
from otel_torchprof._instrument.collective_waits import MOST_GROUPS, CollectiveWaits
from otel_torchprof._model.averages import OTHER
from otel_torchprof._model.step_spans import StepSpan, Trace
from otel_torchprof._native.torch_library import COLLECTIVE_TIME
from otel_torchprof.errors import TorchLibraryError


class Given:
    """Times that come with the next drains: lists of start, end and group."""

    def __init__(self, *drains) -> None:
        self._drains = [np.array([(*time, 0) for time in drain], COLLECTIVE_TIME) for drain in drains]
        self.is_stopped = False

    def take(self):
        return self._drains.pop(0)

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture(autouse=True)
def _group(monkeypatch):
    """A process group, and names of groups."""
    monkeypatch.setattr(collective_waits, "_has_process_group", lambda: True)
    monkeypatch.setattr(collective_waits, "current_names", lambda: [f"group {n}" for n in range(100)])


def step(number: int, start: int, end: int) -> StepSpan:
    return StepSpan(number, Trace(5, True, True), 7, start, end, None, None, thread=1, segment=Segment.STEP)


def found(waits: CollectiveWaits, *steps: StepSpan) -> list[tuple[int, str, int]]:
    return [(of.number, group, round(seconds * 1e9)) for of, group, seconds in waits.of_steps(steps)]


def test_collectives_that_overlap_count_once():
    """A step waits from the first call to the last end where collectives of a group overlap, and not between them."""
    waits = CollectiveWaits(lambda: Given([(20, 40, 1), (10, 30, 1), (12, 15, 1), (60, 65, 1), (61, 62, 2)]))
    assert found(waits, step(1, 0, 100)) == [(1, "group 1", 35), (1, "group 2", 1)]


def test_a_collective_counts_for_each_step_that_it_is_in():
    """What begins in one step and ends in the next is in both, whichever drain it comes with; steps without any are left out."""
    waits = CollectiveWaits(lambda: Given([(90, 110, 1), (310, 320, 1)], [], [(250, 390, 1)]))
    assert found(waits, step(1, 0, 100), step(2, 100, 200)) == [(1, "group 1", 10), (2, "group 1", 10)]
    assert found(waits, step(3, 200, 300)) == []
    assert found(waits, step(4, 300, 400)) == [(4, "group 1", 90)]


def test_groups_without_series_of_their_own_are_one_sum():
    """A program that makes groups again and again gets a limited number of series."""
    count = MOST_GROUPS + 3
    waits = CollectiveWaits(lambda: Given([(10 * n, 10 * n + 5, n) for n in range(count)]))
    of_groups = {group: time for _, group, time in found(waits, step(1, 0, 1000))}
    assert len(of_groups) == MOST_GROUPS + 1
    assert of_groups[OTHER] == 15


def test_a_process_without_a_group_loads_nothing(monkeypatch):
    """Nothing is timed before a process group exists; then its state says so, and a stop ends it."""
    monkeypatch.setattr(collective_waits, "_has_process_group", bool)
    given = Given([(0, 1, 1)])
    waits = CollectiveWaits(lambda: given)
    assert found(waits, step(1, 0, 10)) == []
    assert waits.state == ""
    monkeypatch.setattr(collective_waits, "_has_process_group", lambda: True)
    assert found(waits, step(1, 0, 10)) == [(1, "group 1", 1)]
    assert waits.state == "on"
    waits.stop()
    assert given.is_stopped
    assert waits.state == ""


def test_why_nothing_is_timed_is_in_its_state():
    """Where the library is missing, it is asked for once, and health can say why."""
    asked = []

    def refuse():
        asked.append(1)
        raise TorchLibraryError("not built")

    waits = CollectiveWaits(refuse)
    assert found(waits, step(1, 0, 10)) == found(waits, step(2, 10, 20)) == []
    assert waits.state == "off: not built"
    assert len(asked) == 1
