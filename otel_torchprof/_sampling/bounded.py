"""A whole recording within the budget of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof._spans.span_tables import joined_tables

from .span_buffer import Pieces, SpanBuffer
from .span_policy import Rules

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from otel_torchprof._spans.limits import Budget
    from otel_torchprof._tree.span_table import SpanTable


def bounded(
    table: SpanTable,
    root: npt.NDArray[np.uint64],
    budget: Budget,
    *,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
) -> SpanTable:
    """The spans of a profile, each trace of them within the budget; the table itself where all are.

    Args:
        table: of a whole recording; its synthetic roots come first, and all are below the same span or below none.
        root: of each span the id of its synthetic root.
        budget: of each trace.
        new_trace_id: as ``generate_trace_id`` of OpenTelemetry's IdGenerator.
        new_span_id: as ``generate_span_id``.
    """
    enclosing = np.full(len(table.trace_ids), table.parent_span_id[0])
    pieces = Pieces(table, root, (), enclosing, {}, [], final=True)
    return joined_tables(SpanBuffer(Rules(budget), new_trace_id, new_span_id).decide(pieces))
