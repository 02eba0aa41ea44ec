"""The peak of a device in floating-point operations per second, and what share of it steps reach (MFU)."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._columns.phases import FLOPS, MFU

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .step_spans import StepSpan

_PEAKS = {
    "B200": 2250e12,  # NVIDIA HGX B200 datasheet: 36,000 of 8 GPUs with sparsity
    "H100 PCIe": 756e12,  # NVIDIA H100 datasheet, 2022: 1,513 with sparsity
    "H100 NVL": 835e12,  # NVIDIA H100 datasheet, 2024: 1,671 with sparsity
    "H100": 989e12,  # the same, SXM: 1,979 with sparsity
    "H200 NVL": 835e12,  # NVIDIA H200 datasheet: 1,671 with sparsity
    "H200": 989e12,  # the same, SXM: 1,979 with sparsity
    "GH200": 989e12,  # NVIDIA GH200 datasheet: 1,979 with sparsity
    "A100": 312e12,  # NVIDIA A100 datasheet
    "A30": 165e12,  # NVIDIA A30 datasheet
    "A10": 125e12,  # NVIDIA A10 datasheet
    "L40S": 362e12,  # NVIDIA L40S datasheet: 733 with sparsity
    "L4": 121e12,  # NVIDIA L4 datasheet: 242 with sparsity
    "MI300X": 1307e12,  # AMD Instinct MI300X datasheet
    "MI325X": 1307e12,  # AMD Instinct MI325X datasheet
}
"""Matrix products in bfloat16 without sparsity, by words of a device's name as torch has it, the more specific first. Untested on devices."""


def peak_flops() -> float | None:
    """The peak of this process's device: as given, else that of a known device that the program uses; None if it is not known."""
    given: float | None = config.PEAK_FLOPS.read()
    if given is not None:
        return given
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return None
    return known_peak(cuda.get_device_name(0))


@cache
def known_peak(name: str) -> float | None:
    """The peak of a device, by its name; None for an unknown one."""
    words = re.sub(r"[^A-Za-z0-9]+", " ", name)
    is_part = " MIG " in words
    return None if is_part else next((peak for each, peak in _PEAKS.items() if f" {each} " in f" {words} "), None)


def note_flops(spans: Iterable[StepSpan]) -> None:
    """Adds to spans whose events are all known the operations of these, and which share of the peak they reach; not to those from a file that says it."""
    counted = [span for span in spans if span.flops and span.end > span.start and FLOPS not in span.attributes]
    peak = peak_flops() if counted else None
    for span in counted:
        span.attributes[FLOPS] = span.flops
        if peak is not None:
            span.attributes[MFU] = span.flops * 1e9 / (span.end - span.start) / peak
