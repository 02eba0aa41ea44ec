"""What devices did, from the rows of a Chrome trace: kernels and copies with what launched them, and timed events of this package."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values, used_numbers
from otel_torchprof._columns.schema import DEVICE_COLUMNS, WORK_COLUMNS, WorkFlag
from otel_torchprof._native.trace_files import ROW_TIMED

from .chrome_events import KINDS, OTHER_EVENTS, SliceKind, is_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Array

    from .trace_columns import TraceColumns

CODES = {kind: code for code, kind in enumerate(SliceKind)}
_ANNOTATION = "gpu_user_annotation"
_CUDA = 1
_MOST_DIGITS = 9
_DEVICE_TYPES = {
    **dict.fromkeys(("xpu_runtime", "xpu_driver"), 12),
    **dict.fromkeys(("mtia_runtime", "mtia_ccp_events"), 19),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), 20),
    "hpu_op": 15,
}
"""``c10::DeviceType`` by a category that only traces of such devices have; those of others are CUDA's."""
_TYPES_OF_LABELS = {"XPU": 12, "HPU": 15, "MTIA": 19, "XLA": 9}
"""``c10::DeviceType`` by the first word of the name that a device has in a trace; others are CUDA's."""


class Times(NamedTuple):
    """Times of the rows of a file, ns."""

    start: npt.NDArray[np.int64]
    """Unix time."""
    duration: npt.NDArray[np.int64]
    """-1 for rows that are no slices."""


class Launches(NamedTuple):
    """Events of the host that may have launched work; one entry each."""

    event: Array
    """Ids in the batch."""
    external_id: Array
    """Ids in the file, 0 for none."""
    start: Array
    row: Array
    """Rows of the file."""


def other_events(trace: TraceColumns) -> Counter[str]:
    """Number of events that are no slices, and of slices without duration, by kind."""
    counts = Counter({"slices without duration, counted as 0": trace.figures.without_duration})
    for phase, count in trace.figures.by_phase.items():
        counts[OTHER_EVENTS.get(phase, "events of unknown phase")] += count
    return counts


def slice_kinds(trace: TraceColumns) -> npt.NDArray[np.uint8]:
    """The kind of each row, as a code of :data:`CODES`, by category; without a known one by stream or process."""
    rows, names = trace.rows, trace.names
    unknown = len(CODES)
    by_category = np.full(len(names), unknown, np.uint8)
    for category in used_numbers(rows["category"], len(names)).tolist():
        kind = KINDS.get(names[category])
        by_category[category] = unknown if kind is None else CODES[kind]
    kinds: npt.NDArray[np.uint8] = by_category[rows["category"]]
    others = np.flatnonzero(kinds == unknown)
    if not others.size:
        return kinds
    on_stream = np.zeros(len(kinds), np.bool_)
    on_stream[trace.works["row"][trace.works["stream"] >= 0].astype(np.int64)] = True
    is_work = on_stream[others] | device_tracks(trace)[rows["track"][others]]
    kinds[others] = np.where(is_work, CODES[SliceKind.DEVICE], CODES[SliceKind.HOST])
    return kinds


def device_tracks(trace: TraceColumns) -> npt.NDArray[np.bool_]:
    """For each track, whether its process is a device, by its name, label or id."""
    devices: dict[int, bool] = {}
    for process, name, text in process_names_of(trace):
        state = is_device(name, text)
        if state is not None:  # one labelled as CPU and as device is a CPU: Kineto's ids of devices may equal pids
            devices[process] = state and devices.get(process, True)
    for process in distinct_values(trace.tracks[:, 0]).tolist():
        devices.setdefault(process, is_device("process_name", trace.names[process].strip('"')) or False)
    return np.array([devices[process] for process in trace.tracks[:, 0].tolist()], np.bool_)


def process_names_of(trace: TraceColumns) -> list[tuple[int, str, str]]:
    """The process, kind and text of each name or label of a process."""
    rows, names = trace.rows, trace.names
    metadata = np.flatnonzero(rows["phase"] == ord("M")).tolist()
    said = [(int(trace.tracks[rows["track"].item(row), 0]), names[rows["name"].item(row)], row) for row in metadata]
    return [(process, name, names[rows["text"].item(row)]) for process, name, row in said if name != "thread_name"]


def annotation_slices(trace: TraceColumns) -> npt.NDArray[np.bool_]:
    """A mask of the rows that are the time of a label's kernels on a stream."""
    rows = trace.rows
    category = _number_of(trace, _ANNOTATION)
    if category is None:
        return np.zeros(len(rows["start"]), np.bool_)
    is_annotation: npt.NDArray[np.bool_] = (rows["category"] == category) & ~timed_slices(trace)
    return is_annotation


def timed_slices(trace: TraceColumns) -> npt.NDArray[np.bool_]:
    """A mask of the rows that are the time between two timing events."""
    is_timed: npt.NDArray[np.bool_] = (trace.rows["flags"] & ROW_TIMED) != 0
    return is_timed


