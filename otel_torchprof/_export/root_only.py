"""Reduces steps that are not sampled to their step span, phases, and averages of operators by name."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._model.averages import grouped
from otel_torchprof._model.frames import distinct
from otel_torchprof._model.live_table import with_attributes
from otel_torchprof._model.span_table import AttributeType
from otel_torchprof._model.span_tables import taken
from otel_torchprof._model.span_tree import column_of, rows_of_spans
from otel_torchprof._native.loops import subtract_from_parents

from .aggregating import collapsed_of, counts_of, phases, with_values
from .policy import RECORDED, without_hidden

if TYPE_CHECKING:
    from otel_torchprof._model.span_table import SpanTable

    from .policy import TargetTrace

Array = npt.NDArray[Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# ---- Start and end of the collectives of a step that is not traced in full ----

COLLECTIVES = "torch.collectives"
MOST_COLLECTIVES_BYTES = 511
_WORKS = ("gloo:", "nccl:")
"""Prefixes of the events of backends on their own threads; the name of the collective follows."""


def collective_texts(table: SpanTable, rows: Array, trace_group: Array, roots: Array) -> list[str]:
    """Returns for each trace group its collectives, as a JSON list of ``[group, number, begin, end]`` of at most 511 bytes.

    Times are in us since the start of the root. The end is that of the backend's work with the same name; works have the order of the
    calls. Collectives without a known end are left out; without any, the text is empty.

    Args:
        table: the spans.
        rows: the rows of the table to read.
        trace_group: for each of these rows, the index of its root in ``roots``.
        roots: rows of the roots.
    """
    texts = [""] * len(roots)
    calls = _calls(table, rows)
    if not len(calls):
        return texts
    works = _works(table, rows)
    names, groups, numbers = (_values(table, f"torch.collective.{key}") for key in ("name", "group", "sequence_nr"))
    for place in distinct_values(trace_group[calls]).tolist():
        begin = int(table.start[roots[place]])
        ends = _ends(table, rows[works[trace_group[works] == place]])
        entries, left = [], MOST_COLLECTIVES_BYTES - len("[]")
        for row in _in_order(table, rows[calls[trace_group[calls] == place]]):
            ends_of_name = ends.get(table.names[int(names[row])])
            if not ends_of_name:
                continue
            times = ((int(at) - begin) / 1e3 for at in (table.start[row], ends_of_name.pop(0)))
            entry = _JSON([table.names[int(groups[row])], int(numbers[row]), *times])
            left -= len(entry.encode("utf-8", "replace")) + len(",")
            if left < 0:
                break
            entries.append(entry)
        texts[place] = f"[{','.join(entries)}]" if entries else ""
    return texts


def _calls(table: SpanTable, rows: Array) -> Array:
    """Returns the indices in ``rows`` of collectives that have a number in their group."""
    columns = [column_of(table, f"torch.collective.{key}") for key in ("name", "group", "sequence_nr")]
    known = [column[1] for column in columns if column is not None]
    if len(known) < len(columns):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.logical_and.reduce(known)[rows])


def _works(table: SpanTable, rows: Array) -> Array:
    named = table.names.matching((), prefixes=_WORKS)
    return np.empty(0, dtype=np.int64) if named is None else np.flatnonzero(named[table.name[rows]])


def _ends(table: SpanTable, rows: Array) -> dict[str, list[int]]:
    """Returns, by collective, the ends of its work on the backend's threads, ordered by start."""
    ends: dict[str, list[int]] = defaultdict(list)
    for row in _in_order(table, rows):
        ends[table.names[int(table.name[row])].partition(":")[2]].append(int(table.end[row]))
    return ends


def _in_order(table: SpanTable, rows: Array) -> list[int]:
    ordered: list[int] = rows[np.argsort(table.start[rows], kind="stable")].tolist()
    return ordered


def _values(table: SpanTable, key: str) -> Array:
    column = column_of(table, key)
    return np.zeros(len(table), dtype=np.int64) if column is None else column[0]


AVERAGES = "torch.averages"
MOST_BYTES = 1_279
"""Bytes of both texts, averages and collectives. A step with its phases then takes 3,000 (measured, docs/ranks.md). Tempo truncates
an attribute at 2,048."""
_LONGEST_NAME = 200


def root_only(table: SpanTable, target: TargetTrace) -> SpanTable:
    """Returns the span of ``target`` and its phases, reduced by :func:`without_detail`; an empty table if that span is not in it."""
    if not (table.span_id == np.uint64(target.span_id)).any():
        return taken(table, np.empty(0, dtype=np.int64))
    trace_group = np.full(len(table), target.span_id, dtype=np.uint64)
    stays = root_and_phases(table, trace_group)
    return taken(without_detail(table, trace_group, np.arange(len(table)), stays), np.flatnonzero(stays))


