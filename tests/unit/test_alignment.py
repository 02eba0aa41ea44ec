"""Clocks beside one another, against the truth: ends of collectives with offsets, drifts and delays that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from merged_files import BEGIN, STEP, Meetings, WrongClock

import otel_torchprof as otp
from otel_torchprof._files.alignment import FEWEST_COMMON, align, fit
from otel_torchprof._files.collectives import CollectiveList

JITTER = (10_000, 200_000)
CLOCKS = [
    WrongClock(),
    WrongClock(10**9, 50e-6),
    WrongClock(-(10**9), -50e-6),
    WrongClock(123_456_789, 7e-6),
    WrongClock(-5),
]


def errors(meetings, clocks, reference=0):
    """By rank, the largest error of its clock, in ns, from the first collective to the last; and the clocks."""
    found, unaligned = align([meetings.collectives(rank, clock) for rank, clock in enumerate(clocks)], reference)
    assert not unaligned
    times = np.linspace(BEGIN, meetings.end.max(), 101).astype(np.int64)
    right = clocks[reference].of(times)
    return found, [
        max(
            abs(found[rank].corrected(time) - truth)
            for time, truth in zip(clock.of(times).tolist(), right, strict=True)
        )
        for rank, clock in enumerate(clocks)
    ]


@pytest.mark.parametrize(("count", "spacing"), [(50, STEP), (1000, STEP), (1000, 10 * STEP), (20_000, STEP)])
@pytest.mark.parametrize("reference", [0, 1])
def test_the_clock_is_found(count, spacing, reference):
    """Seconds of offset and 50 ppm of drift are found to less than what a rank takes to wake up, and than the error that is stated."""
    found, largest = errors(Meetings(len(CLOCKS), count, spacing, JITTER), CLOCKS, reference)
    for rank, error in enumerate(largest):
        assert error < (JITTER[1] - JITTER[0]) / 2
        assert error <= found[rank].error
    assert found[reference].corrected(BEGIN) == BEGIN


def test_many_collectives_are_better_than_one():
    """20,000 collectives give the clock to a tenth of what a single end is off, the drift to a tenth of a ppm."""
    found, largest = errors(Meetings(2, 20_000, STEP, JITTER), CLOCKS[:2])
    assert largest[1] < found[1].error / 10
    assert abs(found[1].drift - 50e-6) < 1e-7


def test_ends_without_delay():
    """Where no rank is delayed the clocks are right to some ns, and the error is 0."""
    found, largest = errors(Meetings(2, 100, STEP, (5, 6)), [WrongClock(), WrongClock(10**9)])
    assert (largest[1], found[1].error, found[1].largest, found[1].offset) == (0, 0, 0, 10**9)


def test_delayed_ends():
    """A busy machine that holds a rank up in a quarter of the collectives, for up to a second, is not seen in the clock."""
    meetings = Meetings(2, 1000, STEP, JITTER)
    number = np.random.default_rng(1)
    late = number.random(1000) < 0.25
    meetings.end[1, late] += number.integers(0, 10**9, late.sum())
    found, largest = errors(meetings, CLOCKS[:2])
    assert largest[1] < JITTER[1]
    assert found[1].largest > 5e8


@pytest.mark.parametrize("count", [19, 1000])
def test_no_drift_that_is_not_known(count):
    """A recording of a few collectives, or of some milliseconds, says nothing about drift: it is 0, whatever the ends pretend."""
    for seed in range(20):
        found, _ = errors(
            Meetings(2, count, 10**6 if count == 1000 else STEP, JITTER, seed=seed), [WrongClock(), WrongClock(10**6)]
        )
        assert found[1].drift == 0


def test_no_drift_that_no_clock_has():
    """Up to half a permille is corrected; more is no clock's, and shows as an error."""
    assert fit_of(WrongClock(0, 4e-4)).line.drift == pytest.approx(4e-4, rel=1e-2)
    found = fit_of(WrongClock(0, 2e-3))
    assert found.line.drift == 0
    assert not found.is_useful
    changed = fit_of(WrongClock(0, 1e-2))
    assert (changed.line.drift, changed.steep) == (0, pytest.approx(1e-2, rel=1e-2))
    assert not changed.is_useful


def fit_of(clock):
    meetings = Meetings(2, 1000, STEP, JITTER)
    return fit(meetings.collectives(1, clock), meetings.collectives(0, WrongClock()))[1]


