"""Attributes that come from marks on the streams of devices: how long devices worked for an event, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._columns.schema import Kind
from otel_torchprof._tree.devices import covered_between, device_name, drained_between, joules_between

if TYPE_CHECKING:
    from collections.abc import Callable

    from .attribute_source import Array, Source, Values

_NS_PER_S = 1e9

SHORTEST_WITH_ENERGY_NS = 100_000_000
"""What is shorter lies between two readings of an energy counter, which say nothing of it."""


def duration(source: Source) -> Values | None:
    """Of its own pair of marks; where it has none, of those inside of it; of a root, of all that began in its time."""
    found = _pairs(source)
    if found is None or source.device_times is None:
        return None
    pair, has_pair = found
    total = source.spread(source.device_times.total)
    own = _of_pairs(source, "duration", pair) if has_pair.any() else np.zeros_like(total)
    time = np.where(has_pair, own, np.maximum(total, 0))
    roots = np.flatnonzero(~source.is_event)
    time[roots] = covered_between(source.batch, source.table.start[roots], source.table.end[roots])
    return time / _NS_PER_S, has_pair | (time > 0)


def drained(source: Source) -> Values | None:
    """Of roots in which a device was timed: how long devices waited for the host."""
    if source.device_times is None:
        return None
    roots = ~source.is_event
    time = np.full(len(roots), np.nan)
    time[roots] = drained_between(source.batch, source.table.start[roots], source.table.end[roots])
    return np.nan_to_num(time) / _NS_PER_S, ~np.isnan(time)


def self_duration(source: Source) -> Values | None:
    """Of an event with timing events: the time outside its child events."""
    found = _pairs(source)
    if found is None or source.device_times is None:
        return None
    return np.maximum(source.spread(source.device_times.own), 0) / _NS_PER_S, found[1]


def device(source: Source) -> Values | None:
    """The name of the device's type."""
    found = _pairs(source)
    if found is None or not found[1].any():
        return None
    types, which = np.unique(_of_pairs(source, "device_type", found[0]), return_inverse=True)
    names = source.add([device_name(number) for number in types.tolist()])
    return names[which.reshape(-1)], found[1]


def of_pair(column: str) -> Callable[[Source], Values | None]:
    """A column of the pair of marks."""

    def compute(source: Source) -> Values | None:
        found = _pairs(source)
        if found is None or not found[1].any():
            return None
        return _of_pairs(source, column, found[0]).astype(np.int64), found[1]

    return compute


def energy(source: Source) -> Values | None:
    """Of roots, and of labels and modules that are no shorter than what lies between two readings."""
    table = source.table
    joules = joules_between(source.batch, table.start, table.end)
    if joules is None:
        return None
    kind, length = source.kind, table.end - table.start
    reported = ((kind == Kind.LABEL) | (kind == Kind.MODULE)) & (length >= SHORTEST_WITH_ENERGY_NS)
    return np.nan_to_num(joules), (reported | ~source.is_event) & ~np.isnan(joules)


def _of_pairs(source: Source, column: str, pair: Array) -> Array:
    """A column of the pair of each span, of any pair where it has none; some span has one."""
    values: Array = (source.batch.devices or {})[column][np.maximum(pair, 0)]
    return values


def _pairs(source: Source) -> tuple[Array, Array] | None:
    """Per span the place of its pair, and whether it has one."""
    times = source.device_times
    if times is None:
        return None
    pair = source.spread(times.pair)
    return pair, (pair >= 0) & source.is_event
