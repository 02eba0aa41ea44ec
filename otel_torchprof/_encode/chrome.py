"""Chrome JSON of a batch, as torch's Kineto writes it, in pieces: the trace is never in memory whole.

The format is Google's "Trace Event Format"; names, categories, arguments and top-level keys are those of Kineto's
schema version 1, so that Perfetto, TensorBoard and HTA read it. Of our own are the arguments ``error.type``,
``unfinished``, ``async``, ``lost before``, ``inputs cut``, ``label args`` and ``Python identity`` (the same for all segments of
a generator or coroutine), and the top-level keys ``dropped_events`` and ``python_threads`` (the system's id of each thread with
Python's calls, and ``threading.get_ident()`` of it).

What devices did is on tracks of their own: :mod:`.chrome_devices`.

What one track cannot show as nested slices is written as a pair of asynchronous events, which viewers give a track of
its own: events that ended on another thread, and events that outlive the one around them.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.batch import Batch, Names, Thread
from otel_torchprof._columns.schema import COLUMNS, INPUTS, Flag, Kind
from otel_torchprof._native.chrome_encoders import EscapedNames, encode_events
from otel_torchprof._tree.flows import forward_backward, numbered_rows
from otel_torchprof._tree.modules import module_hierarchy
from otel_torchprof._tree.nesting import not_nested
from otel_torchprof._tree.tree import STEP_PREFIX

from . import chrome_memory, chrome_power
from .chrome_devices import DeviceTimeline
from .chrome_frames import frame_threads, python_columns, stack_columns, with_called_modules
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from otel_torchprof._spans.step_spans import RecordedStep

STEPS_TID = LARGEST_TID
"""Thread id of the steps' track, which no system gives to a thread."""

