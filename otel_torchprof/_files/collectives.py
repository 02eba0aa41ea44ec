"""The collectives of a rank, with the times at which it began and ended each."""

from __future__ import annotations

import zlib
from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._model.collectives import collective_name

from . import attribute_keys
from .trace_events import TraceEventKind

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Any

    from otel_torchprof._columns.arrays import Integers

    from .trace_events import TraceEvents

MOST_COLLECTIVES = 50_000
"""Number of collectives read per process; later ones are ignored."""
_BARRIER_LIKE = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier")
"""Collectives that end on no rank before they have begun on all."""
_PLACE = {name: place for place, name in enumerate(_BARRIER_LIKE)}
_NO_PLACE = len(_BARRIER_LIKE)
_WITH_KERNELS = 2 * _NO_PLACE
"""Added to the place of a collective whose end is that of its kernel."""
WORKS = ("gloo:", "nccl:")
"""Prefixes of the names of events on the backends' own threads."""
_RETURN_AT_ONCE = frozenset(("gloo", "nccl", "xccl", "ucc"))
"""Backends whose operators return before the collective is complete, even if it is synchronous: the program waits later."""
_NEVER = 1 << 62
_ODD = np.uint64(0x9E3779B1)
"""Odd, so that the numbers of a step differ."""


class Collectives(NamedTuple):
    """Numbered collectives in which all ranks of a group take part, sorted by unique key; times in ns."""

    key: npt.NDArray[np.uint64]
    """Hash of group and number, the same on every rank."""
    start: Integers
    end: Integers
    """Later than the start on every rank."""
    period: Integers
    """Time from one collective or step to the next that the number may be mistaken for, ns; 0: the file has the number."""

    def chosen(self, which: Any) -> Collectives:
        """Selects some of them by a mask or indices."""
        return Collectives(*(column[which] for column in self))


