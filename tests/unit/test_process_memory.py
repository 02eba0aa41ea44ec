"""Memory of the process and of torch's allocators: what a drain adds to its last step, and metrics."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from otel_torchprof._columns.phases import DEVICE_ALLOCATED, DEVICE_FREE, DEVICE_PEAK, DEVICE_RESERVED, FREE
from otel_torchprof._instrument.recorder_metrics import _INSTRUMENTS
from otel_torchprof._record import process_memory
from otel_torchprof._record.process_memory import MemoryOfDrains, allocators, resident_memory

OF_DEVICES = {0: (10, 20, 15), 1: (0, 0, 0), 2: (30, 64, 50)}


def fake_cuda(monkeypatch, *, initialized=True, error=None):
    """torch.cuda with three devices, of which one is not used."""

    def memory_stats(index):
        if error is not None:
            raise error
        allocated, reserved, peak = OF_DEVICES[index]
        return {
            "allocated_bytes.all.current": allocated,
            "reserved_bytes.all.current": reserved,
            "allocated_bytes.all.peak": peak,
        }

    cuda = SimpleNamespace(
        is_initialized=lambda: initialized,
        device_count=lambda: len(OF_DEVICES),
        memory_stats=memory_stats,
        get_device_properties=lambda _index: SimpleNamespace(total_memory=100),
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)


def span(**more):
    return SimpleNamespace(is_whole=True, is_running=False, attributes={}, **more)


def test_devices_that_are_used(monkeypatch):
    """What torch's allocator has on each device where it has something."""
    fake_cuda(monkeypatch)
    assert allocators() == [(0, 10, 20, 15, 100), (2, 30, 64, 50, 100)]


@pytest.mark.parametrize("options", [{"initialized": False}, {"error": RuntimeError("lost")}], ids=["unused", "lost"])
def test_nothing_is_initialized_and_nothing_raises(monkeypatch, options):
    """Without CUDA in use there is nothing, nor where the driver fails, nor before torch is imported."""
    fake_cuda(monkeypatch, **options)
    assert allocators() == []
    monkeypatch.delitem(sys.modules, "torch.cuda")
    assert allocators() == []


def test_the_last_step_of_a_drain_has_what_is_free(monkeypatch):
    """Free memory is read once a second, the device with the most allocated at each drain; both are on the last whole step."""
    fake_cuda(monkeypatch)
    monkeypatch.setattr(process_memory, "free_memory", lambda: 7)
    now = [0.0]
    memory = MemoryOfDrains(lambda: now[0])
    first, last, running = span(), span(), SimpleNamespace(is_whole=True, is_running=True, attributes={})
    memory.note([first, last, running])
    of_device = {DEVICE_ALLOCATED: 30, DEVICE_RESERVED: 64, DEVICE_PEAK: 50, DEVICE_FREE: 70}
    assert (first.attributes, last.attributes, running.attributes) == ({}, {FREE: 7, **of_device}, {})
    now[0] = 0.5
    memory.note([first])
    assert first.attributes == of_device
    now[0] = 1.0
    memory.note([])
    memory.note([first])
    assert first.attributes[FREE] == 7


def test_metrics(monkeypatch):
    """Resident memory, and the allocator of each device that is used, are observed."""
    fake_cuda(monkeypatch)
    observed = {name: observe(None) for _, name, _, observe, _ in _INSTRUMENTS[:4]}
    assert [each.value for each in observed.pop("process.memory.usage")] == [pytest.approx(resident_memory(), rel=0.2)]
    assert {
        name: [(each.value, each.attributes["torch.device.index"]) for each in values]
        for name, values in observed.items()
    } == {
        "torch.allocator.allocated": [(10, 0), (30, 2)],
        "torch.allocator.reserved": [(20, 0), (64, 2)],
        "torch.allocator.peak": [(15, 0), (50, 2)],
    }
