"""Chrome JSON of how much memory was in use over time: counters, which viewers draw as curves beside the trace.

A track for each quantity of each device, ``CPU memory allocated``, ``CUDA:0 memory allocated``, ``CUDA:0 memory reserved``, with
one series, ``bytes``: viewers that draw several series of a track stack them, and what is reserved holds what is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._native.chrome_encoders import encode_counter
from otel_torchprof._tree.memory_totals import Total, totals_over_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch

_DEVICES = {0: "CPU", 1: "CUDA", 2: "MKLDNN", 5: "IDEEP", 6: "HIP", 12: "XPU", 19: "MTIA", 20: "PrivateUse1"}
"""``c10::DeviceType`` of the devices whose allocators report their memory."""


def pieces(batch: Batch, base_ns: int, pid: int) -> Iterator[bytes]:
    """The lines of JSON, in pieces of about 1 MiB; none where memory was not recorded. Costs some 0.1 us per sample."""
    if batch.memory is None or not len(batch.memory["time"]):
        return
    for total in totals_over_time(batch.memory):
        yield from _lines(total, base_ns, pid)


def _lines(total: Total, base_ns: int, pid: int) -> Iterator[bytes]:
    columns = {name: np.ascontiguousarray(getattr(total, name), dtype=np.int64) for name in ("time", "bytes")}
    yield from encode_counter(columns, _track(total).encode(), base_ns=base_ns, pid=pid)


def _track(total: Total) -> str:
    device = _DEVICES.get(total.device_type, f"device {total.device_type}")
    index = "" if total.device_index < 0 else f":{total.device_index}"
    return f"{device}{index} memory {total.quantity}"
