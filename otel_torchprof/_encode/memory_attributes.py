"""Attributes of what events allocated: how much, and how much was in use then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._tree.memory import CPU_TYPES, DEVICE_TYPES, NO_PEAK, peaks_between, peaks_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._tree.memory import MovedMemory

    from .attribute_source import Source, Values


def moved(device: str, direction: str) -> Callable[[Source], Values | None]:
    """Bytes allocated or released, ``direction``, by an event and what it called; ``device`` is a fact of the source."""

    def compute(source: Source) -> Values | None:
        found: MovedMemory | None = getattr(source, device)
        if found is None:
            return None
        values = source.spread(getattr(found, direction))
        return values, (values != 0) & source.is_event

    return compute


def cpu_peak(source: Source) -> Values | None:
    """The highest total that the CPU's allocator told inside of each event; in the time of each synthetic span."""
    return _peak(source, CPU_TYPES)


def device_peak(source: Source) -> Values | None:
    """The highest total that the allocator of any device told, likewise."""
    return _peak(source, DEVICE_TYPES)


def _peak(source: Source, types: tuple[int, ...]) -> Values | None:
    of_rows = peaks_of_rows(source.batch, types, source.memory_rows)
    if of_rows is None:
        return None
    peaks, roots = source.spread(of_rows), np.flatnonzero(~source.is_event)
    peaks[roots] = peaks_between(source.batch, types, source.table.start[roots], source.table.end[roots])
    return peaks, peaks != NO_PEAK
