"""Chrome JSON of what devices did: tracks of their own, as torch's Kineto lays out a GPU's.

A device is a process whose id is the device's index, a stream a thread of it whose id is the stream's, where these are free.
A slice is what lies between the marks around an event; it has the category ``gpu_user_annotation``, by which readers of
Kineto's traces know a range on a stream that is no kernel, whatever the event is. ``External id`` is that of the event;
``device`` and ``stream id`` say where it ran. (Kineto's ``stream`` would make it a kernel to HTA.) An arrow ``ac2g`` leads
to it from the event, where that is a slice itself.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._native.chrome_encoders import EscapedNames, encode_device_slices
from otel_torchprof._tree.device_slices import device_slices

from .chrome_json import LARGEST_TID, process_events, track_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._tree.device_slices import DeviceSlices, Stream

# Above every process id of Linux. Kineto sorts devices from here on, and so they come behind the processes.
_BEYOND_PIDS = 5_000_000
_BEYOND_STREAMS = 1_000_000

_KINDS = {1: "GPU", 6: "GPU", 12: "GPU", 13: "GPU", 9: "XLA", 15: "HPU", 19: "MTIA"}
"""What people call a ``c10::DeviceType``."""


class _Place(NamedTuple):
    """A track: one lane of a stream."""

    pid: int
    tid: int
    stream: Stream
    name: str


class DeviceTimeline:
    """The devices' part of one trace. Read-only once made; several threads may encode it at once."""

    def __init__(self, batch: Batch, pid: int) -> None:
        """Lays out the slices of a batch's devices for the trace of the process ``pid``. Raises MemoryError."""
        self._batch = batch
        self._slices = device_slices(batch)
        self._pid = pid
        self._places: list[_Place] = []
        self._place = np.empty(0, dtype=np.uint32)
        self._pids: dict[tuple[int, int], int] = {}
        if self._slices is not None:
            self._lay_out(self._slices)

    def __len__(self) -> int:
        return 0 if self._slices is None else len(self._slices.row)

    @property
    def launches(self) -> npt.NDArray[np.int64]:
        """When the events began, Unix ns: no slice is before the first of them."""
        rows = np.empty(0, dtype=np.int64) if self._slices is None else self._slices.row
        return self._batch["start"][rows]

    def metadata(self) -> str:
        """Names and places of the tracks, each as a line that begins with a comma.

        Viewers show a process as name and id, hence "GPU" of process 0, where Kineto says "python".
        """
        events = []
        for at, ((kind, index), pid) in enumerate(self._pids.items()):
            kind_name = _KINDS.get(kind, "device")
            label = f"{kind_name} {index}"
            events += process_events(pid, kind_name if pid == index else label, _BEYOND_PIDS + at, label)
        for at, place in enumerate(self._places):
            events += track_events(place.pid, place.tid, place.name, at)
        return "".join(f",\n{event}" for event in events)

    def pieces(
        self, displayed: Batch, detached: npt.NDArray[np.uint8], *, first_arrow: int, base_ns: int
    ) -> Iterator[bytes]:
        """The slices and arrows as lines of JSON, in pieces of about 1 MiB. Costs some 0.15 us per slice.

        ``displayed``: the events that are in the trace, of the same names; ``detached``: 1 for those that are no slices.
        """
        if self._slices is None:
            return
        rows, batch = self._slices.row, self._batch
        columns: dict[str, npt.NDArray[Any]] = {
            "start": self._slices.start,
            "duration": self._slices.duration,
            "event": np.ascontiguousarray(batch["id"][rows], dtype=np.uint64),
            "name": np.ascontiguousarray(batch["name"][rows], dtype=np.uint32),
            "place": self._place,
            "launch_time": np.ascontiguousarray(batch["start"][rows], dtype=np.int64),
            "launch_tid": _launch_tids(displayed, detached, batch["id"][rows]),
        }
        reported = [(place.pid, place.tid, place.stream.device_index, place.stream.number) for place in self._places]
        for name, values in zip(("pid", "tid", "device", "stream"), zip(*reported, strict=True), strict=True):
            columns[f"place_{name}"] = np.array(values, dtype=np.int64)
        names = EscapedNames(batch.names)
        yield from encode_device_slices(columns, names, first_arrow=first_arrow, base_ns=base_ns, pid=self._pid)

    def _lay_out(self, slices: DeviceSlices) -> None:
        """Settles the process of each device and the track of each lane."""
        lanes = int(slices.lane.max()) + 1
        used, place = np.unique(slices.stream * lanes + slices.lane, return_inverse=True)
        self._place = place.reshape(-1).astype(np.uint32)
        taken = {self._pid}
        for stream in slices.streams:
            device = (stream.device_type, stream.device_index)
            if device not in self._pids:
                self._pids[device] = _free(stream.device_index, _BEYOND_PIDS, taken)
        # The streams' own tracks first, so that no other lane takes the id of one.
        tids: dict[int, int] = {}
        taken_of: dict[int, set[int]] = {pid: set() for pid in self._pids.values()}
        for at in sorted(used.tolist(), key=lambda at: (at % lanes > 0, at)):
            stream, lane = slices.streams[at // lanes], at % lanes
            pid = self._pids[stream.device_type, stream.device_index]
            tids[at] = _free(-1 if lane else stream.number, _BEYOND_STREAMS, taken_of[pid])
        for at, tid in sorted(tids.items()):
            stream, lane = slices.streams[at // lanes], at % lanes
            name = f"stream {stream.number}" + (f" ({lane + 1})" if lane else "")
            self._places.append(_Place(self._pids[stream.device_type, stream.device_index], tid, stream, name))


def _launch_tids(displayed: Batch, detached: npt.NDArray[np.uint8], events: Any) -> npt.NDArray[np.int64]:
    """The track of each event, by its id; -1 for what is no slice in the trace."""
    row = rows_of(displayed, events)
    tids = np.full(len(row), -1, dtype=np.int64)
    drawn = np.flatnonzero(row >= 0)
    drawn = drawn[detached[row[drawn]] == 0]
    tids[drawn] = np.array([thread.os_tid for thread in displayed.threads], dtype=np.int64)[
        displayed["thread"][row[drawn]]
    ]
    return tids


def _free(number: int, beyond: int, taken: set[int]) -> int:
    """The number itself where a viewer takes it and nobody has it, else the first that is free from ``beyond`` on."""
    if not 0 <= number <= LARGEST_TID or number in taken:
        number = next(free for free in itertools.count(beyond) if free not in taken)
    taken.add(number)
    return number
