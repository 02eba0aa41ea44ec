"""The steps of this process that ended last, as the rank that a file of them would be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Segment
from otel_torchprof._trace_files import wanted as w

from .details import StepsOfProcess
from .rank_reading import rank_of_process
from .step_list import Process, step_row
from .steps import PAUSES, Pause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_torchprof._spans.steps import StepSpan

    from .steps import OperatorTime, Rank


def live_rank(spans: Sequence[StepSpan], *, events: int, dropped: int) -> Rank:
    """What is known of them without a file: phases, and what the system counts.

    Not operators: sums over the life of a process are also of what ran before steps and between them.

    Args:
        spans: of whole steps, and of what stood between them, in order; not empty.
        events: that were recorded.
        dropped: and those that were lost.
    """
    process = Process(events=events, dropped=dropped)
    for span in spans:
        duration = span.end - span.start
        if span.segment is Segment.STEP and duration > 0:
            phases = {} if span.phases is None else span.phases.attributes(span.thread, duration)
            process.steps.append(step_row(span.start, duration, {w.STEP: span.number, **span.attributes, **phases}))
        elif span.name in PAUSES:
            process.pauses.append(Pause(PAUSES[span.name], span.start, duration))
    operators: list[list[OperatorTime]] = [[] for _ in process.steps]
    return rank_of_process("this process", process, StepsOfProcess(process, 0), operators, knows_gaps=False)
