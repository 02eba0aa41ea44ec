"""Events from the columns of a trace file, and from spans."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values, is_any_of, used_numbers
from otel_torchprof._columns.phases import PHASE_NAME, PHASE_PREFIX
from otel_torchprof._columns.samples import SAMPLES, Samples
from otel_torchprof._encode.chrome import STEPS_TID
from otel_torchprof._model.span_table import STEP_NAME, AttributeType
from otel_torchprof._model.tree import STEP_PREFIX
from otel_torchprof._native.trace_files import pair_ends

from .attribute_keys import DURATIONS, JOB, MERGED_RANKS, OTHER, RANK, SELF_DURATION, THREAD, TORCH_NAME, USED
from .chrome_events import OTHER_EVENTS, SliceKind
from .records import MalformedError, malformed, object_of
from .reductions import REDUCTION_KEYS
from .stack_samples import CHUNK, parsed_chunk, parsed_samples, samples_of, within_room
from .trace_columns import RESOURCE
from .trace_devices import CODES, other_events, process_names_of, slice_kinds
from .trace_events import LONGEST_NAME, TraceEventKind, TraceEvents
from .values import LARGEST_NUMBER, key_of, process_of, values_of, whole

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Hashable, Mapping, Sequence

    from otel_torchprof._columns.arrays import Flags, Integers
    from otel_torchprof._columns.batch import Array, Names
    from otel_torchprof._encode.spans import SpanList
    from otel_torchprof._model.span_table import AttributeColumn, SpanTable

    from .trace_columns import TraceColumns

_ATTRIBUTES = "attributes"
"""In the place of a key: attributes that are no object."""
WANTED = (*sorted(USED), SAMPLES, _ATTRIBUTES)
"""Attributes of spans to read from a trace file."""
_CALL = "c10d::"
"""Prefix of the operators of collectives."""
_CUT = 4 * LONGEST_NAME
"""Bytes of a name that are decoded."""


# ---- trace files ----


def events_of_trace(path: str, trace: TraceColumns) -> TraceEvents:
    """The events of a trace that was read for sums; takes its columns out of it. Costs some 100 ns per event."""
    rows, left_out = trace.rows, other_events(trace)
    kind = _kinds(trace, left_out)
    attributes = ReadAttributes.of(trace)
    kind[attributes.faulty] = _NO_EVENT
    chosen = np.flatnonzero(kind != _NO_EVENT)
    began, raw_track = rows["start"], rows["track"]
    kind = kind[chosen]
    start, duration, span_id, parent_id = (
        _picked(rows.pop(name), chosen) for name in ("start", "duration", "span_id", "parent_id")
    )
    names, name = _names(trace, rows.pop("name")[chosen], kind)
    tracks, track, of_track = _tracks(trace, rows.pop("track")[chosen], _picked(rows.pop("id"), chosen), kind)
    traces, number = _traces(trace, _picked(rows.pop("trace"), chosen))
    found = attributes.of_rows(chosen)
    samples = [
        samples_of(found.pop(SAMPLES, None), start, track),
        samples_of(attributes.values.get(CHUNK), began, of_track[raw_track]),
    ]
    if TORCH_NAME not in found and _has_one_group(trace.members):
        found |= _calls(names, name, kind)
    return TraceEvents(
        names,
        tracks,
        traces,
        name,
        track,
        number,
        start,
        duration,
        kind,
        span_id,
        parent_id,
        attributes=found,
        samples=Samples.joined([each for each in samples if each is not None]),
        problems=[*trace.problems, *attributes.problems(path, trace.origin)],
        left_out=+left_out,
    )


def process_names(trace: TraceColumns) -> list[tuple[Hashable, str, str]]:
    """Process, kind and text of each name or label of a process, in the order of the file."""
    return [(key_in(trace.names[process]), kind, text) for process, kind, text in process_names_of(trace)]


def _has_one_group(members: Mapping[str, Any]) -> bool:
    """Whether all groups of a process are of all ranks: calls of gloo do not name theirs. Merged files have no other calls."""
    job, other = (value if isinstance(value, dict) else {} for value in map(members.get, (JOB, OTHER)))
    if MERGED_RANKS in other:
        return True
    groups = job.get("pg_config")
    if not isinstance(groups, list):
        return job.get("pg_count") == 1
    return all(isinstance(group, dict) and group.get("pg_size") == job.get("world_size") for group in groups)


def _calls(names: Sequence[str], name: Array, kind: Array) -> dict[str, tuple[Integers, Sequence[Any]]]:
    """The names of collectives, as attributes of the slices that are calls of them."""
    is_call = np.array([text.startswith(_CALL) for text in names], np.bool_)
    calls = np.flatnonzero(is_call[name] & (kind == TraceEventKind.SLICE))
    return {TORCH_NAME: (calls, [names[number] for number in name[calls].tolist()])} if calls.size else {}


_NO_EVENT = len(TraceEventKind)


def _kinds(trace: TraceColumns, left_out: Counter[str]) -> Array:
    """The kind of each row, :data:`_NO_EVENT` for those that are none. Begins get the durations up to their ends."""
    rows = trace.rows
    of_category, phase = slice_kinds(trace), rows.pop("phase")
    is_event = phase == ord("X")
    is_span = is_event & (rows["span_id"] != 0)
    if is_any_of(phase, list(b"BEbe")).any():
        rows["duration"], _ = pair_ends({**rows, "phase": phase})
        is_begin = (phase == ord("B")) & (rows["duration"] >= 0)
        is_event |= is_begin
        begins, ends = (int((phase == ord(which)).sum()) for which in "BE")
        left_out["ends of no slice"] = ends - int(is_begin.sum())
        left_out["slices without end"] = begins - int(is_begin.sum())
        left_out[OTHER_EVENTS["b"]] += int(is_any_of(phase, list(b"be")).sum())
    for kind in (SliceKind.BESIDE, SliceKind.PROFILER):
        left_out[kind.value] = int((is_event & ~is_span & (of_category == CODES[kind])).sum())
    kinds = np.array([_EVENT_KINDS.get(kind, _NO_EVENT) for kind in CODES], np.uint8)[of_category]
    is_steps = np.array([trace.names[number] == str(STEPS_TID) for number in trace.tracks[:, 1].tolist()], np.bool_)
    kinds[np.append(is_steps, False)[rows["track"]] & (phase == ord("X")) & (kinds != _NO_EVENT)] = TraceEventKind.STEP
    kinds[is_span] = TraceEventKind.SPAN
    kinds[~is_event] = _NO_EVENT
    return kinds


_EVENT_KINDS = {SliceKind.HOST: TraceEventKind.SLICE, SliceKind.DEVICE: TraceEventKind.WORK}


def _picked(column: Array, chosen: Array) -> Array:
    """Some rows of a column; of one that says nothing, a view of one value."""
    return column[: len(chosen)] if column.strides == (0,) else column[chosen]


def _text(raw: bytes) -> str:
    """The text of bytes that need not be UTF-8: lone surrogates are kept, other bytes are escaped by one."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "surrogateescape")


