"""The collectives of a rank, with the times at which it began and ended each."""

from __future__ import annotations

import zlib
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from . import attribute_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from otel_torchprof._columns.arrays import Integers

MOST_COLLECTIVES = 50_000
"""Number of collectives read per process; later ones are ignored."""
_BARRIER_LIKE = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier")
"""Collectives that end on no rank before they have begun on all."""
_PLACE = {name: place for place, name in enumerate(_BARRIER_LIKE)}
_NO_PLACE = len(_BARRIER_LIKE)
WORKS = ("gloo:", "nccl:")
"""Prefixes of the names of events on the backends' own threads."""
_RETURN_AT_ONCE = frozenset(("gloo", "nccl", "xccl", "ucc"))
"""Backends whose operators return before the collective is complete, even if it is synchronous: the program waits later."""
_DEFAULT_GROUP = "0"
"""The group of all ranks."""


class Collectives(NamedTuple):
    """Numbered collectives in which all ranks of a group take part, sorted by unique key; times in ns."""

    key: npt.NDArray[np.uint64]
    """Hash of group and number, the same on every rank."""
    start: Integers
    end: Integers
    """Later than the start on every rank."""

    def chosen(self, which: Any) -> Collectives:
        """Selects some of them by a mask or indices."""
        return Collectives(*(column[which] for column in self))


class CollectiveList:
    """Collects the collectives of one process, and the work of its backends."""

    def __init__(self) -> None:
        self._key, self._start, self._end = array("Q"), array("q"), array("q")
        self._name, self._returns_at_once = array("B"), array("B")
        self._works: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By name of a collective, begins and ends of the work on the backend's threads."""
        self.count = 0
        self.rank: int | None = None
        """Rank of the process, if a collective has it."""

    def add_call(self, start: int, duration: int, attributes: Mapping[str, Any]) -> None:
        """Adds the span of a collective."""
        self.count += 1
        name, group = attributes[attribute_keys.COLLECTIVE], attributes.get(attribute_keys.GROUP, "")
        if group == _DEFAULT_GROUP and self.rank is None:
            self.rank = attributes.get(attribute_keys.RANK_IN_GROUP)
        if name in _PLACE and attribute_keys.SEQUENCE in attributes:
            at_once = (
                bool(attributes.get(attribute_keys.ASYNC)) or attributes.get(attribute_keys.BACKEND) in _RETURN_AT_ONCE
            )
            self._add(
                group,
                attributes[attribute_keys.SEQUENCE],
                (start, start + duration),
                _PLACE[name],
                returns_at_once=at_once,
            )

    def add_step(self, start: int, attributes: Mapping[str, Any]) -> None:
        """Adds the collectives without spans that the span of a step has as an attribute."""
        for group, number, begin, end in attributes.get(attribute_keys.COLLECTIVES, ()):
            self.count += 1
            self._add(group, number, (start + begin, start + end), _NO_PLACE, returns_at_once=False)

    def _add(self, group: str, number: int, times: tuple[int, int], name: int, *, returns_at_once: bool) -> None:
        if len(self._key) < MOST_COLLECTIVES:
            self._key.append(zlib.crc32(group.encode("utf-8", "surrogatepass")) << 32 | number & 0xFFFFFFFF)
            self._start.append(times[0])
            self._end.append(times[1])
            self._name.append(name)
            self._returns_at_once.append(returns_at_once)

    def add_work(self, name: str, start: int, duration: int) -> None:
        """Adds an event of a backend's thread; other events have no effect."""
        if name.startswith(WORKS):
            self.count += 1
            name = name.partition(":")[2]
            if name in _PLACE and len(self._works[name]) < MOST_COLLECTIVES:
                self._works[name].append((start, start + duration))

    def settled(self) -> Collectives:
        """The collectives whose ends are known. An end is that of the backend's work, if recorded; work is in the order of the calls."""
        _, first = np.unique(np.array(self._key, np.uint64), return_index=True)
        columns = zip((self._key, self._start, self._end), ("u8", "i8", "i8"), strict=True)
        collectives = Collectives(*(np.array(column, dtype)[first] for column, dtype in columns))
        names, is_known = np.array(self._name)[first], np.array(self._returns_at_once)[first] == 0
        for name, works in self._works.items():
            calls = np.flatnonzero(names == _PLACE[name])
            is_known[calls] = len(works) == len(calls) or (
                len(works) > len(calls) and len(self._key) == MOST_COLLECTIVES
            )
            if is_known[calls].any():
                calls = calls[np.argsort(collectives.start[calls], kind="stable")]
                collectives.end[calls] = [end for _, end in sorted(works)[: len(calls)]]
        return collectives.chosen(is_known)
