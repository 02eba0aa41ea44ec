"""How long devices worked for each event, on columns.

What is measured is the time between two marks on a stream, one at the begin and one at the end of an event. An event
may have a pair of its own or none; what it and everything inside of it cost is told by the pairs of both: its own pair
for the stream that this is on, and the top-level pairs inside of it for every other stream. Time on several streams adds
up, as the times of kernels do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._native.loops import add_to_parents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]


class DeviceTimes(NamedTuple):
    """One entry per row of a batch, but for ``pair``."""

    pair: npt.NDArray[np.int64]
    """Place of the row's own pair in ``batch.devices``; -1 where it has none."""
    own: npt.NDArray[np.int64]
    """ns that no pair inside of it covers; below 0 where these took longer than its own pair says."""
    total: npt.NDArray[np.int64]
    """ns of the row and everything inside of it."""


class Timed(NamedTuple):
    """The rows of a batch that have a pair of their own; one entry per such row, but for ``pair``."""

    pair: npt.NDArray[np.int64]
    """One entry per row of the batch: place in ``batch.devices``; -1 for none."""
    rows: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    """A small number for the stream of its pair."""
    enclosing: npt.NDArray[np.int64]
    """The nearest row around it that has a pair on the same stream; -1 for none."""


def timed_rows(batch: Batch) -> Timed | None:
    """Which rows have pairs; None where none has."""
    devices = batch.devices
    if devices is None or not len(devices["event"]):
        return None
    pair = _pairs(batch, devices)
    rows = np.flatnonzero(pair >= 0)
    if not rows.size:
        return None
    place = _streams(devices)[pair[rows]]
    stream = np.full(len(batch), -1, dtype=np.int64)
    stream[rows] = place
    return Timed(pair, rows, place, _nearest(batch["parent"], stream, rows))


def device_times(batch: Batch) -> DeviceTimes | None:
    """The times of all rows; None where no device's time is known. Costs some 50 ns per row and 200 per pair."""
    timed = timed_rows(batch)
    return None if timed is None or batch.devices is None else times_of(batch, timed, batch.devices["duration"])


def times_of(batch: Batch, timed: Timed, duration: Array) -> DeviceTimes:
    """The times of all rows, from what :func:`timed_rows` found and the durations (ns) in ``batch.devices``."""
    pair, rows, _, enclosing = timed
    own = np.zeros(len(batch), dtype=np.int64)
    own[rows] = duration[pair[rows]]
    inside = enclosing >= 0
    np.subtract.at(own, enclosing[inside], duration[pair[rows[inside]]])
    return DeviceTimes(pair, own, add_to_parents(batch["parent"], own))


def _pairs(batch: Batch, devices: Mapping[str, Array]) -> npt.NDArray[np.int64]:
    rows = rows_of(batch, devices["event"])
    here = np.flatnonzero(rows >= 0)
    pair = np.full(len(batch), -1, dtype=np.int64)
    pair[rows[here]] = here
    return pair


def not_before(batch: Batch, devices: Mapping[str, Array] | None) -> dict[str, Array] | None:
    """Times of devices, none of which begins before its event in a batch does; ``devices`` are those of the batch.

    A mark is made before the begin of its event is noted, and a calibration is exact to some microseconds: no device can
    have begun what nobody had asked for.
    """
    if devices is None:
        return None
    rows = rows_of(batch, devices["event"])
    begun = np.where(rows >= 0, batch["start"][rows] if len(batch) else 0, devices["start"])
    return {**devices, "start": np.maximum(devices["start"], begun)}


