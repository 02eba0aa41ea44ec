"""A recording as tables of pyarrow, and the table of its events as Parquet."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.joined import rows_of
from otel_torchprof._columns.phases import DURATIONS, FLOPS, MFU, PHASES, TOKENS
from otel_torchprof._columns.phases import SAMPLES as SAMPLES_OF_STEP
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, MEMORY_COLUMNS, MEMORY_KIND, WORK_KIND, Kind
from otel_torchprof._model.event_info import coded_texts
from otel_torchprof._model.flops import group_flops
from otel_torchprof._model.inputs import has_inputs, shape_keys
from otel_torchprof._model.modules import module_hierarchy
from otel_torchprof._model.tree import display_name
from otel_torchprof._native.loops import positions_of
from otel_torchprof.errors import package_of

from .chrome_json import valid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from otel_torchprof._columns.batch import Batch, Names
    from otel_torchprof._columns.file_spans import FileSpans
    from otel_torchprof._columns.schema import Column
    from otel_torchprof._model.event_table import EventTable

Array = npt.NDArray[Any]

ROWS = 1 << 17
"""Rows of a row group in Parquet."""


class Field(NamedTuple):
    """A column of a table. Each table has all its columns, with nulls for what was not recorded."""

    name: str
    type: str
    unit: str
    meaning: str


TEXT, TIME, WHOLE = "dictionary<string>", "timestamp[ns, UTC]", "int64"
_RANK = Field("rank", "int32", "", "rank of the process")
_STEP = Field("step", WHOLE, "", "number of the step in which it began")
_THREAD = Field("thread", WHOLE, "", "number of the thread, as in `events()`")
_THREAD_NAME = Field("thread_name", TEXT, "", "name of the thread")
EVENTS = (
    Field("id", "uint64", "", "id of the event"),
    Field("parent", "uint64", "", "id of the enclosing event; on a thread without one, of the parent by span ids"),
    Field("trace", TEXT, "", "trace id, if the file has spans"),
    Field("name", TEXT, "", "displayed name"),
    Field(
        "kind",
        TEXT,
        "",
        "operator, label (or span of the application), module, frame (a Python call), phase, memory (outside of events), work (of a device)",
    ),
    Field("start", TIME, "", "start time"),
    Field("end", TIME, "", 'end time; a word of SQL: `"end"`'),
    Field("total", WHOLE, "ns", "duration, that of children included; 0 for work"),
    Field("self", WHOLE, "ns", "duration without direct children"),
    Field("count", WHOLE, "", "number of calls that the event stands for"),
    _THREAD,
    _THREAD_NAME,
    _STEP,
    Field("phase", TEXT, "", "innermost phase in which it began"),
    Field("module", TEXT, "", "nearest module: `GPT.blocks.0.attn`"),
    _RANK,
    Field("sequence_nr", WHOLE, "", "torch's autograd sequence number"),
    Field("input_shapes", TEXT, "", "as torch prints them"),
    Field("overload_name", TEXT, "", "overload of the operator"),
    Field("allocated", WHOLE, "bytes", "allocated by the event itself, released or not"),
    Field("cpu_memory_usage", WHOLE, "bytes", "as in `key_averages()`"),
    Field("self_cpu_memory_usage", WHOLE, "bytes", "the same without direct children"),
    Field("device_memory_usage", WHOLE, "bytes", "as in `key_averages()`"),
    Field("self_device_memory_usage", WHOLE, "bytes", "the same without direct children"),
    Field("flops", WHOLE, "", "floating-point operations"),
    Field("device_total", WHOLE, "ns", "device time, that of children included"),
    Field(
        "device_self", WHOLE, "ns", "device time without direct children; work has that of its launching event again"
    ),
)
STEPS = (
    Field("step", WHOLE, "", "number of the step"),
    Field("start", TIME, "", "start time"),
    Field("end", TIME, "", "end time"),
    Field("total", WHOLE, "ns", "duration"),
    *(Field(phase, WHOLE, "ns", "time in the phase" if phase in PHASES else "time in no phase") for phase in DURATIONS),
    Field("tokens", WHOLE, "", "tokens of its batches"),
    Field("samples", WHOLE, "", "samples of its batches"),
    Field("flops", WHOLE, "", "floating-point operations of matrix products, convolutions and attention"),
    Field("mfu", "float64", "", "share of the peak of the device that these reach"),
    _RANK,
)
SAMPLES = (
    Field("time", TIME, "", "time of the sample"),
    Field("duration", WHOLE, "ns", "the time that it stands for"),
    _THREAD,
    _THREAD_NAME,
    _STEP,
    Field("phase", TEXT, "", "phase of the loop's thread"),
    Field("line", TEXT, "", "innermost call: file, line and function"),
    Field("stack", TEXT, "", "all calls, a line each, the innermost first"),
    _RANK,
)


def _field_of(column: Column, texts: Sequence[str]) -> Field:
    """A column of ``prof.columns`` and the like in a table; those of ``texts`` are names instead of their indices."""
    name = "group_rank" if column.name == "rank" else column.name
    meaning = column.meaning.removeprefix("index into Batch.names: ").replace("0: all", "null: all")
    meaning = re.sub("[,;] 0 for none", "", meaning) if column.name in texts else meaning
    if column.name == "thread":
        return _THREAD
    return Field(name, TEXT if column.name in texts else str(column.dtype), column.unit, meaning)


_NAMES = ("group", "ranks", "backend", "dtype", "reduce_op")
COLLECTIVES = (*(_field_of(column, _NAMES) for column in COLLECTIVE_COLUMNS), _STEP, _RANK)
MEMORY = (*(_field_of(column, ()) for column in MEMORY_COLUMNS), _STEP, _RANK)
TABLES: Mapping[str, tuple[Field, ...]] = {
    "events": EVENTS,
    "steps": STEPS,
    "collectives": COLLECTIVES,
    "samples": SAMPLES,
    "memory": MEMORY,
}
"""Columns of the tables, by name."""

_KINDS = {int(kind): kind.name.lower() for kind in Kind} | {MEMORY_KIND: "memory", WORK_KIND: "work"}


def table_of(events: EventTable, name: str = "events") -> pa.Table:
    """Returns one of :data:`TABLES`. Columns of numbers are not copied where that is possible.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: there is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"table is {name!r}; it must be one of {', '.join(map(repr, TABLES))}")
    arrow = package_of("arrow", "pyarrow", "a table of Arrow or Parquet")
    columns = _COLUMNS[name](events)
    count = next((len(_numbers(column)) for column in columns.values()), 0)
    if events.rank is not None:
        columns["rank"] = np.full(count, events.rank, dtype=np.int32)
    fields = TABLES[name]
    arrays = [_array(arrow, field, columns.get(field.name), count) for field in fields]
    described = [
        arrow.field(field.name, array.type, metadata={"unit": field.unit} if field.unit else None)
        for field, array in zip(fields, arrays, strict=True)
    ]
    return arrow.Table.from_arrays(arrays, schema=arrow.schema(described))


