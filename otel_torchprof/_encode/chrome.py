"""Encodes a batch as Chrome JSON like torch's Kineto, in pieces, so that the trace is never whole in memory.

The format is Google's "Trace Event Format"; names, categories, arguments and top-level keys are those of Kineto's
schema version 1, so that Perfetto, TensorBoard and HTA read it. This package adds the arguments ``error.type``,
``unfinished``, ``async``, ``lost before``, ``inputs cut``, ``label args`` and ``Python identity`` (the same for all segments of
a generator or coroutine), and the top-level keys ``dropped_events`` and ``python_threads`` (the system's id of each thread with
Python's calls, and ``threading.get_ident()`` of it).

Events that cannot be nested slices of one track, as they ended on another thread or outlive their parent, are written as pairs of
asynchronous events, for which viewers create a track.

Work of devices is on tracks of its own, as in Kineto. A device is a process whose id is the device's index, a stream is a
thread in it whose id is the stream's, if these ids are free. A slice lasts from the first to the second timing event of an event. Its
category is ``gpu_user_annotation``, which in Kineto's traces means a range on a stream that is no kernel. ``External id`` is that of the
event; ``device`` and ``stream id`` are where it ran. (With Kineto's ``stream``, HTA would take it for a kernel.) An arrow ``ac2g``
leads to it from the event, if that is a slice.

Allocations and releases are instants. Totals over time are counters, which viewers display as curves: a track for each quantity
of each device (``CPU memory allocated``, ``CUDA:0 memory reserved``) with one series, ``bytes``, since viewers stack several series of a
track, and reserved memory contains the allocated; and ``GPU 0 power`` with the series ``W``. For samples of stacks see
:mod:`.chrome_samples`.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.batch import Batch, Names, RecordedThread
from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.schema import COLUMNS, INPUTS, MEMORY_COLUMNS, Flag, Kind
from otel_torchprof._model.devices import curves_of, device_slices
from otel_torchprof._model.flows import forward_backward, numbered_rows
from otel_torchprof._model.frames import frames_of, plain_stacks, python_ids
from otel_torchprof._model.memory import Total, totals_over_time
from otel_torchprof._model.modules import Hierarchy, module_hierarchy
from otel_torchprof._model.tree import STEP_PREFIX, not_nested
from otel_torchprof._native.encoders import (
    EscapedNames,
    encode_counter,
    encode_device_slices,
    encode_events,
    encode_memory,
)

from .chrome_json import (
    BASE_GRID_NS,
    LARGEST_TID,
    compact,
    microseconds,
    process_events,
    track_events,
    valid,
    window_events,
)
from .chrome_samples import sample_pieces
from .chrome_work import work_metadata, work_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from otel_torchprof._model.devices import DeviceSlices, Stream
    from otel_torchprof._model.step_spans import RecordedStep

STEPS_TID = LARGEST_TID
"""Thread id of the steps' track; no operating system assigns it to a thread."""

