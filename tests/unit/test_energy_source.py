"""Energy on spans and in traces: readings of the stand-in's counter while a profile runs, and the joules of steps and labels."""

from __future__ import annotations

import gc
import json
import threading

import numpy as np
import nvml_stand_in
import pytest

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch
from otel_torchprof._encode import chrome
from otel_torchprof._model.devices import joules_between
from otel_torchprof._record.energy_source import EnergySource

nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library

SECOND = 1_000_000_000


def readings(*rows):
    """Rows of (time, joules, device)."""
    time, joules, device = zip(*rows, strict=True)
    return {"time": time, "joules": joules, "device_index": device}


def batch_of(energy, **columns):
    return Batch.of({"start": [0], "end": [1], **columns}, ["", "label"], energy=energy)


def between(batch, *segments):
    starts, ends = (np.array(column, dtype=np.int64) for column in zip(*segments, strict=True))
    return joules_between(batch, starts, ends)


def test_all_devices_where_none_was_timed():
    """Without times of devices a segment has what all that were read consumed; without readings it has nothing."""
    batch = batch_of(readings((0, 5.0, 0), (10, 15.0, 0), (0, 100.0, 1), (10, 130.0, 1)))
    assert between(batch, (0, 10), (5, 10)).tolist() == [40.0, 20.0]
    assert between(batch_of(None), (0, 10)) is None


def test_devices_in_use():
    """With times of devices a segment has what those consumed, not what others did."""
    pairs = {"event": [1], "start": [0], "duration": [1], "stream": [0], "device_type": [1], "device_index": [1]}
    batch = Batch.of(
        {"start": [0]}, [""], energy=readings((0, 5.0, 0), (10, 15.0, 0), (0, 100.0, 1), (10, 130.0, 1)), devices=pairs
    )
    assert between(batch, (0, 10)).tolist() == [30.0]


def test_segments_beyond_the_readings_have_none():
    """Where readings do not reach around a segment nothing is told of it."""
    assert np.isnan(between(batch_of(readings((5, 0.0, 0), (10, 1.0, 0))), (0, 10))).all()


def test_readings_of_a_recording(nvml):
    """The counter is read at the start, between, and at the stop, on a thread that is gone afterwards; times rise."""
    nvml.read("data_centre")
    source = EnergySource()
    assert source.state == "on"
    source.start()
    names = [thread.name for thread in threading.enumerate()]
    source.stop()
    source.stop()
    assert "otel-torchprof-energy" in names
    assert "otel-torchprof-energy" not in [thread.name for thread in threading.enumerate()]
    columns = source.columns()
    assert len(columns["time"]) >= 2
    assert (np.diff(columns["time"]) >= 0).all()
    assert nvml.users == 0


def test_no_counter_is_a_reason(nvml):
    """A card without a counter is said to have none, nothing runs, and NVML is left."""
    nvml.read("little")
    with otp.profile(operators=False, energy=True) as prof:
        pass
    assert prof.health.energy.startswith("off: ")
    assert prof._batch().energy is None
    assert nvml.users == 0


def test_steps_and_long_labels_have_joules(nvml, monkeypatch):
    """On spans, roots have the joules of their time, and so have labels that are no shorter than what lies between readings."""
    nvml.read("data_centre")
    monkeypatch.setattr("otel_torchprof._encode.event_attributes.SHORTEST_WITH_ENERGY_NS", 0)
    prof = otp.profile(operators=False, energy=True)
    with prof, otp.record_function("label"):
        nvml.set("gpu.0.energy", 10**9)
    joules = {span.name: span.attributes.get("torch.device.energy") for span in prof.spans()}
    energy = prof._batch().energy
    assert prof.health.energy == "on"
    assert joules.keys() == {"torch.profile", "label"}
    assert 0 < joules["label"] <= joules["torch.profile"] <= energy["joules"].max() - energy["joules"].min()


