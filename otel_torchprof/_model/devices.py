"""Work of devices as columns: device time of each event, slices, energy.

A device time is the time between two timing events on a stream, one at the begin and one at the end of a recorded event. A
recorded event has one such pair or none. Its total is its own pair's time on the stream of that pair, plus the times of the
outermost pairs inside it on all other streams. Times on several streams add up, as those of kernels do.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.loops import add_to_parents, device_lanes, fit_device_slices, subtract_from_parents

from .memory import places

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]


class DeviceTimes(NamedTuple):
    """Device times: one entry per row of a batch."""

    pair: npt.NDArray[np.int64]
    """Place of the row's own pair in ``batch.devices``; -1 where it has none."""
    own: npt.NDArray[np.int64]
    """ns that no pair inside of it covers; below 0 where these took longer than its own pair says."""
    total: npt.NDArray[np.int64]
    """ns of the row and everything inside of it."""


class TimedRows(NamedTuple):
    """The rows of a batch that have a pair of their own; one entry per such row, but for ``pair``."""

    pair: npt.NDArray[np.int64]
    """Index of its pair in ``batch.devices``, per row of the batch; -1 for none."""
    rows: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    """A small number for the stream of its pair."""
    enclosing: npt.NDArray[np.int64]
    """The nearest row around it that has a pair on the same stream; -1 for none."""


def timed_rows(batch: Batch) -> TimedRows | None:
    """The rows that have pairs; None if none has."""
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
    return TimedRows(pair, rows, place, _nearest(batch["parent"], stream, rows))


def device_times(batch: Batch) -> DeviceTimes | None:
    """The times of all rows; None where no device's time is known. Costs some 50 ns per row and 200 per pair."""
    timed = timed_rows(batch)
    return None if timed is None or batch.devices is None else times_of(batch, timed, batch.devices["duration"])


def times_of(batch: Batch, timed: TimedRows, duration: Array) -> DeviceTimes:
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
    """Moves device times that begin before their event to its begin; ``devices`` are those of the batch.

    The timing event is recorded before the begin of the event, and the calibration of clocks is exact only to some
    microseconds; but no device can begin before the host has launched the work.
    """
    if devices is None:
        return None
    rows = rows_of(batch, devices["event"])
    begun = np.where(rows >= 0, batch["start"][rows] if len(batch) else 0, devices["start"])
    return {**devices, "start": np.maximum(devices["start"], begun)}


def covered_between(batch: Batch, starts: Array, ends: Array) -> npt.NDArray[np.int64]:
    """Device time of the events that began in each segment (Unix ns), in ns; overlapping times of a stream count once.

    A label's pair lies around those of its operators, and around what other threads did on the stream: the time that several
    pairs cover counts once. Segments of the same begin share nothing: the first one has it all.
    """
    covered = np.zeros(len(starts), dtype=np.int64)
    devices = batch.devices
    timed = None if devices is None else timed_rows(batch)
    if devices is None or timed is None or not len(starts):
        return covered
    start, end = (devices["start"][timed.pair[timed.rows]], devices["duration"][timed.pair[timed.rows]])
    end = start + end
    order = np.lexsort((start, timed.stream))
    begun, stream = batch["start"][timed.rows][order], timed.stream[order]
    start, end = start[order], end[order]
    # The time up to which the stream is covered before each pair: a running maximum that restarts with each stream.
    low = int(start.min())
    width = int(end.max()) - low + 1
    reached = np.maximum.accumulate(stream * width + (end - low))
    before = np.concatenate(([0], reached[:-1])) - stream * width + low
    added = np.maximum(end - np.maximum(start, before), 0)
    by_start = np.argsort(starts, kind="stable")
    at = np.searchsorted(starts[by_start], begun, side="right") - 1
    inside = (at >= 0) & (begun <= ends[by_start][at])
    np.add.at(covered, by_start[at[inside]], added[inside])
    return covered


DRAINED_NS = 10_000
"""A device that reaches a timing event within this time after its creation was idle; the clocks agree to some microseconds."""


