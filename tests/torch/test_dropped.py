"""What is left of a profile that nobody stopped."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from followed_calls import is_followed  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof import profile  # noqa: E402


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_profile_that_is_dropped_takes_everything_back(in_a_cycle):
    """A running profile that is collected instead of stopped leaves no profile function, hook or flag behind."""

    def drop():
        dropped = profile(with_stack=True, with_modules=True, profile_memory=True, record_shapes=True, all_threads=True)
        dropped.start()
        dropped.itself = dropped if in_a_cycle else None

    drop()
    gc.collect()
    assert sys.getprofile() is None
    assert threading.getprofile() is None
    assert torch.autograd.profiler._is_profiler_enabled is False
    assert not torch.autograd._profiler_enabled()
    assert not is_followed(torch.nn.Module._call_impl)
    with torch.profiler.profile(profile_memory=True) as other:
        torch.ones(3)
    assert any(event.name == "aten::ones" for event in other.events())


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"schedule": lambda _: otp.ProfilerAction.RECORD}, {"record_shapes": True}])
def test_a_profile_that_has_ended_goes_with_its_last_reference(arguments, read):
    """What it has recorded is freed where the program drops it, not when the garbage collector next comes by."""
    with profile(**arguments) as first:  # what is made with the first profile of a process stays
        torch.ones(1)
    with profile(**arguments) as second:
        torch.ones(1)
        second.step()
    if read:
        second.key_averages()
    reference = weakref.ref(second)
    gc.disable()
    try:
        del second, first
        assert reference() is None
    finally:
        gc.enable()
