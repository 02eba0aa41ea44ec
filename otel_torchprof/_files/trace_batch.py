"""Makes a batch of the columns of a trace file: threads, order, parents, and the metadata that torch's lists have.

What a file does not have is left out and reported; only what follows from the file is added: parents from times on a
thread, torch's ids of threads from the backward functions that name them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values, is_any_of
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.file_spans import FileSpans
from otel_torchprof._columns.frame_info import FrameInfo, ModuleInfo
from otel_torchprof._columns.phases import PHASE_PREFIX, Part
from otel_torchprof._columns.samples import SAMPLES, Samples
from otel_torchprof._columns.schema import COLUMNS, INPUTS, MEMORY_COLUMNS, REDUCTION_COLUMNS, Flag, Kind, Scope
from otel_torchprof._encode.chrome import STEPS_TID
from otel_torchprof._model.file_ids import PROFILER_WINDOW
from otel_torchprof._model.flows import EVALUATION
from otel_torchprof._model.frames import MODULE_PREFIX, distinct
from otel_torchprof._model.inputs import InputKept
from otel_torchprof._model.operator_roots import OPERATORS_NAME
from otel_torchprof._model.step_spans import JOB_NAME, PROFILE_NAME, RecordedStep
from otel_torchprof._model.tree import STEP_PREFIX
from otel_torchprof._native.trace_files import ONE_CHANGE, ROW_APART, enclosing_rows, pair_ends

from .attribute_keys import COLLECTIVE, PHASE_OF, RANK, RATES
from .chrome_events import SliceKind
from .event_columns import ReadAttributes
from .records import BASE_TIME
from .reductions import REDUCTION_KEYS, reductions_of
from .span_collectives import collectives_of_spans, rank_in_job
from .span_memory import PlacedSpans, memory_of_spans
from .stack_samples import CHUNK, samples_of
from .trace_columns import RESOURCE
from .trace_devices import (
    CODES,
    Launches,
    Times,
    annotation_slices,
    devices_of,
    other_events,
    slice_kinds,
    timed_slices,
    work_of,
)
from .trace_events import nested_order

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from otel_torchprof._columns.arrays import Integers
    from otel_torchprof._columns.batch import Array, Names

    from .trace_columns import TraceColumns

_LATEST_BASE = 1 << 61
_MOST_DIGITS = 18
_TRACE_ID = re.compile(b"[0-9a-fA-F]{32}")
_EVENT_KINDS = {"python_function": Kind.FRAME, "user_annotation": Kind.LABEL, "module": Kind.MODULE}
"""Kinds of events by category; events of other categories are operators."""
_RUNTIMES = ("_runtime", "_driver", "Runtime")
"""Suffixes of the categories of calls of a runtime."""
_FLAGS = Flag.ASYNC | Flag.UNFINISHED | Flag.ERROR | Flag.LOSS_BEFORE | Flag.INPUTS_CUT
_DROPPED = "dropped_events"
_UNKNOWN_REASON = "the reason is not in the file"
_IDENTS = "python_threads"
_BEYOND_THREADS = 1 << 40
"""Above every id of a thread: numbers of tracks whose id is none, or that of another process's thread."""


@dataclass(frozen=True)
class TraceTable:
    """A trace file as a batch."""

    batch: Batch
    steps: Sequence[RecordedStep]
    has_step_labels: bool
    """Whether the steps are labels among the events."""
    window: tuple[int, int]
    """Start and end of the recording, Unix ns."""
    pid: int | None
    """Id of the process of the first event; None if the file has none."""
    left_out: Counter[str]
    """Number of events that are not in the batch, by kind."""
    resource: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the process, empty if the file has none; of several processes those of the first."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Members of the file, other than its events."""
    with_flops: bool = False
    rank: int | None = None
    """Rank of the process; None if the file does not say it, or has several."""
    problems: Sequence[str] = ()
    """Messages about spans that cannot be counted."""
    has_modules: bool = False
    """Whether modules are among the events, as in averages of streams and instrumentations, also in another format."""