def root_and_phases(table: SpanTable, trace_group: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the roots of trace groups, and of phases (without tokens) whose parent is a root or another such phase."""
    stays: npt.NDArray[np.bool_] = table.span_id == trace_group
    waiting = np.flatnonzero(phases(table))
    parent = rows_of_spans(table, table.parent_span_id[waiting])
    waiting, parent = waiting[parent >= 0], parent[parent >= 0]
    while (below := stays[parent]).any():
        stays[waiting[below]] = True
        waiting, parent = waiting[~below], parent[~below]
    return stays


def without_detail(
    table: SpanTable, trace_group: npt.NDArray[np.uint64], rows: Array, stays: npt.NDArray[np.bool_]
) -> SpanTable:
    """Adds to roots of trace groups the number of their spans, and averages of the names with the most self time.

    ``torch.averages`` is a JSON list of ``{"name", "count", "self"}``, the longest first, ``self`` in seconds, of at most
    1,279 bytes, less those of collectives. Events that ran while the loop waited for data have entries of their own, with ``"phase": "data"``.
    ``torch.collectives`` has the collectives whose end is known. Costs a few numpy passes, and some 10 µs per trace group. Thread-safe.

    Args:
        table: whole trace groups, each with its root.
        trace_group: for each span, the id of its trace group's root.
        rows: the rows of the trace groups to describe.
        stays: mask of the spans that the caller keeps; these are not in the averages.
    """
    is_root = table.span_id[rows] == trace_group[rows]
    keys, which = np.unique(trace_group[rows], return_inverse=True)
    roots = np.empty(len(keys), dtype=np.int64)
    roots[which[is_root]] = rows[is_root]
    recorded = np.zeros(len(keys), dtype=np.int64)
    np.add.at(recorded, which, (counts_of(table) + collapsed_of(table))[rows])
    goes = ~stays[rows]
    collectives = collective_texts(table, rows, which, roots)
    left = [MOST_BYTES - len(calls.encode("utf-8", "replace")) for calls in collectives]
    texts = _averages(table, rows[goes], which[goes], left)
    reported = with_values(table, RECORDED, AttributeType.INT64, roots, recorded)
    attributes = (
        (row, {AVERAGES: text, **({COLLECTIVES: calls} if calls else {})})
        for row, text, calls in zip(roots.tolist(), texts, collectives, strict=True)
    )
    return without_hidden(with_attributes(reported, attributes))


def _averages(table: SpanTable, events: Array, which: Array, most_bytes: list[int]) -> list[str]:
    """Returns the text of each trace group; ``which``: the trace group of each event."""
    names, name = distinct(table.name[events])
    keys = which * max(len(names), 1) + name
    pairs, place = np.unique(keys << 1 | _in_data(table)[events], return_inverse=True)
    amounts = {"self": _self_seconds(table)[events], "calls": counts_of(table)[events]}
    sums = grouped(place, len(pairs), len(events), amounts)
    seconds, counts = sums.amounts["self"], sums.amounts["calls"]
    in_data = pairs[place[sums.first]] & 1
    of_trace_group, of_name = np.divmod(pairs[place[sums.first]] >> 1, max(len(names), 1))
    order = np.lexsort((of_name, -seconds, of_trace_group))
    texts = [table.names[index][:_LONGEST_NAME] for index in names.tolist()]
    lines: list[list[str]] = [[] for _ in most_bytes]
    left = [most - len("[]") for most in most_bytes]
    entries = (of_trace_group[order], of_name[order], counts[order], seconds[order], in_data[order])
    for number, text, count, own, is_data in zip(*(column.tolist() for column in entries), strict=True):
        if left[number] < 0:
            continue
        phase = {"phase": "data"} if is_data else {}
        line = _JSON({"name": texts[text], "count": count, "self": float(f"{own:.4g}"), **phase})
        left[number] -= len(line.encode("utf-8", "replace")) + len(",")
        if left[number] >= 0:
            lines[number].append(line)
    return [f"[{','.join(group_lines)}]" for group_lines in lines]


def _in_data(table: SpanTable) -> npt.NDArray[np.bool_]:
    """Returns a mask of the spans that began while the loop waited for data."""
    named = table.names.matching((f"{PHASE_PREFIX}data",))
    waits = np.empty(0, dtype=np.int64) if named is None else np.flatnonzero(named[table.name])
    if not len(waits):
        return np.zeros(len(table), dtype=np.bool_)
    waits = waits[np.argsort(table.start[waits], kind="stable")]
    place = np.searchsorted(table.start[waits], table.start, side="right") - 1
    in_data: npt.NDArray[np.bool_] = (place >= 0) & (table.start < table.end[waits[place]])
    return in_data


def _self_seconds(table: SpanTable) -> npt.NDArray[np.float64]:
    """Returns self times in seconds: the attribute of the spans, else computed from durations and children."""
    duration = table.end - table.start
    own = duration.copy()
    subtract_from_parents(own, rows_of_spans(table, table.parent_span_id), duration)
    computed: npt.NDArray[np.float64] = np.maximum(own, 0) / 1e9
    reported = column_of(table, "torch.self_duration")
    return computed if reported is None else np.where(reported[1], reported[0], computed)
