"""A recording that is to hold memory, where there is nobody to tell of it."""

from __future__ import annotations

import otel_torchprof as otp
from otel_torchprof._native import torch_library


def test_without_torch(monkeypatch):
    """Where torch is not installed labels are recorded all the same, and ``health`` says why there is no memory."""
    monkeypatch.setattr(torch_library, "installed_torch", lambda: None)
    with otp.profile(profile_memory=True) as prof, otp.record_function("label"):
        pass
    assert [event.name for event in prof.events()] == ["label"]
    assert [event.cpu_memory_usage for event in prof.events()] == [0]
    assert not len(prof.memory["time"])
    assert "memory is not recorded: torch is not installed" in str(prof.health)


def test_switched_off(monkeypatch):
    """With the switch off nothing is recorded, and that is no error."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    with otp.profile(profile_memory=True) as prof:
        pass
    assert not len(prof.events())
    assert prof.memory is None