def batch_of(path: str, trace: TraceColumns) -> TraceTable:
    """Makes a batch of a trace's columns, which it takes out of the trace. Costs some 0.5 us per event."""
    attributes = ReadAttributes.of(trace)
    sampled, free = _sampled(trace, attributes)
    _put_on_threads(trace)
    left_out = other_events(trace)
    has_spans = bool(trace.rows["span_id"].any())
    base = _base_time(trace.members)
    times = Times(trace.rows["start"] + base, _durations(trace.rows, left_out))
    if attributes.faulty.size:
        times = times._replace(duration=times.duration.copy())
        times.duration[attributes.faulty] = -1
    host, work, window = _chosen(trace, times, left_out)
    steps, on_steps = _steps_apart(trace, host, times)
    placed = _placed(trace, host[~on_steps], times, trace.rows["track"][sampled])
    devices = _devices(trace, placed, work, times)
    devices["reductions"] = _reductions(attributes, placed, times)
    devices["names"] = trace.names
    if COLLECTIVE in attributes.values:
        events = _events_of_rows(len(times.start), placed)
        devices["collectives"], devices["names"] = collectives_of_spans(attributes.values, events, trace.names)
    devices["samples"], nowhere = _samples(trace, attributes, placed, times, free)
    pid = _pid(trace, placed)
    devices["spans"] = _file_spans(trace, placed, times)
    said_of_steps = _said_of_steps(attributes, times)
    del host, work, on_steps, times
    batch = _batch(trace, placed, devices, base)
    labels = labelled_steps(batch)
    steps = [step._replace(attributes=said_of_steps.get((step.start, step.end))) for step in labels or steps]
    # The file of a profile says what was requested; a live recording with shapes has FLOPs of its steps, so also of its calls.
    is_live = trace.figures.is_live if trace.resources else "record_shapes" not in trace.members
    is_counted = trace.figures.has_flops or bool(trace.members.get("with_flops"))
    with_flops = is_counted or (is_live and batch.inputs is not None)
    problems = attributes.problems(path, trace.origin)
    if nowhere:
        problems.append(f"{path!r}: not counted: samples of spans without thread.id: {nowhere:,}")
    said = _resource(trace), trace.members, with_flops, _rank(trace, attributes.values), problems
    has_modules = trace.figures.is_live or (has_spans and not trace.resources) or _has_phases(batch)
    return TraceTable(batch, steps, bool(labels), window or _extent(batch), pid, +left_out, *said, has_modules)


def _rank(trace: TraceColumns, attributes: Mapping[str, tuple[Integers, Sequence[Any]]]) -> int | None:
    """The rank in torch's ``distributedInfo``, in the resources, or in the group of all ranks."""
    info = trace.members.get("distributedInfo")
    ranks = {resource.get(RANK) for resource in trace.resources or [_resource(trace)]}
    rank = info.get("rank") if isinstance(info, dict) else ranks.pop() if len(ranks) == 1 else None
    if rank is None and len(trace.resources or ()) < 2:  # noqa: PLR2004 - else several processes
        rank = rank_in_job(attributes)
    return rank if type(rank) is int and 0 <= rank < _LATEST_BASE else None


def _resource(trace: TraceColumns) -> dict[str, Any]:
    other = trace.members.get("otherData")
    given = trace.resources[0] if trace.resources else other.get("resource") if isinstance(other, dict) else None
    plain = given if isinstance(given, dict) else {}
    return {key: value for key, value in plain.items() if isinstance(value, str | bool | int | float)}


# ---- which rows are events of the host ----


def _chosen(trace: TraceColumns, times: Times, left_out: Counter[str]) -> tuple[Array, Array, tuple[int, int] | None]:
    """The rows that are events of the host, those that are work of devices, and start and end of the recording, if known."""
    kinds, is_slice = slice_kinds(trace), times.duration >= 0
    is_annotation = annotation_slices(trace)
    is_of_job, is_unfinished = is_slice & _spans_of_job(trace), is_slice & _unfinished_steps(trace)
    is_work = is_slice & ((kinds == CODES[SliceKind.DEVICE]) | is_annotation)
    is_beside = is_slice & (kinds == CODES[SliceKind.BESIDE]) & ~is_annotation & ~timed_slices(trace)
    is_root = _profile_roots(trace)
    is_profiler = is_slice & ((kinds == CODES[SliceKind.PROFILER]) | is_root)
    left_out[SliceKind.BESIDE.value] += int(is_beside.sum())
    left_out[SliceKind.PROFILER.value] += int(is_profiler.sum())
    left_out["spans of the job"] += int(is_of_job.sum())
    left_out["steps without end"] += int(is_unfinished.sum())
    host = is_slice & (kinds == CODES[SliceKind.HOST]) & ~is_of_job & ~is_unfinished & ~is_root
    return np.flatnonzero(host), np.flatnonzero(is_work), _window(trace, np.flatnonzero(is_profiler), times)


