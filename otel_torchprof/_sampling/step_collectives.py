"""What is left of the collectives of a step without details: when this rank came to each, and when all had come."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._spans.span_tree import column_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from otel_torchprof._tree.span_table import SpanTable

    Array = npt.NDArray[Any]

COLLECTIVES = "torch.collectives"
MOST_BYTES = 511
_WORKS = ("gloo:", "nccl:")
"""Begins of the names of what backends do on threads of their own; the name of the collective follows."""
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def collective_texts(table: SpanTable, rows: Array, trace_group: Array, roots: Array) -> list[str]:
    """Of each trace group a JSON list of ``[group, number, begin, end]``, in us since the root began; as many as go into 511 bytes.

    Of those whose end is known: the end of the backend's work of that name, which comes in the order of the calls. Empty where there are none.

    Args:
        table: the spans.
        rows: those that are looked at.
        trace_group: of each of these rows the place of its root in ``roots``.
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
        entries, left = [], MOST_BYTES - len("[]")
        for row in _in_order(table, rows[calls[trace_group[calls] == place]]):
            found = ends.get(table.names[int(names[row])])
            if not found:
                continue
            times = ((int(at) - begin) / 1e3 for at in (table.start[row], found.pop(0)))
            entry = _JSON([table.names[int(groups[row])], int(numbers[row]), *times])
            left -= len(entry.encode("utf-8", "replace")) + len(",")
            if left < 0:
                break
            entries.append(entry)
        texts[place] = f"[{','.join(entries)}]" if entries else ""
    return texts


def _calls(table: SpanTable, rows: Array) -> Array:
    """Places in ``rows`` of collectives that have a number in a group."""
    columns = [column_of(table, f"torch.collective.{key}") for key in ("name", "group", "sequence_nr")]
    known = [column[1] for column in columns if column is not None]
    if len(known) < len(columns):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.logical_and.reduce(known)[rows])


def _works(table: SpanTable, rows: Array) -> Array:
    named = table.names.matching((), prefixes=_WORKS)
    return np.empty(0, dtype=np.int64) if named is None else np.flatnonzero(named[table.name[rows]])


def _ends(table: SpanTable, rows: Array) -> dict[str, list[int]]:
    """By collective, when the works on it ended, in the order in which they began."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in _in_order(table, rows):
        found[table.names[int(table.name[row])].partition(":")[2]].append(int(table.end[row]))
    return found


def _in_order(table: SpanTable, rows: Array) -> list[int]:
    ordered: list[int] = rows[np.argsort(table.start[rows], kind="stable")].tolist()
    return ordered


def _values(table: SpanTable, key: str) -> Array:
    found = column_of(table, key)
    return np.zeros(len(table), dtype=np.int64) if found is None else found[0]
