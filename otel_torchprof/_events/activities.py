"""What a profile can be asked to collect: ``ProfilerActivity``, as torch has it, also without torch."""

from __future__ import annotations

from otel_torchprof._native import torch_library

from .torch_enum import TorchEnum


class ProfilerActivity(TorchEnum):
    """Groups of activities: ``torch.profiler.ProfilerActivity``, without torch. Wherever this package takes the one it takes the other."""

    CPU = 0
    XPU = 1
    CUDA = 2
    HPU = 3
    MTIA = 4
    PrivateUse1 = 5


def supported_activities() -> set[ProfilerActivity]:
    """The groups that a profile of this package collects: the CPU's."""
    return {ProfilerActivity.CPU}


def kineto_available() -> bool:
    """What torch says of Kineto, for code that asks before it profiles; False without torch. Nothing here needs Kineto."""
    if torch_library.installed_torch() is None:
        return False
    from torch.autograd import kineto_available as torchs

    return bool(torchs())