def _durations(rows: Mapping[str, Array], left_out: Counter[str]) -> npt.NDArray[np.int64]:
    """Duration of each row, -1 for rows that are no slices."""
    duration, phase = rows["duration"], rows["phase"]
    is_pair = np.isin(phase, np.frombuffer(b"BEbe", np.uint8))
    if not is_pair.any():
        return duration
    duration, unmatched = pair_ends(rows)
    left_out["ends of no slice"] += unmatched
    is_begin = np.isin(phase, np.frombuffer(b"Bb", np.uint8))
    left_out["slices without end"] += int((is_begin & (duration < 0)).sum())
    return duration


def _spans_of_job(trace: TraceColumns) -> npt.NDArray[np.bool_]:
    """A mask of the rows that are spans of a job, or roots that operators share: around events, and none themselves."""
    names = trace.names.matching((JOB_NAME, OPERATORS_NAME))
    is_span: npt.NDArray[np.bool_] = trace.rows["span_id"] != 0
    return np.zeros_like(is_span) if names is None else is_span & names[trace.rows["name"]]


def _profile_roots(trace: TraceColumns) -> npt.NDArray[np.bool_]:
    """A mask of the rows that are roots of a profile without steps, written as spans: the recording itself. In OTLP they are such a slice already."""
    names, is_span = trace.names.matching((PROFILE_NAME,)), trace.rows["span_id"] != 0
    return np.zeros_like(is_span) if names is None else is_span & names[trace.rows["name"]]


def _unfinished_steps(trace: TraceColumns) -> npt.NDArray[np.bool_]:
    """A mask of the rows that are spans of steps which had not ended: no averages have them."""
    rows, names = trace.rows, trace.names.matching((), (STEP_PREFIX,))
    is_span: npt.NDArray[np.bool_] = (rows["span_id"] != 0) & (rows["flags"] & ROW_APART == 0)
    is_open = is_span & (rows["flags"] & Flag.UNFINISHED != 0)
    return np.zeros_like(is_open) if names is None else is_open & names[rows["name"]]


def _sampled(trace: TraceColumns, attributes: ReadAttributes) -> tuple[Array, Array]:
    """The rows that have samples of stacks: those with a thread, and spans without one, which Chrome JSON has on a track all the same."""
    found = [attributes.values[key][0] for key in (SAMPLES, CHUNK) if key in attributes.values]
    rows = np.concatenate([np.empty(0, np.int64), *found])
    if trace.resources:
        is_none = [not trace.names[thread] for thread in trace.tracks[trace.rows["track"][rows], 1].tolist()]
        is_free = np.array(is_none, np.bool_)
    else:
        is_free = (trace.rows["span_id"][rows] != 0) & (trace.rows["id"][rows] == 0)
    return rows[~is_free], rows[is_free]


def _put_on_threads(trace: TraceColumns) -> None:
    """Puts spans on the track that most spans of their thread are on: those that cross others are on tracks of their own in the file.

    Spans of OTLP are on the tracks of their threads.
    """
    if trace.resources:
        return
    rows, tracks = trace.rows, trace.tracks
    spans = np.flatnonzero((rows["span_id"] != 0) & (rows["id"] != 0))
    if not spans.size:
        return
    ident, track = rows["id"][spans], rows["track"][spans]
    process = tracks[track, 0]
    order = np.lexsort((track, ident, process))
    ident, track, process, spans = ident[order], track[order], process[order], spans[order]
    differs = (ident[1:] != ident[:-1]) | (track[1:] != track[:-1]) | (process[1:] != process[:-1])
    begins = np.flatnonzero(np.append([True], differs))
    counts = np.diff(np.append(begins, len(spans)))
    of_begins = list(zip(process[begins].tolist(), ident[begins].tolist(), strict=True))
    most: dict[tuple[int, int], tuple[int, int]] = {}
    for thread, count, own in zip(of_begins, counts.tolist(), track[begins].tolist(), strict=True):
        most[thread] = max(most.get(thread, (0, 0)), (count, own))
    chosen = np.array([most[thread][1] for thread in of_begins], rows["track"].dtype)
    for name, values in (("track", np.repeat(chosen, counts)), ("id", 0)):
        rows[name] = np.require(rows[name], requirements="W")  # a column with one value is a view of it
        rows[name][spans] = values


def _base_time(members: Mapping[str, Any]) -> int:
    base = members.get(BASE_TIME, 0)
    return base if isinstance(base, int) and abs(base) <= _LATEST_BASE else 0


# ---- order, threads and parents ----


