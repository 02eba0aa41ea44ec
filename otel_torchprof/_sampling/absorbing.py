"""Spans that stand for others: what becomes of parents, links and attributes when spans leave a table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.phases import PHASE_PREFIX, Part
from otel_torchprof._spans.limits import limited
from otel_torchprof._spans.span_tables import taken
from otel_torchprof._spans.span_tree import column_of, rows_of_spans
from otel_torchprof._tree.span_table import AttributeColumn, AttributeType, SpanTable

if TYPE_CHECKING:
    from otel_torchprof._spans.span_tree import SpanTree

Array = npt.NDArray[Any]

AGGREGATED_COUNT, AGGREGATED_DURATION = "torch.aggregated.count", "torch.aggregated.duration"
COLLAPSED_COUNT, COLLAPSED_DURATION = "torch.collapsed.count", "torch.collapsed.duration"
PRECIOUS = "torch.collective."
"""What has such an attribute is looked for from other processes: it is never aggregated, and collapsed last."""
MOST_LINKS = 128
"""Of a span that has absorbed others; those beyond are counted as dropped. OpenTelemetry's default limit."""


def counts_of(table: SpanTable) -> npt.NDArray[np.int64]:
    """How many recorded spans each one stands for, those that were collapsed into it not among them."""
    return _numbers(table, AGGREGATED_COUNT, 1)


def collapsed_of(table: SpanTable) -> npt.NDArray[np.int64]:
    """How many recorded spans were collapsed into each."""
    return _numbers(table, COLLAPSED_COUNT, 0)


def durations_of(table: SpanTable) -> npt.NDArray[np.int64]:
    """How long each took, ns; of an aggregate span the sum."""
    own = table.end - table.start
    found = column_of(table, AGGREGATED_DURATION)
    return own if found is None else np.where(found[1], np.rint(found[0] * 1e9), own).astype(np.int64)


def precious(table: SpanTable) -> npt.NDArray[np.bool_]:
    """Which spans others look for."""
    found = np.zeros(len(table), dtype=np.bool_)
    for column in table.attributes:
        if column.key.startswith(PRECIOUS):
            found |= True if column.present is None else column.present != 0
    return found


def phases(table: SpanTable) -> npt.NDArray[np.bool_]:
    """Which spans are phases: they are never aggregated nor collapsed, but for tokens, of which there may be thousands."""
    named = table.names.matching((), prefixes=(PHASE_PREFIX,))
    return np.zeros(len(table), dtype=np.bool_) if named is None else named[table.name] & ~tokens(table)


def tokens(table: SpanTable) -> npt.NDArray[np.bool_]:
    """Which spans are calls of a model that ``generate`` makes for one token more."""
    named = table.names.matching((Part.DECODE.event_name,))
    return np.zeros(len(table), dtype=np.bool_) if named is None else named[table.name]


def _numbers(table: SpanTable, key: str, otherwise: int) -> npt.NDArray[np.int64]:
    found = column_of(table, key)
    if found is None:
        return np.full(len(table), otherwise, dtype=np.int64)
    return np.where(found[1], found[0], otherwise)


def with_values(table: SpanTable, key: str, kind: AttributeType, rows: Array, values: Any) -> SpanTable:
    """The table with an attribute on some rows; other rows keep theirs."""
    before = column_of(table, key)
    column = np.zeros(len(table), dtype=kind.dtype) if before is None else before[0].copy()
    present = np.zeros(len(table), dtype=np.uint8) if before is None else before[1].astype(np.uint8)
    column[rows], present[rows] = values, 1
    others = tuple(c for c in table.attributes if c.key != key)
    return replace(table, attributes=(*others, AttributeColumn(key, kind, column, None if present.all() else present)))


def absorbed(table: SpanTable, tree: SpanTree, into: Array, *, with_links: bool = True) -> SpanTable:
    """Only the spans that stay, as parents and in links where those were that went into them.

    ``into``: for each row the one that it goes into, itself for what stays. Attributes and times stay as they are.
    ``with_links``: what stays has the links of what went into it, too.
    """
    if not with_links:
        links = table.links
        table = replace(table, links=links[into[links["row"].astype(np.int64)] == links["row"].astype(np.int64)])
    parent = np.where(tree.parent >= 0, table.span_id[into[tree.parent]], table.parent_span_id)
    surviving = np.flatnonzero(into == np.arange(len(into)))
    links = _moved_links(table, into)
    dropped = table.dropped_links
    if dropped is not None:
        dropped = np.bincount(into, weights=dropped, minlength=len(into)).astype(np.uint32)
    whole = replace(table, parent_span_id=parent, links=links, dropped_links=dropped)
    return limited(taken(whole, surviving), max_attributes=None, max_links=MOST_LINKS, max_attribute_length=None)


def _moved_links(table: SpanTable, into: Array) -> Array:
    """By rising row, each once, none from a span to what has absorbed it."""
    if not len(table.links):
        return table.links
    links = table.links.copy()
    row = into[links["row"].astype(np.int64)]
    target, inside = linked_rows(table)
    target = np.where(inside, into[target], -1)
    links["span_id"] = np.where(inside, table.span_id[target], links["span_id"])
    links["row"] = row
    return links_once(links[target != row])


def links_once(links: Array) -> Array:
    """The links by rising row, without those that lead from one row to the same span id again."""
    row, span_id = links["row"], links["span_id"]
    order = np.lexsort((span_id, row))
    again = (row[order][1:] == row[order][:-1]) & (span_id[order][1:] == span_id[order][:-1])
    surviving = np.sort(order[np.concatenate((np.ones(min(len(row), 1), np.bool_), ~again))])
    found: Array = links[surviving[np.argsort(row[surviving], kind="stable")]]
    return found


def linked_rows(table: SpanTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The row that each link points to, and whether it is in the table."""
    target = rows_of_spans(table, table.links["span_id"])
    inside = target >= 0
    inside &= (table.trace_ids[table.trace[target]] == table.links["trace_id"]).all(axis=1)
    return target, inside