def test_order_is_kept():
    """Of a rank's times none becomes earlier than one before it, to the nanosecond, and none changes order with the drift."""
    found = fit_of(WrongClock(10**9, 50e-6))
    times = [found.line.corrected(BEGIN + at) for at in range(100_000, 140_000)]
    assert all(later - earlier in {0, 1, 2} for earlier, later in itertools.pairwise(times))


def without(found, keys):
    return found.chosen(~np.isin(found.key, found.key[keys]))


def test_by_way_of_others():
    """A rank that shares nothing with the reference is aligned by one that does; errors of both steps add up as squares."""
    meetings = Meetings(4, 300, STEP, JITTER)
    ranks = [meetings.collectives(rank, clock) for rank, clock in enumerate(CLOCKS[:4])]
    # Rank 0 meets rank 1, rank 1 meets rank 2, and rank 3 meets rank 2 too rarely.
    ranks[0], ranks[2] = without(ranks[0], range(100, 300)), without(ranks[2], range(150))
    ranks[3] = without(ranks[3], range(150 + FEWEST_COMMON - 1, 300))
    ranks[3] = without(ranks[3], range(150))
    ranks[1] = without(ranks[1], range(150, 150 + FEWEST_COMMON - 1))
    found, unaligned = align(ranks, 0)
    assert {rank: clock.by for rank, clock in found.items()} == {0: None, 1: 0, 2: 1}
    _, direct = fit(ranks[2], ranks[1])
    assert found[2].error == pytest.approx(np.hypot(found[1].error, direct.error))
    truth = meetings.start[2, 200]
    assert abs(found[2].corrected(int(CLOCKS[2].of(truth))) - truth) < 2 * JITTER[1]
    assert {rank: (each.most, each.by) for rank, each in unaligned.items()} == {3: (FEWEST_COMMON - 1, 2)}


def test_collectives_that_are_not_the_same():
    """Equal numbers of unrelated collectives are no alignment: what is left is longer than they last."""
    number = np.random.default_rng(0)
    one, other = (CollectiveList() for _ in range(2))
    for each in (one, other):
        for at in range(100):
            attributes = {"torch.collective.name": "barrier", "torch.collective.sequence_nr": at}
            each.add_call(int(number.integers(0, 10**11)), 10**6, attributes)
    found, unaligned = align([one.settled(), other.settled()], 0)
    assert list(found) == [0]
    assert unaligned[1].most == 100
    assert unaligned[1].fit.error > unaligned[1].fit.duration


def kept(works, calls=((2, 100, True), (1, 50, False), (1, 70, False), (3, 150, True))):
    """By number, start and end of what is kept."""
    found = CollectiveList()
    for number, start, is_async in calls:
        more = {"torch.collective.async": True} if is_async else {}
        found.add_call(
            start, 5, {"torch.collective.name": "all_reduce", "torch.collective.sequence_nr": number, **more}
        )
    for start, duration in works:
        found.add_work("gloo:all_reduce", start, duration)
    settled = found.settled()
    return [
        (key & 0xFF, start, end) for key, start, end, _ in zip(*(column.tolist() for column in settled), strict=True)
    ]


def test_what_is_kept_of_collectives():
    """Each number once, the first of it, by key; where a backend worked, with the end of that work, or not at all."""
    assert kept([]) == [(1, 50, 55)]
    assert kept([(160, 9), (105, 8), (51, 7)]) == [(1, 50, 58), (2, 100, 113), (3, 150, 169)]
    assert kept([(160, 9), (105, 8)]) == []


@pytest.mark.parametrize("late", [0, 2_000_000])
def test_a_straggler_whose_clock_drifts(tmp_path, late):
    """In 10 s a clock of 200 ppm goes wrong by as much as the rank is late: it is found all the same, and none where ranks come by chance."""
    meetings = Meetings(4, 1000, late=late)
    clocks = [WrongClock(), WrongClock(10**8, -50e-6), WrongClock(-(10**9)), WrongClock(10**9, 200e-6)]
    files = [meetings.trace(rank, clock).chrome(tmp_path / f"{rank}.json") for rank, clock in enumerate(clocks)]
    found = otp.explain(*files)
    stragglers = [each for each in found.faults if each.verdict == "straggler"]
    assert [each.ranks for each in stragglers] == ([("rank 3",)] if late else [])
