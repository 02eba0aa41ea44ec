"""Events and averages as pandas' data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.schema import MEMORY_KIND, Flag, Kind, Scope
from otel_torchprof._model.event_info import AMOUNTS, DEVICE_TIMES, PEAKS, coded_texts
from otel_torchprof._model.flows import numbered_rows
from otel_torchprof._model.inputs import shape_keys
from otel_torchprof._model.tree import display_name
from otel_torchprof.errors import package_of

from .function_event_avg import FunctionEventAvg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import pandas as pd

    from otel_torchprof._model.event_info import Values

    from .recorded_events import EventSource

    Array = npt.NDArray[Any]

_NS_PER_US = 1000
_IF_ANY = (*DEVICE_TIMES, *AMOUNTS, *PEAKS)
"""Numbers that have a column only if one of them is not 0."""
_TEXTS_IF_ANY = ("input_shapes", "overload_name", "stack")
"""Texts that have a column only if one of them is not empty."""


def of_columns(source: EventSource) -> pd.DataFrame:
    """The frame of recorded events."""
    pandas = _pandas()
    batch, view = source.batch, source.view
    rows, numbered = view.rows, numbered_rows(source.batch)[view.rows]
    names = view.display_name[rows]
    threads = np.array([thread.number for thread in batch.threads], dtype=np.int64)
    thread = threads[batch["thread"][rows]]
    sequence = batch["sequence_nr"][numbered]
    forward = np.where(sequence >= 0, batch["fwd_thread"][numbered], 0).astype(np.int64)
    is_memory = batch["kind"][rows] == MEMORY_KIND
    columns = {
        "name": _coded(pandas, names, lambda index: display_name(batch.names[index])),
        "id": batch["id"][rows].astype(np.int64),
        "parent": view.parent.astype(np.int64),
        "thread": thread,
        "start": (batch["start"][rows] - source.origin_ns) / _NS_PER_US,
        "end": (batch["end"][rows] - source.origin_ns) / _NS_PER_US,
        "cpu_time_total": view.duration / _NS_PER_US,
        "self_cpu_time_total": view.self_time / _NS_PER_US,
        "scope": batch["scope"][rows].astype(np.int64),
        "sequence_nr": sequence,
        # As in torch, a change of memory has its own thread here.
        "fwd_thread": np.where(is_memory, thread, forward),
        "is_async": (batch["flags"][rows] & Flag.ASYNC) != 0,
        "is_user_annotation": batch["scope"][rows] == Scope.USER_SCOPE,
        "is_python_function": batch["kind"][rows] == Kind.FRAME,
    }
    if view.calls is not None:
        columns["count"] = view.calls
    for name in DEVICE_TIMES:
        times = source.info.device_time(name)
        if times is not None and times.any():
            columns[name] = times / _NS_PER_US
    numbers = source.info.amounts() | source.info.peaks()
    columns |= {name: column for name, column in numbers.items() if column.any()}
    return pandas.DataFrame(columns | _texts(pandas, source))


def of_objects(events: Sequence[Any]) -> pd.DataFrame:
    """The frame of events or averages that are objects."""
    pandas = _pandas()
    averages = bool(events) and isinstance(events[0], FunctionEventAvg)
    columns = _average_columns(pandas, events) if averages else _event_columns(pandas, events)
    if any(event.count != 1 for event in events):  # of averages it is there already
        columns["count"] = [event.count for event in events]
    for name in _IF_ANY:
        values = [getattr(event, name) or 0 for event in events]
        if any(values):
            columns[name] = values
    for name in _TEXTS_IF_ANY:
        texts = [_text(name, getattr(event, name)) for event in events]
        if any(texts):
            columns[name] = pandas.Categorical(texts)
    return pandas.DataFrame(columns)


def _event_columns(pandas: Any, events: Sequence[Any]) -> dict[str, Any]:
    place = {id(event): index for index, event in enumerate(events)}
    names = ("cpu_time_total", "self_cpu_time_total", "scope", "sequence_nr", "fwd_thread", "is_async")
    return {
        "name": pandas.Categorical([event.name for event in events]),
        "id": [event.id for event in events],
        "parent": [place.get(id(event.cpu_parent), -1) for event in events],
        "thread": [event.thread for event in events],
        "start": [event.time_range.start for event in events],
        "end": [event.time_range.end for event in events],
        **{name: [getattr(event, name) for event in events] for name in names},
        "is_user_annotation": [bool(event.is_user_annotation) for event in events],
        "is_python_function": [bool(event.is_python_function) for event in events],
    }


def _average_columns(pandas: Any, averages: Iterable[Any]) -> dict[str, Any]:
    names = ("count", "cpu_time_total", "self_cpu_time_total", "cpu_time", "is_async")
    return {
        "key": pandas.Categorical([average.key for average in averages]),
        **{name: [getattr(average, name) for average in averages] for name in names},
        "is_user_annotation": [bool(average.is_user_annotation) for average in averages],
    }


def _texts(pandas: Any, source: EventSource) -> dict[str, Any]:
    """The columns of :data:`_TEXTS_IF_ANY` of recorded events."""
    keys, shapes = shape_keys(source.batch)
    coded: dict[str, tuple[Array, Values]] = {"input_shapes": (keys[source.view.rows], shapes)}
    overloads, stacks = source.info.overload_codes, source.info.stack_codes
    if overloads is not None:
        coded["overload_name"] = overloads
    if stacks is not None:
        coded["stack"] = stacks
    columns = {}
    for name, (codes, values) in coded.items():
        texts = {code: _text(name, values[code]) for code in distinct_values(codes).tolist()}
        if any(texts.values()):
            columns[name] = _coded(pandas, codes, texts.__getitem__)
    return columns


def _text(name: str, value: Any) -> str:
    """A stack as lines, shapes as torch prints them; empty for none."""
    if name == "stack":
        return "\n".join(value or ())
    return str(value) if value and value != "[]" else ""


def _coded(pandas: Any, codes: Array, text_of: Any) -> Any:
    """A categorical column of texts, from their codes; several codes may have the same text."""
    return pandas.Categorical.from_codes(*coded_texts(codes, text_of))


def _pandas() -> Any:
    return package_of("pandas", "pandas", "to_pandas()")
