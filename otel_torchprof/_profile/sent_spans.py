"""The spans of a profile on their way to an exporter: within OpenTelemetry's limits, and within the budget of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export import sdk
from otel_torchprof._sampling.bounded import bounded
from otel_torchprof._spans.limits import limited

if TYPE_CHECKING:
    from otel_torchprof._sampling.span_policy import SpanPolicy
    from otel_torchprof._tree.units import SpanTable


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