def _names(trace: TraceColumns, name: Array, kind: Array) -> tuple[list[str], Array]:
    """Different names of events, and the number of each event's."""
    used = used_numbers(name, len(trace.names))
    texts = [_text(trace.names.raw(number)[:_CUT])[:LONGEST_NAME] for number in used.tolist()]
    known: dict[str, int] = {}
    renumbered = np.zeros(len(trace.names), np.uint32)
    renumbered[used] = [known.setdefault(text, len(known)) for text in texts]
    name = renumbered[name]
    # All steps of spans have one name, since their number is an attribute; in OTLP they have it already.
    if not trace.resources and (kind == TraceEventKind.SPAN).any():
        is_step = np.array([text.startswith(STEP_PREFIX) for text in known], np.bool_)
        steps = np.flatnonzero((kind == TraceEventKind.SPAN) & is_step[name])
        if steps.size:
            name[steps] = known.setdefault(STEP_NAME, len(known))
    return list(known), name


def _tracks(
    trace: TraceColumns, track: Array, thread: Array, kind: Array
) -> tuple[list[tuple[Hashable, Hashable]], Array, Array]:
    """Different processes and threads, the number of each event's pair, and of each track's; the thread of a span is its attribute."""
    keys = {number: key_in(trace.names[number]) for number in distinct_values(trace.tracks).tolist()}
    if trace.resources:
        of_resource = [process_of(attributes) for attributes in trace.resources]
        for number in distinct_values(trace.tracks[:, 0]).tolist():
            keys[number] = of_resource[int(trace.names[number].removeprefix(RESOURCE))]
    pairs = [(keys[process], keys[of_thread]) for process, of_thread in trace.tracks.tolist()]
    known: dict[tuple[Hashable, Hashable], int] = {}
    renumbered = np.array([known.setdefault(pair, len(known)) for pair in pairs], np.uint32)
    numbers = renumbered[track]
    spans = np.flatnonzero(kind == TraceEventKind.SPAN)
    if spans.size and not trace.resources:
        threads = distinct_values(thread[spans])
        place = track[spans].astype(np.int64) * len(threads) + np.searchsorted(threads, thread[spans])
        used = distinct_values(place)
        of_used = [
            known.setdefault(
                (pairs[number // len(threads)][0], threads.item(number % len(threads)) or None), len(known)
            )
            for number in used.tolist()
        ]
        numbers[spans] = np.array(of_used, np.uint32)[np.searchsorted(used, place)]
    return list(known), numbers, renumbered


def key_in(text: str) -> Hashable:
    """The key of a process or a thread, given as JSON; None for values of other types."""
    try:
        key: Hashable = key_of(json.loads(text)) if text else None
    except (ValueError, RecursionError):
        key = None
    return key


def _traces(trace: TraceColumns, number: Array) -> tuple[list[Hashable], Array]:
    used = distinct_values(number)
    traces: list[Hashable] = [trace.names[of_name] if of_name else None for of_name in used.tolist()]
    return traces, np.searchsorted(used, number).astype(np.uint32) if len(used) > 1 else np.zeros_like(number)


class ReadAttributes(NamedTuple):
    """Attributes of rows of a trace."""

    values: dict[str, tuple[Integers, list[Any]]]
    """By key, rows and values."""
    faulty: Integers
    """Rows with a value that cannot be used."""
    faults: Mapping[str, Mapping[int, tuple[str, int]]]
    """What is wrong and where, by row; by what is not counted for it. A span whose samples cannot be read is counted without them."""

    @classmethod
    def of(cls, trace: TraceColumns) -> ReadAttributes:
        """Parses what the reader found; each different text once."""
        values: dict[str, tuple[Integers, list[Any]]] = {}
        faults: dict[str, dict[int, tuple[str, int]]] = {"": {}, " samples of": {}}
        of_spans, of_samples = faults.values()
        for number in distinct_values(trace.attributes["key"]).tolist():
            key, found = trace.names[number], trace.attributes[trace.attributes["key"] == number]
            texts = distinct_values(found["value"])
            each = (_parsed(key, trace.names[text]) for text in texts.tolist())
            parsed = within_room(each, key) if key in {SAMPLES, CHUNK} else list(each)
            of_rows = [parsed[at] for at in np.searchsorted(texts, found["value"]).tolist()]
            of_rows = _within_sum(key, of_rows) if key in REDUCTION_KEYS else of_rows
            is_read = np.ones(len(found), np.bool_)
            for at, value in enumerate(of_rows):
                if isinstance(value, MalformedError):
                    entry, is_read[at] = found[at], False
                    place = f"{value}, event {entry['event']}", int(entry["offset"])
                    (of_samples if key in {SAMPLES, CHUNK} else of_spans).setdefault(int(entry["row"]), place)
            rows = found["row"].astype(np.int64)
            values[key] = rows[is_read], [of_rows[at] for at in np.flatnonzero(is_read).tolist()]
        values.pop(_ATTRIBUTES, None)
        return cls(values, np.array(list(of_spans), np.int64), faults)

    def problems(self, path: str, origin: int) -> list[str]:
        """A message about rows that are not counted, and one about samples, if there are any."""
        messages = []
        for what, faults in self.faults.items():
            if faults:
                first, offset = faults[min(faults)]
                place = f"at byte {origin + offset}"
                messages.append(f"{path!r}: not counted:{what} {len(faults):,}; the first: {first}, {place}")
        return messages

    def of_rows(self, chosen: Integers) -> dict[str, tuple[Integers, Sequence[Any]]]:
        """The attributes of rows that are events, by their place among these."""
        attributes: dict[str, tuple[Integers, Sequence[Any]]] = {}
        for key, (rows, values) in self.values.items():
            place = np.minimum(np.searchsorted(chosen, rows), max(len(chosen) - 1, 0))
            kept = np.flatnonzero(chosen[place] == rows) if chosen.size else np.empty(0, np.int64)
            is_last = np.ones(len(kept), np.bool_)  # of a key that comes twice
            is_last[:-1] = place[kept[1:]] != place[kept[:-1]]
            kept = kept[is_last]
            if kept.size:
                attributes[key] = place[kept], [values[at] for at in kept.tolist()]
        return attributes


def _parsed(key: str, text: str) -> Any:
    """The value of an attribute, or the error why it has none."""
    try:
        value = json.loads(text)
        if key == _ATTRIBUTES:
            return object_of(value or {}, key)
        parsed = {SAMPLES: parsed_samples, CHUNK: parsed_chunk}.get(key)
        return values_of([(key, value)])[key] if parsed is None else parsed(value, key)
    except MalformedError as error:
        return error
    except (ValueError, RecursionError) as error:
        return MalformedError(f"{key} cannot be read ({error})")


def _within_sum(key: str, values: list[Any]) -> list[Any]:
    """The values, with an error instead of each with which their sum would be too large for a number of 64 bits."""
    scale, total, checked = 1e9 if key in DURATIONS else 1, 0, []
    for value in values:
        number = 0 if isinstance(value, MalformedError) else round(value * scale)
        if total + number > LARGEST_NUMBER:
            checked.append(malformed(value, key, f"at most {LARGEST_NUMBER / scale:.0f} in all"))
            continue
        total += number
        checked.append(value)
    return checked


# ---- spans ----


def events_of_spans(spans: SpanList) -> TraceEvents:
    """The events of spans, as of a file with these spans. Costs some 100 ns each."""
    table, resource = spans.table, dict(spans.resource.attributes)
    known: dict[str, int] = {}
    name = _renamed(known, table.names, table.name)
    columns = {column.key: column for column in table.attributes}
    phase, thread = columns.get(PHASE_NAME), np.full(len(table), -1, np.int64)
    if phase is not None:
        name[_rows_of(phase, len(table))] = _renamed(known, table.names, phase.values, PHASE_PREFIX)
    if THREAD in columns:
        thread[_rows_of(columns[THREAD], len(table))] = columns[THREAD].values
    is_phase = np.array([text.startswith(PHASE_PREFIX) for text in known], np.bool_)[name]
    attributes = {
        key: _values_of(column, table.names, is_phase if key == SELF_DURATION else None, len(table))
        for key, column in columns.items()
        if key in USED
    }
    threads, process = distinct_values(thread), process_of(resource)
    track = np.searchsorted(threads, thread).astype(np.uint32)
    return TraceEvents(
        list(known),
        [(process, number if number >= 0 else None) for number in threads.tolist()],
        [trace_id.tobytes() for trace_id in table.trace_ids],
        name,
        track,
        table.trace,
        table.start,
        np.maximum(table.end - table.start, 0),
        np.full(len(table), TraceEventKind.SPAN, np.uint8),
        table.span_id,
        table.parent_span_id,
        attributes={key: values for key, values in attributes.items() if len(values[0])},
        samples=None if SAMPLES not in columns else _samples_of(columns[SAMPLES], table, track),
        ranks={process: whole(resource[RANK], RANK)} if resource.get(RANK) is not None else {},
    )


def _samples_of(column: AttributeColumn, table: SpanTable, track: Array) -> Samples | None:
    """The samples of spans; without those whose text a limit has cut off."""
    rows, values = [], []
    for row, name in zip(_rows_of(column, len(table)).tolist(), column.values.tolist(), strict=True):
        with contextlib.suppress(MalformedError):
            values.append(parsed_samples(table.names[name], SAMPLES))
            rows.append(row)
    return samples_of((np.array(rows, np.int64), values), table.start, track)


def _rows_of(column: AttributeColumn, spans: int) -> Integers:
    return np.arange(spans) if column.rows is None else column.rows.astype(np.int64)


def _renamed(known: dict[str, int], names: Names, numbers: Array, prefix: str = "") -> Array:
    """The numbers in ``known``, to which new ones are added, of names with a prefix."""
    used = distinct_values(numbers)
    of_used = [known.setdefault(f"{prefix}{names[number]}"[:LONGEST_NAME], len(known)) for number in used.tolist()]
    return np.array(of_used, np.uint32)[np.searchsorted(used, numbers)]


def _values_of(
    column: AttributeColumn, names: Names, wanted: Flags | None, spans: int
) -> tuple[Integers, Sequence[Any]]:
    """The rows that have an attribute, of the wanted ones if not all are, and its values."""
    rows, values = _rows_of(column, spans), column.values
    if wanted is not None:
        rows, values = rows[wanted[rows]], values[wanted[rows]]
    given = [names[value] for value in values.tolist()] if column.type is AttributeType.NAME else values.tolist()
    return rows, [values_of([(column.key, value)])[column.key] for value in given]