OWN_METADATA = frozenset(
    ("schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "dropped_events", "python_threads", "traceEvents")
)
"""Members of the document that the format itself has; metadata cannot have their names."""


def encode(
    batch: Batch,
    *,
    steps: Iterable[RecordedStep] = (),
    metadata: Mapping[str, Any] | None = None,
    base_ns: int | None = None,
    pid: int | None = None,
    call_stacks: bool = False,
    devices_of: Batch | None = None,
    window: tuple[int, int] | None = None,
) -> Iterator[bytes]:
    """Encodes a batch as one Chrome JSON document, in pieces of about 1 MiB.

    ``steps`` become ``ProfilerStep#<number>`` around the events of their thread, as in a trace that was streamed; on a track of their
    own where something crosses the end of one, or their thread is not among the batch's.
    ``metadata`` is merged into the top level of the document. Times are written as microseconds since ``base_ns`` (Unix
    ns; default: the start of the week of the first event), which the document states as ``baseTimeNanoseconds``. ``call_stacks``:
    write the calls around each event as ``Call stack``, and the ``Python thread`` of each call, as Kineto does for a profile
    that is verbose: the trace becomes many times as large. ``devices_of``: a batch of the same names whose devices are drawn
    instead of the batch's, for one that lacks some of its events. ``window``: when the recording began and ended, Unix ns, which
    becomes Kineto's slice of it and marks.

    The arguments are checked before the iterator is returned: TypeError or ValueError for metadata that is not JSON or
    uses a key of the format, ValueError for a batch that points outside its own tables. Costs about 0.15 µs per event, a little more with inputs;
    memory is one piece, the escaped names and about 10 bytes per event (60 per slice of a device), besides arrays over the
    events that live while the arrows are paired. The batch is not changed; several threads may encode it at once.
    """
    extra = checked_metadata(metadata)
    _check_indices(batch)
    if devices_of is not None and devices_of is not batch:
        _check_indices(devices_of)
    step_batch = _batch_of_steps(list(steps), batch)
    pid = os.getpid() if pid is None else pid
    devices = DeviceTimeline(batch if devices_of is None else devices_of, pid)
    starts = [int(part["start"].min()) for part in (batch, step_batch) if len(part)]
    if len(devices):
        starts.append(int(devices.launches.min()))
    if batch.memory is not None and len(batch.memory["time"]):
        starts.append(int(batch.memory["time"].min()))
    if batch.work is not None:
        starts.append(int(batch.work["start"].min()))
    if batch.samples is not None and len(batch.samples):
        starts.append(int(batch.samples.time[0]))
    if base_ns is None:
        base_ns = min(starts) // BASE_GRID_NS * BASE_GRID_NS if starts else 0
    ends = [int(part["end"].max()) for part in (batch, step_batch) if len(part)]
    head = _head(extra, batch, base_ns) + ",\n".join(process_events(pid, "python", pid, "CPU"))
    threads = _host_threads(batch)
    if len(step_batch):
        threads += step_batch.threads
    marks = window_events(*window, base_ns) if window else []
    tail = "".join(f",\n{event}" for event in marks)
    tail += _drop_marker(batch.dropped, pid, threads, max(ends, default=base_ns) - base_ns) + "\n]}\n"
    head += _threads(pid, threads) + devices.metadata() + work_metadata(batch)
    written = (_part(part, base_ns, pid, call_stacks, of) for part, of in ((step_batch, None), (batch, devices)))
    return itertools.chain([head.encode()], itertools.chain.from_iterable(written), [tail.encode()])


class _Drawn(NamedTuple):
    """Tracks and arrows of a batch's events."""

    tids: npt.NDArray[np.int64]
    """Thread id in the trace for each thread of the batch."""
    detached: npt.NDArray[np.uint8]
    """1 for rows that are written as asynchronous pairs instead of slices."""
    flows: Mapping[str, npt.NDArray[Any]]
    """Both ends of each arrow."""


def _part(batch: Batch, base_ns: int, pid: int, call_stacks: bool, devices: DeviceTimeline | None) -> Iterator[bytes]:
    detached, first_arrow = np.empty(0, dtype=np.uint8), 1
    if len(batch):
        drawn = _drawn(batch)
        yield from _events(batch, base_ns, pid, call_stacks, drawn)
        detached, first_arrow = drawn.detached, 1 + len(drawn.flows["flow_row"]) // 2
    if devices:
        yield from devices.pieces(batch, detached, first_arrow=first_arrow, base_ns=base_ns)
    yield from work_pieces(batch, base_ns)
    yield from _memory(batch, base_ns, pid)
    yield from _power(batch, base_ns, pid)
    yield from sample_pieces(batch.samples, batch.threads, base_ns, pid)


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the user's metadata as JSON text by key."""
    encoded = {}
    for key, value in (metadata or {}).items():
        if not isinstance(key, str):
            raise TypeError(f"metadata has the key {key!r} of type {type(key).__name__}: keys must be strings")
        if key in OWN_METADATA:
            raise ValueError(f"metadata has the key {key!r}, which the trace format uses itself: choose another name")
        try:
            encoded[key] = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"metadata[{key!r}] cannot be written as JSON ({error}): give strings, finite numbers, booleans, "
                "None, and lists and dictionaries of them"
            ) from error
    return encoded