class _Placed(NamedTuple):
    """Rows of the file in the order of a batch."""

    rows: Array
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    thread: npt.NDArray[np.uint32]
    parent: npt.NDArray[np.int32]
    tracks: Array
    """Track of each thread."""


def _placed(trace: TraceColumns, host: Array, times: Times, sampled: Array) -> _Placed:
    """The rows of the host in order; ``sampled``: tracks that are threads also without events."""
    track = trace.rows["track"]
    tracks = distinct_values(np.concatenate((track[host], trace.memory["track"], sampled)))
    thread_of = np.zeros(len(trace.tracks) + 1, np.uint32)
    thread_of[tracks] = np.arange(len(tracks))
    thread = thread_of[track[host]]
    start = times.start[host]
    end = start + times.duration[host]
    order = nested_order(thread, start, end)
    if order is not None:
        host, thread, start, end = host[order], thread[order], start[order], end[order]
    apart = (trace.rows["flags"][host] & Flag.ASYNC) != 0
    parent = enclosing_rows(thread, start, end, apart)
    return _Placed(host, start, end, thread, _with_parents_of_spans(trace, host, thread, parent), tracks)


def _with_parents_of_spans(trace: TraceColumns, host: Array, thread: Array, parent: Array) -> Array:
    """Replaces the parents of spans by those that the file says: what tasks of one thread did may cross, or lie in one another."""
    span_id, above = trace.rows["span_id"][host], trace.rows["parent_id"][host]
    spans = np.flatnonzero(span_id)
    if not spans.size:
        return parent
    of_job = np.flatnonzero(_spans_of_job(trace))
    beyond = dict(zip(trace.rows["span_id"][of_job].tolist(), trace.rows["parent_id"][of_job].tolist(), strict=True))
    for _ in range(len({OPERATORS_NAME, JOB_NAME})):
        for at in np.flatnonzero(np.isin(above, np.array(list(beyond), np.uint64))).tolist():
            above[at] = beyond[above.item(at)]
    # Nearly all lie in what encloses them; a search of all ids by all would take a tenth of reading a file.
    enclosing = parent[spans]
    spans = spans[(enclosing < 0) | (span_id[enclosing] != above[spans])]
    if not spans.size:
        return parent
    possible = np.flatnonzero(is_any_of(span_id, distinct_values(above[spans])) & (span_id != 0))
    ordered = possible[np.argsort(span_id[possible], kind="stable")]
    nearest = np.full(len(spans), -1)
    if ordered.size:
        nearest = ordered[np.minimum(np.searchsorted(span_id[ordered], above[spans]), len(ordered) - 1)]
    is_there = (
        (nearest >= 0) & (span_id[nearest] == above[spans]) & (nearest < spans) & (thread[nearest] == thread[spans])
    )
    # Spans of a profile are below their step, also those in a call that began before it.
    apart = trace.rows["span_id"][trace.rows["flags"] & ROW_APART != 0]
    otherwise = np.where(np.isin(above[spans], apart), parent[spans], -1)
    parent = parent.copy()
    parent[spans] = np.where(is_there, nearest, otherwise)
    return parent


def _threads(trace: TraceColumns, tracks: Array) -> list[RecordedThread]:
    """The threads of tracks, with their names, and the ids that the file has."""
    names, rows = trace.names, trace.rows
    labels: dict[int, str] = {}
    for row in np.flatnonzero(rows["phase"] == ord("M")).tolist():
        if names[rows["name"].item(row)] == "thread_name":
            labels[rows["track"].item(row)] = names[rows["text"].item(row)]
    idents = _idents(trace.members)
    threads, known = [], set[int]()
    for track in tracks.tolist():
        text = names[int(trace.tracks[track, 1])]
        number = _number(text.strip('"'))
        tid = _BEYOND_THREADS + track if number is None or number >= _BEYOND_THREADS or number in known else number
        known.add(tid)
        ident = number if trace.resources and number is not None else tid  # spans have the ids of Python
        threads.append(RecordedThread(tid, idents.get(text, ident), 0, labels.get(track, "")))
    return threads


def _pid(trace: TraceColumns, placed: _Placed) -> int | None:
    process = trace.names[int(trace.tracks[int(placed.tracks[0]), 0])] if len(placed.tracks) else ""
    if not trace.resources:
        return _number(process)
    pid = trace.resources[_number(process.removeprefix(RESOURCE)) or 0].get("process.pid")
    return pid if type(pid) is int else None