def test_power_in_chrome_json():
    """Chrome JSON has the power of each device between readings as a counter."""
    batch = batch_of(readings((0, 0.0, 0), (SECOND, 50.0, 0), (3 * SECOND, 350.0, 0)))
    trace = json.loads(b"".join(chrome.encode(batch, base_ns=0)))
    samples = [(e["ts"], e["args"]["W"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert samples == [(0, 50.0), (1e6, 150.0), (3e6, 150.0)]


def test_one_reading_is_no_power():
    """A single reading draws nothing."""
    trace = json.loads(b"".join(chrome.encode(batch_of(readings((0, 7.0, 0))), base_ns=0)))
    assert not [e for e in trace["traceEvents"] if e["ph"] == "C"]


def test_bad_readings_never_reach_the_program(nvml):
    """A driver that fails in the middle of a recording leaves the program alone."""
    nvml.read("data_centre")
    with otp.profile(operators=False, energy=True) as prof:
        nvml.fail("nvmlDeviceGetTotalEnergyConsumption", 15)
    assert len(prof._batch().energy["time"]) >= 1


@pytest.mark.parametrize("seed", range(5))
def test_covered_time_against_a_model(seed):
    """What devices worked for in each segment is the length of the union of its pairs, stream by stream."""
    from otel_torchprof._model.devices import covered_between

    random = np.random.default_rng(seed)
    count = 40
    begun = np.sort(random.integers(0, 1000, count))
    start = begun + random.integers(0, 100, count)
    duration, stream = random.integers(0, 60, count), random.integers(0, 3, count)
    pairs = {"event": np.arange(1, count + 1), "start": start, "duration": duration, "stream": stream}
    pairs |= {"device_type": np.ones(count), "device_index": np.zeros(count)}
    batch = Batch.of({"start": begun, "end": begun + 1}, [""], devices=pairs)
    edges = np.array([0, 300, 700, 1000])
    covered, expected = covered_between(batch, edges[:-1], edges[1:] - 1), [0, 0, 0]
    taken = {one: set() for one in range(3)}
    for row in sorted(range(count), key=lambda row: (start[row], row)):
        time = set(range(start[row], start[row] + duration[row]))
        part = int(np.searchsorted(edges, begun[row], side="right")) - 1
        if part < 3 and begun[row] <= edges[part + 1] - 1:
            expected[part] += len(time - taken[stream[row]])
        taken[stream[row]] |= time
    assert covered.tolist() == expected


def test_a_driver_that_does_not_answer(nvml, monkeypatch):
    """A stop waits for a driver that hangs no longer than so much, keeps what was read before, and says so."""
    nvml.read("data_centre")
    source = EnergySource()
    monkeypatch.setattr("otel_torchprof._record.energy_source.STOP_SECONDS", 0.01)
    monkeypatch.setattr("otel_torchprof._record.energy_source.READ_SECONDS", 0.0)
    asked, answer = threading.Event(), threading.Event()
    read, me = source._counters.read, threading.current_thread()

    def hangs():
        if threading.current_thread() is not me:
            asked.set()
            answer.wait()
        return read()

    monkeypatch.setattr(source._counters, "read", hangs)
    source.start()
    asked.wait()
    thread = source._thread
    source.stop()
    assert source.state == "off: the driver has not answered within 0.01 s"
    assert len(source.columns()["time"]) >= 1
    answer.set()
    thread.join()


def test_an_interrupted_stop_is_finished_by_the_next(nvml, monkeypatch):
    """A stop that is interrupted while it waits leaves the thread to be ended by the next one, whose reading is kept."""
    nvml.read("data_centre")
    source = EnergySource()
    source.start()
    thread = source._thread

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.stop()
    before = len(source.columns()["time"])
    source.stop()
    assert not thread.is_alive()
    assert len(source.columns()["time"]) > before


def test_nobody_keeps_the_library_who_does_not_read(nvml):
    """NVML is shut down where there is no counter, and by profiles that were made, or made ready, and never recorded."""
    prof = otp.profile(operators=False, energy=True)
    assert nvml.users == 1
    del prof
    gc.collect()
    assert nvml.users == 0
    nvml.read("little")
    without = otp.profile(operators=False, energy=True)
    assert without.health.energy.startswith("off: ")
    assert nvml.users == 0


def test_stopped_by_the_thread_that_reads(nvml):
    """A recording that is dropped may be stopped where garbage is collected, on the thread of the readings too: that ends then."""
    source, collected, failed = EnergySource(), threading.Event(), []
    read = source._read

    def reading():
        read()
        if threading.current_thread().name == "otel-torchprof-energy" and not collected.is_set():
            collected.set()
            try:
                source.stop()
            except RuntimeError as error:
                failed.append(error)

    source._read = reading
    source.start()
    reader = source._thread
    assert collected.wait(30)
    reader.join(30)
    assert not failed
    assert not reader.is_alive()
    assert nvml.users == 0


def test_unlike_cards_whose_numbers_are_not_known(nvml, monkeypatch):
    """Where torch's number of a card is not known nothing is read, and the reason says what to set; with that there are joules."""
    nvml.read("two_cards")
    nvml.set("gpu.1.name", "another card")
    assert "CUDA_DEVICE_ORDER" in EnergySource().state
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert EnergySource().state == "on"
