"""Times of devices over many drains: an event ends in another drain than what ran inside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import DEVICE_COLUMNS
from otel_torchprof._tree.devices import DeviceTimes, timed_rows, times_of
from otel_torchprof._tree.forest import top_level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._tree.devices import Timed
    from otel_torchprof._tree.forest import Forest

Array = npt.NDArray[Any]

_STREAM = ("device_type", "device_index", "stream")


class _ChildTimes(NamedTuple):
    """What a stream did inside of an event, in drains before that of its end."""

    event: int
    """Its id."""
    device_type: int
    device_index: int
    stream: int


class LiveDevices:
    """Times of devices of the events of one recording, drain after drain. For one thread at a time.

    Memory does not grow with the events: what is remembered is of what is open. A pair that comes in a later drain than its
    event is not counted.
    """

    def __init__(self) -> None:
        self._inside: dict[_ChildTimes, int] = {}

    def times(self, batch: Batch, trees: Forest) -> DeviceTimes | None:
        """The times of the rows of a batch whose parents are those of ``trees``; None where no device's time is known.

        Totals have what was drained before, own times are without it.
        """
        devices = batch.devices
        if not self._inside and (devices is None or not len(devices["event"])):
            return None
        whole = self._with_children(batch)
        timed = timed_rows(whole)
        if timed is not None:
            self._remember(whole, timed, trees)
        still_open = set(trees.id[trees.rows :].tolist())
        self._inside = {child_time: time for child_time, time in self._inside.items() if child_time.event in still_open}
        if timed is None or whole.devices is None:
            return None
        found = times_of(whole, timed, whole.devices["duration"])
        rows = len(batch)
        return DeviceTimes(found.pair[:rows], found.own[:rows], found.total[:rows])

    def _with_children(self, batch: Batch) -> Batch:
        """The batch, with a row and a pair more for each stream that worked before inside of an event that has ended now."""
        ids = np.fromiter((child_time.event for child_time in self._inside), np.uint64, len(self._inside))
        ended = np.flatnonzero(np.isin(batch["id"], ids))
        row_of = dict(zip(batch["id"][ended].tolist(), ended.tolist(), strict=True))
        known = [(child_time, time) for child_time, time in self._inside.items() if child_time.event in row_of]
        for child_time, _ in known:
            del self._inside[child_time]
        if not known and batch.devices is not None:
            return batch
        new = np.arange(len(known), dtype=np.uint64) + np.uint64(2**64 - 1 - len(known))
        added: dict[str, Any] = {
            "event": new,
            "start": np.zeros(len(known)),
            "duration": [time for _, time in known],
            **{name: [getattr(child_time, name) for child_time, _ in known] for name in _STREAM},
        }
        parent = np.array([row_of[child_time.event] for child_time, _ in known], dtype=np.int32)
        columns = {
            "id": np.concatenate((batch["id"], new)),
            "start": np.concatenate((batch["start"], np.zeros(len(known), np.int64))),
            "parent": np.concatenate((batch["parent"], parent)),
        }
        return Batch(columns, batch.names, batch.threads, devices=_joined(batch.devices, added))

    def _remember(self, whole: Batch, timed: Timed, trees: Forest) -> None:
        """Adds what the rows know to what is known of the events that are open around them."""
        rows, devices = trees.rows, whole.devices
        top = top_level(whole["parent"].astype(np.int64))[timed.rows]
        node = trees.parent[top]
        chosen = np.flatnonzero((node >= rows) & (timed.enclosing < 0))
        if devices is not None and chosen.size:
            pair, stream = timed.pair[timed.rows[chosen]], timed.stream[chosen]
            width = int(stream.max()) + 1
            _, first, place = np.unique(node[chosen] * width + stream, return_index=True, return_inverse=True)
            sums = np.zeros(len(first), dtype=np.int64)
            np.add.at(sums, place.reshape(-1), devices["duration"][pair])
            keys = [trees.id[node[chosen[first]]], *(devices[name][pair[first]] for name in _STREAM)]
            for *key, time in zip(*(column.tolist() for column in keys), sums.tolist(), strict=True):
                child_time = _ChildTimes(*key)
                self._inside[child_time] = self._inside.get(child_time, 0) + time


def _joined(devices: Mapping[str, Array] | None, added: Mapping[str, Any]) -> dict[str, Array]:
    """Pairs, and others behind them."""
    new = {column.name: np.asarray(added[column.name], dtype=column.dtype) for column in DEVICE_COLUMNS}
    return new if devices is None else {name: np.concatenate((devices[name], new[name])) for name in new}
