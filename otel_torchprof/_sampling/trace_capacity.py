"""How many spans traces of the application were sent already: what is below their spans comes piece by piece."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_MOST = 2_000
"""Traces that are remembered; of more, those that had nothing for the longest time are forgotten."""


class TraceCapacity:
    """For one thread at a time.

    Args:
        max_spans: that a trace may have.
    """

    def __init__(self, max_spans: int) -> None:
        self._max = max_spans
        self._spent: OrderedDict[bytes, int] = OrderedDict()

    def overflowing(self, trace_ids: Array, counts: Array) -> npt.NDArray[np.bool_]:
        """Which traces so many more spans do not fit into; to the others they are added.

        Args:
            trace_ids: shape (traces, 16); one may occur more than once.
            counts: spans that each entry is to get.
        """
        over = np.zeros(len(counts), dtype=np.bool_)
        for at in np.flatnonzero(counts).tolist():
            key, count = trace_ids[at].tobytes(), int(counts[at])
            over[at] = count > self.left(key)
            if not over[at]:
                self.spend(key, count)
        return over

    def left(self, trace_id: bytes) -> int:
        """Spans that still fit."""
        return self._max - self._spent.get(trace_id, 0)

    def spend(self, trace_id: bytes, spans: int) -> None:
        """So many go there."""
        self._spent[trace_id] = self._spent.get(trace_id, 0) + spans
        self._spent.move_to_end(trace_id)
        if len(self._spent) > _MOST:
            self._spent.popitem(last=False)
