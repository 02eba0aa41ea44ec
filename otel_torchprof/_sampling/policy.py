"""What a trace may be, and how one that is more becomes that: merge, fold, split, in this order and only as far as needed.

All of it is pure: tables in, tables out. What is sent, what was aggregated and what was collapsed always adds up to what was
recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof import config
from otel_torchprof._spans.span_sizes import LINK_SIZE, span_sizes
from otel_torchprof._tree.span_table import AttributeType, SpanTable

from .absorbing import collapsed_of, counts_of, with_values
from .aggregating import aggregated
from .collapsing import collapsed
from .splitting import Part, TargetTrace, split, with_links
from .tokens import tokens_aggregated

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._spans.budget import Budget

__all__ = ["RECORDED", "Part", "Reduction", "TargetTrace", "fits", "reduced", "without_hidden"]

Array = npt.NDArray[Any]

RECORDED = "torch.recorded_spans"
_MOST_PART_LINKS = 100
"""Links from a root to its parts; all have links to it, and their number is an attribute."""
_ROOT_SIZE = 160
"""Bytes that the numbers of what was reduced add to a root, at most."""


@dataclass(frozen=True)
class Reduction:
    """What became of spans; adds up over the tables of a trace group."""

    recorded: int = 0
    """How many there were: those sent, aggregated and collapsed together."""
    aggregated: int = 0
    """How many aggregate spans stand for, beyond one each."""
    collapsed: int = 0
    """How many were collapsed into others."""
    parts: int = 0
    """Traces beside the trace group's own."""
    linked: tuple[Part, ...] = ()
    """The first of these, for links from the trace group's root."""
    became: Array | None = field(default=None, compare=False)
    """Of one table: for each of its spans the id of the one that it is part of now; None where it is itself."""

    def __add__(self, other: Reduction) -> Reduction:
        return Reduction(
            self.recorded + other.recorded,
            self.aggregated + other.aggregated,
            self.collapsed + other.collapsed,
            self.parts + other.parts,
            (self.linked + other.linked)[:_MOST_PART_LINKS],
        )

    def __bool__(self) -> bool:
        """Whether anything was reduced."""
        return bool(self.aggregated or self.collapsed or self.parts)


def fits(table: SpanTable, budget: Budget) -> bool:
    """Whether the spans, as those of one trace, are within the budget. Costs about 0.3 µs per span, nothing for too many."""
    return len(table) <= budget.max_spans and int(span_sizes(table).sum()) <= budget.max_bytes


def reduced(
    table: SpanTable,
    budget: Budget,
    target: TargetTrace,
    *,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
    before: Reduction = Reduction(),
    stays: bool = False,
) -> tuple[SpanTable, Reduction]:
    """The spans of one trace group as traces within the budget, and what was done now: add it to ``before`` for the next table.

    ``table`` holds the spans of one trace; where that of ``target`` is not among them yet, all go to linked traces, or those that
    do not fit if ``stays``: that trace is somebody else's. The table
    itself comes back where it fits and nothing was reduced before. ``new_trace_id`` and ``new_span_id`` have the contract of
    OpenTelemetry's IdGenerator. Thread-safe; some 2 µs per span that is too many.
    """
    found = np.flatnonzero(table.span_id == np.uint64(target.span_id))
    root = int(found[0]) if found.size else -1
    stays |= root >= 0
    if not len(table) or (stays and not before and fits(table, budget)):
        return table, _accounts(table)
    links_before = len(before.linked) if root >= 0 else 0
    links_left = min(_MOST_PART_LINKS - links_before, budget.max_bytes // (10 * LINK_SIZE))
    available = (
        budget.less(0, _ROOT_SIZE + links_before * LINK_SIZE) if root >= 0 else budget.less(0 if stays else 1, 512)
    )
    if root >= 0:
        table = _with_strays(table, root)
    table, became = _smaller(table, target, budget, available)
    done, parts = _accounts(table), list[Part]()
    if not stays or not fits(table, available):
        first = available.less(0, links_left * LINK_SIZE)
        table, parts = split(
            table,
            target,
            (first.max_spans, first.max_bytes),
            (budget.max_spans, budget.max_bytes),
            before=before.parts,
            stays=stays,
            new_trace_id=new_trace_id,
            new_span_id=new_span_id,
        )
    done = replace(done, parts=len(parts), linked=tuple(parts[:links_left]), became=became)
    if root >= 0 and (total := before + done):
        table = _reported(table, target, total)
    return without_hidden(table), done


def without_hidden(table: SpanTable) -> SpanTable:
    """The table without attributes that no span is to have."""
    hidden = config.HIDDEN_ATTRIBUTES.read()
    if not any(column.key in hidden for column in table.attributes):
        return table
    return replace(table, attributes=tuple(column for column in table.attributes if column.key not in hidden))


def _accounts(table: SpanTable) -> Reduction:
    count, into = int(counts_of(table).sum()), int(collapsed_of(table).sum())
    return Reduction(recorded=count + into, aggregated=count - len(table), collapsed=into)


def _smaller(table: SpanTable, target: TargetTrace, budget: Budget, available: Budget) -> tuple[SpanTable, Array]:
    """Aggregated and collapsed as far as needed and possible; and which span each one became, by id."""
    short = (table.end.max() - table.start.min()) / budget.max_spans if budget.short is None else budget.short * 1e9
    at = np.arange(len(table))
    for reduce in (tokens_aggregated, aggregated, collapsed):
        if fits(table, available):
            break
        found = np.flatnonzero(table.span_id == np.uint64(target.span_id))
        table, into = reduce(table, int(found[0]) if found.size else -1, float(short), available.allows)
        at = (np.cumsum(into == np.arange(len(into))) - 1)[into[at]]
    return table, table.span_id[at]


def _with_strays(table: SpanTable, root: int) -> SpanTable:
    """What hangs under spans that went to other traces before, or will since they continue, hangs under the root."""
    known = np.isin(table.parent_span_id, table.span_id) | (table.parent_span_id == 0)
    known[root] = True
    return replace(table, parent_span_id=np.where(known, table.parent_span_id, table.span_id[root]))


def _reported(table: SpanTable, target: TargetTrace, total: Reduction) -> SpanTable:
    """The table with numbers, and links to parts, on its root."""
    row = int(np.flatnonzero(table.span_id == np.uint64(target.span_id))[0])
    numbers = {
        RECORDED: total.recorded,
        "torch.aggregated_spans": total.aggregated,
        "torch.collapsed_spans": total.collapsed,
        "torch.parts": total.parts,
    }
    for key, number in numbers.items():
        table = with_values(table, key, AttributeType.INT64, np.array([row]), number)
    return with_links(table, row, total.linked) if total.linked else table
