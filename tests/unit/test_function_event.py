"""Single events and averages: torch's constructor, device times, old names, bad input."""

import inspect

import pytest

from otel_torchprof import DeviceType, FunctionEvent, FunctionEventAvg, Kernel

LATER = ("typed_metadata",)
"""Arguments that torch's constructor has from 2.14 on."""


def test_constructor_as_torch():
    """The event's constructor has torch's parameters, in torch's order, with torch's defaults; those of later versions come last."""
    util = pytest.importorskip("torch.autograd.profiler_util", reason="compares with torch's constructor")
    ours, theirs = (inspect.signature(each).parameters for each in (FunctionEvent, util.FunctionEvent))
    later = [name for name in LATER if name not in theirs]
    mine = [(name, p.default) for name, p in ours.items()]
    assert mine[: len(mine) - len(later)] == [(name, p.default) for name, p in theirs.items()]
    assert [name for name, _ in mine[len(mine) - len(later) :]] == later


def test_device_types_as_torch():
    """Values, names and text are torch's, and ours equals torch's."""
    torch = pytest.importorskip("torch", reason="compares with torch's enumeration")
    theirs = torch.autograd.DeviceType.__members__
    assert {device.name: int(device) for device in DeviceType} == {name: int(device) for name, device in theirs.items()}
    for name, device in theirs.items():
        assert DeviceType[name] == device
        assert f"{DeviceType[name]}" == str(device)
    assert theirs["CUDA"] != DeviceType.CPU
    assert DeviceType.CPU == 0


def test_device_events():
    """Kernels count for the operator that launched them; an event on a device has device time and no CPU time."""
    parent, child = (FunctionEvent(i, "a", 1, 0, 10, use_device="cuda") for i in (1, 2))
    kernel = FunctionEvent(3, "k", 1, 0, 4, use_device="cuda", device_type=DeviceType.CUDA)
    parent.append_cpu_child(child)
    child.set_cpu_parent(parent)
    parent.append_kernel("k1", 0, 3)
    child.append_kernel("k2", 0, 4)
    assert (parent.device_time_total, parent.self_device_time_total, child.self_device_time_total) == (7, 3, 4)
    assert (kernel.device_time_total, kernel.cpu_time_total, kernel.self_cpu_time_total) == (4, 0, 0)
    assert child.kernels == [Kernel("k2", 0, 4)]
    with pytest.raises(ValueError, match="event 'k' ran on DeviceType\\.CUDA: only CPU events have kernels"):
        kernel.append_kernel("k3", 0, 1)
    with pytest.raises(TypeError, match="'nothing' is no FunctionEvent"):
        parent.append_cpu_child("nothing")


def test_averages_add_only_their_own_key():
    """An average takes events and averages of its key; anything else is an error that says so."""
    total = FunctionEventAvg()
    total += FunctionEvent(1, "a", 1, 0, 10)
    total += total.__class__().add(FunctionEvent(2, "a", 1, 0, 4, flops=3))
    assert (total.count, total.cpu_time_total, total.cpu_time, total.flops) == (2, 14, 7.0, 3)
    with pytest.raises(ValueError, match="'b' to the average of 'a'"):
        total.add(FunctionEvent(3, "b", 1, 0, 1))
    with pytest.raises(TypeError, match="cannot add 5"):
        total.add(5)