def _check_indices(batch: Batch) -> None:
    """Checks that indices are in range, since native code does not."""
    limits = {"name": len(batch.names), "error_type": len(batch.names)}
    limits |= {"thread": len(batch.threads), "end_thread": len(batch.threads)}
    for column, limit in limits.items():
        highest = int(batch[column].max(initial=0))
        if len(batch) and highest >= limit:
            table = "threads" if "thread" in column else "names"
            raise ValueError(f"the batch's column {column!r} points at {table}[{highest}], but there are {limit}")
    if batch.memory is not None and (batch.memory["thread"] >= len(batch.threads)).any():
        raise ValueError(f"the batch's memory points at a thread beyond the {len(batch.threads)} that there are")


def _batch_of_steps(steps: list[RecordedStep], batch: Batch) -> Batch:
    columns = {
        "start": [step.start for step in steps],
        "end": [step.end for step in steps],
        "name": range(1, len(steps) + 1),
        "id": np.zeros(len(steps), dtype=np.uint64),
        "kind": np.full(len(steps), Kind.LABEL),
    }
    names = ["", *(f"{STEP_PREFIX}{step.number}" for step in steps)]
    return Batch.of(columns, names, (_thread_of_steps(steps, batch),))


def _thread_of_steps(steps: list[RecordedStep], batch: Batch) -> RecordedThread:
    """Returns the thread of the training loop if its slices nest with those of the steps; else a track for steps alone."""
    own = RecordedThread(STEPS_TID, 0, 0, "steps")
    idents = {step.thread for step in steps}
    tracks = {thread.os_tid: thread for thread in batch.threads if thread.ident in idents}
    if len(idents) != 1 or len(tracks) != 1:
        return own
    (track,) = tracks.values()
    on_it = np.array([thread.os_tid == track.os_tid for thread in batch.threads], dtype=np.bool_)
    slices = on_it[batch["thread"]] & ((batch["flags"] & Flag.ASYNC) == 0)
    slices &= (batch["start"] >= steps[0].start) | (
        batch["end"] < steps[-1].end
    )  # without slices that enclose all steps: they cross none
    start, end = batch["start"], batch["end"]
    if not slices.all():
        start, end = start[slices], end[slices]
    return own if _any_crosses(start, end, steps) else track


def _any_crosses(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], steps: list[RecordedStep]) -> bool:
    """Whether an event begins in a step and ends after it, or begins before one and ends in it. Costs 10 ns per event."""
    if not len(start):
        return False
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    latest_end = np.maximum.accumulate(end)
    # Only an event that is open at the edge of a step can cross it, and mostly none is.
    edges = np.array([(step.start, step.end) for step in steps], dtype=np.int64)
    before = np.searchsorted(start, edges)
    for number, is_end in np.argwhere((before > 0) & (latest_end[before - 1] > edges)).tolist():
        first, last = edges[number].tolist()
        until = before[number, is_end]
        is_open = end[:until] > (last if is_end else first)
        if (is_open & (start[:until] >= first if is_end else end[:until] < last)).any():
            return True
    return False


# --- Parts written once, with Python's json ---


def _head(extra: Mapping[str, str], batch: Batch, base_ns: int) -> str:
    fields = {"schemaVersion": "1", **extra, "displayTimeUnit": '"ms"', "baseTimeNanoseconds": str(base_ns)}
    fields |= dropped_member(batch)
    if threads := [batch.threads[number] for number in _frame_threads(batch)]:
        fields["python_threads"] = compact({str(thread.os_tid): thread.ident for thread in threads})
    return "{" + ",\n".join(f"{compact(key)}:{value}" for key, value in fields.items()) + ',\n"traceEvents":[\n'