class CollectiveList:
    """Collects the collectives of one process, and the work of its backends."""

    def __init__(self) -> None:
        self._key, self._start, self._end = array("Q"), array("q"), array("q")
        self._name, self._returns_at_once, self._is_numbered = array("B"), array("B"), array("B")
        self._works: dict[tuple[int, int | None], list[tuple[int, int]]] = defaultdict(list)
        """By name and group of a collective, begins and ends of its work; group None: of any."""
        self._steps: dict[int, tuple[int, int]] = {}
        """Begins and ends by number."""
        self.count = 0
        self.rank: int | None = None
        """Rank of the process, if a collective has it."""

    def add_call(self, start: int, duration: int, attributes: Mapping[str, Any]) -> None:
        """Adds the span of a collective."""
        self.count += 1
        name, group = attributes[attribute_keys.COLLECTIVE], attributes.get(attribute_keys.GROUP, "")
        if group == attribute_keys.DEFAULT_GROUP and self.rank is None:
            self.rank = attributes.get(attribute_keys.RANK_IN_GROUP)
        if name in _PLACE and attribute_keys.SEQUENCE in attributes:
            at_once = (
                bool(attributes.get(attribute_keys.ASYNC)) or attributes.get(attribute_keys.BACKEND) in _RETURN_AT_ONCE
            )
            self._add(
                _hash(group),
                attributes[attribute_keys.SEQUENCE],
                (start, start + duration),
                _PLACE[name],
                returns_at_once=at_once,
            )

    def add_torch_call(
        self, start: int, duration: int, attributes: Mapping[str, Any], *, is_kernel: bool = False
    ) -> None:
        """Adds a call of a trace of torch.profiler, which returns at once, or its kernel, which begins when its rank is ready."""
        self.count += 1
        place = _PLACE.get(collective_name(attributes[attribute_keys.TORCH_NAME]))
        if place is None:
            return
        group, number = attribute_keys.DEFAULT_GROUP, attributes.get(attribute_keys.TORCH_NUMBER)
        if attribute_keys.TORCH_GROUP in attributes:
            place += _WITH_KERNELS
            group = f"{attributes[attribute_keys.TORCH_GROUP]} {attributes.get(attribute_keys.TORCH_RANKS)}"
        times = start, start + duration
        if not is_kernel or number is not None:
            self._add(_hash(group), number, times, place, returns_at_once=not is_kernel)
        elif len(self._works[place, _hash(group)]) < MOST_COLLECTIVES:
            self._works[place, _hash(group)].append(times)

    def add_step(self, start: int, attributes: Mapping[str, Any]) -> None:
        """Adds the collectives without spans that the span of a step has as an attribute."""
        for group, number, begin, end in attributes.get(attribute_keys.COLLECTIVES, ()):
            self.count += 1
            self._add(_hash(group), number, (start + begin, start + end), _NO_PLACE, returns_at_once=False)

    def add_torch_step(self, number: int, start: int, duration: int) -> None:
        """Adds a step of torch.profiler, in which calls without a number are counted; not two with one number."""
        if len(self._steps) < MOST_COLLECTIVES:
            self._steps[number] = (start, start if number in self._steps else start + duration)

    def _add(self, group: int, number: int | None, times: tuple[int, int], name: int, *, returns_at_once: bool) -> None:
        if len(self._key) < MOST_COLLECTIVES:
            self._key.append(group << 32 | (number or 0) & 0xFFFFFFFF)
            self._start.append(times[0])
            self._end.append(times[1])
            self._name.append(name)
            self._returns_at_once.append(returns_at_once)
            self._is_numbered.append(number is not None)

    def add_work(self, name: str, start: int, duration: int) -> None:
        """Adds an event of a backend's thread; other events have no effect."""
        if name.startswith(WORKS):
            self.count += 1
            place = _PLACE.get(name.partition(":")[2])
            if place is not None and len(self._works[place, None]) < MOST_COLLECTIVES:
                self._works[place, None].append((start, start + duration))

    def settled(self) -> Collectives:
        """The collectives whose ends are known. An end is that of the work, if recorded; work is in the order of the calls."""
        columns = zip((self._key, self._start, self._end), ("u8", "i8", "i8"), strict=True)
        key, start, end = (np.array(column, dtype) for column, dtype in columns)
        at_once, is_numbered, period = (
            np.array(self._returns_at_once),
            np.array(self._is_numbered) != 0,
            np.zeros_like(start),
        )
        if not is_numbered.all():
            is_numbered = self._number(key, start, period, np.flatnonzero(~is_numbered))
        order = np.lexsort((at_once, key))[: len(key)]
        order = order[is_numbered[order]]
        _, first = np.unique(key[order], return_index=True)
        first = order[first]
        collectives = Collectives(key[first], start[first], end[first], period[first])
        names, is_known = np.array(self._name)[first], at_once[first] == 0
        for (name, group), works in self._works.items():
            is_of_group = True if group is None else collectives.key >> np.uint64(32) == group
            calls = np.flatnonzero((names == name) & is_of_group)
            is_known[calls] = len(works) == len(calls) or (
                len(works) > len(calls) and len(self._key) == MOST_COLLECTIVES
            )
            if is_known[calls].any():
                calls = calls[np.argsort(collectives.start[calls], kind="stable")]
                begins, ends = zip(*sorted(works)[: len(calls)], strict=True)
                collectives.end[calls] = ends
                if group is not None:
                    collectives.start[calls] = begins
        return collectives.chosen(is_known)

    def _number(self, key: Any, start: Integers, period: Integers, rows: Integers) -> npt.NDArray[np.bool_]:
        """Sets the numbers of calls that have none, by the names and the order of all those of their group and step.

        Without steps: of the recording. Ranks with different numbers or names of calls in a step have none in common.

        Returns:
            A mask of the calls with numbers.
        """
        steps = sorted((begin, end, number) for number, (begin, end) in self._steps.items()) or [(-_NEVER, _NEVER, 0)]
        begins, ends, numbers = (np.array(column, np.int64) for column in zip(*steps, strict=True))
        step = np.searchsorted(begins, start[rows], side="right") - 1
        is_numbered = np.ones(len(key), np.bool_)
        is_numbered[rows] = (step >= 0) & (start[rows] < ends[step])
        step, rows = step[is_numbered[rows]], rows[is_numbered[rows]]
        order = np.lexsort((start[rows], step, key[rows]))
        step, rows = step[order], rows[order]
        is_first = np.append(True, (step[1:] != step[:-1]) | (key[rows][1:] != key[rows][:-1]))[: len(rows)]
        names = np.array(self._name)
        for part, of_step in zip(
            np.split(rows, np.flatnonzero(is_first)[1:]), numbers[step[is_first]].tolist(), strict=True
        ):
            base = zlib.crc32(names[part].tobytes(), of_step & 0xFFFFFFFF)
            key[part] |= (base + np.arange(len(part), dtype=np.uint64) * _ODD) & np.uint64(0xFFFFFFFF)
        if rows.size:
            interval = np.median(ends - begins) if self._steps else np.ptp(start[rows]) / len(rows)
            period[rows] = max(int(interval), 1)
        return is_numbered


def host_of_kernels(events: TraceEvents) -> Hashable:
    """The process that calls the collectives whose kernels are on devices, in a trace of torch.profiler; None if several do."""
    rows, _ = events.attributes.get(attribute_keys.TORCH_NAME, (np.empty(0, np.int64), ()))
    tracks = distinct_values(events.track[rows[events.kind[rows] != TraceEventKind.WORK]])
    hosts = {events.tracks[track][0] for track in tracks.tolist()}
    return hosts.pop() if len(hosts) == 1 else None


def _hash(group: str) -> int:
    return zlib.crc32(group.encode("utf-8", "surrogatepass"))
