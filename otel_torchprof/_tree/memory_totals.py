"""How much of each device's memory was in use over time, as its allocator told it, on columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Array = npt.NDArray[Any]

MOST_SAMPLES = 100_000
"""Samples of one quantity that are kept all; of more, those that a picture of it is made of."""
_KEPT_OF_EACH_SEGMENT = 4


class Total(NamedTuple):
    """One quantity of one device over time, by time; each sample holds until the next."""

    device_type: int
    """``c10::DeviceType``."""
    device_index: int
    """Which of its type; -1 where there is one only."""
    quantity: str
    """``allocated``: what the allocator had given out; ``reserved``: what it held of the system."""
    time: npt.NDArray[np.int64]
    """Unix ns."""
    bytes: npt.NDArray[np.int64]


def totals_over_time(memory: Mapping[str, Array], most: int = MOST_SAMPLES) -> Iterator[Total]:
    """What the allocator of each device reported of its totals, whenever they changed.

    ``memory`` is :attr:`Batch.memory`. A quantity that is not told is not there; so is ``reserved`` where it is 0 throughout,
    which is what the CPU's allocator, who reserves nothing, tells. At most ``most`` samples each: see :func:`thinned`.
    Costs some 50 ns per record, and a sort where several threads recorded. Pure.
    """
    devices = memory["device_type"].astype(np.int64) << 32 | memory["device_index"].astype(np.int64) & 0xFFFFFFFF
    for device in distinct_values(devices).tolist():
        rows = np.flatnonzero(devices == device)
        time = memory["time"][rows]
        if (time[1:] < time[:-1]).any():
            rows = rows[np.argsort(time, kind="stable")]
        for quantity in ("allocated", "reserved"):
            reported = memory[f"total_{quantity}"][rows]
            known = reported >= 0
            if not known.any() or (quantity == "reserved" and reported.max() == 0):
                continue
            first = rows[np.flatnonzero(known)[0]]
            kept = thinned(*_changes(memory["time"][rows[known]], reported[known]), most)
            yield Total(int(memory["device_type"][first]), int(memory["device_index"][first]), quantity, *kept)


def thinned(time: Array, value: Array, most: int) -> tuple[Array, Array]:
    """The samples, or if they are more than ``most`` the first, lowest, highest and last of each of ``most / 4`` segments.

    A segment is so many samples in a row: where much happens there are many. No peak is lost, and nothing is invented.
    """
    count = len(time)
    if count <= most:
        return time, value
    width = -(-count // (most // _KEPT_OF_EACH_SEGMENT))
    segments = -(-count // width)
    padded = np.full(segments * width, value[-1], dtype=value.dtype)
    padded[:count] = value
    grid, begin = padded.reshape(segments, width), np.arange(segments) * width
    ends = (begin, begin + grid.argmin(axis=1), begin + grid.argmax(axis=1), begin + width - 1)
    kept = distinct_values(np.minimum(np.concatenate(ends), count - 1))
    return time[kept], value[kept]


def _changes(time: Array, value: Array) -> tuple[Array, Array]:
    """The samples that differ from the one before."""
    changed = np.flatnonzero(np.concatenate(([True], value[1:] != value[:-1])))
    return time[changed], value[changed]
