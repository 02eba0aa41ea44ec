"""Chrome JSON of what was allocated and given back: an instant each, as torch's Kineto writes it, and the totals over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import MEMORY_COLUMNS
from otel_torchprof._native.ffi import ffi, lib
from otel_torchprof._native.loops import pointer

from . import chrome_counters
from .chrome_json import PIECE_SIZE, checked, new_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_torchprof._columns.batch import Batch


def pieces(batch: Batch, base_ns: int, pid: int) -> Iterator[bytes]:
    """The lines of JSON, in pieces of about 1 MiB; none where memory was not recorded. Costs some 0.1 us per record.

    Their ``Ev Idx`` goes on behind the rows of the batch. The threads must be in range.
    """
    if batch.memory is None:
        return
    columns = {
        c.name: np.ascontiguousarray(batch.memory[c.name], dtype=c.dtype) for c in MEMORY_COLUMNS if c.name != "event"
    }
    columns["thread_tids"] = np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)
    memory = ffi.new("otp_chrome_memory *", {field: pointer(array) for field, array in columns.items()})
    memory.count, memory.first_index = len(columns["time"]), len(batch)
    memory.base, memory.pid = base_ns, pid

    # `memory` points into `columns`, which this frame holds until the last row.
    piece = new_buffer()
    row = 0
    while row < memory.count:
        piece.size = 0
        row = checked(lib.otp_chrome_encode_memory(memory, row, PIECE_SIZE, piece))
        yield ffi.buffer(piece.data, piece.size)[:]
    yield from chrome_counters.pieces(batch, base_ns, pid)