def _idents(members: Mapping[str, Any]) -> dict[str, int]:
    """``threading.get_ident()`` by the system's id of a thread, for threads of which the file says it."""
    given = members.get(_IDENTS)
    given = given if isinstance(given, dict) else {}
    return {tid: ident for tid, ident in given.items() if type(ident) is int and 0 < ident < _LATEST_BASE}


def _torch_tids(numbers: Array, fwd_thread: Array, thread: Array, is_backward: Array) -> dict[int, int]:
    """Torch's ids of threads: most backward functions name the thread whose operators have their sequence numbers."""
    forward = np.flatnonzero((numbers >= 0) & ~is_backward)
    backward = np.flatnonzero(is_backward)
    if not forward.size or not backward.size:
        return {}
    forward = forward[np.argsort(numbers[forward], kind="stable")]
    at = np.minimum(np.searchsorted(numbers[forward], numbers[backward]), len(forward) - 1)
    same = numbers[forward[at]] == numbers[backward]
    pairs = np.stack((thread[forward[at]][same].astype(np.int64), fwd_thread[backward][same].astype(np.int64)))
    votes, counts = np.unique(pairs, axis=1, return_counts=True)
    tids: dict[int, int] = {}
    for vote in np.argsort(-counts, kind="stable").tolist():
        number, tid = votes[:, vote].tolist()
        if number not in tids and tid not in tids.values():
            tids[number] = tid
    return tids


# ---- the columns ----


def _batch(trace: TraceColumns, placed: _Placed, devices: dict[str, Any], base: int) -> Batch:
    names = trace.names
    texts = trace.rows["text"][placed.rows]
    columns = _columns(trace, placed)
    info = _frame_info(names, columns, texts)
    has_inputs = bool(len(trace.inputs))
    if has_inputs:
        columns[INPUTS.name] = trace.rows.pop("inputs")[placed.rows]
    is_backward = columns["scope"] == Scope.BACKWARD_FUNCTION
    torch_tids = _torch_tids(columns["sequence_nr"], columns["fwd_thread"], placed.thread, is_backward)
    threads = [thread._replace(torch_tid=torch_tids.get(at, 0)) for at, thread in enumerate(devices["threads"])]
    return Batch(
        columns,
        **{**devices, "threads": threads},
        inputs=trace.inputs if has_inputs else None,
        kept=int(InputKept.INPUTS | InputKept.CALL_STACKS),
        memory=_memory(trace, placed, base),
        dropped=_dropped(trace),
        frame_info=info,
    )


def _columns(trace: TraceColumns, placed: _Placed) -> dict[str, Array]:
    """The columns of the events. Takes each of the file out of it, so that they are not in memory twice."""
    names, chosen = trace.names, placed.rows

    def taken(name: str) -> Array:
        return trace.rows.pop(name)[chosen]

    name, flags = taken("name"), taken("flags")
    kind = _event_kinds(trace, taken("category"))
    part = np.where(taken("span_id") != 0, _parts(names, name), np.uint8(0))
    kind = np.where(part > 0, np.uint8(Kind.PHASE), kind)
    is_evaluation, is_backward = _backward_functions(names, name, placed.parent)
    numbers = np.where(is_evaluation, -1, taken("sequence_nr"))
    fwd_thread = np.where(is_evaluation, np.uint32(0), taken("fwd_thread"))
    is_backward |= (kind == Kind.OPERATOR) & (fwd_thread > 0) & (numbers >= 0)
    scope = np.where(is_backward, np.uint8(Scope.BACKWARD_FUNCTION), np.uint8(Scope.FUNCTION))
    columns = {
        "id": np.arange(1, len(chosen) + 1, dtype=np.uint64),
        "start": placed.start,
        "end": placed.end,
        "sequence_nr": numbers,
        "name": name,
        "parent": placed.parent,
        "thread": placed.thread,
        "end_thread": placed.thread,
        "fwd_thread": np.where(part > 0, part.astype(np.uint32), fwd_thread),
        "error_type": np.where(flags & Flag.ERROR, taken("text"), np.uint32(0)),
        "kind": kind,
        "scope": np.where(kind == Kind.LABEL, np.uint8(Scope.USER_SCOPE), scope),
        "flags": flags & np.uint8(_FLAGS) | np.where(kind == int(Kind.MODULE), _roots(names, name), np.uint8(0)),
    }
    return {column.name: np.ascontiguousarray(columns.pop(column.name), column.dtype) for column in COLUMNS}


