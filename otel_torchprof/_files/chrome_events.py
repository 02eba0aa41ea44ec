"""Kinds of the events of Chrome traces, by phase, category and process."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

OTHER_EVENTS = {
    phase: name
    for name, phases in {
        "arrows": "stf",
        "instant events": "iI",
        "counter values": "C",
        "asynchronous events": "bneSTpF",
        "events of objects": "NOD",
        "marks, samples and dumps": "RcPvV",
    }.items()
    for phase in phases
}
"""Events that are no slices, by phase."""


class SliceKind(Enum):
    """Kinds of slices; the values are the words in which omitted ones are reported."""

    HOST = "slices of the program"
    DEVICE = "slices of devices"
    BESIDE = "waits and ranges of devices"
    """On a device, but not work of it."""
    PROFILER = "slices of the profiler"


KINDS: dict[str, SliceKind] = {
    **dict.fromkeys(
        (
            *("cpu_op", "user_annotation", "external_correlation", "cpu_instant_event", "python_function"),
            *("cuda_runtime", "cuda_driver", "glow_runtime", "mtia_runtime", "xpu_runtime", "xpu_driver"),
            *("privateuse1_runtime", "privateuse1_driver", "Operator", "Runtime", "module"),
        ),
        SliceKind.HOST,
    ),
    **dict.fromkeys(
        (
            *("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "mtia_insight", "hpu_op", "concurrent_kernel"),
            *("Kernel", "Memcpy", "Memset"),
        ),
        SliceKind.DEVICE,
    ),
    **dict.fromkeys(
        (
            *("gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range"),
            *("xpu_sync", "xpu_scope_profiler", "mtia_counters"),
        ),
        SliceKind.BESIDE,
    ),
    **dict.fromkeys(("Trace", "overhead"), SliceKind.PROFILER),
}
"""Kinds by category: Kineto's activity types, its capitalized names until 2022, and those of this package."""

_DEVICE = r"(?:GPU|CUDA|HIP|XPU|NPU|HPU|TPU|IPU|MLU|MTIA|XLA)"
_NAME = re.compile(rf"(?:rank \d+ )?{_DEVICE}(?:[ :]?\d+)?|CUDA functions|/device:(?!CPU).*")


def is_device(kind: str, text: Any) -> bool | None:
    """Whether a process is a device, by its label or its name; None if unknown.

    Kineto gives the processes of devices the program's name, and labels both.
    """
    if not isinstance(text, str):
        return None
    if kind == "process_labels" and text == "CPU":
        return False
    return True if _NAME.fullmatch(text) else None