def drained_between(batch: Batch, starts: Array, ends: Array) -> npt.NDArray[np.float64]:
    """Returns for each segment (Unix ns) the ns in which devices had finished all work, and waited for the host.

    Computed at timing events: a device that reaches one at once was idle before, at most since the last timing event that it reached or that
    was created. So the result is an upper limit. Timing events of other threads and streams that a device has not reached show
    that it was not idle. NaN for a segment without timing events.
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
    # Drained time from the first timing event to each moment: constant up to `since`, then rising up to the next event.
    moments = np.column_stack((since, made[1:])).ravel() - made[0]
    known = np.column_stack((np.concatenate(([0], sums[:-1])), sums)).ravel()
    at = [np.interp(edge - made[0], moments, known) for edge in (starts, ends)]
    is_known = np.searchsorted(made, ends, side="right") > np.searchsorted(made, starts)
    return np.where(is_known, at[1] - at[0], np.nan)


def _streams(devices: Mapping[str, Array]) -> npt.NDArray[np.int64]:
    """Returns a small number for the stream of each pair. Consecutive pairs are mostly on one stream: only changes are sorted."""
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
    """For each timed row, the nearest ancestor with timing events on the same stream; -1 for none."""
    nearest = parent[timed].astype(np.int64)
    moving = np.flatnonzero((nearest >= 0) & (stream[nearest] != stream[timed]))
    while moving.size:
        above = parent[nearest[moving]]
        nearest[moving] = above
        moving = moving[(above >= 0) & (stream[above] != stream[timed[moving]])]
    return nearest


# ---- Views without some events: device times of these go to the nearest ancestor that remains ----

_PRIVATE_USE = 20
_NAMES = {
    0: "cpu", 1: "cuda", 2: "mkldnn", 3: "opengl", 4: "opencl", 5: "ideep", 6: "hip", 7: "fpga", 8: "maia", 9: "xla",
    10: "vulkan", 11: "metal", 12: "xpu", 13: "mps", 14: "meta", 15: "hpu", 16: "ve", 17: "lazy", 18: "ipu", 19: "mtia",
    _PRIVATE_USE: "privateuseone",
}  # fmt: skip


def device_name(number: int) -> str:
    """The name of a ``c10::DeviceType`` as ``torch.device.type`` has it; a private backend's own where it was given one."""
    torch = sys.modules.get("torch") if number == _PRIVATE_USE else None
    if torch is not None and hasattr(torch, "_C"):
        return str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001 - no other way
    return _NAMES.get(number, str(number))


class DisplayedTimes(NamedTuple):
    """One entry per event of a view, ns."""

    own: npt.NDArray[np.int64]
    """Time outside of child events; 0 for asynchronous events, whose time counts for their enclosing event."""
    total: npt.NDArray[np.int64]
    """With all events that the view has inside of it."""


def displayed_times(view: TreeView, times: DeviceTimes | None = None) -> DisplayedTimes | None:
    """Device times of the events that torch displays; None if no device was timed.

    ``times`` are of the view's batch; default: computed from it. As in torch, asynchronous events have none. What nothing
    that is shown is around, such as the time of a module that no label is around, is in none of the sums.
    """
    row_times = device_times(view.batch) if times is None else times
    if row_times is None:
        return None
    displayed = _displayed(view, row_times.own)
    # Only passed times include children that are in no row.
    before = 0 if times is None else _displayed(view, _left_over(view.batch, times))
    return DisplayedTimes(displayed, add_to_parents(view.parent, displayed + before))


def remaining_times(whole: Batch, left: Batch) -> DeviceTimes | None:
    """The times of a batch from which rows were left out (:func:`~otel_torchprof._columns.joined.without`), theirs included."""
    times = device_times(whole)
    if times is None or left is whole:
        return times
    rows = rows_of(whole, left["id"])
    total, parent = times.total[rows], left["parent"]
    own = total.copy()
    subtract_from_parents(own, parent, total)
    return DeviceTimes(times.pair[rows], own, total)