def _backward_functions(names: Names, name: Array, parent: Array) -> tuple[Array, Array]:
    """Masks of the engine's events around backward functions, and of these functions.

    The file has the numbers of the backward function at the engine's event too, as torch's lists do.
    """
    evaluation = names.matching((), (EVALUATION,))
    if evaluation is None:
        return np.zeros(len(name), np.bool_), np.zeros(len(name), np.bool_)
    of_function = {names[number].removeprefix(EVALUATION): number for number in np.flatnonzero(evaluation).tolist()}
    around = np.full(len(names), -1, np.int64)
    for number in distinct_values(name).tolist():
        around[number] = of_function.get(names[number], -1)
    is_inside = (parent >= 0) & (around[name] == np.append(name, 0)[parent].astype(np.int64)) & (around[name] >= 0)
    return evaluation[name], is_inside


def _parts(names: Names, name: Array) -> Array:
    """For each row the first part of the phase that it is by its name; 0 for other events."""
    first = {part.event_name: part for part in reversed(Part)}
    parts = np.zeros(len(names), np.uint8)
    matching = names.matching(tuple(first))
    for number in () if matching is None else np.flatnonzero(matching).tolist():
        parts[number] = first[names[number]]
    return parts[name]


def _event_kinds(trace: TraceColumns, category: Array) -> npt.NDArray[np.uint8]:
    by_category = np.full(len(trace.names), Kind.OPERATOR, np.uint8)
    for number in distinct_values(category).tolist():
        by_category[number] = _EVENT_KINDS.get(trace.names[number], Kind.OPERATOR)
    kinds: npt.NDArray[np.uint8] = by_category[category]
    return kinds


def _roots(names: Names, name: Array) -> npt.NDArray[np.uint8]:
    """:attr:`Flag.ROOT` for names of modules that have no dot and begin with a capital letter, as classes do; a file does not say it."""
    used = distinct_values(name)
    flags = np.zeros(len(names), np.uint8)
    flags[used] = [Flag.ROOT * (names[at][:1].isupper() and "." not in names[at]) for at in used.tolist()]
    return flags[name]


def _has_phases(batch: Batch) -> bool:
    """Whether there are phases, which profiles do not record."""
    is_phase = batch.names.matching((), (PHASE_PREFIX,))
    return is_phase is not None and bool(is_phase[batch["name"]].any())


def _frame_info(names: Names, columns: Mapping[str, Array], texts: Array) -> FrameInfo | None:
    """What the file says of calls of Python: the names of modules, in Chrome JSON from the class of the root, in OTLP without it."""
    is_frame = columns["kind"] == int(Kind.FRAME)
    if not is_frame.any():
        return None
    called = np.flatnonzero(is_frame & (columns["flags"] & int(Flag.ERROR) == 0) & (texts > 0))
    pairs = dict(zip(columns["name"][called].tolist(), texts[called].tolist(), strict=True))
    modules = {}
    for name, text in pairs.items():
        if names[name].startswith(MODULE_PREFIX):
            class_name = names[name].removeprefix(MODULE_PREFIX).rpartition("_")[0]
            modules[name] = _module_info(names[text], class_name)
    return FrameInfo(modules=modules)


def _module_info(text: str, class_name: str) -> ModuleInfo:
    root, _, path = text.partition(".")
    if not path or not root[:1].isupper():
        root, path = (text if text == class_name else ""), text
    return ModuleInfo(path, root, class_name, ())


def _dropped(trace: TraceColumns) -> dict[str, int]:
    given = trace.members.get(_DROPPED)
    given = given if isinstance(given, dict) else {_UNKNOWN_REASON: trace.figures.dropped}
    return {reason: count for reason, count in given.items() if type(count) is int and count > 0}


def _memory(trace: TraceColumns, placed: _Placed, base: int) -> dict[str, Array] | None:
    """The changes of memory, each with the innermost event that was open on its thread; those of spans come last."""
    memory, of_span = trace.memory, trace.memory["span"] != ONE_CHANGE
    if not len(memory["time"]):
        return None
    changes = {name: values[~of_span] for name, values in memory.items()}
    thread = np.searchsorted(placed.tracks, changes["track"]).astype(np.uint32)
    order = np.lexsort((changes["time"], thread))
    thread, time = thread[order], changes["time"][order] + base
    columns = {column.name: changes[column.name][order] for column in MEMORY_COLUMNS if column.name in changes}
    columns |= {"time": time, "thread": thread, "event": _innermost(placed, thread, time)}
    if of_span.any():
        spans = PlacedSpans(placed.rows, placed.parent, placed.end, placed.thread)
        moved = memory_of_spans({name: values[of_span] for name, values in memory.items()}, spans)
        columns = {name: np.concatenate((columns[name], moved[name])) for name in moved}
        order = np.lexsort((columns["time"], columns["thread"]))
        columns = {name: values[order] for name, values in columns.items()}
    return {column.name: np.ascontiguousarray(columns[column.name], column.dtype) for column in MEMORY_COLUMNS}


