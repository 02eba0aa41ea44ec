"""Which slices of a Chrome trace are a device's: by their category, or by their process."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(Enum):
    """What a slice is, in the words in which those that are left out are reported."""

    HOST = "slices of the program"
    DEVICE = "slices of devices"
    BESIDE = "waits and ranges of devices"
    """On a device, but none of its work."""
    PROFILER = "slices of the profiler"


KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        (
            *("cpu_op", "user_annotation", "external_correlation", "cpu_instant_event", "python_function"),
            *("cuda_runtime", "cuda_driver", "glow_runtime", "mtia_runtime", "xpu_runtime", "xpu_driver"),
            *("privateuse1_runtime", "privateuse1_driver", "Operator", "Runtime", "module"),
        ),
        Kind.HOST,
    ),
    **dict.fromkeys(
        (
            *("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "mtia_insight", "hpu_op", "concurrent_kernel"),
            *("Kernel", "Memcpy", "Memset"),
        ),
        Kind.DEVICE,
    ),
    **dict.fromkeys(
        (
            *("gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range"),
            *("xpu_sync", "xpu_scope_profiler", "mtia_counters"),
        ),
        Kind.BESIDE,
    ),
    **dict.fromkeys(("Trace", "overhead"), Kind.PROFILER),
}
"""By category: those of Kineto's activity types, the names with capitals that it wrote until 2022, and this package's own."""

_DEVICE = r"(?:GPU|CUDA|HIP|XPU|NPU|HPU|TPU|IPU|MLU|MTIA|XLA)"
_NAME = re.compile(rf"(?:rank \d+ )?{_DEVICE}(?:[ :]?\d+)?|CUDA functions|/device:(?!CPU).*")


def is_device(kind: str, text: Any) -> bool | None:
    """Whether a process is a device, by its label or its name; None where that does not tell.

    Kineto names a device's process as the program's, and labels both.
    """
    if not isinstance(text, str):
        return None
    if kind == "process_labels" and text == "CPU":
        return False
    return True if _NAME.fullmatch(text) else None


def kind_by_stream(event: Mapping[str, Any]) -> Kind | None:
    """That of a slice which says that it is on a device's stream; None where it does not."""
    args, process = event.get("args"), event.get("pid")
    if isinstance(args, dict) and "stream" in args and "device" in args:
        return Kind.DEVICE
    return Kind.DEVICE if isinstance(process, str) and _NAME.fullmatch(process) else None