def _displayed(view: TreeView, values: Array) -> npt.NDArray[np.int64]:
    """Sums of the values of rows by the displayed event that they belong to."""
    moved = np.flatnonzero(values)
    place = places(view, moved)
    inside = place >= 0
    displayed = np.zeros(len(view), dtype=np.int64)
    np.add.at(displayed, place[inside], values[moved[inside]])
    return displayed


def _left_over(batch: Batch, times: DeviceTimes) -> npt.NDArray[np.int64]:
    """Time in the totals that no row has: that of children from earlier drains."""
    left_over: npt.NDArray[np.int64] = times.total - times.own
    subtract_from_parents(left_over, batch["parent"], times.total)
    return left_over


# ---- Slices for display: stream, lane, start and end ----

Numbers = npt.NDArray[np.int64]

# Small enough that sums of very many fit into 64 bits.
_LATEST = 1 << 62
_LONGEST = 1 << 53


class Stream(NamedTuple):
    """A stream of a device."""

    device_type: int
    """``c10::DeviceType``."""
    device_index: int
    number: int
    """Torch's ``Stream.stream_id``."""


class DeviceSlices(NamedTuple):
    """One entry per slice; grouped by stream, then in order of begin, the outer one first."""

    row: Numbers
    """Row of the event in the batch."""
    start: Numbers
    """Unix ns, not before the event's."""
    duration: Numbers
    """ns."""
    stream: Numbers
    """Index into ``streams``."""
    lane: Numbers
    """Lane of the stream, from 0; slices of one lane are disjoint or nested."""
    streams: tuple[Stream, ...]
    """Sorted by type, device and number."""


def device_slices(batch: Batch) -> DeviceSlices | None:
    """Returns the slices of all pairs whose event is in the batch; None if there are none.

    Costs some 0.3 us per slice, and more for those that overlap on many lanes. Raises MemoryError.
    """
    devices = batch.devices
    if devices is None or not len(devices["event"]):
        return None
    rows = rows_of(batch, devices["event"])
    here = np.flatnonzero(rows >= 0)
    here = here[np.argsort(rows[here], kind="stable")]
    if not len(here):
        return None
    row = rows[here]
    streams, stream = _distinct_streams([devices[name][here] for name in ("device_type", "device_index", "stream")])
    start = np.clip(devices["start"][here].astype(np.int64), 0, _LATEST)
    duration = np.clip(devices["duration"][here].astype(np.int64), 0, _LONGEST)
    outer = _fit(batch, row, stream, start, duration)
    order = np.lexsort((row, -duration, start, stream))
    start += _delay(order, stream, start, duration, batch["start"][row])
    lane = device_lanes(order, stream, outer, start, duration)
    return DeviceSlices(row[order], start[order], duration[order], stream[order], lane[order], streams)


def _distinct_streams(keys: list[Array]) -> tuple[tuple[Stream, ...], Numbers]:
    """The streams, by type, device and number, and the place of each pair's among them."""
    code, sizes, values = np.zeros(len(keys[0]), dtype=np.int64), [], []
    for key in keys:
        known, place = _numbered(key)
        code = code * len(known) + place
        sizes.append(len(known))
        values.append(known)
    used, place = _numbered(code)
    parts = np.unravel_index(used, sizes)
    columns = [known[part].tolist() for known, part in zip(values, parts, strict=True)]
    return tuple(itertools.starmap(Stream, zip(*columns, strict=True))), place


def _numbered(key: Array) -> tuple[Array, Numbers]:
    """The few values of a key, in order, and the place of each entry's among them; np.unique would sort places too."""
    known = distinct_values(key)
    return known, np.searchsorted(known, key).astype(np.int64, copy=False)


