"""Chrome JSON of what was allocated and freed: an instant each, as torch's Kineto writes it, and the totals over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof._native.chrome_encoders import encode_memory

from . import chrome_counters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch


def pieces(batch: Batch, base_ns: int, pid: int) -> Iterator[bytes]:
    """The lines of JSON, in pieces of about 1 MiB; none where memory was not recorded. Costs some 0.1 us per record.

    Their ``Ev Idx`` continues behind the rows of the batch. The threads must be in range.
    """
    if batch.memory is None:
        return
    columns = {
        c.name: np.ascontiguousarray(batch.memory[c.name], dtype=c.dtype) for c in MEMORY_COLUMNS if c.name != "event"
    }
    columns["thread_tids"] = np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)
    yield from encode_memory(columns, first_index=len(batch), base_ns=base_ns, pid=pid)
    yield from chrome_counters.pieces(batch, base_ns, pid)
