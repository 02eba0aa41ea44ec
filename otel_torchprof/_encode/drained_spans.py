"""The spans of one drain, with all that they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_torchprof._spans.frame_spans import with_plain_names
from otel_torchprof._spans.limits import limited
from otel_torchprof._spans.live_table import live_table

from .attributes import add_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from opentelemetry.sdk.trace import SpanLimits

    from otel_torchprof._spans.live_table import Flows
    from otel_torchprof._spans.placed import Placed
    from otel_torchprof._spans.step_spans import StepSpan
    from otel_torchprof._tree.span_table import SpanTable


def drained_spans(
    placed: Placed,
    ended: Sequence[StepSpan],
    flows: Flows,
    *,
    with_flops: bool = False,
    callers: npt.NDArray[np.uint32] | None = None,
    **options: Any,
) -> SpanTable:
    """The spans of a drain, or of a whole recording, with their attributes; neither reduced nor within any limits.

    Args:
        placed: the events with their places.
        ended: the synthetic spans that have ended.
        flows: which forward operator a backward function links to.
        with_flops: as for :func:`~.attributes.add_attributes`.
        callers: likewise.
        options: of :func:`~otel_torchprof._spans.live_table.live_table`.
    """
    table = live_table(placed, ended, flows, **options)
    return add_attributes(
        with_plain_names(table, placed.batch),
        placed.batch,
        dropped_on=_last_root(table) if any(placed.batch.dropped.values()) else None,
        self_time=None if placed.child_time is None else placed.self_times(),
        with_flops=with_flops,
        callers=callers,
        device_times=placed.devices,
    )


def _last_root(table: SpanTable) -> int | None:
    """The last span that is the root of a trace, or of a step."""
    roots = np.flatnonzero((table.parent_span_id == 0) | (table.step >= 0))
    return int(roots[-1]) if len(roots) else None


def within_limits(table: SpanTable, limits: SpanLimits) -> SpanTable:
    """The spans within OpenTelemetry's limits: the last thing that happens to them."""
    return limited(
        table,
        max_attributes=limits.max_span_attributes,
        max_links=limits.max_links,
        max_attribute_length=limits.max_span_attribute_length,
    )