def dropped_member(batch: Batch) -> dict[str, str]:
    """The member with the numbers of dropped events by reason, as JSON; empty without any."""
    return {"dropped_events": compact(dict(batch.dropped))} if batch.dropped else {}


def _host_threads(batch: Batch) -> list[RecordedThread]:
    """The threads of a batch that are no streams of devices."""
    streams = set() if batch.work is None else set(distinct_values(batch.work["thread"]).tolist())
    return [thread for number, thread in enumerate(batch.threads) if number not in streams]


def _threads(pid: int, threads: Iterable[RecordedThread]) -> str:
    """Encodes name and position of each track; a reused thread id keeps its first name."""
    names: dict[int, str] = {}
    for thread in threads:
        names[thread.os_tid] = names.get(thread.os_tid) or thread.name
    tracks = (track_events(pid, tid, name, -1 if tid == STEPS_TID else tid) for tid, name in names.items())
    return "".join(f",\n{event}" for event in itertools.chain.from_iterable(tracks))


def _drop_marker(dropped: Mapping[str, int], pid: int, threads: Sequence[RecordedThread], end_ns: int) -> str:
    total = sum(dropped.values())
    if not total:
        return ""
    name = f"{total} events dropped ({', '.join(reason for reason, count in dropped.items() if count)})"
    event = {"ph": "i", "s": "p", "cat": "dropped_events", "name": valid(name), "pid": pid}
    event |= {"tid": threads[0].os_tid if threads else 0, "args": dict(dropped)}
    return f',\n{compact(event)[:-1]},"ts":{microseconds(end_ns)}}}'


# --- Events, encoded natively ---


def _events(batch: Batch, base_ns: int, pid: int, call_stacks: bool, drawn: _Drawn) -> Iterator[bytes]:
    all_names, stacks = _stack_columns(batch) if call_stacks else (batch.names, {})
    names = EscapedNames(all_names)
    columns = {c.name: np.ascontiguousarray(batch[c.name], dtype=c.dtype) for c in COLUMNS if c.name != "parent"}
    numbered = numbered_rows(batch)
    columns |= {name: columns[name][numbered] for name in ("sequence_nr", "fwd_thread")}
    if batch.inputs is not None and INPUTS.name in batch.columns:
        columns[INPUTS.name] = np.ascontiguousarray(batch[INPUTS.name], dtype=INPUTS.dtype)
        columns["input_words"] = np.ascontiguousarray(batch.inputs, dtype=np.int64)
    hierarchy = _with_called_modules(batch, module_hierarchy(batch))
    hierarchies = EscapedNames(Names.of(hierarchy.texts))
    if len(hierarchy.texts) > 1:
        columns["hierarchy"] = hierarchy.rows
    columns |= _python_columns(batch, call_stacks) | stacks
    columns |= {"detached": drawn.detached, "thread_tids": drawn.tids, **drawn.flows}
    yield from encode_events(columns, names, hierarchies, base_ns=base_ns, pid=pid)


def _drawn(batch: Batch) -> _Drawn:
    tids = np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)
    detached = not_nested(batch).astype(np.uint8)
    return _Drawn(tids, detached, _flow_ends(batch, detached))


