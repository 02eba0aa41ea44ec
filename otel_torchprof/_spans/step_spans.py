"""Steps and other segments of a job, and the spans that stand for them: the records that :mod:`~.steps` keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.trace import SpanContext, TraceFlags

from otel_torchprof._columns.phases import Segment
from otel_torchprof._native.untracked import untracked
from otel_torchprof._tree.phases import PhaseTimes
from otel_torchprof._tree.span_table import STEP_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_torchprof._columns.phases import Usage
    from otel_torchprof._tree.compiled import Shares


NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


@untracked
@dataclass
class Trace:
    """A trace that a sampler was asked about."""

    trace_id: int
    recorded: bool
    """Whether its events are to be recorded at all."""
    exported: bool
    """Whether its spans are sent."""
    trace_state: str = ""
    attributes: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)
    """What the sampler adds to its root, beyond what it was told."""
    span_id: int = 0
    """Of the span that stands for it in this process, where that is decided already."""
    parent: SpanContext | None = None
    """What that span hangs under: one of another process."""
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids to which that span links."""


UNSAMPLED = Trace(0, False, False)
"""Of a step that ends inside an unsampled span of the application."""


@untracked
@dataclass(eq=False)
class StepSpan:
    """A synthetic span: a step in one context, a section of the job, a root that operators share."""

    number: int
    """Of the step; -1 of what is none."""
    trace: Trace
    span_id: int
    start: int
    """Unix ns."""
    end: int
    """Unix ns; while the step runs, of the latest event of it."""
    parent: SpanContext | None
    link: tuple[int, int] | None
    """Trace and span id of the step before."""

    job: tuple[int, int] | None = None
    """Trace and span id of the section of the job that it began in."""
    name: str = STEP_NAME
    segment: Segment | None = None
    """What it is of the training job; None of what is no segment of it."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Of its own."""
    is_detailed: bool = True
    """Whether what happened in it becomes spans."""
    thread: int | None = None
    """``threading.get_ident()`` of the thread whose step it is, where that is known."""
    child_time: int = 0
    """Time of its top-level events, ns."""
    longest: int = 0
    """Time of the longest of these."""

    is_running: bool = False
    """Taken before its end."""
    is_sent: bool = False
    """What still comes of it is late."""
    first: int | None = None
    """When its first event began."""
    own_end: int = 0
    """When the last event of the loop's own threads ended."""
    shares: Shares | None = None
    """What ran in compiled regions, so far; None where the program has none."""
    phases: PhaseTimes | None = None
    """Of the whole segment, which all spans of that share; None of what is no segment of the job."""
    is_whole: bool = False
    """Made for the end of its step; the others of that are for what happened in their contexts."""

    @property
    def is_enclosed(self) -> bool:
        """Whether it is in a span of the application; below another rank's step it is in none."""
        return self.parent is not self.trace.parent

    @property
    def span_context(self) -> SpanContext | None:
        """By which others refer to it; None where it is not sent."""
        if not self.trace.exported:
            return None
        return SpanContext(
            self.trace.trace_id, self.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    def widen(self, start: int, end: int, own_end: int, child_time: int, longest: int) -> None:
        """Takes in events."""
        self.start, self.end = min(self.start, start), max(self.end, end)
        self.first = start if self.first is None else min(self.first, start)
        self.own_end = max(self.own_end, own_end)
        self.child_time += child_time
        self.longest = max(self.longest, longest)


class RecordedStep(NamedTuple):
    """A step that is over, or a whole recording without steps."""

    number: int
    """From 0; -1 of what is none."""
    start: int
    """Unix ns."""
    end: int
    """Unix ns."""
    thread: int | None = None
    """``threading.get_ident()`` of the thread whose step it is, where that is known."""
    name: str = STEP_NAME
    """Of its span."""


@untracked
@dataclass(eq=False)
class Step:
    """A segment of the job that has begun: a step, or what stands between steps."""

    number: int
    start: int
    end: int | None = None
    name: str = STEP_NAME
    segment: Segment | None = Segment.STEP
    revision: int = 0
    """Of the rule that it began by."""
    usage: Usage | None = None
    """When it began."""
    starts_earlier: bool = False
    """It is the first: only its end is known, and what is placed next shows when it began."""
    trace: Trace | None = None
    """Its own; asked for when something of it happens outside of any context, or is about to."""
    link: tuple[int, int] | None = None
    job: tuple[int, int] | None = None
    spans: dict[int, StepSpan] = field(default_factory=dict)
    """By context."""
    planned: dict[int, StepSpan] = field(default_factory=dict)
    """Spans whose ids were asked for before anything was in them."""
    phases: PhaseTimes = field(default_factory=PhaseTimes)
