"""Slices of devices: where they lie in time and on lanes."""

from __future__ import annotations

import pytest
from device_runs import WEEK_NS, Pair, Program, batch_of
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Flag
from otel_torchprof._model.devices import Stream, device_slices

SEEDS = st.integers(0, 1 << 32)


def reported(batch):
    """(event, start, duration, stream, lane) of each slice."""
    found = device_slices(batch)
    columns = (found.row + 1, found.start - WEEK_NS, found.duration, found.stream, found.lane)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_nothing_to_show():
    """A batch without pairs, or with pairs of other batches' events alone, has no slices."""
    assert device_slices(Batch.of({"start": [1]}, [""])) is None
    assert device_slices(batch_of([(0, 9)])) is None
    assert device_slices(batch_of([(0, 9)], [Pair(99, 5, 5)])) is None


def test_streams_stand_by_device_and_number():
    """Each stream of each device has its slices together, as they begin, with the times that were told."""
    pairs = [Pair(1, 100, 50, 7, 1), Pair(2, 90, 5, -3, 0), Pair(3, 60, 5, 7, 0), Pair(4, 50, 5, 7, 0, 20)]
    batch = batch_of([(0, 9), (10, 19), (20, 29), (30, 39)], pairs)
    assert device_slices(batch).streams == (Stream(1, 0, -3), Stream(1, 0, 7), Stream(1, 1, 7), Stream(20, 0, 7))
    assert reported(batch) == [(2, 90, 5, 0, 0), (3, 60, 5, 1, 0), (1, 100, 50, 2, 0), (4, 50, 5, 3, 0)]


def test_what_runs_without_a_pause_moves_as_one():
    """What lies around, inside and close behind a slice that is moved keeps its place beside it; a pause takes it up."""
    times = [(0, 90), (50, 60), (95, 99), (100, 110)]
    pairs = [Pair(1, 10, 80), Pair(2, 40, 20), Pair(3, 95, 10), Pair(4, 300, 5)]
    found = reported(batch_of(times, pairs, parent=[-1, 0, -1, -1]))
    assert found == [(1, 20, 80, 0, 0), (2, 50, 20, 0, 0), (3, 100, 10, 0, 0), (4, 300, 5, 0, 0)]


def test_another_stream_stays():
    """A move on one stream moves nothing on another, and nothing on that of another device."""
    pairs = [Pair(1, 0, 50), Pair(2, 300, 5, 1), Pair(3, 300, 5, 0, 1)]
    found = reported(batch_of([(200, 210), (220, 230), (240, 250)], pairs))
    assert [row[:3] for row in found] == [(1, 200, 50), (2, 300, 5), (3, 300, 5)]


def test_rounding_is_taken_out():
    """Slices of one thread that overlap by rounding lie one after another; those inside another stay inside."""
    times, parents = [(0, 90), (10, 20), (30, 40), (95, 99)], [-1, 0, 0, -1]
    pairs = [Pair(1, 100, 60), Pair(2, 90, 30), Pair(3, 115, 25), Pair(4, 150, 10)]
    found = reported(batch_of(times, pairs, parent=parents))
    assert found == [(1, 100, 60, 0, 0), (2, 101, 30, 0, 0), (3, 131, 25, 0, 0), (4, 160, 10, 0, 0)]


def test_what_is_too_long_for_its_room_is_cut():
    """Where slices are longer together than the one around them, the last of them ends with it."""
    found = reported(
        batch_of(
            [(0, 90), (10, 20), (30, 40)], [Pair(1, 100, 50), Pair(2, 100, 40), Pair(3, 100, 40)], parent=[-1, 0, 0]
        )
    )
    assert [row[:3] for row in found] == [(1, 100, 50), (2, 101, 40), (3, 141, 9)]


def test_two_threads_on_one_stream_have_lanes():
    """What overlaps without lying inside goes to another lane, and what is inside of it along with it."""
    times, threads = [(0, 90), (1, 80), (2, 60)], [0, 1, 1]
    pairs = [Pair(1, 100, 50), Pair(2, 120, 60), Pair(3, 160, 10)]
    found = reported(batch_of(times, pairs, parent=[-1, -1, 1], thread=threads))
    assert found == [(1, 100, 50, 0, 0), (2, 120, 60, 0, 1), (3, 160, 10, 0, 1)]


