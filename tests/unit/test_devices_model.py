"""Times of devices on columns: what each event cost, by its own pair of marks and by those inside of it."""

from __future__ import annotations

import numpy as np

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.joined import joined, without
from otel_torchprof._model.devices import DRAINED_NS, device_times, drained_between


def devices(*rows):
    """Pairs of (event, stream, duration, device index)."""
    event, stream, duration, index = zip(*rows, strict=True)
    neutral = [0] * len(rows)
    return {
        "event": event,
        "stream": stream,
        "duration": duration,
        "device_index": index,
        "start": neutral,
        "device_type": [1] * len(rows),
    }


def batch_of(parents, pairs):
    """Events with these parents, and ids from 1."""
    start = list(range(len(parents)))
    columns = {"start": start, "end": [100 - at for at in start], "parent": parents}
    return Batch.of(columns, [""], devices=devices(*pairs))


def test_nothing_timed():
    """A batch without pairs, or with pairs of events that are not in it, tells of no times."""
    assert device_times(Batch.of({"start": [1]}, [""])) is None
    assert device_times(batch_of([-1], [(99, 0, 5, 0)])) is None


def test_random_trees_against_a_model():
    """For random trees, pairs and streams the times are those of a plain walk over the tree."""
    random = np.random.default_rng(7)
    for _ in range(50):
        count = int(random.integers(1, 30))
        parents = [int(random.integers(-1, i)) if i else -1 for i in range(count)]
        pairs = [
            (i + 1, int(random.integers(0, 3)), int(random.integers(0, 50)), int(random.integers(0, 2)))
            for i in range(count)
            if random.random() < 0.6
        ]
        if not pairs:
            continue
        times = device_times(batch_of(parents, pairs))
        own_pair = {event - 1: ((stream, index), duration) for event, stream, duration, index in pairs}

        def on(stream, row, parents=parents, own_pair=own_pair):
            key, duration = own_pair.get(row, (None, 0))
            if key == stream:
                return duration
            return sum(on(stream, child) for child, above in enumerate(parents) if above == row)

        streams = {key for key, _ in own_pair.values()}
        totals = [sum(on(stream, row) for stream in streams) for row in range(count)]
        assert times.total.tolist() == totals
        inside = [sum(totals[child] for child, above in enumerate(parents) if above == row) for row in range(count)]
        assert times.own.tolist() == [total - below for total, below in zip(totals, inside, strict=True)]


def test_pairs_of_several_recordings():
    """Joining batches keeps all pairs, and leaving out a row leaves out its pair."""
    one, other = batch_of([-1], [(1, 0, 5, 0)]), batch_of([-1], [(1, 0, 6, 0)])
    assert joined([one, Batch.of({"start": []}, [""]), other]).devices["duration"].tolist() == [5, 6]
    assert device_times(
        without(batch_of([-1, 0], [(1, 0, 9, 0), (2, 0, 5, 0)]), np.array([True, False]))
    ).total.tolist() == [5]


def drained(edges, *rows):
    """Of each segment between the edges, with events of (begin, end, when the device came to the mark at each), in us."""
    begin, end, first, last = (np.array(column) * 1000 for column in zip(*rows, strict=True))
    pairs = {"event": np.arange(1, len(rows) + 1), "start": first, "duration": last - first}
    pairs |= {name: np.zeros(len(rows)) for name in ("stream", "device_type", "device_index")}
    batch = Batch.of({"start": begin, "end": end}, [""], devices=pairs)
    edges = np.array(edges) * 1000
    return (drained_between(batch, edges[:-1], edges[1:]) / 1000).tolist()


def test_a_device_that_waits_for_the_host():
    """Where each mark is reached as soon as it is made, all time is drained from there to the next."""
    assert drained([0, 100, 200], (10, 60, 10, 61), (110, 160, 110, 160)) == [89, 60]


def test_a_device_that_is_behind_the_host():
    """Where the device comes to no mark before long, it never waits, up to the threshold and not at it."""
    late = DRAINED_NS // 1000
    assert drained([0, 200], (10, 60, 10 + late, 60 + late), (110, 160, 110 + late, 160 + late)) == [0]
    assert drained([0, 200], (10, 60, 9 + late, 59 + late), (110, 160, 109 + late, 159 + late)) == [123]


def test_where_no_device_was_timed():
    """Of a segment without a mark nothing is known, be it before the first one or between two."""
    assert np.isnan(drained([0, 100, 200, 300], (110, 120, 110, 120), (310, 320, 310, 320))).tolist() == [
        True,
        False,
        True,
    ]


def test_a_device_that_catches_up():
    """A device that has done what it was given waits from then on, not from when it was asked for."""
    assert drained([0, 50, 100, 150], (0, 20, 40, 90), (100, 120, 100, 120)) == [0, 10, 20]


def test_another_stream_that_is_behind():
    """A mark that is reached at once says nothing while a device is behind with what it was given before."""
    assert drained([0, 100], (0, 10, 0, 90), (20, 40, 20, 40)) == [0]
