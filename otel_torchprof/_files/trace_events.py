"""The events of trace files, or of a profile, as columns: what ``show``, ``explain`` and ``diff`` are computed from."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import blocks
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.samples import Samples
from otel_torchprof._model.span_table import STEP_NAME
from otel_torchprof._model.tree import STEP_PREFIX
from otel_torchprof._native.loops import positions_of
from otel_torchprof._native.trace_files import enclosing_rows

from .attribute_keys import STEP
from .reductions import Reductions, reductions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from otel_torchprof._columns.arrays import Flags, Integers
    from otel_torchprof._columns.batch import Array

_MOST_DIGITS = 18
LONGEST_NAME = 500
"""Characters of a name; what comes after them is cut off."""


class TraceEventKind(enum.IntEnum):
    """Kinds of events."""

    SPAN = 0
    """Its parent is known by its id."""
    SLICE = 1
    """Its parent is the event that encloses it on its track."""
    WORK = 2
    """Work of a device; its parent likewise."""
    STEP = 3
    """A step of a profile beside its events: no parent of any."""


@dataclass(eq=False)
class TraceEvents:
    """Events in the order of their file, one entry each; times in ns. 30 bytes per event."""

    names: Sequence[str]
    """Different names, in the order in which they first came, cut after :data:`LONGEST_NAME` characters."""
    tracks: Sequence[tuple[Hashable, Hashable]]
    """Different pairs of a process and a thread; of spans, a thread is an id or None."""
    traces: Sequence[Hashable]
    """Different traces; None for events without one."""
    name: Array
    track: Array
    trace: Array
    start: npt.NDArray[np.int64]
    duration: npt.NDArray[np.int64]
    kind: npt.NDArray[np.uint8]
    """:class:`TraceEventKind`."""
    span_id: Array
    parent_id: Array
    """Ids of spans; 0: none."""
    attributes: Mapping[str, tuple[Integers, Sequence[Any]]] = field(default_factory=dict)
    """By key of :data:`USED`, the rows that have it, ascending, and the value of each."""
    samples: Samples | None = None
    """Samples of Python stacks; their threads are indices into :attr:`tracks`. None: there are none."""
    ranks: Mapping[Hashable, int] = field(default_factory=dict)
    """Ranks by process; of None: of the whole file."""
    problems: list[str] = field(default_factory=list)
    """Messages about unreadable parts."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of records that are no events, by kind."""

    def __len__(self) -> int:
        return len(self.name)

    @cached_property
    def parent(self) -> npt.NDArray[np.int32]:
        """The row of the parent of each event, -1 for none."""
        parent = np.full(len(self), -1, np.int32)
        spans = np.flatnonzero(self.parent_id != 0)
        if spans.size:
            parent[spans] = positions_of(self.span_id, self.parent_id[spans])
        for kind in (TraceEventKind.SLICE, TraceEventKind.WORK):
            rows = np.flatnonzero(self.kind == kind)
            parent[rows] = nested_in(rows, self.track[rows], self.start[rows], self.duration[rows])
        return parent

    def of_names(self, value: Callable[[str], Any], dtype: npt.DTypeLike) -> Array:
        """A value for each name."""
        return np.array([value(name) for name in self.names], dtype)

    def named(self, test: Callable[[str], bool]) -> Flags:
        """A mask of the events whose name passes a test."""
        is_named: Flags = self.of_names(test, np.bool_)[self.name]
        return is_named

    def step_spans(self) -> Flags:
        """A mask of the spans that are steps."""
        are_steps: Flags = self.named(lambda name: name == STEP_NAME) & (self.kind == TraceEventKind.SPAN)
        are_steps &= self.has(STEP)
        return are_steps

    def steps(self) -> Flags:
        """A mask of the steps: spans with a number, and steps of profiles, by their names."""
        is_of_profile = (self.kind == TraceEventKind.SLICE) | (self.kind == TraceEventKind.STEP)
        are_steps: Flags = self.step_spans() | (self.named(lambda name: step_number(name) is not None) & is_of_profile)
        return are_steps

    def has(self, key: str) -> Flags:
        """A mask of the events with an attribute."""
        mask = np.zeros(len(self), np.bool_)
        if key in self.attributes:
            mask[self.attributes[key][0]] = True
        return mask

    def attributes_of(self, rows: Integers) -> list[dict[str, Any]]:
        """The attributes of some events. Costs a microsecond each, and some more per attribute."""
        found: list[dict[str, Any]] = [{} for _ in rows]
        for key, (known, values) in self.attributes.items():
            place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
            for at in np.flatnonzero(known[place] == rows).tolist():
                found[at][key] = values[place[at]]
        return found

    @cached_property
    def reductions(self) -> Reductions:
        """The spans that stand for several events."""
        return reductions_of(self.attributes, self.duration)

    def totals(self) -> npt.NDArray[np.int64]:
        """Durations; of spans that stand for several events, the sum of theirs."""
        if not len(self.reductions.row):
            return self.duration
        totals = self.duration.copy()
        totals[self.reductions.row] = self.reductions.duration
        return totals

    def self_times(self, totals: Integers, is_counted: Flags) -> npt.NDArray[np.int64]:
        """The totals without those of direct children, and without collapsed ones; of those that are counted only."""
        own = totals.copy()
        own[self.reductions.row] -= self.reductions.collapsed_duration
        for block in blocks(len(self)):
            parent = self.parent[block]
            child = np.flatnonzero((parent >= 0) & is_counted[block])
            np.subtract.at(own, parent[child], totals[block][child])
        return np.maximum(own, 0, out=own)


