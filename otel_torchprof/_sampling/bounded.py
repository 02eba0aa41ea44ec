"""A whole recording within the budget of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decisions import Rules
from .span_buffer import Pieces, SpanBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._spans.budget import Budget
    from otel_torchprof._tree.units import SpanTable


def bounded(
    table: SpanTable, budget: Budget, *, new_trace_id: Callable[[], int], new_span_id: Callable[[], int]
) -> SpanTable:
    """The spans of a profile, each trace of them within the budget; the table itself where all are.

    Args:
        table: as :func:`~otel_torchprof._tree.units.span_table` makes it: each unit's root, then its events.
        budget: of each trace.
        new_trace_id: as ``generate_trace_id`` of OpenTelemetry's IdGenerator.
        new_span_id: as ``generate_span_id``.
    """
    is_root = table.row < 0
    unit = table.span_id[is_root][np.cumsum(is_root) - 1]
    around = np.zeros(len(table.trace_ids), dtype=np.uint64)
    around[table.trace[is_root]] = table.parent_span_id[is_root]
    pieces = Pieces(table, unit, (), around, {}, [], final=True)
    return SpanBuffer(Rules(budget), new_trace_id, new_span_id).decide(pieces)
