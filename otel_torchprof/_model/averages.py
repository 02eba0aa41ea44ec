"""Sums of events by name and by further keys, for ``key_averages()``, metrics and running averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import BLOCK
from otel_torchprof._columns.schema import WORK_KIND, Kind, Scope
from otel_torchprof._native.loops import add_to_groups, sums_by_name
from otel_torchprof._process import threads

from .devices import device_times, displayed_times
from .frames import distinct
from .reductions import COLLAPSED
from .tree import ChildTimes, display_name, display_names, displayed_events, torch_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from otel_torchprof._columns.batch import Batch, Names

    from .devices import DeviceTimes
    from .tree import ChildTime, TreeView

Array = npt.NDArray[Any]

_LARGEST = 2**63 - 1
_FEW_GROUPS = 4096


@dataclass(frozen=True, eq=False)
class Averages:
    """One entry per group, in the order in which the groups first appear in the view. Times are exact sums in ns."""

    first: npt.NDArray[np.int64]
    """Position in the view of the group's first event."""
    count: npt.NDArray[np.int64]
    cpu_time_total: npt.NDArray[np.int64]
    self_cpu_time_total: npt.NDArray[np.int64]
    amounts: Mapping[str, Array]
    """Sums of what else was given to be added up, by the same names."""
    peaks: Mapping[str, Array]
    """Largest values of the columns passed as ``peaks``, by name."""

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def of(
        cls,
        view: TreeView,
        splits: Sequence[Array] = (),
        amounts: Mapping[str, Array] | None = None,
        peaks: Mapping[str, Array] | None = None,
    ) -> Averages:
        """Groups the events of a view; costs 15 ns per event, and memory per group only.

        Each of ``splits`` has a small number per event, by which groups are split. A split costs 10 ns per event; with many more
        numbers than events it sorts, for 85 ns per event. Each of ``amounts`` is a column over the events to sum in its own type;
        for ``peaks``, which must not be negative, the group gets the largest value.
        As in torch, an operator and a label of the same name are two groups.
        """
        named = _Groups(view)
        groups, bound = _split(view, named, splits) if splits else (named, named.bound)
        # "", " own" and " calls" cannot collide with names of amounts.
        columns = {"": view.duration, " own": view.self_time, **(amounts or {})}
        columns |= {} if view.calls is None else {" calls": view.calls}
        sums = grouped(groups, bound, len(view), columns, peaks)
        total, self_time = sums.amounts.pop(""), sums.amounts.pop(" own")
        count = sums.amounts.pop(" calls", sums.count)
        return cls(sums.first, count, total, self_time, sums.amounts, sums.peaks)


@dataclass(frozen=True, eq=False)
class EventGroups:
    """One entry per group that occurs, in the order in which the groups first appear."""

    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    amounts: dict[str, Array]
    peaks: dict[str, Array]


def grouped(
    groups: _Groups | Array,
    bound: int,
    rows: int,
    amounts: Mapping[str, Array],
    peaks: Mapping[str, Array] | None = None,
) -> EventGroups:
    """Returns the sums of ``amounts`` and the largest ``peaks`` of each group; groups are numbers below ``bound``."""
    first, count = np.full(bound, -1, dtype=np.int64), np.zeros(bound, dtype=np.int64)
    sums, largest = (
        {name: np.zeros(bound, dtype=column.dtype) for name, column in given.items()}
        for given in (amounts, peaks or {})
    )
    for begin in range(0, rows, BLOCK):
        block = slice(begin, begin + BLOCK)
        group = groups[block]
        whole = [name for name, column in amounts.items() if column.dtype == np.int64]
        add_to_groups(group, begin, first, count, [(amounts[name][block], sums[name]) for name in whole])
        for name in amounts.keys() - whole:
            np.add.at(sums[name], group, amounts[name][block])
        for name, column in (peaks or {}).items():
            np.maximum.at(largest[name], group, column[block])
    used = np.flatnonzero(first >= 0)
    used = used[np.argsort(first[used])]
    of_used = ({name: column[used] for name, column in columns.items()} for columns in (sums, largest))
    return EventGroups(first[used], count[used], *of_used)


