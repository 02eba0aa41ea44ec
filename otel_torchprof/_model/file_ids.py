"""Gives the spans of a recording that was read from a file the traces, ids and parents that they have there."""

from __future__ import annotations

from binascii import unhexlify
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._native.loops import positions_of

from .frames import distinct
from .operator_roots import OPERATORS_NAME
from .span_table import LINK, SpanTable
from .span_tables import joined_tables, without_rows
from .step_spans import JOB_NAME, PROFILE_NAME
from .tree import STEP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._columns.file_spans import FileSpans

Array = npt.NDArray[Any]

PROFILER_WINDOW = "PyTorch Profiler"
"""Prefix of the name of the slice that is a whole recording, in files."""


def with_file_ids(table: SpanTable, root: Array, batch: Batch) -> tuple[SpanTable, Array]:
    """The spans with the ids that they have in the file, and for each the id of the root of its trace.

    Spans of the job, and roots that operators share, are added: they are no events. A span whose parent is not in the table
    gets the nearest span above it that is, else its parent in no file. Costs some 300 ns per span, and a microsecond per trace.

    Args:
        table: the spans of the batch's events, and synthetic ones.
        root: the id of the root of each.
        batch: the displayed events; without ids of a file, table and root are returned.
    """
    spans = batch.spans
    if spans is None:
        return table, root
    entry = _entries(table, batch, spans)
    added = _beside(spans, batch, entry)
    entry = np.concatenate((added, entry))
    table = joined_tables([_table_of(spans, added, table), table])
    is_known = entry >= 0
    traces, code = distinct(spans.trace[entry[is_known]])
    ids = b"".join(unhexlify(batch.names.raw(name)) for name in traces.tolist())
    trace, span_id = table.trace.copy(), table.span_id.copy()
    trace[is_known] = len(table.trace_ids) + code
    span_id[is_known] = spans.span_id[entry[is_known]]
    parent_id = table.parent_span_id.copy()
    place = positions_of(table.span_id, parent_id)
    parent_id[place >= 0] = span_id[place[place >= 0]]
    parent_id[is_known] = _parents(spans, entry[is_known])[entry[is_known]]
    trace_ids = np.concatenate((table.trace_ids, np.frombuffer(ids, np.uint8).reshape(-1, 16)))
    top, parent_id = _roots(span_id, parent_id)
    renamed = replace(
        table,
        trace=trace,
        trace_ids=trace_ids,
        trace_states=(),
        span_id=span_id,
        parent_span_id=parent_id,
        links=_linked(table, span_id, trace_ids[trace]),
    )
    stays = ~_needless(renamed, is_known)
    return without_rows(renamed, np.flatnonzero(~stays)), span_id[top][stays]


def _entries(table: SpanTable, batch: Batch, spans: FileSpans) -> Array:
    """The entry of each span of the table; -1 for those that the file has not."""
    entry = np.full(len(table), -1, np.int64)
    of_events = np.flatnonzero(table.row >= 0)
    entry[of_events] = positions_of(spans.event, batch["id"][table.row[of_events]])
    steps = _steps(spans, batch)
    for row in np.flatnonzero(table.row < 0).tolist():
        number = table.step.item(row)
        entry[row] = steps.get((number, table.start.item(row)), steps.get((number, None), -1))
    return entry


def _steps(spans: FileSpans, batch: Batch) -> Mapping[tuple[int, int | None], int]:
    """The entries of steps, by number and start, and by number alone; that of a whole profile has the number -1."""
    found: dict[tuple[int, int | None], int] = {}
    for at, (name, start) in enumerate(zip(spans.name.tolist(), spans.start.tolist(), strict=True)):
        text = batch.names[name]
        number = "-1" if text.startswith((PROFILE_NAME, PROFILER_WINDOW)) else text.removeprefix(STEP_PREFIX)
        if number != text and number.removeprefix("-").isdecimal():
            found[int(number), start] = at
            found.setdefault((int(number), None), at)
    return found


def _beside(spans: FileSpans, batch: Batch, entry: Array) -> Array:
    """The entries of spans of the job and of roots that operators share, none of which is in the table yet."""
    names = batch.names.matching((JOB_NAME, OPERATORS_NAME))
    if names is None:
        return np.empty(0, np.int64)
    first = np.flatnonzero(names[spans.name])
    found: Array = first[(spans.event[first] == 0) & ~np.isin(first, entry)]
    return found


def _table_of(spans: FileSpans, entry: Array, table: SpanTable) -> SpanTable:
    """Spans of entries that are no events, without attributes; with the ids of the file."""
    count = len(entry)
    return SpanTable(
        name=spans.name[entry],
        start=spans.start[entry],
        end=spans.end[entry],
        trace=np.zeros(count, np.uint32),
        trace_ids=table.trace_ids[:1],
        span_id=spans.span_id[entry],
        parent_span_id=spans.parent_id[entry],
        error=np.zeros(count, np.uint8),
        row=np.full(count, -1),
        step=np.full(count, -1),
        links=np.empty(0, LINK),
        names=table.names,
    )


def _parents(spans: FileSpans, shown: Array) -> Array:
    """The parent id of each entry: of the nearest one above it that is shown, else as in the file; 0 in a cycle of others."""
    is_shown = np.zeros(len(spans), np.bool_)
    is_shown[shown] = True
    parent_id, above = spans.parent_id.copy(), positions_of(spans.span_id, spans.parent_id)
    for _ in range(len(spans).bit_length()):
        moving = np.flatnonzero((above >= 0) & ~is_shown[above])
        if not moving.size:
            break
        parent_id[moving], above[moving] = parent_id[above[moving]], above[above[moving]]
    parent_id[(above >= 0) & ~is_shown[above]] = 0
    return parent_id


def _roots(span_id: Array, parent_id: Array) -> tuple[Array, Array]:
    """The topmost span above each, and the parent ids, none of spans that are their own ancestors."""
    parent = positions_of(span_id, parent_id)
    top = np.where(parent >= 0, parent, np.arange(len(parent)))
    for _ in range(len(parent).bit_length()):
        following = top[top]
        if (following == top).all():
            break
        top = following
    cyclic = parent[top] >= 0
    return np.where(cyclic, np.arange(len(top)), top), np.where(cyclic, np.uint64(0), parent_id)


def _linked(table: SpanTable, span_id: Array, trace_ids: Array) -> Array:
    """The links of the table, to where its spans have other ids now."""
    target = positions_of(table.span_id, np.ascontiguousarray(table.links["span_id"]))
    here, links = target >= 0, table.links.copy()
    links["span_id"][here] = span_id[target[here]]
    links["trace_id"][here] = trace_ids[target[here]]
    return links


def _needless(table: SpanTable, is_known: Array) -> Array:
    """A mask of synthetic spans that the file has not, which nothing is in, and which say nothing."""
    empty = (table.row < 0) & (table.step < 0) & ~is_known
    for column in table.attributes:
        empty[column.spans(len(table))] = False
    return empty & ~np.isin(table.span_id, table.parent_span_id)