def _innermost(placed: _Placed, thread: Array, time: Array) -> npt.NDArray[np.uint64]:
    """Ids of the innermost events that are open on a thread at a time; 0 for none."""
    event = np.full(len(time), -1, np.int64)
    firsts = np.searchsorted(placed.thread, np.arange(len(placed.tracks) + 1))
    for number in distinct_values(thread).tolist():
        first, last = firsts[number], firsts[number + 1]
        here = thread == number
        event[here] = first + np.searchsorted(placed.start[first:last], time[here], side="right") - 1
        event[here & (event < first)] = -1
    moving = np.flatnonzero((event >= 0) & (placed.end[event] < time))
    while moving.size:
        above = placed.parent[event[moving]]
        event[moving] = above
        moving = moving[(above >= 0) & (placed.end[above] < time[moving])]
    return (event + 1).astype(np.uint64)


def _reductions(attributes: ReadAttributes, placed: _Placed, times: Times) -> dict[str, Array] | None:
    """The spans that stand for several calls; None without any. Of those that are no events, what was collapsed counts."""
    if not attributes.values.keys() & set(REDUCTION_KEYS):
        return None
    slices = np.flatnonzero(times.duration >= 0)
    found = reductions_of(attributes.of_rows(slices), times.duration[slices])
    rows, event = slices[found.row], _events_of_rows(len(times.start), placed)
    columns = {**found._asdict(), "event": event[rows], "start": times.start[rows]}
    counts = (columns["event"] > 0) | (found.collapsed > 0)
    return {column.name: columns[column.name][counts] for column in REDUCTION_COLUMNS} if counts.any() else None


def _events_of_rows(count: int, placed: _Placed) -> npt.NDArray[np.uint64]:
    """The id of the event of each row of the file; 0 for none."""
    event = np.zeros(count, np.uint64)
    event[placed.rows] = np.arange(1, len(placed.rows) + 1)
    return event


def _file_spans(trace: TraceColumns, placed: _Placed, times: Times) -> FileSpans | None:
    """The spans of the file with their ids; None without any. Those whose trace id is none are left out."""
    rows = np.flatnonzero((trace.rows["span_id"] != 0) & (times.duration >= 0))
    traces, code = distinct(trace.rows["trace"][rows])
    is_trace = np.array([_TRACE_ID.fullmatch(trace.names.raw(name)) is not None for name in traces.tolist()], np.bool_)
    rows = rows[is_trace[code]]
    if not rows.size:
        return None
    event, is_step = _events_of_rows(len(times.start), placed)[rows], trace.names.matching((), (STEP_PREFIX,))
    comes_first = event == 0 if is_step is None else (event == 0) | is_step[trace.rows["name"][rows]]
    order = np.argsort(~comes_first, kind="stable")
    rows, event = rows[order], event[order]
    first = rows[: int(comes_first.sum())]
    trace_id, span_id, parent_id = (trace.rows[name][rows] for name in ("trace", "span_id", "parent_id"))
    name, start = trace.rows["name"][first], times.start[first]
    return FileSpans(event, trace_id, span_id, parent_id, name, start, start + times.duration[first])


def _samples(
    trace: TraceColumns, attributes: ReadAttributes, placed: _Placed, times: Times, free: Array
) -> tuple[Samples | None, int]:
    """Samples of stacks, and the number of spans whose samples are on no thread; ``free``: rows without one.

    A profile without steps has those of all threads on its root, which has none: they are on the first thread of its process.
    """
    given = [attributes.values[key] for key in (SAMPLES, CHUNK) if key in attributes.values]
    if not given:
        return None, 0
    thread = np.full(len(trace.tracks), -1, np.int64)
    thread[placed.tracks] = np.arange(len(placed.tracks))
    of_row = thread[trace.rows["track"]]
    of_row[free] = -1
    is_root = trace.names.matching((PROFILE_NAME,), (PROFILER_WINDOW,))
    for row in [] if is_root is None else free[is_root[trace.rows["name"][free]]].tolist():
        process = trace.tracks[trace.rows["track"].item(row), 0]
        of_row[row] = next(iter(np.flatnonzero(trace.tracks[placed.tracks, 0] == process)), -1)
    samples = [samples_of(each, times.start, of_row) for each in given]
    return Samples.joined([each for each in samples if each is not None]), int((of_row[free] < 0).sum())


