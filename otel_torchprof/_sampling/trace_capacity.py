"""Traces of the application: how many spans were sent already, since they come piece by piece, and how many processes add to one."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_MOST = 2_000
"""Traces that are remembered; of more, those that had nothing for the longest time are forgotten."""
PROCESSES = 4
"""That are assumed to add to a trace which began in another process: how many do is known to none of them."""
_MOST_JOINED = 10_000
"""Such traces that are remembered."""


class TraceCapacity:
    """For one thread at a time, but for :meth:`join`."""

    def __init__(self) -> None:
        self._spent: OrderedDict[bytes, int] = OrderedDict()

        self._joining: deque[int] = deque(maxlen=_MOST_JOINED)
        self._joined: OrderedDict[bytes, None] = OrderedDict()

    def join(self, trace_id: int) -> None:
        """The trace began in another process. Any thread."""
        self._joining.append(trace_id)

    def learn_joined(self) -> None:
        """Takes in what other threads said."""
        while self._joining:
            self._joined[self._joining.popleft().to_bytes(16, "big")] = None
            if len(self._joined) > _MOST_JOINED:
                self._joined.popitem(last=False)

    def processes(self, trace_id: bytes) -> int:
        """Among how many the size limit of the trace is divided."""
        return PROCESSES if trace_id in self._joined else 1

    def overflowing(self, trace_ids: Array, counts: Array, most: Array) -> npt.NDArray[np.bool_]:
        """Which traces so many more spans do not fit into; to the others they are added.

        Args:
            trace_ids: shape (traces, 16); one may occur more than once.
            counts: spans that each entry is to get.
            most: spans that each one's trace may have.
        """
        over = np.zeros(len(counts), dtype=np.bool_)
        for at in np.flatnonzero(counts).tolist():
            key, count = trace_ids[at].tobytes(), int(counts[at])
            over[at] = count > self.left(key, int(most[at]))
            if not over[at]:
                self.spend(key, count)
        return over

    def left(self, trace_id: bytes, most: int) -> int:
        """Spans that still fit into a trace that may have ``most``."""
        return most - self._spent.get(trace_id, 0)

    def spend(self, trace_id: bytes, spans: int) -> None:
        """So many go there."""
        self._spent[trace_id] = self._spent.get(trace_id, 0) + spans
        self._spent.move_to_end(trace_id)
        if len(self._spent) > _MOST:
            self._spent.popitem(last=False)