def _flow_ends(batch: Batch, detached: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """Returns both ends of each arrow, by row. Arrows bind to slices, so a detached event has none."""
    forward, backward = forward_backward(batch)
    on_track = (detached[forward] | detached[backward]) == 0
    forward, backward = forward[on_track], backward[on_track]
    numbers = np.arange(1, len(forward) + 1, dtype=np.uint64)
    rows = np.concatenate((forward, backward)).astype(np.uint64)
    order = np.argsort(rows, kind="stable")
    return {
        "flow_row": rows[order],
        "flow_id": np.concatenate((numbers, numbers))[order],
        "flow_phase": np.repeat(np.frombuffer(b"sf", dtype=np.uint8), len(forward))[order],
    }


# --- Python calls: numbers, threads, and the stacks of all events ---


Array = npt.NDArray[Any]


def _frame_threads(batch: Batch) -> list[int]:
    """Returns the threads with calls, by their first call, as indices into ``Batch.threads``."""
    is_frame = frames_of(batch)
    if is_frame is None:
        return []
    thread, start = batch["thread"][is_frame], batch["start"][is_frame]
    first = np.full(len(batch.threads), np.iinfo(np.int64).max)
    np.minimum.at(first, thread, start)
    order: list[int] = np.argsort(first, kind="stable").tolist()
    return order[: len(distinct_values(thread))]


def _with_called_modules(batch: Batch, enclosing: Hierarchy) -> Hierarchy:
    """Returns the enclosing modules of events, and for calls of modules the module itself, if known: ``GPT.blocks.0.attn``."""
    modules = {} if batch.frame_info is None else batch.frame_info.modules
    if not modules:
        return enclosing
    texts, by_name = list(enclosing.texts), np.zeros(len(batch.names), dtype=np.uint32)
    for name, module in modules.items():
        by_name[name] = len(texts)
        root = "" if module.qualified_name == module.root else module.root
        texts.append(f"{root}.{module.qualified_name}".removeprefix("."))
    own = np.where(batch["kind"] == Kind.FRAME, by_name[batch["name"]], 0)
    return Hierarchy(np.where(own > 0, own, enclosing.rows).astype(np.uint32), texts)


def _python_columns(batch: Batch, number_threads: bool) -> dict[str, Array]:
    """Returns the columns of ``otp_chrome_events`` for calls; empty without calls."""
    ids = python_ids(batch)
    if ids is None:
        return {}
    columns = {"python_id": ids.own, "python_parent_id": ids.caller, "python_module_id": ids.module}
    if number_threads:
        numbers = np.zeros(len(batch.threads), dtype=np.int64)
        threads = _frame_threads(batch)
        numbers[threads] = np.arange(len(threads))
        columns["python_threads"] = numbers
    return columns


def _stack_columns(batch: Batch) -> tuple[Names, dict[str, Array]]:
    """Returns the names of the batch and of stacks, and the columns of ``otp_chrome_events`` for stacks."""
    codes, stacks = plain_stacks(batch)
    if len(stacks) == 1:
        return batch.names, {}
    return stacks.names, {"stack": codes, "stack_outer": stacks.outer, "stack_name": stacks.name}


# --- Devices ---


# Above every process id of Linux. Kineto sorts devices from this number on, hence after processes.
_BEYOND_PIDS = 5_000_000
_BEYOND_STREAMS = 1_000_000

_KINDS = {1: "GPU", 6: "GPU", 12: "GPU", 13: "GPU", 9: "XLA", 15: "HPU", 19: "MTIA"}
"""Common names of ``c10::DeviceType`` values."""


class _Place(NamedTuple):
    """A track: one lane of a stream."""

    pid: int
    tid: int
    stream: Stream
    name: str


class DeviceTimeline:
    """The devices of one trace. Immutable; several threads may encode it at once."""

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
        """Start of the events that launched slices, Unix ns; no slice begins before the first of them."""
        rows = np.empty(0, dtype=np.int64) if self._slices is None else self._slices.row
        return self._batch["start"][rows]

    def metadata(self) -> str:
        """Returns names and positions of the tracks, each as a line that begins with a comma.

        Viewers display a process as name and id; hence the name is "GPU" for process 0, where Kineto writes "python".
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
        """Encodes slices and arrows as lines of JSON, in pieces of about 1 MiB. Costs some 0.15 us per slice.

        ``displayed``: the events in the trace, with the same names; ``detached``: 1 for those that are not slices.
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
        """Assigns a process to each device and a track to each lane."""
        lanes = int(slices.lane.max()) + 1
        used, place = np.unique(slices.stream * lanes + slices.lane, return_inverse=True)
        self._place = place.reshape(-1).astype(np.uint32)
        taken = {self._pid}
        for stream in slices.streams:
            device = (stream.device_type, stream.device_index)
            if device not in self._pids:
                self._pids[device] = _free(stream.device_index, _BEYOND_PIDS, taken)
        # First the tracks with the numbers of streams, so that no other lane gets one of these.
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
    """Returns the track of each event, given by id; -1 if it is not a slice in the trace."""
    row = rows_of(displayed, events)
    tids = np.full(len(row), -1, dtype=np.int64)
    drawn = np.flatnonzero(row >= 0)
    drawn = drawn[detached[row[drawn]] == 0]
    tids[drawn] = np.array([thread.os_tid for thread in displayed.threads], dtype=np.int64)[
        displayed["thread"][row[drawn]]
    ]
    return tids


def _free(number: int, beyond: int, taken: set[int]) -> int:
    """Returns ``number`` if viewers accept it and it is not taken; else the first free number from ``beyond`` on."""
    if not 0 <= number <= LARGEST_TID or number in taken:
        number = next(free for free in itertools.count(beyond) if free not in taken)
    taken.add(number)
    return number


# --- Memory and power ---

_DEVICES = {0: "CPU", 1: "CUDA", 2: "MKLDNN", 5: "IDEEP", 6: "HIP", 12: "XPU", 19: "MTIA", 20: "PrivateUse1"}
"""``c10::DeviceType`` of the devices whose allocators report their memory."""


def _memory(batch: Batch, base_ns: int, pid: int) -> Iterator[bytes]:
    """Encodes memory records and totals as lines of JSON, in pieces of about 1 MiB; nothing if memory was not recorded.

    Their ``Ev Idx`` continues after the rows of the batch. Threads must be in range. Costs some 0.1 us per record and per sample.
    """
    if batch.memory is None:
        return
    columns = {
        c.name: np.ascontiguousarray(batch.memory[c.name], dtype=c.dtype) for c in MEMORY_COLUMNS if c.name != "event"
    }
    columns["thread_tids"] = np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)
    yield from encode_memory(columns, first_index=len(batch), base_ns=base_ns, pid=pid)
    for total in totals_over_time(batch.memory) if len(batch.memory["time"]) else ():
        samples = {name: np.ascontiguousarray(getattr(total, name), dtype=np.int64) for name in ("time", "bytes")}
        yield from encode_counter(samples, total_track(total).encode(), base_ns=base_ns, pid=pid)


def total_track(total: Total) -> str:
    """The name of the counter of a total."""
    device = _DEVICES.get(total.device_type, f"device {total.device_type}")
    index = "" if total.device_index < 0 else f":{total.device_index}"
    return f"{device}{index} memory {total.quantity}"


def _power(batch: Batch, base_ns: int, pid: int) -> Iterator[bytes]:
    """Encodes power as lines of JSON, a piece per device; nothing if no energy counter was read.

    Each device has a track ``GPU 0 power`` with one series, ``W``: the average power from each reading to the next.
    """
    if batch.energy is None:
        return
    for index, (times, readings) in curves_of(batch.energy):
        apart = np.flatnonzero(np.append(times[1:] > times[:-1], True))
        time, joules = times[apart], readings[apart]
        watts = np.diff(joules) / (np.diff(time) / 1e9)
        head = compact({"ph": "C", "name": f"GPU {index} power", "pid": pid, "tid": 0})[:-1]
        samples = zip(time.tolist(), np.append(watts, watts[-1:]).tolist(), strict=False)
        yield "".join(
            f',\n{head},"ts":{microseconds(at - base_ns)},"args":{compact({"W": round(power, 3)})}}}'
            for at, power in samples
        ).encode()