class _Groups:
    """The group of each event by name and kind, computed on demand for a block of events.

    Groups are renumbered if the process has many more of them than the view has events.
    """

    def __init__(self, view: TreeView) -> None:
        self._view = view
        self._has_labels = bool((view.batch["scope"] == Scope.USER_SCOPE).any())
        self._has_work = view.batch.work is not None
        self._own: Array | None = None
        self.bound = len(view.batch.names) * (2 if self._has_labels else 1) * (2 if self._has_work else 1)
        if self.bound > _FEW_GROUPS + len(view):
            used, self._own = distinct(self[slice(0, len(view))])
            self.bound = len(used)

    def __getitem__(self, block: slice) -> Array:
        if self._own is not None:
            return self._own[block]
        rows, batch = self._view.rows[block], self._view.batch
        names: Array = self._view.display_name[rows]
        if self._has_labels:
            names = names * np.uint32(2) + (batch["scope"][rows] == Scope.USER_SCOPE)
        if self._has_work:  # work of a device is no event of the CPU with that name
            names = names * np.uint32(2) + (batch["kind"][rows] == WORK_KIND)
        return names


def _split(view: TreeView, groups: _Groups, splits: Sequence[Array]) -> tuple[Array, int]:
    """The groups split further: a small number per event, and how many there are."""
    codes, bound = np.empty(len(view), dtype=np.int64), groups.bound
    for begin in range(0, len(view), BLOCK):
        codes[begin : begin + BLOCK] = groups[slice(begin, begin + BLOCK)]
    for split in splits:
        width = int(split.max(initial=0)) + 1
        if bound * width > _LARGEST:
            used, codes = distinct(codes)
            bound = len(used)
        codes = codes * width + split
        bound *= width
    used, codes = distinct(codes)
    return codes, len(used)


# ---- Running sums: their size is bounded by the number of names, not of events ----


Key = TypeVar("Key")

MAX_NAMES = 10_000
"""Span names with sums of their own; further names share one entry."""
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
"""Number of sums per name."""


def collapsed_average(calls: Array, durations: Array) -> Average:
    """The entry of collapsed spans: their numbers and total durations, ns, are given by what they were collapsed into."""
    time = sum(durations.tolist())
    return Average(COLLAPSED, False, sum(calls.tolist()), time, time)


class NamedSums(Generic[Key]):
    """The numbers of an :class:`Average` by key, in the order of first occurrence. Not thread-safe.

    Sums are Python integers, which no file can make overflow. Adding costs about 0.6 µs.

    Args:
        other: key of the entry for all keys without one of their own.
        admits: whether a new key with its first amounts gets an entry. Default: always.
    """

    def __init__(self, other: Key, admits: Callable[[Key, Sequence[int]], bool] | None = None) -> None:
        self._admits = admits
        self._other = other
        self._places: dict[Key, int] = {}
        self.sums: list[list[int]] = []
        """Sums of each entry, in the order of the entries."""

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


# ---- Sums of operators for metrics; a bounded number of operators has sums of its own ----


OTHER = "other"
"""Name of the entry for all operators without an entry of their own."""

_LATE_SHARE = 0.01
"""Share of all self time that an operator needs to get one of the entries reserved for late operators."""


