"""Steps of a live recording: assigns times to steps, and creates the spans of steps.

A step is a segment of time. It becomes a span in every context in which it has events, usually one. Without a context the step span
is the root of a trace and links to the previous step; inside an application span it is a child of that span.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.phases import LOADED, PEAK, RESIDENT, USAGE, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._native.recorder import CONTEXT_MUTED
from otel_torchprof._process import threads

from .span_table import STEP_NAME
from .step_spans import UNSAMPLED, Step, StepSpan, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.trace import SpanContext

    from otel_torchprof._columns.phases import SegmentChange, Usage

    from .step_spans import RecordedStep

_MOST = 100_000
"""Steps stored for a drain; beyond it the oldest are dropped."""


def _all(_step: int, _trace_id: int) -> bool:
    """Selects every step."""
    return True


def _none() -> None:
    """Returns None: there is no job span."""


class Steps:
    """The steps of the process. Thread-safe: the loop's thread calls :meth:`boundary`, the draining thread the other methods.

    Args:
        new_trace: creates the trace of a step that is a root, from the step's name, its number, and the step that it links to.
        new_span_id: ``generate_span_id`` of OpenTelemetry's IdGenerator.
        current_span: returns the span of a context, and its start (Unix ns) if known.
        selects: whether the step with a number, in the trace with an id, is traced in full.
        job: returns trace and span id of the current job span, to which steps link.
        first: number of the first step.
    """

    def __init__(
        self,
        new_trace: Callable[[str, int, tuple[int, int] | None], Trace],
        new_span_id: Callable[[], int],
        current_span: Callable[[int], tuple[SpanContext, int | None] | None],
        *,
        selects: Callable[[int, int], bool] = _all,
        job: Callable[[], tuple[int, int] | None] = _none,
        first: int = 0,
    ) -> None:
        self._new_trace = new_trace
        self._new_span_id = new_span_id
        self._current_span = current_span
        self._selects = selects
        self._job = job
        self._lock = threads.RLock()  # a signal handler may shut down in the middle of a boundary
        self._steps: list[Step] = []
        self._ended: list[Step] = []
        self._contexts: set[int] = set()
        self._first = self._number = first
        self._are_recorded = False
        self.revision = 0
        """Revision of the learned rule by which steps end, from 1."""
        self._link: tuple[int, int] | None = None
        self._origin: int | None = None
        self._forgotten_end: int | None = None
        """End of the latest forgotten step."""
        self.threads: set[int] = set()
        """``threading.get_ident()`` of the threads whose steps these are."""

    @property
    def active(self) -> bool:
        """Whether there are any steps."""
        return bool(self._steps)

    @property
    def origin(self) -> int | None:
        """Start of the first segment, Unix ns; None if unknown."""
        return self._origin

    @property
    def running(self) -> int:
        """Number of the running step; 0 before the first one ended. Thread-safe."""
        steps = self._steps
        return steps[-1].number if steps else 0

    @property
    def completed(self) -> int:
        """Number of ended steps, including skipped ones. Thread-safe."""
        running = self._steps[-1:]
        return self._number - self._first - sum(step.segment is Segment.STEP and step.end is None for step in running)

    @property
    def next_number(self) -> int:
        """Number of the next step."""
        return self._number

    @property
    def begun(self) -> bool:
        """Whether the start of the first segment is known."""
        return self._origin is not None

    def begin(
        self, start: int, segment: Segment = Segment.STEP, *, setup: int | None = None, usage: Usage | None = None
    ) -> None:
        """Sets the start of the first segment, which may have ended. ``setup``: start of the set-up before it."""
        with self._lock:
            if not self._steps:
                self._steps.append(self._new(segment, start, None, usage))
            first, self._origin = self._steps[0], start
            if first.starts_earlier:
                first.start, first.starts_earlier = min(first.start, start), False
                for context, span in first.spans.items():
                    span.start = _start(first, self._enclosing(context))
            if setup is not None and setup < first.start:
                before = self._new(Segment.SETUP, setup, None)
                self._steps.insert(0, before)
                self._origin = setup
                self._end(before, first.start, 0, None)
                self._ended.insert(0, self._ended.pop())

    def first_step_is(self, start: int | None) -> None:
        """Sets the start of the first step, after the set-up, for a program that marks its steps and has not ended one yet.

        None if unknown: the step then begins with the set-up.
        """
        with self._lock:
            if not self._steps:
                if start is not None:
                    self.begin(start)
                return
            running = self._steps[-1]
            if running.segment is not Segment.SETUP:
                return
            if start is not None and start > running.start:
                self.boundary(Segment.STEP, start, 0, None)
            else:
                running.segment, running.number, running.name = Segment.STEP, self._take_number(), STEP_NAME
                for span in running.spans.values():
                    span.segment, span.number, span.name = running.segment, running.number, running.name

    def boundary(
        self, segment: Segment, now: int, context: int, thread: int | None, usage: Usage | None = None
    ) -> bool:
        """Ends the current segment, on a thread (its ident) with a current context (0: none), and begins another.

        Returns whether events without a context are recorded.
        """
        with self._lock:
            self.end(now, context, thread, usage)
            return self._begin_next(segment, now, context, usage)

    def change(
        self, change: SegmentChange, now: int, context: int, thread: int | None, usage: Usage | None = None
    ) -> bool:
        """As :meth:`boundary`, for a change that the program reports: may begin the first segment, or end the current one without another."""
        with self._lock:
            if change.replaces_step and (replaced := self._replace_step(change.begins)) is not None:
                return self._is_recorded(replaced, context)
            running = self._steps[-1].segment if self._steps else None
            if change.begins is None and running is Segment.SETUP:  # the loop has begun, but not its first segment
                return True
            if self._steps or change.ends_step:
                self.end(now, context, thread, usage, change.attributes)
            elif thread is not None:
                self.threads.add(thread)
            return change.begins is None or self._begin_next(change.begins, now, context, usage)

    def _begin_next(self, segment: Segment, now: int, context: int, usage: Usage | None) -> bool:
        if self._origin is None and not self._steps:
            self._origin = now
        following = self._new(segment, max(now, self._steps[-1].start) if self._steps else now, self._link, usage)
        self._steps.append(following)
        del self._steps[:-_MOST], self._ended[:-_MOST]
        return self._is_recorded(following, context)

    def _is_recorded(self, step: Step, context: int) -> bool:
        """Whether events without a context are recorded."""
        if context:
            self._contexts.add(context)
            return True
        trace = self._trace_of(step)
        return trace.recorded and self._selects(step.number, trace.trace_id)

    def _replace_step(self, segment: Segment | None) -> Step | None:
        """Changes the running step to a segment of this kind, or removes it. Returns None if it is removed, has to end as it is, or none runs."""
        running = self._steps[-1] if self._steps else None
        if running is None or running.end is not None or running.segment is not Segment.STEP:
            return None
        if segment is None:
            if not running.spans:  # else some of its events were sent with it as their parent
                self._number -= 1
                self._steps.pop()
            return None
        self._number -= 1
        running.planned = None
        running.segment, running.number, running.name = segment, -1, segment.span_name
        if not running.spans:
            running.trace = None  # its ids may be those of the step with that number
        for span in running.spans.values():
            span.segment, span.number, span.name = running.segment, running.number, running.name
        return running

    def end(
        self,
        now: int,
        context: int,
        thread: int | None,
        usage: Usage | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Ends the current segment; if there is none yet, a first step of which only the end is known."""
        with self._lock:
            if thread is not None:
                self.threads.add(thread)
            if not self._steps:
                self._steps.append(replace(self._new(Segment.STEP, now, None), starts_earlier=True))
            step = self._steps[-1]
            if step.end is None:
                # Threads may report in another order than they read the clock.
                self._link = self._end(step, max(now, step.start), context, thread, usage)
                if attributes:
                    step.spans[context].attributes |= attributes

    def gaps(self) -> list[tuple[int, int]]:
        """Returns start and end, Unix ns, of the times in no step: between two steps, or after the last one.

        Steps from :meth:`add` have none.
        """
        with self._lock:
            if self._are_recorded or not self._steps:
                return []
            ends = [self._forgotten_end, *(step.end for step in self._steps)]
            starts = [*(step.start for step in self._steps), NEVER]
            return [(end, start) for end, start in zip(ends, starts, strict=True) if end is not None and end < start]

    def skip(self, steps: int) -> None:
        """Numbers the first known step as if ``steps`` steps preceded it, to match the counts of the program and the other ranks."""
        with self._lock:
            if self._number == self._first:
                self._number += steps

    def _new(self, segment: Segment, start: int, link: tuple[int, int] | None, usage: Usage | None = None) -> Step:
        number = self._take_number() if segment is Segment.STEP else -1
        revision = self.revision if segment is Segment.STEP else 0
        step = Step(number, start, None, segment.span_name, segment, revision, usage)
        step.link, step.job = link, self._job()
        return step

    def _take_number(self) -> int:
        self._number += 1
        return self._number - 1

    def add(self, recorded: Iterable[RecordedStep]) -> None:
        """Adds ended steps, in order. Events between two of them belong to the earlier one."""
        with self._lock:
            self._are_recorded, link = True, None
            for number, start, end, thread, name, attributes in recorded:
                self._steps.append(Step(number, start, name=name, segment=None, link=link))
                link = self._end(self._steps[-1], end, 0, thread)
                self._steps[-1].spans[0].attributes |= attributes or {}
                self.threads |= set() if thread is None else {thread}

    def known(self) -> Sequence[Step]:
        """Returns the steps to which events of this drain can belong, in order: those taken last, new ones, and the running one."""
        with self._lock:
            return list(self._steps)

    def open_since(self, unsent: Sequence[Step]) -> int:
        """Start of the earliest step that has not ended or is among some others, Unix ns; :data:`NEVER` without any."""
        others = {id(step) for step in unsent}
        with self._lock:
            steps = [step for step in self._steps if step.end is None or id(step) in others]
            return min((0 if step.starts_earlier else step.start for step in steps), default=NEVER)

    def note_contexts(self, contexts: Iterable[int]) -> None:
        """Stores contexts seen on a thread of the loop: their events belong to steps."""
        with self._lock:
            self._contexts.update(contexts)

    def owns(self, context: int) -> bool:
        """Whether events in this context belong to steps; those of a request that is served meanwhile do not."""
        return context == 0 or context in self._contexts

    def span(self, step: Step, context: int) -> StepSpan:
        """Returns the span of a step in a context; creates it if there is none yet."""
        span = step.spans.get(context)
        if span is None:
            with self._lock:
                span = self._span(step, context)
        return span

    def running_span(self) -> StepSpan | None:
        """Returns the span of the running step; None if none runs, or its context is not known yet. Thread-safe."""
        with self._lock:
            step = self._steps[-1] if self._steps else None
            if step is None or step.end is not None:
                return None
            if not step.spans:  # none of its events has ended: it will have the context of the previous step
                before = self._steps[-2].spans if len(self._steps) > 1 else {}
                for context in [context for context, span in before.items() if span.is_whole]:
                    if step.planned is None:
                        step.planned = {}
                    if context not in step.planned:
                        step.planned[context] = self._made(step, context)
                    return step.planned[context]
            return max(step.spans.values(), key=lambda span: span.end, default=None)

    def settle(self) -> None:
        """Moves the start of a step to the end of the previous one, if events of the loop were open at the boundary.

        The optimizer's own label ends microseconds after the boundary, since torch calls the hook inside it. Labels that
        last for several steps, and other threads, do not affect where a step begins.
        """
        with self._lock:
            for step, following in pairwise(self._steps):
                end = max([span.own_end for span in step.spans.values() if span.thread is not None], default=0)
                if end <= following.start or (following.end is not None and end > following.end):
                    continue
                for span in following.spans.values():
                    if span.start == following.start:
                        span.start = max(span.start, end if span.first is None else min(end, span.first))
                        span.end = max(span.end, span.start)

    def take_ended(self, *, everything: bool = False) -> list[Step]:
        """Returns the steps that ended since the last call, in order; with ``everything`` the running one too.

        Drops the steps that were returned before.
        """
        with self._lock:
            ended, self._ended = self._ended, []
            taken = {id(step) for step in ended}
            forgotten = [step.end for step in self._steps if step.end is not None and id(step) not in taken]
            self._forgotten_end = max(forgotten, default=self._forgotten_end)
            self._steps = [step for step in self._steps if step.end is None or id(step) in taken]
            if everything and self._steps and self._steps[-1].end is None:
                ended.append(self._steps[-1])
                for span in self._steps[-1].spans.values():
                    span.is_running = True
            return ended

    def put_back(self, ended: Sequence[Step]) -> None:
        """Returns steps to the queue: the next call of :meth:`take_ended` returns them again."""
        with self._lock:
            self._ended[:0] = ended

    def forget_contexts(self, known: Callable[[int], bool]) -> None:
        """Drops contexts whose spans no longer exist."""
        with self._lock:
            self._contexts = {context for context in self._contexts if known(context)}

    def _end(
        self, step: Step, end: int, context: int, thread: int | None, usage: Usage | None = None
    ) -> tuple[int, int] | None:
        """Ends a step; returns trace and span id for the link from the next one."""
        step.end = end
        main = self._span(step, context)
        main.end = max(main.end, end)
        main.thread, main.is_whole = thread, True
        main.attributes |= _used(step.usage, usage, end - step.start)
        step.usage = None  # the garbage collector counts tuples
        self._ended.append(step)
        return (main.trace.trace_id, main.span_id) if main.trace.exported else None

    def _trace_of(self, step: Step) -> Trace:
        if step.trace is None:
            step.trace = self._new_trace(step.name, step.number, step.link)
        return step.trace

    def _span(self, step: Step, context: int) -> StepSpan:
        span = step.spans.get(context)
        if span is None:
            span = step.planned.pop(context, None) if step.planned else None
            span = step.spans[context] = self._made(step, context) if span is None else span
        return span

    def _made(self, step: Step, context: int) -> StepSpan:
        enclosing_span = self._enclosing(context) if context else None
        start = _start(step, enclosing_span) if enclosing_span else step.start
        if enclosing_span is None:
            trace = UNSAMPLED if context == CONTEXT_MUTED else self._trace_of(step)
            parent = trace.parent
        else:
            parent = enclosing_span[0]
            trace = Trace(parent.trace_id, True, True, parent.trace_state.to_header())
        is_free = trace.span_id and trace.span_id not in [span.span_id for span in step.spans.values()]
        span_id = trace.span_id if is_free else self._new_span_id()
        step_span = StepSpan(step.number, trace, span_id, start, start, parent, step.link)
        step_span.name, step_span.segment = step.name, step.segment
        if step.revision:
            step_span.attributes["torch.step.rule.revision"] = step.revision
        step_span.phases = None if step.segment is None else step.phases
        step_span.job = step.job if enclosing_span is None else None
        step_span.is_detailed = self._selects(step.number, trace.trace_id)
        return step_span

    def _enclosing(self, context: int) -> tuple[SpanContext, int | None] | None:
        return None if context in {0, CONTEXT_MUTED} else self._current_span(context)


