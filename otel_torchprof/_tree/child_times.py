"""Self time over several drains: children end, and are drained, before their parents."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class ChildTimes:
    """Durations of the children of events that are still open, by the id of the parent. For one thread at a time.

    Memory grows with the open events only.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._times)

    def settle(self, ended: Array, parents: Array, durations: Array, still_open: Array) -> Array | None:
        """One drain: the time of earlier drains' children of each event, ns; None where no event has any.

        Args:
            ended: ids of the events that have ended.
            parents: for children that have ended before their parents, the ids of these.
            durations: of these children, ns.
            still_open: ids of all open events; what is known of others is forgotten.
        """
        found = self._of(ended) if self._times else None
        ids, which = np.unique(parents, return_inverse=True)
        sums = np.zeros(len(ids), dtype=np.int64)
        np.add.at(sums, which, durations)
        for key, time in zip(ids.tolist(), sums.tolist(), strict=True):
            self._times[key] = self._times.get(key, 0) + time
        if self._times:
            is_open = set(still_open.tolist())
            self._times = {key: time for key, time in self._times.items() if key in is_open}
        return found

    def _of(self, ended: Array) -> Array | None:
        at = np.flatnonzero(np.isin(ended, np.fromiter(self._times, np.uint64, len(self._times))))
        if not at.size:
            return None
        found = np.zeros(len(ended), dtype=np.int64)
        found[at] = [self._times.pop(key) for key in ended[at].tolist()]
        return found
