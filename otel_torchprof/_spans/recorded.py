"""A recording that is over, placed at once: the last drain of a recording that was never drained before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .live import LiveTrees
from .step_spans import Trace
from .steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.trace import SpanContext

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._tree.devices import DeviceTimes

    from .placed import Placed
    from .step_spans import RecordedStep, StepSpan


def placed_recording(
    batch: Batch,
    steps: Sequence[RecordedStep],
    *,
    new_trace_id: Callable[[], int],
    new_span_id: Callable[[], int],
    parent: SpanContext | None = None,
    device_times: DeviceTimes | None = None,
) -> tuple[Placed, list[StepSpan]]:
    """The events of a recording with their places, and the spans of its steps, of which there is at least one.

    Without ``parent`` each step is a trace of its own, whose root links to the one before; with it all join that span's trace.
    ``new_span_id`` is asked for the key of the events' ids first, which therefore do not depend on the steps. ``device_times``: as for
    :meth:`LiveTrees.place`.
    """

    def new_trace(_name: str, _number: int, _link: tuple[int, int] | None) -> Trace:
        if parent is None:
            return Trace(new_trace_id(), True, True)
        return Trace(parent.trace_id, True, True, parent.trace_state.to_header(), parent=parent)

    def no_span(_context: int) -> None:
        return None

    key = new_span_id()
    known = Steps(new_trace, new_span_id, no_span)
    known.add(steps)
    trees = LiveTrees(key=key, steps=known, new_trace=new_trace, current_span=no_span, calls=None)
    placed = trees.place(batch, device_times)
    return placed, [span for step in known.take_ended() for span in step.spans.values()]
