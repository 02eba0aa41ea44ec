"""Allocation records, searched by time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class MemRecordsAcc:
    """Index of allocation records by start time; mirrors torch's class of that name.

    Costs one sort when it is made and two binary searches per query. Queries do not change it, so threads may share it.

    Args:
        mem_records: sequences whose first item has a method ``start_ns()``, in ns.

    Examples:
        >>> from types import SimpleNamespace
        >>> records = [(SimpleNamespace(start_ns=lambda: 30), "b"), (SimpleNamespace(start_ns=lambda: 10), "a")]
        >>> [name for _, name in otp.MemRecordsAcc(records).in_interval(0, 20)]
        ['a']
    """

    def __init__(self, mem_records: Sequence[Any]) -> None:
        starts = [record[0].start_ns() for record in mem_records]
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self._starts = [starts[place] for place in order]
        self._records = [mem_records[place] for place in order]

    def in_interval(self, start_ns: int, end_ns: int) -> Iterator[Any]:
        """Yields the records that start from ``start_ns`` to ``end_ns`` (both included, in ns), ordered by start."""
        yield from self._records[bisect_left(self._starts, start_ns) : bisect_right(self._starts, end_ns)]
