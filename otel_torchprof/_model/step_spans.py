"""Records of steps, other segments of a job, the job itself, and their spans; managed by :mod:`~.steps`.

A span is sent when it ends. A span for the whole run would appear only after the run, and never after a crash. So the job's is
split into sections, each a trace of its own with a link to the one before; a step links to the section in which it began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.trace import SpanContext, TraceFlags

from otel_torchprof._columns.phases import Segment
from otel_torchprof._native.python_sources import untracked
from otel_torchprof._process import threads
from otel_torchprof._process.give_way import with_pauses

from .phases import PhaseTimes
from .span_table import STEP_KIND, STEP_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from otel_torchprof._columns.phases import Usage

    from .compiled import Shares

NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
_KINDS = {segment: segment.value for segment in Segment}


@untracked
@dataclass
class Trace:
    """A trace with its sampler's decision."""

    trace_id: int
    recorded: bool
    """Whether its events are to be recorded at all."""
    exported: bool
    """Whether its spans are sent."""
    trace_state: str = ""
    attributes: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)
    """Attributes that the sampler adds to the root."""
    span_id: int = 0
    """Id of the trace's first span in this process, if already decided; else 0."""
    parent: SpanContext | None = None
    """Parent of that span: a span of another process."""
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids to which that span links."""


UNSAMPLED = Trace(0, False, False)
"""Trace of a step that ends inside an unsampled span of the application."""


@untracked
@dataclass(eq=False)
class StepSpan:
    """A synthetic span: a step in one context, a section of the job, a root that operators share."""

    number: int
    """Number of the step; -1 for other spans."""
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
    """Kind of segment of the training job; None for other spans."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The span's own attributes."""
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
    """Whether the span has been sent: later events of it are late."""
    first: int | None = None
    """When its first event began."""
    own_end: int = 0
    """When the last event of the loop's own threads ended."""
    flops: int = 0
    """Floating-point operations of its events so far, as far as these have inputs."""
    shares: Shares | None = None
    """Share of compiled regions so far; None without any."""
    phases: PhaseTimes | None = None
    """Phase times of the whole segment, shared by all its spans; None for other spans."""
    is_whole: bool = False
    """Made for the end of its step; the others of that are for what happened in their contexts."""
    unattributed: int = 0
    """Time of the segment in no phase, ns, once :func:`note_phases` was called."""

    @property
    def is_enclosed(self) -> bool:
        """Whether it is in a span of the application; below another rank's step it is in none."""
        return self.parent is not self.trace.parent

    @property
    def span_context(self) -> SpanContext | None:
        """Context for references from other spans; None if the span is not exported."""
        if not self.trace.exported:
            return None
        return SpanContext(
            self.trace.trace_id, self.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    def widen(self, start: int, end: int, own_end: int, child_time: int, longest: int) -> None:
        """Extends the span to include events."""
        self.start, self.end = min(self.start, start), max(self.end, end)
        self.first = start if self.first is None else min(self.first, start)
        self.own_end = max(self.own_end, own_end)
        self.child_time += child_time
        self.longest = max(self.longest, longest)


def note_phases(spans: Sequence[StepSpan]) -> None:
    """Adds to spans of segments whose events are all known their kind, and to one span of each segment the times of its phases."""
    running = max([span for span in spans if span.is_running], key=lambda span: span.end - span.start, default=None)
    for span in with_pauses(spans):
        if span.phases is None or span.segment is None:
            continue
        times: dict[str, float] = {}
        if span.is_whole or span is running:
            times, span.unattributed = span.phases.attributes(span.thread, span.end - span.start)
        # Another dictionary in its place: the garbage collector counts those that are alive.
        span.attributes = {STEP_KIND: _KINDS[span.segment], **times, **span.attributes}


class RecordedStep(NamedTuple):
    """A step that is over, or a whole recording without steps."""

    number: int
    """Number of the step, from 0; -1 for other segments."""
    start: int
    """Unix ns."""
    end: int
    """Unix ns."""
    thread: int | None = None
    """``threading.get_ident()`` of the thread whose step it is, where that is known."""
    name: str = STEP_NAME
    """Name of its span."""
    attributes: Mapping[str, Any] | None = None
    """Of its span, from a recording that has them: times of phases, use of processors."""


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
    """Revision of the rule by which it began."""
    usage: Usage | None = None
    """When it began; None once it has ended."""
    starts_earlier: bool = False
    """Whether it is the first step, with only its end known; its start follows from later events."""
    trace: Trace | None = None
    """Trace of the step, created when it has, or is about to have, an event without a context."""
    link: tuple[int, int] | None = None
    job: tuple[int, int] | None = None
    spans: dict[int, StepSpan] = field(default_factory=dict)
    """By context."""
    planned: dict[int, StepSpan] | None = None
    """Spans whose ids were requested before they had events, by context; None: there were none yet."""
    phases: PhaseTimes = field(default_factory=PhaseTimes)


JOB_NAME = "torch.job"
PROFILE_NAME = "torch.profile"
"""Name of the root of a profile without steps."""


class Job:
    """The sections of one recording. Not thread-safe, except :meth:`link` and :meth:`begin`.

    Args:
        interval_ns: after which a section ends; 0: there is no such span.
        new_trace: asked once per section: its name, -1, and the section that it links to.
        new_span_id: as ``generate_span_id`` of OpenTelemetry's IdGenerator.
    """

    def __init__(
        self,
        interval_ns: int,
        new_trace: Callable[[str, int, tuple[int, int] | None], Trace],
        new_span_id: Callable[[], int],
    ) -> None:
        self._interval_ns = interval_ns
        self._new_trace = new_trace
        self._new_span_id = new_span_id
        self._lock = threads.RLock()  # a signal handler may shut down in the middle of a boundary
        self._section: StepSpan | None = None
        self._link: tuple[int, int] | None = None  # one for all steps of a section: the garbage collector counts tuples
        self._number = 0
        self._is_linked = False
        self._steps = 0
        self._first_step = self._last_step = -1

    def link(self) -> tuple[int, int] | None:
        """Trace and span id of the running section, once there is one that is sent. Any thread."""
        return self._link

    def begin(self, now: int) -> None:
        """Sets the begin of the first step (Unix ns); later calls have no effect. Any thread."""
        with self._lock:
            if self._section is None and self._interval_ns:
                self._begin_section(now)

    def note(self, steps: Iterable[StepSpan]) -> None:
        """Steps have ended. Those inside spans of the application count not: these are their job."""
        link = self.link()
        for step in steps:
            self._is_linked |= step.trace.exported and step.job is not None and step.job == link
            if step.number >= 0 and step.thread is not None and not step.is_enclosed:
                if self._section is not None and not self._number:
                    self._section.start = min(self._section.start, step.start)
                self._steps += 1
                self._first_step = step.number if self._first_step < 0 else self._first_step
                self._last_step = max(self._last_step, step.number)

    def ended(self, now: int, *, final: bool) -> list[StepSpan]:
        """The section that ends now (Unix ns), if it is time; ``final``: the running one, unless nothing was in it or links to it.

        The first one lasts until there was a step in it.
        """
        section = self._section
        is_due = final or (section is not None and now - section.start >= self._interval_ns)
        is_empty = not self._steps and not self._is_linked
        if section is None or not is_due or (is_empty and (final or not self._number)):
            return []
        section.end = max(now, section.start)
        section.attributes |= {"torch.job.section": self._number, "torch.job.steps": self._steps}
        if self._steps:
            section.attributes |= {"torch.job.first_step": self._first_step, "torch.job.last_step": self._last_step}
        self._number += 1
        self._is_linked, self._steps, self._first_step, self._last_step = False, 0, -1, -1
        if final:
            self._section = self._link = None
        else:
            self._begin_section(section.end)
        return [section]

    def _begin_section(self, now: int) -> None:
        trace, before = self._new_trace(JOB_NAME, -1, self._link), self._link
        self._section = StepSpan(-1, trace, self._new_span_id(), now, now, None, before, name=JOB_NAME)
        self._link = (trace.trace_id, self._section.span_id) if trace.exported else None
