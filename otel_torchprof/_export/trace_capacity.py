"""Size limits of the application's traces: counts the spans that were sent to each, and the processes that contribute to it."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MOST_TRACES = 2_000
"""Most traces that are stored; of more, the least recently used are removed."""
PROCESSES = 4
"""Assumed number of processes of a trace that began in another process; the real number is unknown."""
_MOST_JOINED = 10_000
"""Most such traces that are stored."""


class TraceCapacity:
    """Remaining capacity of traces. Not thread-safe, except :meth:`join`."""

    def __init__(self) -> None:
        self._spent: OrderedDict[bytes, int] = OrderedDict()

        self._joining: deque[int] = deque(maxlen=_MOST_JOINED)
        self._joined: OrderedDict[bytes, None] = OrderedDict()

    def join(self, trace_id: int) -> None:
        """The trace began in another process. Any thread."""
        self._joining.append(trace_id)

    def learn_joined(self) -> None:
        """Adds the traces that other threads have joined."""
        while self._joining:
            self._joined[self._joining.popleft().to_bytes(16, "big")] = None
            if len(self._joined) > _MOST_JOINED:
                self._joined.popitem(last=False)

    @property
    def has_joined(self) -> bool:
        """Whether any trace began in another process."""
        return bool(self._joined)

    def processes(self, trace_id: bytes) -> int:
        """Number of processes that share the size limit of a trace."""
        return PROCESSES if trace_id in self._joined else 1

    def overflowing(self, trace_ids: Array, counts: Array, most: Array) -> npt.NDArray[np.bool_]:
        """Mask of the traces into which the spans do not fit; for all others, the spans are counted.

        Args:
            trace_ids: shape (traces, 16); one may occur more than once.
            counts: new spans of each entry.
            most: span limit of each entry's trace.
        """
        over, spent = np.zeros(len(counts), dtype=np.bool_), self._spent
        rows = np.flatnonzero(counts)
        keys = trace_ids[rows].view("V16").reshape(-1).tolist()
        entries = zip(rows.tolist(), keys, counts[rows].tolist(), most[rows].tolist(), strict=True)
        for row, key, spans, allowed in entries:
            if key not in spent and spans <= allowed:  # nearly all: the trace of a new step
                spent[key] = spans
                if len(spent) > _MOST_TRACES:
                    spent.popitem(last=False)
            elif spans > self.left(key, allowed):
                over[row] = True
            else:
                self.spend(key, spans)
        return over

    def left(self, trace_id: bytes, most: int) -> int:
        """Spans that still fit into a trace that may have ``most``."""
        return most - self._spent.get(trace_id, 0)

    def spend(self, trace_id: bytes, spans: int) -> None:
        """Counts spans that are sent to a trace."""
        self._spent[trace_id] = self._spent.get(trace_id, 0) + spans
        self._spent.move_to_end(trace_id)
        if len(self._spent) > _MOST_TRACES:
            self._spent.popitem(last=False)
