"""What the legacy engine is asked to do, and how it is asked to stop."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class ProfilerState(enum.IntEnum):
    """What is profiled; torch's names and numbers. The legacy engine knows CPU and CUDA."""

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
    """What is recorded, with the names and in the order of torch's class, whose own objects tell nobody what is in them.

    Raises:
        ValueError: a state that is none of torch's.
    """

    state: Any = ProfilerState.CPU
    """A :class:`ProfilerState`, or torch's."""
    report_input_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    experimental_config: Any = None
    """Accepted as torch has it, without a meaning here."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", ProfilerState(int(self.state)))


@dataclass(frozen=True)
class ProfilerDisableOptions:
    """How a profile is disabled."""

    cleanup_tls_state: bool = True
    """Take it away from the calling thread; False: it continues there."""
    consolidate: bool = True
    """Hand out what was recorded so far, which is then removed from it; False: other threads may continue, and one of them asks."""
