"""Energy: reading the cards' counters, and what a series of readings says of any segment of time."""

from __future__ import annotations

import threading

import numpy as np
import nvml_stand_in
import pytest
from forked import in_child
from hypothesis import given
from hypothesis import strategies as st
from nvml_stand_in import DRIVER_NOT_LOADED, GPU_IS_LOST

from otel_torchprof._model.devices import interpolated
from otel_torchprof._record.energy_source import EnergyCounters, EnergySeries

nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library

CARD = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
NOW = 1_790_000_000_000_000_000
"""A Unix time in ns of today's size: doubles do not hold such to the last nanosecond."""


@pytest.fixture
def counters(nvml):
    made = EnergyCounters()
    yield made
    made.close()


def test_counters_are_read_in_joules(counters):
    """Each visible card's counter, in joules, by UUID."""
    assert counters.health == "on"
    assert counters.devices == (CARD,)
    assert counters.read() == {CARD: 987654.321}


def test_a_reading_asks_one_question_per_card(nvml, counters):
    """Nothing but the counter is asked for at a step's boundary."""
    before = nvml.calls("nvmlDeviceGetTotalEnergyConsumption")
    others = ("nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID", "nvmlInitWithFlags")
    calls = [nvml.calls(function) for function in others]
    for _ in range(10):
        counters.read()
    assert nvml.calls("nvmlDeviceGetTotalEnergyConsumption") == before + 10
    assert [nvml.calls(function) for function in others] == calls


def test_counters_never_fall(nvml, counters):
    """A counter that begins anew goes on from where it was; a reading that comes late repeats the one before."""
    nvml.set("gpu.0.energy", 2_000)
    assert counters.read() == {CARD: 987654.321 + 2}
    nvml.set("gpu.0.energy", 1_999)
    assert counters.read() == {CARD: 987654.321 + 2}
    nvml.set("gpu.0.energy", 5_000)
    assert counters.read() == {CARD: 987654.321 + 5}


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda nvml: nvml.fail("nvmlInitWithFlags", DRIVER_NOT_LOADED), "driver is not loaded"),
        (lambda nvml: nvml.read("little"), "Not Supported"),
        (lambda nvml: nvml.read("mig"), "all its MIG devices together"),
        (lambda nvml: nvml.set("count", 0), "there is no GPU"),
        (lambda nvml: nvml.set("gpu.0.lost", 1), "GPU 0 does not answer: GPU is lost"),
    ],
)
def test_no_counter_is_a_reason(nvml, prepare, reason):
    """Where there is nothing to read it is off and says why, and reading gives nothing."""
    prepare(nvml)
    counters = EnergyCounters()
    assert counters.read() == {}
    assert counters.health.startswith("off: ")
    assert reason in counters.health
    counters.close()
    assert nvml.users == 0


def test_only_visible_cards_in_cudas_order(nvml, monkeypatch):
    """The cards are those that CUDA shows, in its order, so that a device's number finds its counter."""
    nvml.read("two_cards")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa1,GPU-aaaa0")
    counters = EnergyCounters()
    assert [uuid[:9] for uuid in counters.devices] == ["GPU-aaaa1", "GPU-aaaa0"]
    assert list(counters.read().values()) == [9000.0, 1000.0]
    assert [counters.of_device(index) for index in (-1, 0, 1, 2)] == [None, *counters.devices, None]
    counters.close()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    by_speed = EnergyCounters()
    assert (len(by_speed.read()), by_speed.of_device(0)) == (2, None)
    by_speed.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    none = EnergyCounters()
    assert (none.devices, none.read()) == ((), {})
    assert "shows no GPU" in none.health
    none.close()


def test_one_card_without_a_counter(nvml):
    """A card without a counter is left out; the other one is read, and that is on."""
    nvml.read("two_cards")
    nvml.set("gpu.0.energy", None)
    counters = EnergyCounters()
    assert counters.health == "on"
    assert list(counters.read()) == [counters.devices[1]]
    counters.close()


def test_a_lost_card_is_left_out_until_it_answers(nvml, counters):
    """While it is lost it has no reading and a reason, afterwards readings again."""
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", GPU_IS_LOST)
    assert (counters.read(), counters.health) == ({}, "off: GPU is lost")
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", None)
    assert (counters.read(), counters.health) == ({CARD: 987654.321}, "on")


def test_closed_counters_read_nothing(nvml, counters):
    """After close() there are no readings, and NVML is shut down."""
    counters.close()
    assert (counters.read(), nvml.users) == ({}, 0)
    assert counters.health.startswith("off: closed")


