"""Memory of this process and of torch's allocators on devices: metrics, and attributes of the last step of a drain."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._columns.phases import DEVICE_ALLOCATED, DEVICE_FREE, DEVICE_PEAK, DEVICE_RESERVED, FREE
from otel_torchprof._process.free_memory import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._model.step_spans import StepSpan

_EVERY_SECONDS = 1.0


class AllocatorMemory(NamedTuple):
    """Bytes of torch's allocator on one device."""

    device: int
    """Its index."""
    allocated: int
    reserved: int
    peak: int
    """The most that was allocated."""
    total: int
    """Memory of the device."""


def resident_memory() -> int | None:
    """Bytes of resident memory of this process; None where the system does not say. Costs 20 us."""
    try:
        return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def allocators() -> list[AllocatorMemory]:
    """What torch's allocators have on CUDA devices; none where the program has not initialized CUDA. Never raises, and initializes nothing."""
    found: list[AllocatorMemory] = []
    cuda = sys.modules.get("torch.cuda")
    with contextlib.suppress(Exception):  # of torch or its driver: a reading is missing then
        if cuda is not None and cuda.is_initialized():
            for index in range(cuda.device_count()):
                allocated, reserved, peak = (
                    int(cuda.memory_stats(index).get(f"{name}_bytes.all.{which}", 0))
                    for name, which in (("allocated", "current"), ("reserved", "current"), ("allocated", "peak"))
                )
                if reserved:
                    total = int(cuda.get_device_properties(index).total_memory)
                    found.append(AllocatorMemory(index, allocated, reserved, peak, total))
    return found


class MemoryOfDrains:
    """Adds to the last step of a drain what only changes slowly, or takes long to read. Not thread-safe.

    Args:
        clock: seconds. Default: monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at = float("-inf")

    def note(self, spans: Sequence[StepSpan]) -> None:
        """Adds the memory that is free, once a second (some 200 us), and what the device that has allocated most has (20 us)."""
        last = next((span for span in reversed(spans) if span.is_whole and not span.is_running), None)
        if last is None:
            return
        if (now := self._clock()) - self._free_at >= _EVERY_SECONDS:
            self._free_at = now
            last.attributes[FREE] = free_memory()
        if device := max(allocators(), key=lambda each: each.allocated, default=None):
            last.attributes |= {
                DEVICE_ALLOCATED: device.allocated,
                DEVICE_RESERVED: device.reserved,
                DEVICE_PEAK: device.peak,
                DEVICE_FREE: max(device.total - device.allocated, 0),
            }