def work_of(
    trace: TraceColumns, rows: Array, times: Times, threads: Mapping[int, int], launches: Launches
) -> dict[str, Array] | None:
    """The work in some rows, by track, start and the longer first, as :attr:`Batch.work`; None without any.

    ``threads``: the thread of each track of a device.
    """
    if not rows.size:
        return None
    start, track = times.start[rows], trace.rows["track"][rows]
    thread = np.array([threads.get(number, 0) for number in range(len(trace.tracks))], np.uint32)[track]
    order = np.lexsort((-times.duration[rows], start, thread))
    rows, start, track, thread = rows[order], start[order], track[order], thread[order]
    info = _infos(trace, rows)
    stream = np.where(info["stream"] >= 0, info["stream"], _numbers_of(trace, 1)[track])
    device = np.where(info["device"] >= 0, info["device"], _numbers_of(trace, 0)[track])
    columns = {
        "event": _launching(trace, rows, start, info["correlation"], launches),
        "start": start,
        "duration": times.duration[rows],
        "stream": stream,
        "bytes": info["bytes"],
        "correlation": info["correlation"],
        "name": trace.rows["name"][rows],
        "category": trace.rows["category"][rows],
        "thread": thread,
        "device_type": np.full(len(rows), _device_type(trace)),
        "device_index": device,
        "flags": np.where(annotation_slices(trace)[rows], WorkFlag.ANNOTATION, 0),
    }
    return {column.name: np.ascontiguousarray(columns[column.name], column.dtype) for column in WORK_COLUMNS}


def devices_of(trace: TraceColumns, times: Times, launches: Launches) -> dict[str, Array] | None:
    """The times between timing events, as :attr:`Batch.devices`; None without any."""
    rows = np.flatnonzero(timed_slices(trace) & (times.duration >= 0))
    if not rows.size:
        return None
    info, start = _infos(trace, rows), times.start[rows]
    words = {process: text.split(" ")[0] for process, name, text in process_names_of(trace) if name == "process_labels"}
    process = trace.tracks[trace.rows["track"][rows], 0].tolist()
    columns = {
        "event": _by_external_id(trace.rows["id"][rows], start, launches),
        "start": start,
        "duration": times.duration[rows],
        "stream": info["stream"],
        "device_type": [_TYPES_OF_LABELS.get(words.get(number, ""), _CUDA) for number in process],
        "device_index": info["device"],
    }
    return {column.name: np.ascontiguousarray(columns[column.name], column.dtype) for column in DEVICE_COLUMNS}


def _device_type(trace: TraceColumns) -> int:
    names = (trace.names[number] for number in distinct_values(trace.rows["category"]).tolist())
    return next((_DEVICE_TYPES[name] for name in names if name in _DEVICE_TYPES), _CUDA)


def _infos(trace: TraceColumns, rows: Array) -> dict[str, Array]:
    """The columns of ``trace.works`` for some rows, -1 for those without."""
    works, place = trace.works, np.full(len(trace.rows["start"]), -1, np.int64)
    place[works["row"].astype(np.int64)] = np.arange(len(works["row"]))
    at = place[rows]
    return {
        name: np.append(works[name], -1)[at].astype(np.int64) for name in ("stream", "device", "bytes", "correlation")
    }


def _numbers_of(trace: TraceColumns, which: int) -> npt.NDArray[np.int64]:
    """The number in the process (0) or thread (1) of each track; 0 for none."""
    texts = [trace.names[number].strip('"').removeprefix("stream ") for number in trace.tracks[:, which].tolist()]
    return np.array([int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0 for text in texts], np.int64)


def _number_of(trace: TraceColumns, name: str) -> int | None:
    matching = trace.names.matching((name,))
    return None if matching is None else int(matching.argmax())


def _launching(
    trace: TraceColumns, rows: Array, start: Array, correlation: Array, launches: Launches
) -> npt.NDArray[np.uint64]:
    """Ids of the events that launched work: by the id of the operator, or where the file has none by the call of the runtime."""
    external_id = trace.rows["id"][rows]
    if external_id.any():
        return _by_external_id(external_id, start, launches)
    event = np.zeros(len(rows), np.uint64)
    calls = np.flatnonzero(trace.works["stream"] < 0)
    number, called = trace.works["correlation"][calls], trace.works["row"][calls].astype(np.int64)
    known = number >= 0
    order = np.argsort(number[known], kind="stable")
    number, called = number[known][order], called[known][order]
    if not number.size:
        return event
    event_of_row = np.zeros(len(trace.rows["start"]), np.uint64)
    event_of_row[launches.row] = launches.event
    at = np.minimum(np.searchsorted(number, correlation), len(number) - 1)
    return np.where((number[at] == correlation) & (correlation >= 0), event_of_row[called[at]], event)


def _by_external_id(external_id: Array, start: Array, launches: Launches) -> npt.NDArray[np.uint64]:
    """For each id the event of it that began last before the work, else the first: ids come again in files of several recordings."""
    known = np.flatnonzero(launches.external_id > 0)
    event = np.zeros(len(external_id), np.uint64)
    if not known.size:
        return event
    known = known[np.lexsort((launches.start[known], launches.external_id[known]))]
    ids, starts = launches.external_id[known], launches.start[known]
    first = np.searchsorted(ids, external_id)
    last = np.searchsorted(ids, external_id, side="right") - 1
    several = np.flatnonzero(last > first)
    at = np.where(last >= first, first, 0)
    for place in several.tolist():
        low, high = int(first[place]), int(last[place]) + 1
        at[place] = low + max(int(np.searchsorted(starts[low:high], start[place], side="right")) - 1, 0)
    return np.where((last >= first) & (external_id > 0), launches.event[known[at]], event)