def test_counters_do_not_reach_into_a_child(nvml, counters):
    """In a forked child the parent's counters read nothing; new ones read all."""
    assert in_child(lambda: (counters.read(), EnergyCounters().read())) == f"({{}}, {{'{CARD}': 987654.321}})"
    assert counters.read() == {CARD: 987654.321}


def test_a_reading_does_not_wait_for_another(nvml, counters):
    """While another thread hangs in NVML, a reading of the counters returns."""
    user = counters._nvml
    nvml.block("nvmlDeviceGetPowerUsage")
    thread = threading.Thread(target=user.power, args=(counters._gpus[0],))
    thread.start()
    nvml.wait_until_blocked()
    assert counters.read() == {CARD: 987654.321}
    nvml.release()
    thread.join()


def series(*samples, **options):
    made = EnergySeries(**options)
    for time, joules in samples:
        made.add(NOW + time, joules)
    return made


def segments(made, starts, ends):
    """Joules of segments (Unix ns) along the readings of a series."""
    return interpolated(*made.readings(), np.asarray(starts, np.int64), np.asarray(ends, np.int64))


def between(made, start, end):
    return float(segments(made, [NOW + start], [NOW + end])[0])


def test_joules_between_readings_are_even():
    """Between two readings the power is even, and over several their joules add up."""
    made = series((0, 10.0), (100, 30.0), (200, 30.0), (400, 70.0))
    assert between(made, 0, 400) == 60.0
    assert between(made, 25, 75) == pytest.approx(10.0)
    assert between(made, 50, 300) == pytest.approx(30.0)
    assert between(made, 120, 180) == 0.0
    assert between(made, 30, 30) == 0.0


def test_what_the_readings_do_not_cover_is_nan():
    """A segment that begins before the first reading, ends after the last, or before it begins, has no joules."""
    made = series((0, 1.0), (100, 2.0))
    starts, ends = NOW + np.array([-1, 0, 60, 0]), NOW + np.array([50, 101, 50, 100])
    assert np.isnan(segments(made, starts, ends)).tolist() == [True, True, True, False]
    assert np.isnan(segments(EnergySeries(), [1, 2], [3, 4])).all()
    assert segments(EnergySeries(), [], []).shape == (0,)
    assert np.isnan(between(series((0, 1.0)), -1, 1))


def test_late_readings_find_their_place():
    """Readings of two threads in any order give the same answer, and joules never run backwards."""
    made = series((200, 30.0), (0, 10.0), (100, 31.0))
    assert between(made, 0, 100) == 21.0
    assert between(made, 100, 200) == 0.0


def test_old_readings_are_forgotten():
    """What no later segment needs goes; a segment that begins at that time is still known."""
    made = series(*((10 * number, float(number)) for number in range(100)))
    made.forget(NOW + 505)
    assert len(made) == 50
    assert between(made, 505, 990) == pytest.approx(48.5)
    assert np.isnan(between(made, 499, 990))
    made.forget(NOW + 10_000)
    assert len(made) == 1


def test_memory_is_bounded():
    """However many readings come, no more than the limit are kept, the newest."""
    made = series(*((number, float(number)) for number in range(1000)), limit=100)
    assert len(made) <= 100
    assert between(made, 990, 999) == pytest.approx(9.0)


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.floats(0, 1e6)), min_size=2, max_size=30),
    st.lists(st.integers(0, 10**10), min_size=3, max_size=3),
)
def test_joules_add_up(samples, times):
    """The joules of two segments in a row are those of both together, never less than none."""
    made = series(*zip(sorted(time for time, _ in samples), sorted(joules for _, joules in samples), strict=True))
    first, middle, last = sorted(times)
    parts = between(made, first, middle), between(made, middle, last)
    whole = between(made, first, last)
    if not np.isnan(whole):
        assert sum(parts) == pytest.approx(whole, abs=1e-6)
        assert min(parts) >= 0.0


def test_threads_may_add_read_and_forget():
    """Adding, asking and forgetting at once loses nothing and breaks nothing."""
    made = EnergySeries()
    begin = threading.Barrier(4)

    def add(offset):
        begin.wait()
        for number in range(2000):
            made.add(NOW + 2 * number + offset, number + offset / 2)

    def ask():
        begin.wait()
        for number in range(200):
            answers = segments(made, [NOW + number], [NOW + number + 50])
            assert np.isnan(answers[0]) or answers[0] >= 0.0
            made.forget(NOW)

    threads = [threading.Thread(target=work) for work in (lambda: add(0), lambda: add(1), ask)]
    for thread in threads:
        thread.start()
    begin.wait()
    for thread in threads:
        thread.join()
    assert len(made) == 4000
    assert between(made, 0, 3998) == pytest.approx(1999.0)