class OperatorSums:
    """Sums by operator that only grow. Not thread-safe.

    An operator keeps its entry, so that no sum ever decreases. The first operators get four fifths of the entries, those with the most
    self time first; the last fifth is reserved for later operators with at least 1 % of all self time so far. Calls before an
    operator got its entry stay with :data:`OTHER`. Labels are not counted, since their number has no bound; operators inside them are.

    Args:
        most: number of entries.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._at_once = most - most // 5
        self._sums = NamedSums(OTHER, self._gets_entry)
        self._self_time = 0
        self._without_entry: dict[str, int] = {}
        self._child_times = ChildTimes()
        self.has_devices = False
        """Whether the time of a device was ever recorded."""

    def add(self, batch: Batch) -> None:
        """Adds the operators of a drained batch: some 20 ns per event, 200 us for any."""
        devices = device_times(batch)
        self.has_devices |= devices is not None
        outer = batch.outer_rows.astype(np.int64)
        child_time = self._child_times.settle(
            batch["id"], batch.outer_parents, (batch["end"] - batch["start"])[outer], batch.opens.id
        )
        rows, sums = _by_name(batch, child_time, () if devices is None else (devices.total, devices.own))
        is_operator = (batch["scope"][rows] != Scope.USER_SCOPE) & (batch["kind"][rows] != Kind.PHASE)
        named = [batch.names[name] for name in batch["name"][rows][is_operator].tolist()]
        sums = sums[is_operator]
        self._self_time += int(sums[:, 2].sum())
        for at in np.argsort(-sums[:, 2], kind="stable").tolist():
            self._sums.add(named[at], sums[at].tolist())

    def read(self) -> list[Average]:
        """The sums so far; :data:`OTHER` last, if there is one."""
        averages = [Average(name, False, *sums) for name, sums in self._sums]
        return sorted(averages, key=lambda average: average.name == OTHER)

    def _gets_entry(self, name: str, amounts: Sequence[int]) -> bool:
        entries = len(self._sums) - (OTHER in self._sums)
        if name == OTHER or entries >= self._most:
            return False
        if entries < self._at_once:
            return True
        # Usually there are few names; one of very many will hardly reach the share.
        if name not in self._without_entry and len(self._without_entry) >= 100 * self._most:
            self._without_entry.clear()
        so_far = self._without_entry[name] = self._without_entry.get(name, 0) + amounts[2]
        if so_far < _LATE_SHARE * self._self_time:
            return False
        del self._without_entry[name]
        return True


# ---- Averages over the life of a process ----


class RunningAverages:
    """Sums over batches, and over application spans. Thread-safe; reading costs a microsecond per name."""

    def __init__(self) -> None:
        self._lock = threads.RLock()  # a signal handler may read in the middle
        self._groups = NamedSums(0)
        self._spans = NamedSums(OTHER_NAMES, lambda _name, _amounts: len(self._spans) < MAX_NAMES)
        self._device_type: int | None = None
        self._names: Names | None = None

    @property
    def device_type(self) -> int | None:
        """``c10::DeviceType`` of the first device that reported times; None where none did."""
        return self._device_type

    def add(
        self,
        batch: Batch,
        child_time: ChildTime | None = None,
        *,
        counted: npt.NDArray[np.bool_] | None = None,
        devices: DeviceTimes | None = None,
    ) -> None:
        """Adds the events of a batch: 15 ns per event, 60 more with devices.

        Args:
            batch: its names are the recorder's.
            child_time: time of children in earlier batches; that of a row that is not displayed is of its nearest displayed ancestor.
            counted: a mask of the rows that are added.
            devices: times of devices by row.
        """
        rows, sums = _by_name(batch, child_time, () if devices is None else _displayed(batch, devices), counted)
        is_label = batch["scope"][rows] == Scope.USER_SCOPE
        # The same in every batch of a process, since names keep their indices.
        groups = display_names(batch.names, batch["name"][rows]).astype(np.int64) * 2 + is_label
        with self._lock:
            self._names = batch.names
            for group, of_group in zip(groups.tolist(), sums.tolist(), strict=True):
                self._groups.add(group, of_group)
            if len(rows) and devices is not None and self._device_type is None and batch.devices is not None:
                self._device_type = next(iter(batch.devices["device_type"].tolist()), None)

    def add_span(self, name: str, duration: int, self_time: int) -> None:
        """Adds one span of the application; ns."""
        self.add_spans(name, (1, duration, self_time))

    def add_spans(self, name: str, sums: Sequence[int]) -> None:
        """Adds spans of one name: their number, and the sums of their durations and self times, ns."""
        with self._lock:
            self._spans.add(name, sums)

    def read(self) -> list[Average]:
        """The sums so far, in the order in which the names first came; the application's spans first."""
        with self._lock:
            averages = [Average(name, True, *sums) for name, sums in self._spans]
            for group, sums in self._groups:
                name = self._names[group >> 1] if self._names is not None else ""
                averages.append(Average(display_name(name), bool(group & 1), *sums))
            return averages


def count_span(sums: dict[str, list[int]], name: str, duration: int, self_time: int) -> None:
    """Adds a span to sums by name as :meth:`RunningAverages.add_spans` takes them; ns."""
    of_name = sums.setdefault(name, [0, 0, 0])
    of_name[0] += 1
    of_name[1] += duration
    of_name[2] += self_time


def _by_name(
    batch: Batch,
    child_time: ChildTime | None,
    amounts: Sequence[Array] = (),
    counted: npt.NDArray[np.bool_] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sums the displayed events of a batch by name, labels and operators apart, as :meth:`Averages.of` does those of a view.

    Returns:
        The row of the first event of each name, in their order on display; and a row of the sums of each: number, time, self time, amounts.
    """
    more = {"scope": batch["scope"], "counted": counted}
    more |= {} if child_time is None else {"child_row": child_time.rows, "child_time": child_time.times}
    given = {name: np.ascontiguousarray(column) for name, column in more.items() if column is not None}
    first, *sums = sums_by_name(displayed_events(batch, modules=True), given, amounts, len(batch.names))
    return first, np.column_stack(sums)


def _displayed(batch: Batch, devices: DeviceTimes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the device times that torch displays for each row, total and own; 0 for rows that it does not display."""
    view = torch_view(batch, modules=True)
    times, total, own = displayed_times(view, devices), *np.zeros((2, len(batch)), dtype=np.int64)
    if times is not None:
        total[view.rows], own[view.rows] = times.total, times.own
    return total, own
