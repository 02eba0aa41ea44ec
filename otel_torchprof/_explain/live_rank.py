"""The steps of this process that ended last, as the rank that a file of them would be."""

from __future__ import annotations

import math
import struct
from collections import deque
from typing import TYPE_CHECKING

from otel_torchprof._columns.phases import Segment
from otel_torchprof._trace_files import wanted as w

from .details import StepsOfProcess
from .rank_reading import rank_of_process
from .step_list import NAN, Process, step_row
from .steps import PAUSES, Pause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_torchprof._spans.step_spans import StepSpan

    from .steps import OperatorTime, Rank

_MOST = 1_000
_SEGMENTS = tuple(Segment)
_OF_SPAN = (w.REVISION, w.RUNNABLE, *w.COUNTERS, w.BLOCKED, w.OTHER_THREADS, w.DRAINED, *w.PHASE_OF)
"""The attributes that are kept."""
_ROW = struct.Struct(f"<Bqqq{len(_OF_SPAN)}f")
"""Segment, number, begin (Unix ns), duration (ns), and attributes, NaN for what is not known."""


class LiveSteps:
    """The last 1,000 steps and what stood between them, 150 bytes each. For one thread that adds, and any that read."""

    def __init__(self) -> None:
        self._rows: deque[bytes] = deque(maxlen=_MOST)

    def add(self, spans: Iterable[StepSpan]) -> None:
        """Adds whole steps, and what stood between them."""
        for span in spans:
            if span.segment is not None:
                duration = span.end - span.start
                phases = {} if span.phases is None else span.phases.attributes(span.thread, duration)
                known = {**span.attributes, **phases}
                values = (known.get(key, NAN) for key in _OF_SPAN)
                kind = _SEGMENTS.index(span.segment)
                self._rows.append(_ROW.pack(kind, span.number, span.start, duration, *values))

    def rank(self, *, events: int, dropped: int) -> Rank | None:
        """What is known of them without a file: phases, and what the system counts; None where there is no step.

        Not operators: sums over the life of a process are also of what ran before steps and between them.

        Args:
            events: that were recorded.
            dropped: and those that were lost.
        """
        process = Process(events=events, dropped=dropped)
        for row in tuple(self._rows):
            kind, number, start, duration, *values = _ROW.unpack(row)
            segment = _SEGMENTS[kind]
            attributes = {key: value for key, value in zip(_OF_SPAN, values, strict=True) if not math.isnan(value)}
            if segment is Segment.STEP and duration > 0:
                process.steps.append(step_row(start, duration, {w.STEP: number, **attributes}))
            elif segment.span_name in PAUSES:
                process.pauses.append(Pause(segment.value, start, duration))
        if not process.steps:
            return None
        operators: list[list[OperatorTime]] = [[] for _ in process.steps]
        return rank_of_process("this process", process, StepsOfProcess(process, 0), operators, knows_gaps=False)
