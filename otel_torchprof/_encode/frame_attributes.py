"""Attributes that come from Python's calls: of calls that are spans, and of what was called directly by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._tree.frames import distinct

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.frame_info import FunctionInfo

    from .attribute_source import Source, Values

COLLECTION = "gc.collect: generation "
"""How the names of collections of garbage begin."""

UNKNOWN_ERROR = "_OTHER"
"""What OpenTelemetry's conventions have for an error whose class nobody knows."""


def function(value_of: Callable[[FunctionInfo], Any], *, is_text: bool) -> Callable[[Source], Values | None]:
    """Something of the function that a span is a call of, or was called by."""

    def compute(source: Source) -> Values | None:
        found = source.functions
        if found is None:
            return None
        info, which = found
        values = [value_of(info_field) for info_field in info]
        column = source.add(values) if is_text else np.array(values, dtype=np.int64)
        return np.append(column, column[:1])[which], which >= 0

    return compute


def module(source: Source) -> Values | None:
    """The full names of modules: the events' own names, of calls what is known of them."""
    is_module = (source.kind == Kind.MODULE) & source.is_event
    if source.frames is None and not is_module.any():
        return None
    values = np.where(is_module, source.table.name, np.uint32(0))
    info = source.batch.frame_info
    if info is None or source.frames is None:
        return values, is_module
    present = is_module.copy()
    parts = info.recordings or (info,)
    since = np.array([part.since for part in parts], dtype=np.int64)
    part_of = np.maximum(np.searchsorted(since, source.table.start[source.frames], side="right") - 1, 0)
    for number, part in enumerate(parts):
        spans = source.frames[part_of == number]
        used, which = distinct(source.frame_names(spans))
        known = [part.modules[name].qualified_name if name in part.modules else "" for name in used.tolist()]
        names = source.add(known)
        is_known = np.array([bool(name) for name in known], dtype=np.bool_)[which]
        values[spans[is_known]] = names[which[is_known]]
        present[spans[is_known]] = True
    return values, present


def generation(source: Source) -> Values | None:
    """Of a collection of garbage."""
    if source.frames is None:
        return None
    used, which = distinct(source.frame_names(source.frames))
    found = np.array([_generation(source.batch.names[name]) for name in used.tolist()], dtype=np.int64)
    values = np.full(len(source.table), -1, dtype=np.int64)
    values[source.frames] = found[which]
    return values, values >= 0


def identity(source: Source) -> Values | None:
    """Of calls: which generator, coroutine or optimizer it was."""
    if source.frames is None:
        return None
    values = np.zeros(len(source.table), dtype=np.int64)
    values[source.frames] = source.column("fwd_thread")[source.frames]
    return values, values != 0


def error_type(source: Source) -> Values | None:
    """The class of an exception; not known of every call."""
    if not source.any_flags & Flag.ERROR and not source.batch["error_type"].max(initial=0):
        return None
    values = source.column("error_type")
    unknown = (values == 0) & (source.column("flags") & Flag.ERROR != 0)
    if unknown.any():
        values = np.where(unknown, source.add([UNKNOWN_ERROR])[0], values)
    return values, (values != 0) & source.is_event


def _generation(name: str) -> int:
    number = name.removeprefix(COLLECTION)
    return int(number) if number != name and number.isdecimal() else -1