def parquet(events: EventTable) -> Iterator[bytes]:
    """Yields the pieces of a Parquet file with the table of events.

    Raises:
        ImportError: pyarrow is not installed.
    """
    writing = package_of("arrow", "pyarrow.parquet", "a table of Arrow or Parquet")
    table = table_of(events)
    sink = _Sink()
    with writing.ParquetWriter(sink, table.schema, compression="zstd") as writer:
        for begin in range(0, max(len(table), 1), ROWS):
            writer.write_table(table.slice(begin, ROWS))
            yield sink.taken()
    yield sink.taken()


class _Sink:
    """A file that keeps what is written until it is taken."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: Any) -> int:
        self._pieces.append(bytes(piece))
        return len(self._pieces[-1])

    def flush(self) -> None:
        """There is nothing behind it."""

    def close(self) -> None:
        """What was written can still be taken."""

    def taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


# ---- columns as arrays of numpy ----


class _Texts(NamedTuple):
    """A column of texts: per row an index, negative for none, into texts."""

    codes: npt.NDArray[np.int32]
    texts: Sequence[str]


class _Nullable(NamedTuple):
    """A column of numbers, without those of a mask."""

    values: Array
    is_null: npt.NDArray[np.bool_]


_Values = Array | _Texts | _Nullable
_Columns = dict[str, _Values]


def _numbers(column: _Values) -> Array:
    return column if isinstance(column, np.ndarray) else column[0]


def _array(arrow: Any, field: Field, column: _Values | None, count: int) -> Any:
    is_text = field.type == TEXT
    made = arrow.timestamp("ns", "UTC") if field.type == TIME else None
    made = arrow.dictionary(arrow.int32(), arrow.string()) if is_text else made or arrow.type_for_alias(field.type)
    if column is None:
        return arrow.nulls(count, made)
    if isinstance(column, _Texts):
        codes = arrow.array(column.codes, mask=column.codes < 0)
        return arrow.DictionaryArray.from_arrays(codes, arrow.array(column.texts, arrow.string()))
    values, is_null = column if isinstance(column, _Nullable) else (column, None)
    if field.type == TIME:
        return arrow.array(values.astype(np.int64, copy=False)).view(made)
    return arrow.array(values, made, mask=is_null)


def _coded(codes: Array, text_of: Callable[[int], str]) -> _Texts:
    """A column of texts from codes; an empty text is null."""
    places, texts = coded_texts(codes, lambda code: valid(text_of(code)) if code >= 0 else "")
    if "" in texts:
        places = np.where(places == texts.index(""), np.int32(-1), places)
    return _Texts(places, texts)


def _without(values: Array, none: int) -> _Nullable:
    return _Nullable(values, values == none)


def _phase(codes: Array) -> _Texts:
    return _Texts(codes.astype(np.int32), PHASES)


def _threads(events: EventTable, thread: Array) -> _Columns:
    threads = events.batch.threads
    numbers = np.array([each.number for each in threads], dtype=np.int64)
    return {
        "thread": numbers[thread] if len(threads) else np.zeros(len(thread), np.int64),
        "thread_name": _coded(thread, lambda number: threads[number].name),
    }


def _events(events: EventTable) -> _Columns:
    info, batch = events.info, events.batch
    view, names = info.view, events.batch.names
    hierarchy = module_hierarchy(batch)
    shapes, texts = shape_keys(batch)
    ids = events.column("id")
    columns: _Columns = {
        "id": ids,
        **_of_file(batch.spans, ids, np.where(view.parent >= 0, ids[view.parent], 0) if len(ids) else ids, names),
        "name": _coded(view.display_name[view.rows], lambda code: display_name(names[code])),
        "kind": _coded(events.column("kind"), _KINDS.__getitem__),
        "start": events.column("start"),
        "end": events.column("end"),
        "total": view.duration,
        "self": view.self_time,
        "count": np.ones(len(view), np.int64) if view.calls is None else view.calls,
        **_threads(events, events.column("thread")),
        "step": _without(events.steps_at(events.column("start")), -1),
        "phase": _phase(events.phases),
        "module": _coded(hierarchy.rows[view.rows], hierarchy.texts.__getitem__),
        "sequence_nr": _without(events.column("sequence_nr"), -1),
        "input_shapes": _coded(shapes[view.rows], lambda code: "" if texts[code] == "[]" else texts[code]),
    }
    if info.overload_codes is not None:
        columns["overload_name"] = _coded(info.overload_codes.codes, info.overload_codes.values.__getitem__)
    amounts = {**info.amounts(), "allocated": info.allocated}
    amounts |= {name: info.device_time(torchs) for name, torchs in _DEVICE.items()}
    return columns | {name: column for name, column in amounts.items() if column is not None}


def _of_file(spans: FileSpans | None, ids: Array, parent: Array, names: Names) -> _Columns:
    """The parents and the traces of events; ``parent``: ids of those on the same thread, 0 for none."""
    if spans is None:
        return {"parent": _without(parent, 0)}
    entry = positions_of(spans.event, ids)
    above = positions_of(spans.span_id, np.where(entry >= 0, spans.parent_id[entry], np.uint64(0)))
    parent = np.where((parent == 0) & (above >= 0), spans.event[above], parent)
    trace = np.where(entry >= 0, spans.trace[entry].astype(np.int64), -1)
    return {"parent": _without(np.where(parent == ids, 0, parent), 0), "trace": _coded(trace, names.__getitem__)}


_DEVICE = {"device_total": "device_time_total", "device_self": "self_device_time_total"}


def _steps(events: EventTable) -> _Columns:
    number, start, end = (
        np.array([getattr(step, name) for step in events.steps], np.int64) for name in ("number", "start", "end")
    )
    columns: _Columns = {"step": number, "start": start, "end": end, "total": end - start}
    said = [step.attributes or {} for step in events.steps]
    for name, key in {**DURATIONS, **_AMOUNTS}.items():
        values = np.array([each.get(key, -1) for each in said], np.float64)
        is_null = values < 0
        values = values * 1e9 if name in DURATIONS else values
        columns[name] = _Nullable(values if name == "mfu" else np.rint(values).astype(np.int64), is_null)
    if has_inputs(events.batch) and not any(FLOPS in each for each in said):
        columns["flops"] = _without(_flops(events.batch, start, end), 0)
    return columns


_AMOUNTS = {"tokens": TOKENS, "samples": SAMPLES_OF_STEP, "flops": FLOPS, "mfu": MFU}


def _flops(batch: Batch, start: Array, end: Array) -> Array:
    """The operations of the events that began between each start and its end."""
    if not len(start):
        return start
    order, began = np.argsort(start, kind="stable"), batch["start"]
    step = order[np.searchsorted(start[order], began, side="right") - 1]
    is_inside = (began >= start[step]) & (began < end[step])
    return group_flops(batch, np.where(is_inside, step, -1), len(start)).astype(np.int64)


def _collectives(events: EventTable) -> _Columns:
    collectives, batch = events.batch.collectives, events.batch
    if collectives is None:
        return {}
    rows = rows_of(batch, collectives["event"])
    times = np.where(rows >= 0, batch["start"][rows], -1) if len(batch) else rows
    columns: _Columns = {name: column for name, column in collectives.items() if name not in _NAMES}
    columns["group_rank"] = columns.pop("rank")
    columns |= {name: _coded(collectives[name], batch.names.__getitem__) for name in _NAMES}
    return columns | {"step": _without(events.steps_at(times), -1)}


def _memory(events: EventTable) -> _Columns:
    memory = events.batch.memory
    if memory is None:
        return {}
    return {
        **memory,
        "thread": _threads(events, memory["thread"])["thread"],
        "step": _without(events.steps_at(memory["time"]), -1),
    }


def _samples(events: EventTable) -> _Columns:
    samples = events.batch.samples
    if samples is None:
        return {}
    stacks = samples.stacks
    return {
        "time": samples.time,
        "duration": samples.duration,
        **_threads(events, samples.thread),
        "step": _without(events.steps_at(samples.time), -1),
        "phase": _phase(events.phases_at(samples.time)),
        "line": _coded(samples.stack, lambda code: str(stacks[code][0]) if stacks[code] else ""),
        "stack": _coded(samples.stack, lambda code: "\n".join(map(str, stacks[code]))),
    }


_COLUMNS: Mapping[str, Callable[[EventTable], _Columns]] = {
    "events": _events,
    "steps": _steps,
    "collectives": _collectives,
    "samples": _samples,
    "memory": _memory,
}
