"""How much of each device's memory was in use over time: which samples, of what, and which are kept of too many."""

from __future__ import annotations

import random

import numpy as np
import pytest

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof._model.memory import MOST_SAMPLES, thinned, totals_over_time

CPU, CUDA = 0, 1


def totals(most=MOST_SAMPLES, **columns):
    """{(device type, index, quantity): [(time, bytes)]} of records whose other columns are 0."""
    count = len(columns["time"])
    reported = {c.name: columns.get(c.name, [0] * count) for c in MEMORY_COLUMNS}
    memory = Batch.of({"start": []}, [""], memory=reported).memory
    found = list(totals_over_time(memory, most))
    assert all(total.time.dtype == total.bytes.dtype == np.int64 for total in found)
    return {
        (total.device_type, total.device_index, total.quantity): list(
            zip(total.time.tolist(), total.bytes.tolist(), strict=True)
        )
        for total in found
    }


def test_devices_and_quantities_are_apart():
    """Each device of each type has its own curve, and one of what is reserved if that is told."""
    found = totals(
        time=[1, 2, 3, 4],
        device_type=[CPU, CUDA, CUDA, CUDA],
        device_index=[-1, 0, 1, 0],
        total_allocated=[5, 6, 7, 8],
        total_reserved=[0, 20, 30, 40],
    )
    assert found == {
        (CPU, -1, "allocated"): [(1, 5)],
        (CUDA, 0, "allocated"): [(2, 6), (4, 8)],
        (CUDA, 0, "reserved"): [(2, 20), (4, 40)],
        (CUDA, 1, "allocated"): [(3, 7)],
        (CUDA, 1, "reserved"): [(3, 30)],
    }


def test_what_is_not_told_is_not_there():
    """A total of -1 is no sample; where nothing but that or nothing but 0 reserved is told there is no curve."""
    assert totals(time=[1, 2, 3], total_allocated=[-1, 4, -1], total_reserved=[-1, -1, 0]) == {
        (CPU, 0, "allocated"): [(2, 4)]
    }
    assert totals(time=[1], total_allocated=[-1], total_reserved=[-1]) == {}
    assert totals(time=[]) == {}


def test_threads_are_merged_by_time():
    """Records of several threads, which stand one thread after another, become one curve by time."""
    assert totals(time=[1, 5, 2, 6], thread=[0, 0, 1, 1], total_allocated=[10, 30, 20, 40]) == {
        (CPU, 0, "allocated"): [(1, 10), (2, 20), (5, 30), (6, 40)]
    }


def test_only_changes_are_samples():
    """A total that stays as it is has one sample; what is reserved changes seldom."""
    assert totals(time=[1, 2, 3], total_allocated=[5, 6, 6], total_reserved=[9, 9, 9]) == {
        (CPU, 0, "allocated"): [(1, 5), (2, 6)],
        (CPU, 0, "reserved"): [(1, 9)],
    }


def test_too_many_are_thinned():
    """Up to the bound every change is there; beyond it the bound holds."""
    exact = [(time, time % 7 + 1) for time in range(100)]
    time, value = zip(*exact, strict=True)
    assert totals(100, time=time, total_allocated=value)[CPU, 0, "allocated"] == exact
    many = totals(100, time=range(1000), total_allocated=[time % 7 + 1 for time in range(1000)])[CPU, 0, "allocated"]
    assert 50 <= len(many) <= 100


@pytest.mark.parametrize("seed", range(20))
def test_thinning_keeps_the_picture(seed):
    """Of random walks as many samples stay as allowed, among them the first, lowest, highest and last of every segment."""
    choose = random.Random(seed)
    count, most = choose.randrange(101, 3000), choose.choice([8, 40, 100])
    value, total = [], 0
    for _ in range(count):
        total = max(0, total + choose.randrange(-50, 60))
        value.append(total)
    given = list(zip(range(count), value, strict=True))
    kept = list(zip(*(column.tolist() for column in thinned(np.arange(count), np.array(value), most)), strict=True))
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert set(kept) <= set(given)
    width = -(-count // (most // 4))
    for begin in range(0, count, width):
        segment = given[begin : begin + width]
        inside = [sample for sample in kept if begin <= sample[0] < begin + width]
        assert (inside[0], inside[-1]) == (segment[0], segment[-1])
        for extreme in (min, max):
            assert extreme(v for _, v in inside) == extreme(v for _, v in segment)