def _used(before: Usage | None, after: Usage | None, duration: int) -> dict[str, Any]:
    """Returns attributes of the resources a thread used in ``duration`` ns; only memory if that is unknown, or if the threads differ."""
    memory = memory_of(after)
    if before is None or after is None or before[0] != after[0]:
        return memory
    _, runnable, *counts, running, of_process, _, _, tokens, samples = map(operator.sub, after, before)
    memory |= {key: count for key, count in zip(LOADED, (tokens, samples), strict=True) if count > 0}
    if before[1] < 0 or after[1] < 0:
        return {**dict(zip(USAGE[1:5], counts, strict=True)), **memory}
    blocked, others = max(duration - running - runnable, 0), max(of_process - running, 0)
    times = zip(USAGE, (runnable / 1e9, *counts, blocked / 1e9, others / 1e9), strict=True)
    return {**dict(times), **memory}


def memory_of(usage: Usage | None) -> dict[str, int]:
    """Returns the attributes of the process's memory; none if it is unknown."""
    return {} if usage is None or usage[8] < 0 else {RESIDENT: usage[8], PEAK: max(usage[8:10])}


def _start(step: Step, current: tuple[SpanContext, int | None] | None) -> int:
    """Returns the start of a step, Unix ns: inside an application span, not before that span."""
    return step.start if current is None else max(step.start, current[1] or 0)
