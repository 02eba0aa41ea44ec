"""What a profile can be asked to collect: ``ProfilerActivity``, as torch has it, also without torch."""

from __future__ import annotations

import enum

from otel_torchprof._native import torch_library


class ProfilerActivity(enum.IntEnum):
    """Groups of activities: the values and the text of ``torch.profiler.ProfilerActivity``, without torch.

    ``ours == torchs`` holds for the same group; ``torchs == ours`` does not, since torch's enumeration knows only itself.
    Wherever this package takes the one it takes the other.
    """

    CPU = 0
    XPU = 1
    CUDA = 2
    HPU = 3
    MTIA = 4
    PrivateUse1 = 5

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ == "ProfilerActivity":
            return int(self) == int(other)  # type: ignore[call-overload, no-any-return]  # torch's converts to int too
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return f"ProfilerActivity.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def supported_activities() -> set[ProfilerActivity]:
    """The groups that a profile of this package collects: the CPU's."""
    return {ProfilerActivity.CPU}


def kineto_available() -> bool:
    """What torch says of Kineto, for code that asks before it profiles; False without torch. Nothing here needs Kineto."""
    if torch_library.installed_torch() is None:
        return False
    from torch.autograd import kineto_available as torchs

    return bool(torchs())
