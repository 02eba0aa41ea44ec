"""The collectives of a rank: when it came to each, and when all had come."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._trace_files import wanted as w

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .arrays import Integers

MOST_COLLECTIVES = 50_000
"""Of a process: the first of them."""
_BARRIER_LIKE = frozenset(("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier"))
"""None of these ends on any rank before it has begun on all."""
_BACKENDS = ("gloo:", "nccl:")


class Collectives(NamedTuple):
    """Those that all ranks take part in and that have a number; times in ns."""

    keys: list[tuple[str, int]]
    """Group and number, the same on every rank."""
    start: Integers
    end: Integers


class CollectiveList:
    """Takes the spans of one process, and keeps its collectives and the work of backends."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], tuple[int, int, str, bool]] = {}
        """By group and number: start, end, name, whether the call returns before all have come."""
        self._works: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By name of a collective, begin and end of each on the threads of its backend."""
        self.count = 0

    def add_call(self, start: int, duration: int, attributes: Mapping[str, Any]) -> None:
        """The span of a collective."""
        self.count += 1
        name = attributes[w.COLLECTIVE]
        if name in _BARRIER_LIKE and w.SEQUENCE in attributes and len(self._calls) < MOST_COLLECTIVES:
            key = attributes.get(w.GROUP, ""), attributes[w.SEQUENCE]
            self._calls.setdefault(key, (start, start + duration, name, bool(attributes.get(w.ASYNC))))

    def add_work(self, name: str, start: int, duration: int) -> None:
        """A slice of a thread on which a backend works; others have no effect."""
        if name.startswith(_BACKENDS):
            self.count += 1
            name = name.partition(":")[2]
            if name in _BARRIER_LIKE and len(self._works[name]) < MOST_COLLECTIVES:
                self._works[name].append((start, start + duration))

    def settled(self) -> Collectives | None:
        """Those whose end is known: a call that returns at once ends with the work that it began, which are in one order."""
        ends = {key: end for key, (_, end, _, is_async) in self._calls.items() if not is_async}
        for name, works in self._works.items():
            keys = [key for key, (_, _, of_call, is_async) in self._calls.items() if of_call == name and is_async]
            if len(keys) == len(works):
                in_order = sorted(keys, key=lambda key: self._calls[key][0])
                ends |= {key: end for key, (_, end) in zip(in_order, sorted(works), strict=True)}
        if not ends:
            return None
        starts = [self._calls[key][0] for key in ends]
        return Collectives(list(ends), np.array(starts, np.int64), np.array([*ends.values()], np.int64))
