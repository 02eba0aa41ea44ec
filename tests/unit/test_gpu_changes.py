"""GPU metrics when something is missing, fails, is lost, appears or hangs; against a stand-in for NVML."""

from __future__ import annotations

import logging
import threading

import gpu_collector
import nvml_stand_in
import pynvml
from forked import in_child
from gpu_collector import FAILED, IDEAL
from nvml_stand_in import DRIVER_NOT_LOADED, GPU_IS_LOST, VERSION_MISMATCH

from otel_torchprof._instrument.gpu_metrics import BUDGET, REDISCOVERY, GpuPass

clock, collector, watch = gpu_collector.clock, gpu_collector.collector, gpu_collector.watch
nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library


def test_quantities_that_a_card_lacks_are_left_out(nvml, collector, watch):
    """A card that tells little has the series that it can have; the others are off, with NVML's reason."""
    nvml.read("little")
    metrics = watch()
    assert {key[0] for key in collector.series()} == {
        "hw.gpu.memory.usage",
        "hw.gpu.memory.limit",
        "hw.gpu.memory.utilization",
        "hw.temperature",
        "hw.status",
    }
    off = {name for name, state in metrics.health.sources.items() if state != "on"}
    assert off == {"hw.gpu.utilization", "hw.gpu.io", "hw.power", "hw.energy", "hw.errors"}
    assert {metrics.health.sources[name] for name in off} == {"off: Not Supported"}


def test_what_one_card_lacks_is_a_note(nvml, collector, watch):
    """Where another card has a metric it is on, and a note says who lacks it and why."""
    nvml.read("two_cards")
    nvml.set("gpu.0.power", None)
    metrics = watch()
    assert [key for key in collector.series() if key[0] == "hw.power"] == [("hw.power", "GPU 1")]
    assert metrics.health.sources["hw.power"] == "on"
    assert "hw.power of GPU 0: Not Supported" in metrics.health.notes
    assert "hw.power of GPU 0: Not Supported" in str(metrics.health)


def test_a_lost_card_fails_and_comes_back(nvml, collector, clock, watch, caplog):
    """A lost card keeps only its state, `failed`, until a look for GPUs, 30 s on, finds it again; one line is logged."""
    metrics = watch()
    assert collector.series() == IDEAL
    nvml.set("gpu.0.lost", 1)
    assert collector.series() == FAILED
    assert collector.series() == FAILED
    assert metrics.health.sources["hw.power"] == "off: the GPU is lost"
    nvml.set("gpu.0.lost", None)
    assert collector.series() == FAILED
    assert nvml.calls("nvmlInitWithFlags") == 1
    clock.now += REDISCOVERY
    assert collector.series() == IDEAL
    assert metrics.health.sources["hw.power"] == "on"
    assert (nvml.calls("nvmlInitWithFlags"), nvml.users) == (2, 1)
    assert len([record for record in caplog.records if "lost" in record.message]) == 1


def test_a_card_lost_amid_a_pass_leaves_no_halves(nvml, collector, watch):
    """What the pass had read of a card before it was lost is not reported."""
    watch()
    nvml.fail("nvmlDeviceGetTotalEnergyConsumption", GPU_IS_LOST)
    assert collector.series() == FAILED


def test_a_card_that_stays_lost_stays_failed(nvml, collector, clock, watch):
    """A look for GPUs that does not find it keeps it in mind, and says so; the other card goes on."""
    nvml.read("two_cards")
    metrics = watch()
    nvml.set("gpu.0.lost", 1)
    for _ in range(3):
        clock.now += REDISCOVERY
        series = collector.series()
        assert {key: value for key, value in series.items() if key[1] == "GPU 0"} == FAILED
        assert series["hw.power", "GPU 1"] == 300.0
    assert any("GPU 0" in note and "lost" in note for note in metrics.health.notes)
    assert nvml.users == 1