_OWN_KEYS = frozenset(
    ("schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "dropped_events", "python_threads", "traceEvents")
)


def encode(
    batch: Batch,
    *,
    steps: Iterable[RecordedStep] = (),
    metadata: Mapping[str, Any] | None = None,
    base_ns: int | None = None,
    pid: int | None = None,
    process_name: str = "python",
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
    extra = _checked_metadata(metadata)
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
    if base_ns is None:
        base_ns = min(starts) // BASE_GRID_NS * BASE_GRID_NS if starts else 0
    ends = [int(part["end"].max()) for part in (batch, step_batch) if len(part)]
    head = _head(extra, batch, base_ns) + ",\n".join(process_events(pid, valid(process_name), pid, "CPU"))
    threads = list(batch.threads)
    if len(step_batch):
        threads += step_batch.threads
    marks = window_events(*window, base_ns) if window else []
    tail = "".join(f",\n{event}" for event in marks)
    tail += _drop_marker(batch.dropped, pid, threads, max(ends, default=base_ns) - base_ns) + "\n]}\n"
    head += _threads(pid, threads) + devices.metadata()
    written = (_part(part, base_ns, pid, call_stacks, of) for part, of in ((step_batch, None), (batch, devices)))
    return itertools.chain([head.encode()], itertools.chain.from_iterable(written), [tail.encode()])


class _Drawn(NamedTuple):
    """How the events of a batch are drawn."""

    tids: npt.NDArray[np.int64]
    """Of its threads."""
    detached: npt.NDArray[np.uint8]
    """1 for the rows that are asynchronous pairs instead of slices."""
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
    yield from chrome_memory.pieces(batch, base_ns, pid)
    yield from chrome_power.pieces(batch, base_ns, pid)


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """The user's metadata as JSON text by key."""
    encoded = {}
    for key, value in (metadata or {}).items():
        if not isinstance(key, str):
            raise TypeError(f"metadata has the key {key!r} of type {type(key).__name__}: keys must be strings")
        if key in _OWN_KEYS:
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
    """Native code follows the indices without looking, so they are looked at here."""
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


def _thread_of_steps(steps: list[RecordedStep], batch: Batch) -> Thread:
    """That of the loop, if its slices and those of the steps nest."""
    own = Thread(STEPS_TID, 0, 0, "steps")
    idents = {step.thread for step in steps}
    tracks = {thread.os_tid: thread for thread in batch.threads if thread.ident in idents}
    if len(idents) != 1 or len(tracks) != 1:
        return own
    (track,) = tracks.values()
    on_it = np.array([thread.os_tid == track.os_tid for thread in batch.threads], dtype=np.bool_)
    slices = on_it[batch["thread"]] & ((batch["flags"] & Flag.ASYNC) == 0)
    slices &= (batch["start"] >= steps[0].start) | (
        batch["end"] < steps[-1].end
    )  # what is around all steps crosses none
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
    # Only an event that is open at an edge of a step can cross it, and at most edges none is.
    edges = np.array([(step.start, step.end) for step in steps], dtype=np.int64)
    before = np.searchsorted(start, edges)
    for number, is_end in np.argwhere((before > 0) & (latest_end[before - 1] > edges)).tolist():
        first, last = edges[number].tolist()
        until = before[number, is_end]
        is_open = end[:until] > (last if is_end else first)
        if (is_open & (start[:until] >= first if is_end else end[:until] < last)).any():
            return True
    return False


# --- what is written once: Python's json ---


def _head(extra: Mapping[str, str], batch: Batch, base_ns: int) -> str:
    fields = {"schemaVersion": "1", **extra, "displayTimeUnit": '"ms"', "baseTimeNanoseconds": str(base_ns)}
    if batch.dropped:
        fields["dropped_events"] = compact(dict(batch.dropped))
    if threads := [batch.threads[number] for number in frame_threads(batch)]:
        fields["python_threads"] = compact({str(thread.os_tid): thread.ident for thread in threads})
    return "{" + ",\n".join(f"{compact(key)}:{value}" for key, value in fields.items()) + ',\n"traceEvents":[\n'


def _threads(pid: int, threads: Iterable[Thread]) -> str:
    """Name and place of each track; a thread id that the system gave out twice keeps the name it had first."""
    names: dict[int, str] = {}
    for thread in threads:
        names[thread.os_tid] = names.get(thread.os_tid) or thread.name
    tracks = (track_events(pid, tid, name, -1 if tid == STEPS_TID else tid) for tid, name in names.items())
    return "".join(f",\n{event}" for event in itertools.chain.from_iterable(tracks))


def _drop_marker(dropped: Mapping[str, int], pid: int, threads: Sequence[Thread], end_ns: int) -> str:
    total = sum(dropped.values())
    if not total:
        return ""
    name = f"{total} events dropped ({', '.join(reason for reason, count in dropped.items() if count)})"
    event = {"ph": "i", "s": "p", "cat": "dropped_events", "name": valid(name), "pid": pid}
    event |= {"tid": threads[0].os_tid if threads else 0, "args": dict(dropped)}
    return f',\n{compact(event)[:-1]},"ts":{microseconds(end_ns)}}}'


# --- what is written per event: native ---


def _events(batch: Batch, base_ns: int, pid: int, call_stacks: bool, drawn: _Drawn) -> Iterator[bytes]:
    all_names, stacks = stack_columns(batch) if call_stacks else (batch.names, {})
    names = EscapedNames(all_names)
    columns = {c.name: np.ascontiguousarray(batch[c.name], dtype=c.dtype) for c in COLUMNS if c.name != "parent"}
    numbered = numbered_rows(batch)
    columns |= {name: columns[name][numbered] for name in ("sequence_nr", "fwd_thread")}
    if batch.inputs is not None and INPUTS.name in batch.columns:
        columns[INPUTS.name] = np.ascontiguousarray(batch[INPUTS.name], dtype=INPUTS.dtype)
        columns["input_words"] = np.ascontiguousarray(batch.inputs, dtype=np.int64)
    hierarchy = with_called_modules(batch, module_hierarchy(batch))
    hierarchies = EscapedNames(Names.of(hierarchy.texts))
    if len(hierarchy.texts) > 1:
        columns["hierarchy"] = hierarchy.rows
    columns |= python_columns(batch, call_stacks) | stacks
    columns |= {"detached": drawn.detached, "thread_tids": drawn.tids, **drawn.flows}
    yield from encode_events(columns, names, hierarchies, base_ns=base_ns, pid=pid)


def _drawn(batch: Batch) -> _Drawn:
    tids = np.array([thread.os_tid for thread in batch.threads], dtype=np.int64)
    detached = not_nested(batch).astype(np.uint8)
    return _Drawn(tids, detached, _flow_ends(batch, detached))


def _flow_ends(batch: Batch, detached: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """Both ends of each arrow, sorted by row. Arrows bind to slices, so a detached event has none."""
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
