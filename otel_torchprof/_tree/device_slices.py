"""When devices worked, as slices that can be drawn: on whose stream, on which lane, from when to when.

A slice is what lies between the two marks of an event. Three things are put right, here and nowhere else:

- What one thread gives to one stream runs in its order, and an event's marks lie around those of the events inside of
  it. Clocks of devices round, and a time that is told as a distance from a far one rounds more; slices that would
  overlap by that are moved apart, or into the one around them.
- Nothing runs before it is launched. Where the calibration between the clocks says so, the slice is moved to the begin
  of its event on the CPU, with all that its stream ran without a pause before and after; its length stays.
- Pairs of several threads on one stream may overlap, and so may asynchronous events: these are given lanes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import Flag
from otel_torchprof._native.loops import device_lanes, fit_device_slices

from .devices import _nearest

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

# Sums of a great many of these still are numbers of 64 bits.
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
    """One entry per slice; those of a stream stand together, as they begin, the outer one of two first."""

    row: Numbers
    """Of the event in the batch."""
    start: Numbers
    """Unix ns, not before the event's."""
    duration: Numbers
    """ns."""
    stream: Numbers
    """Index into ``streams``."""
    lane: Numbers
    """From 0: on one lane of a stream slices lie apart or one inside the other."""
    streams: tuple[Stream, ...]
    """By type, device and number."""


def device_slices(batch: Batch) -> DeviceSlices | None:
    """The slices of all pairs whose event is in the batch; None where there is none. Pure.

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
    streams, stream = _streams([devices[name][here] for name in ("device_type", "device_index", "stream")])
    start = np.clip(devices["start"][here].astype(np.int64), 0, _LATEST)
    duration = np.clip(devices["duration"][here].astype(np.int64), 0, _LONGEST)
    outer = _fit(batch, row, stream, start, duration)
    order = np.lexsort((row, -duration, start, stream))
    start += _delay(order, stream, start, duration, batch["start"][row])
    lane = device_lanes(order, stream, outer, start, duration)
    return DeviceSlices(row[order], start[order], duration[order], stream[order], lane[order], streams)


def _streams(keys: list[Array]) -> tuple[tuple[Stream, ...], Numbers]:
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
    """How much later each slice is drawn, so that none begins before it was launched and all stay in their order."""
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
    """The same for one stream: what lies without a pause moves as one, and what is behind it makes room."""
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], start[1:] >= reach[:-1])))
    begin, needed = start[first], np.maximum.reduceat(early, first)
    length = np.maximum.reduceat(end, first) - begin
    before = np.cumsum(length) - length
    moved = np.maximum.accumulate(begin + needed - before) + before
    return np.repeat(moved - begin, np.diff(np.append(first, len(start))))
