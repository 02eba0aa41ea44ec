"""The spans of a profile on their way to an exporter: within OpenTelemetry's limits, and within the budget of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._encode.spans import SpanList
from ._export import sdk
from ._model.bounded import bounded
from ._model.limits import limited

if TYPE_CHECKING:
    from ._model.units import SpanTable
    from .span_policy import SpanPolicy


def within_limits(table: SpanTable) -> SpanTable:
    """The spans within the limits of the TracerProvider in use."""
    limits = sdk.span_limits()
    return limited(
        table,
        max_attributes=limits.max_span_attributes,
        max_links=limits.max_links,
        max_attribute_length=limits.max_span_attribute_length,
    )


def within_budget(spans: SpanList, policy: SpanPolicy) -> SpanList:
    """The spans, each trace of them within the policy's budget; the same where all are."""
    new = sdk.id_generator()
    table = bounded(
        spans.table, policy.rules().budget, new_trace_id=new.generate_trace_id, new_span_id=new.generate_span_id
    )
    if table is spans.table:
        return spans
    return SpanList(within_limits(table), resource=spans.resource, scope=spans.scope)
