"""Options of the legacy profiler, and of its stop."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class ProfilerState(enum.IntEnum):
    """Device to profile; torch's names and numbers. The legacy profiler supports CPU and CUDA."""

    Disabled = 0
    CPU = 1
    CUDA = 2
    NVTX = 3
    ITT = 4
    PRIVATEUSE1 = 5
    KINETO = 6
    KINETO_GPU_FALLBACK = 7
    KINETO_PRIVATEUSE1_FALLBACK = 8
    KINETO_PRIVATEUSE1 = 9


@dataclass(frozen=True)
class ProfilerConfig:
    """Recording options, with the names and order of torch's class, whose objects have no readable attributes.

    Raises:
        ValueError: the state is not one of torch's.
    """

    state: Any = ProfilerState.CPU
    """A :class:`ProfilerState`, or torch's."""
    report_input_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    experimental_config: Any = None
    """Accepted as in torch, without an effect."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", ProfilerState(int(self.state)))


@dataclass(frozen=True)
class ProfilerDisableOptions:
    """Options for the end of a profile."""

    cleanup_tls_state: bool = True
    """Whether to remove it from the calling thread; if False, it continues there."""
    consolidate: bool = True
    """Whether to return the events so far, which removes them from the profile; False if other threads continue, and
    one of them returns them."""
