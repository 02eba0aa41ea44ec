"""``ProfilerActivity``: the groups of events that a profile can collect, with or without torch."""

from __future__ import annotations

from otel_torchprof._native import torch_library

from .torch_enum import TorchEnum


class ProfilerActivity(TorchEnum):
    """Activity groups.

    ``torch.profiler.ProfilerActivity``, without torch. Every argument of this package takes either class.

    Examples:
        >>> otp.ProfilerActivity.CPU == torch.profiler.ProfilerActivity.CPU
        True
    """

    CPU = 0
    XPU = 1
    CUDA = 2
    HPU = 3
    MTIA = 4
    PrivateUse1 = 5


def supported_activities() -> set[ProfilerActivity]:
    """Returns the activity groups that every profile of this package can collect: the CPU.

    Mirrors ``torch.profiler.supported_activities``.

    Examples:
        >>> [activity.name for activity in otp.supported_activities()]
        ['CPU']
    """
    return {ProfilerActivity.CPU}


def kineto_available() -> bool:
    """Whether torch was built with Kineto; False without torch. This package does not need Kineto.

    Mirrors ``torch.autograd.kineto_available``.

    Examples:
        >>> isinstance(otp.kineto_available(), bool)
        True
    """
    if torch_library.installed_torch() is None:
        return False
    from torch.autograd import kineto_available as torchs

    return bool(torchs())