def test_another_thread_may_lie_inside():
    """What another thread's slice holds in time needs no lane."""
    found = reported(batch_of([(0, 90), (1, 80)], [Pair(1, 100, 50), Pair(2, 120, 10)], thread=[0, 1]))
    assert [row[4] for row in found] == [0, 0]


def test_of_two_that_begin_together_the_longer_is_around():
    """The longer slice comes first, and of two as long the one whose event began first."""
    pairs = [Pair(1, 100, 50), Pair(2, 100, 60), Pair(3, 300, 0, 1), Pair(4, 300, 0, 1)]
    batch = batch_of([(0, 90), (1, 80), (100, 200), (110, 120)], pairs, parent=[-1, -1, -1, 2], thread=[0, 1, 0, 0])
    assert [(row[0], row[4]) for row in reported(batch)] == [(2, 0), (1, 0), (3, 0), (4, 0)]


@pytest.mark.parametrize("odd", [{"flags": [0, Flag.ASYNC, 0]}, {"thread": [0, 0, 0], "end_thread": [0, 1, 0]}])
def test_asynchronous_events_may_overlap(odd):
    """An asynchronous event's pair stays where it is, and neighbours stay where they are."""
    pairs = [Pair(1, 100, 50), Pair(2, 120, 50), Pair(3, 150, 5)]
    found = reported(batch_of([(0, 9), (5, 60), (20, 29)], pairs, **odd))
    assert found == [(1, 100, 50, 0, 0), (2, 120, 50, 0, 1), (3, 150, 5, 0, 0)]


def test_what_outlives_the_event_around_it_may_overlap_it():
    """The pair of a label that was begun inside another and ended after it is not cut to that."""
    found = reported(batch_of([(0, 50), (10, 90)], [Pair(1, 100, 40), Pair(2, 110, 80)], parent=[-1, 0]))
    assert found == [(1, 100, 40, 0, 0), (2, 110, 80, 0, 1)]


@given(SEEDS, st.integers(1, 40), st.integers(1, 3), st.sampled_from([1, 32, 1000, 8000]))
def test_a_device_that_rounds(seed, events, streams, rounding):
    """For random programs all is on one lane, as long as it was to few ns, and begins where it did to the rounding."""
    program = Program(seed, events, streams)
    true = {pair.event: pair for pair in program.pairs}
    found = device_slices(program.batch(rounding=rounding))
    assert not found.lane.any()
    assert sorted(found.row.tolist()) == list(range(events))
    for event, start, duration, stream, _ in reported(program.batch(rounding=rounding)):
        pair = true[event]
        assert found.streams[stream].number == pair.stream
        assert pair.duration - events <= duration <= pair.duration
        assert abs(start - pair.start) <= 2 * rounding + events


@given(SEEDS, st.integers(1, 40), st.integers(1, 3), st.integers(0, 100_000))
def test_a_device_whose_clock_is_behind(seed, events, streams, behind):
    """However early begins are told, none is before its event's, none is moved further than that, lengths and order stay."""
    program = Program(seed, events, streams)
    exact, late = reported(program.batch()), reported(program.batch(behind=behind))
    assert [(row[0], row[2], row[4]) for row in exact] == [(row[0], row[2], row[4]) for row in late]
    for (event, true, *_), (_, start, *_) in zip(exact, late, strict=True):
        assert max(program.times[event - 1][0], true - behind) <= start <= true + events


def test_times_beyond_all_measure():
    """What no clock tells neither crashes nor makes a slice that ends before it begins, or lies before its event."""
    limit = 2**63 - 1
    pairs = [Pair(1, 0, limit), Pair(2, -WEEK_NS, limit), Pair(3, limit - WEEK_NS, limit), Pair(4, 0, -5)]
    batch = batch_of([(0, 90), (10, 20), (30, 40), (50, 60)], pairs, parent=[-1, 0, 0, -1])
    found = device_slices(batch)
    assert (found.duration >= 0).all()
    assert (found.start >= batch["start"][found.row]).all()