def step_number(name: str) -> int | None:
    """The number of a step of a profile, by its name; None for other names."""
    number = name.removeprefix(STEP_PREFIX)
    is_number = name.startswith(STEP_PREFIX) and number.isdecimal() and len(number) <= _MOST_DIGITS
    return int(number) if is_number else None


# ---- parents by time ----


def nested_in(rows: Integers, track: Array, start: Integers, duration: Integers) -> Array:
    """For events in some rows, the row of the nearest event that encloses it on its track; -1 for none."""
    end = start + duration
    order = nested_order(track, start, end)
    if order is None:
        parent = enclosing_rows(track, start, end, whole=True)
        return np.where(parent >= 0, rows[parent], -1)
    ordered = enclosing_rows(track[order], start[order], end[order], whole=True)
    parent = np.empty(len(rows), np.int32)
    parent[order] = np.where(ordered >= 0, rows[order[ordered]], -1)
    return parent


def nested_order(track: Array, start: Integers, end: Integers) -> npt.NDArray[np.intp] | None:
    """Events by track, start, and the longer first; None if they are in this order already."""
    order = np.argsort(start, kind="stable")
    tied = np.flatnonzero(start[order[1:]] == start[order[:-1]])
    if tied.size and (end[order[tied + 1]] > end[order[tied]]).any():
        at = np.union1d(tied, tied + 1)
        ties = order[at]
        order[at] = ties[np.lexsort((-end[ties], start[ties]))]
    if track.size and track.max() > 0:
        small = track[order].astype(np.uint16) if track.max() < 1 << 16 else track[order]
        order = order[np.argsort(small, kind="stable")]
    return None if (order[1:] > order[:-1]).all() else order


# ---- several files of one recording ----


def joined(parts: Sequence[TraceEvents]) -> TraceEvents:
    """The events of several files as those of one."""
    if len(parts) == 1:
        return parts[0]
    names, name = _renumbered([(part.names, part.name) for part in parts])
    tracks, track = _renumbered([(part.tracks, part.track) for part in parts])
    traces, trace = _renumbered([(part.traces, part.trace) for part in parts])
    start, duration, kind, span_id, parent_id = (
        np.concatenate([getattr(part, column) for part in parts])
        for column in ("start", "duration", "kind", "span_id", "parent_id")
    )
    firsts = np.cumsum([0, *map(len, parts)])
    attributes = {}
    for key in dict.fromkeys(key for part in parts for key in part.attributes):
        having = [
            (first, *part.attributes[key]) for first, part in zip(firsts, parts, strict=False) if key in part.attributes
        ]
        rows = np.concatenate([rows + first for first, rows, _ in having])
        attributes[key] = (rows, [value for _, _, values in having for value in values])
    place = {key: number for number, key in enumerate(tracks)}
    samples = [
        replace(part.samples, thread=np.array([place[key] for key in part.tracks], np.int64)[part.samples.thread])
        for part in parts
        if part.samples is not None
    ]
    return TraceEvents(
        names,
        tracks,
        traces,
        name,
        track,
        trace,
        start,
        duration,
        kind,
        span_id,
        parent_id,
        attributes=attributes,
        samples=Samples.joined(samples),
        ranks={process: rank for part in parts for process, rank in part.ranks.items()},
        problems=[problem for part in parts for problem in part.problems],
        left_out=sum((part.left_out for part in parts), Counter()),
    )


def _renumbered(parts: Sequence[tuple[Sequence[Any], Array]]) -> tuple[list[Any], Array]:
    """The different keys of all parts, and the number of each entry's."""
    known: dict[Any, int] = {}
    columns = [np.array([known.setdefault(key, len(known)) for key in keys], np.uint32)[of] for keys, of in parts]
    return list(known), np.concatenate(columns)