def _devices(trace: TraceColumns, placed: _Placed, work: Array, times: Times) -> dict[str, Any]:
    """The threads, the work of devices in some rows, and the times of timed events, as fields of a batch."""
    is_runtime = np.isin(trace.rows["category"][placed.rows], _numbers_of_runtimes(trace))
    external_id = np.where(is_runtime, 0, trace.rows["id"][placed.rows])
    launches = Launches(np.arange(1, len(placed.rows) + 1, dtype=np.uint64), external_id, placed.start, placed.rows)
    tracks = distinct_values(trace.rows["track"][work])
    numbers = {track: len(placed.tracks) + number for number, track in enumerate(tracks.tolist())}
    return {
        "threads": _threads(trace, np.concatenate((placed.tracks, tracks))),
        "work": work_of(trace, work, times, numbers, launches),
        "devices": devices_of(trace, times, launches),
    }


def _numbers_of_runtimes(trace: TraceColumns) -> list[int]:
    """The names of categories of calls of a runtime, whose ids are those of the operators that made them."""
    used = distinct_values(trace.rows["category"]).tolist()
    return [number for number in used if trace.names[number].endswith(_RUNTIMES)]


# ---- steps and the recording ----


def _steps_apart(trace: TraceColumns, host: Array, times: Times) -> tuple[list[RecordedStep], npt.NDArray[np.bool_]]:
    """Steps that are no events of the recording, and a mask of their rows: on a track of their own, or without an id."""
    names = trace.names
    is_step = names.matching((), (STEP_PREFIX,))
    apart = np.zeros(len(host), np.bool_)
    if is_step is None:
        return [], apart
    thread_name = np.array([names[number] == str(STEPS_TID) for number in trace.tracks[:, 1].tolist()], np.bool_)
    rows, idents = trace.rows, _idents(trace.members)
    apart = is_step[rows["name"][host]] & (thread_name[rows["track"][host]] | (rows["id"][host] == 0))
    apart &= (rows["span_id"][host] == 0) | (rows["flags"][host] & ROW_APART != 0)
    steps = []
    for row in host[apart].tolist():
        number, start = _number(names[rows["name"].item(row)].removeprefix(STEP_PREFIX)), times.start.item(row)
        if number is not None:
            text = names[int(trace.tracks[rows["track"].item(row), 1])]
            thread = None if text == str(STEPS_TID) else idents.get(text, _number(text))
            steps.append(RecordedStep(number, start, start + times.duration.item(row), thread))
    return steps, apart


def _said_of_steps(attributes: ReadAttributes, times: Times) -> dict[tuple[int, int], dict[str, Any]]:
    """The attributes of steps that say what they did, by start and end."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for key in attributes.values.keys() & {*RATES, *PHASE_OF}:
        rows, values = attributes.values[key]
        ends = (times.start[rows] + times.duration[rows]).tolist()
        for start, end, value in zip(times.start[rows].tolist(), ends, values, strict=True):
            found.setdefault((start, end), {})[key] = value
    return found


def labelled_steps(batch: Batch) -> list[RecordedStep]:
    """Steps that are labels among the events."""
    is_step = batch.names.matching((), (STEP_PREFIX,))
    if is_step is None:
        return []
    steps = []
    for row in np.flatnonzero(is_step[batch["name"]] & (batch["kind"] == Kind.LABEL)).tolist():
        number = _number(batch.names[batch["name"].item(row)].removeprefix(STEP_PREFIX))
        if number is not None:
            thread = batch.threads[batch["thread"].item(row)].ident
            steps.append(RecordedStep(number, batch["start"].item(row), batch["end"].item(row), thread))
    return steps


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS else None


def _window(trace: TraceColumns, profiler: Array, times: Times) -> tuple[int, int] | None:
    """When the recording began and ended, where a slice of the profiler says so."""
    for row in profiler.tolist():
        if trace.names[trace.rows["name"].item(row)].startswith((PROFILER_WINDOW, PROFILE_NAME)):
            start = times.start.item(row)
            return start, start + times.duration.item(row)
    return None


def _extent(batch: Batch) -> tuple[int, int]:
    return (int(batch["start"].min()), int(batch["end"].max())) if len(batch) else (0, 0)
