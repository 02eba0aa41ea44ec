"""Sums by name that outlive what they are made of: bounded by the number of names, never by that of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Key = TypeVar("Key")

MAX_NAMES = 10_000
"""Different names of spans that have sums of their own; the others share one entry."""
OTHER_NAMES = "(other spans)"


class Average(NamedTuple):
    """The sums of one name; times in ns."""

    name: str
    is_label: bool
    calls: int
    total: int
    self_time: int
    """Without direct children."""
    device_total: int = 0
    device_self_time: int = 0
    """Time of devices, and the same without direct children."""


AMOUNTS = len(Average._fields) - 2
"""How many numbers are summed for each name."""


class NamedSums(Generic[Key]):
    """The numbers of an :class:`Average` by key, in the order in which the keys first came. For one thread at a time.

    The sums are Python's integers: no file can make them overflow. Adding costs about 0.6 µs.

    Args:
        other: the key of the entry for all that get none.
        admits: whether a new key gets an entry, given what it comes with. Default: always.
    """

    def __init__(self, other: Key, admits: Callable[[Key, Sequence[int]], bool] | None = None) -> None:
        self._admits = admits
        self._other = other
        self._places: dict[Key, int] = {}
        self.sums: list[list[int]] = []
        """Those of each entry, in order."""

    def __len__(self) -> int:
        return len(self.sums)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[tuple[Key, list[int]]]:
        return zip(self._places, self.sums, strict=True)

    def add(self, key: Key, amounts: Sequence[int]) -> int:
        """Adds calls, total and self time, and those of devices where there are any; returns the entry's place in :attr:`sums`."""
        place = self._places.get(key)
        if place is None:
            key = key if self._admits is None or self._admits(key, amounts) else self._other
            place = self._places.setdefault(key, len(self.sums))
            if place == len(self.sums):
                self.sums.append([0] * AMOUNTS)
        sums = self.sums[place]
        for number, amount in enumerate(amounts):
            sums[number] += amount
        return place
