"""Work in the background that lets the program's threads go first."""

from __future__ import annotations

import threading

import pytest
from threaded import in_threads

from otel_torchprof._columns.schema import NEVER
from otel_torchprof._export.draining import Drainer
from otel_torchprof._process import give_way as module
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.give_way import give_way, giving_way, with_pauses, without_yielding

MILLISECOND = 1_000_000
LONG = 60


class Clock:
    """The thread's own time, which stands still; what rests says so here."""

    def __init__(self) -> None:
        self.now = 0
        self.rests: list[float] = []

    def thread_time_ns(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.rests.append(round(seconds, 6))


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(module, "threads", found)
    return found


def test_it_rests_after_each_millisecond_of_work(clock):
    """Nine times as long as it has worked, and never for less than a millisecond's work, nor for more than a waiter would bear."""
    with giving_way(lambda: False):
        for worked in (MILLISECOND // 2, MILLISECOND // 2, MILLISECOND // 4, 2 * MILLISECOND, 1000 * MILLISECOND):
            clock.now += worked
            give_way()
    assert clock.rests == [0.009, 0.02, 0.02]


def test_urgent_work_rests_less(clock):
    """The more urgent it is the less, and not at all from 1 on; how urgent it is, is asked once per millisecond of work."""
    answers = iter([0, 1 / 3, 2 / 3, 1, 5, 0])
    with giving_way(lambda: next(answers)):
        for _ in range(6):
            clock.now += MILLISECOND
            for _ in range(10):
                give_way()
    assert clock.rests == [0.009, 0.006, 0.003, 0.009]


def test_small_items_share_a_pause(clock):
    """Among items of a few microseconds it is not asked before each whether it is time to rest."""
    with giving_way(lambda: False):
        for _ in with_pauses(range(200)):
            clock.now += MILLISECOND // 64
    assert clock.rests == [0.009] * 3


def test_nothing_rests_where_a_lock_is_held(clock):
    """A thread of the program that waits for the lock would wait for the rest too; behind it the work rests as before."""
    with giving_way(lambda: False):
        clock.now += MILLISECOND
        with without_yielding():
            give_way()
        assert clock.rests == []
        give_way()
    assert clock.rests == [0.009]


def test_other_threads_do_not_rest(clock):
    """What a flush or the program's own thread does is as fast as it can be, during such work and after it."""
    with giving_way(lambda: False):
        clock.now += MILLISECOND
        in_threads(give_way)
    give_way()
    assert clock.rests == []


@pytest.fixture
def drainer():
    """Makes drainers, and ends their threads."""
    found: list[Drainer] = []

    def make(*arguments):
        found.append(Drainer(*arguments))
        return found[-1]

    yield make
    for each in found:
        each.end(Deadline.after(LONG))


@pytest.mark.parametrize(("backlog", "rests"), [(0, [0.009]), (0.5, [0.0045]), (1.5, [])])
def test_a_scheduled_drain_gives_way_until_it_is_behind(clock, drainer, backlog, rests):
    """Then the oldest events would be thrown away for the sake of politeness."""
    done = threading.Event()

    def take() -> int:
        clock.now += MILLISECOND
        give_way()
        done.set()
        return NEVER

    drainer(0.001, take, lambda: False, lambda: backlog).start()
    assert done.wait(LONG)
    assert clock.rests[:1] == rests


def test_a_drain_that_somebody_waits_for_does_not_give_way(clock, drainer, monkeypatch):
    """Nor does the one that was at work when the request came."""
    at_work, asked = threading.Event(), threading.Event()

    def take() -> int:
        if not at_work.is_set():
            at_work.set()
            assert asked.wait(LONG)
            clock.now += MILLISECOND
            give_way()
        return NEVER

    slow = drainer(0.001, take, lambda: False, lambda: False)
    slow.start()
    assert at_work.wait(LONG)
    ask = slow._thread.ask
    monkeypatch.setattr(slow._thread, "ask", lambda request: (ask(request), asked.set())[0])
    assert slow.drain(Deadline.after(LONG))
    assert clock.rests == []