def test_a_card_that_appears_is_found(nvml, collector, clock, watch):
    """A card that was not there is in the first collection after 30 s, and no sooner."""
    nvml.read("two_cards")
    nvml.set("count", 1)
    metrics = watch()
    nvml.set("count", 2)
    assert {key[1] for key in collector.series()} == {"GPU 0"}
    clock.now += REDISCOVERY
    assert {key[1] for key in collector.series()} == {"GPU 0", "GPU 1"}
    assert len(metrics.health.devices) == 2


def test_series_outlive_a_change_of_numbers(nvml, collector, clock, watch):
    """When a card goes and the next one moves up, that one's series keep their attributes."""
    nvml.read("two_cards")
    watch()
    before = collector.series()
    nvml.set("count", 1)
    nvml.set("gpu.0.uuid", "GPU-aaaa1111-0000-0000-0000-000000000000")
    nvml.set("gpu.0.power", 299000)
    clock.now += REDISCOVERY
    after = collector.series()
    assert (before["hw.power", "GPU 1"], after["hw.power", "GPU 1"]) == (300.0, 299.0)
    assert after["hw.status", "GPU 0", "failed"] == 1


def test_discovery_is_no_more_often_than_every_30_seconds(nvml, collector, clock, watch):
    """Many collections ask once per 30 s which GPUs there are, failing NVML or not."""
    nvml.fail("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    watch()
    for _ in range(50):
        collector.collect()
    assert nvml.calls("nvmlInitWithFlags") == 1
    nvml.fail("nvmlInitWithFlags", None)
    clock.now += REDISCOVERY
    for _ in range(50):
        collector.collect()
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlDeviceGetCount_v2")) == (2, 1)


def test_mig(nvml, collector, watch):
    """A split card: memory by MIG device with the card as parent, all else of the card, no utilisation and why."""
    nvml.read("mig")
    metrics = watch()
    collected = collector.collect()
    usage = {point.attributes["hw.name"]: point for point in collected["hw.gpu.memory.usage"].data.data_points}
    assert {name: point.value for name, point in usage.items()} == {
        "GPU 0 MIG 0": 5234491392,
        "GPU 0 MIG 1": 1046898278,
    }
    (power,) = collected["hw.power"].data.data_points
    assert {point.attributes["hw.parent"] for point in usage.values()} == {power.attributes["hw.id"]}
    assert "hw.parent" not in power.attributes
    assert "hw.gpu.utilization" not in collected
    assert "split by MIG" in metrics.health.sources["hw.gpu.utilization"]


def test_a_chosen_mig_device(nvml, collector, watch, monkeypatch):
    """Where CUDA shows one MIG device, the memory of the others is not ours to tell."""
    nvml.read("mig")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-22222222-5c4d-5e6f-8a9b-0c1d2e3f4a5b")
    watch()
    series = collector.series()
    assert [key[1] for key in series if key[0] == "hw.gpu.memory.usage"] == ["GPU 0 MIG 1"]
    assert series["hw.power", "GPU 0"] == 51.0


def test_a_split_card_without_mig_devices(nvml, collector, watch):
    """It has no memory to tell, and a reason."""
    nvml.read("mig")
    nvml.set("gpu.0.mig.max", 0)
    metrics = watch()
    assert "hw.gpu.memory.usage" not in collector.collect()
    assert "has no MIG device" in metrics.health.sources["hw.gpu.memory.usage"]


def no_library(name):
    raise OSError(name)


def test_a_missing_library_is_a_reason(collector, watch, monkeypatch, caplog):
    """Without NVIDIA's library nothing is reported, nothing raised; health says why, and one line is logged, no warning."""
    caplog.set_level(logging.INFO, "otel_torchprof")
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    metrics = watch()
    assert collector.collect() == {}
    assert "Shared Library Not Found" in metrics.health.sources["nvml"]
    assert str(metrics.health).startswith("nvml off: NVML Shared Library Not Found")
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_nvml_that_fails_at_first_is_tried_again(nvml, collector, clock, watch, caplog):
    """A driver that does not fit is warned of once and is a reason; when it fits, metrics begin."""
    nvml.fail("nvmlInitWithFlags", VERSION_MISMATCH)
    metrics = watch()
    for _ in range(3):
        clock.now += REDISCOVERY
        assert collector.collect() == {}
    assert "version mismatch" in metrics.health.sources["nvml"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    nvml.fail("nvmlInitWithFlags", None)
    clock.now += REDISCOVERY
    assert collector.series() == IDEAL


def test_nvml_shut_down_by_others_is_opened_again(nvml, collector, watch):
    """When somebody shuts NVML down once too often, one collection misses it and the next has everything."""
    watch()
    pynvml.nvmlShutdown()
    assert collector.series() == {}
    assert collector.series() == IDEAL


def test_the_choice_outlives_a_lost_card(nvml, collector, clock, watch, monkeypatch):
    """A number keeps meaning the card that it meant at first, though fewer cards are listed now."""
    nvml.read("two_cards")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    watch()
    nvml.set("gpu.0.lost", 1)
    clock.now += REDISCOVERY
    assert collector.series() == FAILED


def test_a_call_that_hangs_keeps_nobody_else(nvml, collector, clock, watch):
    """While a reader hangs in the driver, another gets nothing at once, health and stop() return, and the hanging one cleans up."""
    metrics = watch(lock_timeout=0)
    nvml.block("nvmlDeviceGetPowerUsage")
    collected = []
    reader = threading.Thread(target=lambda: collected.append(collector.series()))
    reader.start()
    nvml.wait_until_blocked()
    clock.now += 1
    watched = metrics._pass
    assert watched.look().points == {}
    assert watched.points("hw.power") == ()
    assert metrics.health.sources["nvml"] == "on"
    metrics.stop()
    assert nvml.users == 1
    nvml.release()
    reader.join()
    assert nvml.users == 0
    assert set(collected[0].values()) <= set(IDEAL.values())


def test_patience_is_lost_once(nvml, clock):
    """The first who finds another thread reading waits a moment, those after it not at all, until that reading has ended."""
    watched = GpuPass(everything=True, clock=clock, lock_timeout=0.25)

    class Held:
        waits: list[float] = []  # noqa: RUF012 - one object is made

        def acquire(self, timeout):
            self.waits.append(timeout)
            return False

    free, watched._lock = watched._lock, Held()
    assert [watched.look().points for _ in range(3)] == [{}, {}, {}]
    assert Held.waits == [0.25, 0, 0]
    watched._lock = free
    assert watched.look().points
    assert not watched._hangs
    watched.close()


def test_after_a_hang_it_goes_on(nvml, clock):
    """When the hanging call returns, the next look reads as before."""
    watched = GpuPass(everything=True, clock=clock, lock_timeout=0)
    watched.look()
    clock.now += 1
    nvml.block("nvmlDeviceGetPowerUsage")
    thread = threading.Thread(target=watched.look)
    thread.start()
    nvml.wait_until_blocked()
    assert [watched.look().points for _ in range(2)] == [{}, {}]
    nvml.release()
    thread.join()
    clock.now += 1
    assert watched.points("hw.power")[0].value == 412.345
    watched.close()


def test_a_slow_driver_is_not_asked_everything(nvml, collector, clock, watch):
    """A pass that takes too long leaves out the rest, with the reason."""
    metrics = watch()
    clock.each = BUDGET / 4
    series = collector.series()
    clock.each = 0.0
    assert ("hw.status", "GPU 0", "ok") in series
    assert ("hw.gpu.io", "GPU 0", "receive") not in series
    assert "longer than 1 s" in metrics.health.sources["hw.gpu.io"]


def test_an_error_of_ours_is_logged_and_not_raised(nvml, collector, watch, monkeypatch, caplog):
    """Should a pass itself fail, readers get nothing from it and the log says what happened."""
    watch()
    monkeypatch.setattr(GpuPass, "_pass", lambda _: 1 / 0)
    assert collector.collect() == {}
    assert {record.message for record in caplog.records} == {"The GPUs could not be read"}


def test_a_forked_child_goes_on(nvml, collector, clock, watch):
    """In a forked child readers get everything, from an NVML that the child has opened; the parent goes on too."""
    watch()
    assert in_child(lambda: collector.series() == IDEAL and nvml.users == 2) == "True"
    assert collector.series() == IDEAL
    assert nvml.users == 1
