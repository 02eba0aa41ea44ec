"""Records of allocations, found by time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class MemRecordsAcc:
    """Finds the records that begin within an interval. A record is a sequence whose first item has ``start_ns()``.

    Costs a sort when made, and two binary searches per question. Not changed by questions, hence safe to share.
    """

    def __init__(self, mem_records: Sequence[Any]) -> None:
        starts = [record[0].start_ns() for record in mem_records]
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self._starts = [starts[place] for place in order]
        self._records = [mem_records[place] for place in order]

    def in_interval(self, start_ns: int, end_ns: int) -> Iterator[Any]:
        """Yield the records that begin from ``start_ns`` to ``end_ns``, both included, in the order of their begins."""
        yield from self._records[bisect_left(self._starts, start_ns) : bisect_right(self._starts, end_ns)]
