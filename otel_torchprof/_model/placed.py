"""Trace, parent and span id of a live recording's events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._native.loops import self_times
from otel_torchprof._native.python_sources import untracked

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.placing import GroupSums
    from otel_torchprof._process.heap import Arena

    from .devices import DeviceTimes
    from .step_spans import StepSpan, Trace
    from .tree import ChildTime


@untracked
@dataclass(eq=False)
class TraceGroup:
    """The common trace and parent of some top-level events."""

    trace: Trace
    parent_span_id: int
    """0 if the events are roots."""
    is_remote: bool = False
    step: StepSpan | None = None
    """The parent if it is synthetic: a step span, or the root that operators share."""

    @property
    def is_traced(self) -> bool:
        """Whether its events become spans, by samplers and steps."""
        return self.trace.exported and (self.step is None or self.step.is_detailed)


class Placed(NamedTuple):
    """A batch with trace, parent and span id of every event; one entry per row."""

    batch: Batch
    """The batch; the parent of each event is its nearest ancestor with the same context."""
    trace_groups: Sequence[TraceGroup]
    trace_group: npt.NDArray[np.int64]
    """Index into ``trace_groups``."""
    span_id: npt.NDArray[np.uint64]
    parent_span_id: npt.NDArray[np.uint64]
    is_root: npt.NDArray[np.bool_]
    child_time: ChildTime | None
    """Times of direct children in earlier drains; None if no event has any."""
    root: npt.NDArray[np.uint64]
    """Span id of the trace group's root: a synthetic span or the top-level event."""
    open_roots: frozenset[int]
    """Ids of the roots that are events with a part of their tree still open, mostly the root itself."""
    sums: GroupSums
    """Of each trace group."""
    devices: DeviceTimes | None = None
    """Device times, including children in earlier drains."""

    def self_times(self, room: Arena | None = None) -> npt.NDArray[np.int64]:
        """Returns the self time of each event, ns."""
        batch = self.batch
        own = self_times(batch["parent"], batch["start"], batch["end"], room)
        if self.child_time is not None:
            own[self.child_time.rows] -= self.child_time.times
        return np.maximum(own, 0, out=own)