def _fit(batch: Batch, row: Array, stream: Numbers, start: Numbers, duration: Numbers) -> Numbers:
    """Puts slices in the order of their thread, in place; returns the place of the slice around each, -1 for none."""
    of_row = np.full(len(batch), -1, dtype=np.int64)
    of_row[row] = stream
    enclosing = _nearest(batch["parent"], of_row, row)
    of_row[row] = np.arange(len(row))
    outer = np.where(enclosing >= 0, of_row[enclosing], -1)
    thread, end = batch["thread"][row], batch["end"][row]
    free = ((batch["flags"][row] & Flag.ASYNC) != 0) | (thread != batch["end_thread"][row])
    free |= (enclosing >= 0) & (end > batch["end"][enclosing])
    outer[free] = -1
    line = np.where(free, -1, thread.astype(np.int64) * (int(stream.max()) + 1) + stream)
    outer = np.ascontiguousarray(outer, dtype=np.int64)
    fit_device_slices(outer, line, start, duration)
    return outer


def _delay(order: Numbers, stream: Numbers, start: Numbers, duration: Numbers, launched: Array) -> Numbers:
    """Shift of each slice, ns, so that none begins before its launch and the order stays the same."""
    early = np.maximum(launched - start, 0)
    delay = np.zeros(len(start), dtype=np.int64)
    if not early.any():
        return delay
    bounds = np.searchsorted(stream[order], np.arange(int(stream.max()) + 2))
    for first, last in itertools.pairwise(bounds.tolist()):
        slices = order[first:last]
        delay[slices] = _delay_on_stream(start[slices], start[slices] + duration[slices], early[slices])
    return delay


def _delay_on_stream(start: Numbers, end: Numbers, early: Numbers) -> Numbers:
    """The same for one stream: slices without a gap move together, and push later ones."""
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], start[1:] >= reach[:-1])))
    begin, needed = start[first], np.maximum.reduceat(early, first)
    length = np.maximum.reduceat(end, first) - begin
    before = np.cumsum(length) - length
    moved = np.maximum.accumulate(begin + needed - before) + before
    return np.repeat(moved - begin, np.diff(np.append(first, len(start))))


# ---- Energy in a segment of time, from readings of the devices' counters ----


def joules_between(batch: Batch, starts: Array, ends: Array) -> npt.NDArray[np.float64] | None:
    """Joules that the devices of a batch consumed in each segment (Unix ns); None where no counter was read.

    Of the devices that the batch has times of; of all whose counters were read where it has none. NaN where readings do not
    reach around the segment. Between two readings the power is taken to be even. Costs some 100 ns per segment and device.
    """
    if batch.energy is None or not len(batch.energy["time"]):
        return None
    used = set() if batch.devices is None else set(distinct_values(batch.devices["device_index"]).tolist())
    curves = dict(curves_of(batch.energy))
    chosen = [curve for index, curve in curves.items() if index in used] or list(curves.values())
    total: npt.NDArray[np.float64] = np.sum([interpolated(*curve, starts, ends) for curve in chosen], axis=0)
    return total


def curves_of(energy: Mapping[str, Array]) -> Iterator[tuple[int, tuple[Array, Array]]]:
    """Yields for each device its index, and its readings as (time, joules), by time."""
    for index in distinct_values(energy["device_index"]).tolist():
        rows = np.flatnonzero(energy["device_index"] == index)
        rows = rows[np.argsort(energy["time"][rows], kind="stable")]
        # Energy never decreases: corrects readings whose time is too early.
        yield index, (energy["time"][rows], np.maximum.accumulate(energy["joules"][rows]))


def interpolated(times: Array, joules: Array, starts: Array, ends: Array) -> npt.NDArray[np.float64]:
    """Returns joules in each segment from one device's readings; NaN if these do not cover it, or it ends before it starts."""
    if len(times) == 0:
        return np.full(np.broadcast(starts, ends).shape, np.nan)
    # Relative to the first: a double cannot represent Unix ns exactly.
    first = times[0]
    known = (starts >= first) & (ends <= times[-1]) & (starts <= ends)
    at = [np.interp((bound - first).astype(np.float64), times - first, joules) for bound in (starts, ends)]
    return np.where(known, at[1] - at[0], np.nan)