def covered_between(batch: Batch, starts: Array, ends: Array) -> npt.NDArray[np.int64]:
    """Ns that devices worked for what began in each segment (Unix ns), one segment after another: each stream's once.

    A label's pair lies around those of its operators, and around what other threads did on the stream: the time that several
    pairs cover counts once. Segments of the same begin share nothing: the first one has it all.
    """
    found = np.zeros(len(starts), dtype=np.int64)
    devices = batch.devices
    timed = None if devices is None else timed_rows(batch)
    if devices is None or timed is None or not len(starts):
        return found
    start, end = (devices["start"][timed.pair[timed.rows]], devices["duration"][timed.pair[timed.rows]])
    end = start + end
    order = np.lexsort((start, timed.stream))
    begun, stream = batch["start"][timed.rows][order], timed.stream[order]
    start, end = start[order], end[order]
    # How far the stream has been covered before each pair: a running maximum that begins anew with each stream.
    low = int(start.min())
    width = int(end.max()) - low + 1
    reached = np.maximum.accumulate(stream * width + (end - low))
    before = np.concatenate(([0], reached[:-1])) - stream * width + low
    added = np.maximum(end - np.maximum(start, before), 0)
    by_start = np.argsort(starts, kind="stable")
    at = np.searchsorted(starts[by_start], begun, side="right") - 1
    inside = (at >= 0) & (begun <= ends[by_start][at])
    np.add.at(found, by_start[at[inside]], added[inside])
    return found


DRAINED_NS = 10_000
"""A device that comes to a mark this soon after it was made had nothing else to do: the two clocks agree to some microseconds."""


def drained_between(batch: Batch, starts: Array, ends: Array) -> npt.NDArray[np.float64]:
    """Ns of each segment (Unix ns) in which devices had done all that they had been given, and waited for the host to give more.

    Known where a mark is made: a device that comes to it at once had nothing to do before, since the last mark that it came to or
    that was made, or for a part of that time. So it is what it is at most. Marks of other threads and streams that a device has not
    come to say that it is not so. NaN of a segment in which no mark was made.
    """
    devices = batch.devices
    timed = None if devices is None else timed_rows(batch)
    if devices is None or timed is None or not len(starts):
        return np.full(len(starts), np.nan)
    rows, pair = timed.rows, timed.pair[timed.rows]
    begun = devices["start"][pair]
    made = np.concatenate((batch["start"][rows], batch["end"][rows]))
    reached = np.concatenate((begun, begun + devices["duration"][pair]))
    order = np.argsort(made, kind="stable")
    made = made[order]
    latest = np.maximum.accumulate(reached[order])
    since = np.minimum(np.maximum(made[:-1], latest[:-1]), made[1:])
    is_drained = latest[1:] - made[1:] < DRAINED_NS
    sums = np.cumsum(np.where(is_drained, made[1:] - since, 0))
    # How much is drained from the first mark to any moment: nothing more up to `since`, then all up to the mark.
    moments = np.column_stack((since, made[1:])).ravel() - made[0]
    known = np.column_stack((np.concatenate(([0], sums[:-1])), sums)).ravel()
    at = [np.interp(edge - made[0], moments, known) for edge in (starts, ends)]
    is_known = np.searchsorted(made, ends, side="right") > np.searchsorted(made, starts)
    return np.where(is_known, at[1] - at[0], np.nan)


def _streams(devices: Mapping[str, Array]) -> npt.NDArray[np.int64]:
    """A small number for the stream of each pair. What follows each other mostly is on one stream: only the changes are sorted."""
    columns = [devices[name] for name in ("device_type", "device_index", "stream")]
    changes = np.zeros(len(columns[0]) - 1, dtype=np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    first = np.concatenate(([0], np.flatnonzero(changes) + 1))
    number = np.zeros(len(first), dtype=np.int64)
    for column in columns:
        values, place = np.unique(column[first], return_inverse=True)
        number = number * len(values) + place.reshape(-1)
    return np.repeat(number, np.diff(np.append(first, len(columns[0]))))


def _nearest(parent: Array, stream: Array, timed: Array) -> npt.NDArray[np.int64]:
    """For each timed row the nearest one around it that has a pair on the same stream; -1 for none."""
    found = parent[timed].astype(np.int64)
    moving = np.flatnonzero((found >= 0) & (stream[found] != stream[timed]))
    while moving.size:
        above = parent[found[moving]]
        found[moving] = above
        moving = moving[(above >= 0) & (stream[above] != stream[timed[moving]])]
    return found
