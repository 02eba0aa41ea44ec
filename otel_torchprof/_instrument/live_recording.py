"""The recording behind a span processor: what the recorder has, drained while it runs, as spans and as sums."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASE_PREFIX, UNATTRIBUTED, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._encode.spans import SpanList, drained_spans, within_limits
from otel_torchprof._export.sdk import instrumentation_scope
from otel_torchprof._export.span_buffer import Pieces, SpanBuffer
from otel_torchprof._export.span_policy import SpanPolicy
from otel_torchprof._model.collectives import LiveCollectives
from otel_torchprof._model.devices import DisplayedTimes, displayed_times
from otel_torchprof._model.inputs import InputKept, kept
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._model.live_table import CallRules, Flows, traced_events
from otel_torchprof._model.step_spans import Job
from otel_torchprof._model.steps import Steps
from otel_torchprof._model.tree import torch_view
from otel_torchprof._native.python_sources import usage_at
from otel_torchprof._native.recorder import SLICE_BYTES, now_ns
from otel_torchprof._native.torch_library import Observation
from otel_torchprof._process import threads
from otel_torchprof._process.give_way import give_way
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof._record.step_marks import StepMarks
from otel_torchprof.errors import NativeError

from .step_segments import StepRule, StepSegments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.trace import SpanContext

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._export.provider import Provider
    from otel_torchprof._model.averages import RunningAverages
    from otel_torchprof._model.collectives import GroupRanks
    from otel_torchprof._model.placed import Placed
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof._model.step_spans import Step, StepSpan
    from otel_torchprof._model.tree import TreeView
    from otel_torchprof._record.contexts import ContextTable
    from otel_torchprof._record.recording import Recording

    from .foresight import Foresight


# ---- What one drain adds to sums: of the averages by name, and of the time of children of the application's spans ----


def add_up(averages: RunningAverages, placed: Placed, ended: Sequence[StepSpan]) -> None:
    """Adds the events of a drain, and the steps that ended in it."""
    averages.add(*_displayed(placed))
    for step in ended:
        give_way()
        # Once each: not what else of it happened in other spans, nor what the end of the recording left of the last one.
        if step.trace.recorded and step.thread is not None:
            duration = step.end - step.start
            own = max(duration - step.child_time, 0)
            if step.phases is not None:  # the row of what is in no phase has it
                rest = step.phases.on_thread(step.thread, duration)[UNATTRIBUTED]
                averages.add_span(f"{PHASE_PREFIX}{UNATTRIBUTED}", rest, min(own, rest))
                own = 0
            averages.add_span(step.name, duration, own)


def child_times(placed: Placed, ended: Sequence[StepSpan]) -> dict[int, int]:
    """Time that the spans of this process did not spend themselves, by span id."""
    child_time: dict[int, int] = {}
    below = np.flatnonzero(placed.is_root)
    sums = np.zeros(len(placed.trace_groups), dtype=np.int64)
    np.add.at(sums, placed.trace_group[below], (placed.batch["end"] - placed.batch["start"])[below])
    for trace_group, time in zip(placed.trace_groups, sums.tolist(), strict=True):
        if trace_group.step is None and trace_group.parent_span_id and not trace_group.is_remote:
            child_time[trace_group.parent_span_id] = child_time.get(trace_group.parent_span_id, 0) + time
    for step in ended:
        if step.parent is not None and not step.parent.is_remote:
            child_time[step.parent.span_id] = child_time.get(step.parent.span_id, 0) + step.end - step.start
    return child_time


def _displayed(placed: Placed) -> tuple[TreeView, DisplayedTimes | None]:
    """Returns the events as torch displays them, without those of traces that are not recorded; self times exclude earlier children."""
    view = torch_view(placed.batch, modules=True)
    devices = None if placed.devices is None else displayed_times(view, placed.devices)
    if placed.child_time is not None:
        view = view.without_child_time(placed.child_time)
    recorded = np.array([trace_group.trace.recorded for trace_group in placed.trace_groups], dtype=np.bool_)
    if recorded.all():
        return view, devices
    requested = recorded[placed.trace_group[view.rows]]
    # For sums only: the parents of what remains would have to be renumbered for anything else.
    chosen = replace(
        view,
        rows=view.rows[requested],
        duration=view.duration[requested],
        self_time=view.self_time[requested],
        parent=view.parent[:0],
    )
    return chosen, None if devices is None else DisplayedTimes(*(column[requested] for column in devices))


_FEW_EVENTS, _MANY_EVENTS = 2_500, 10_000
"""Of a drain: below, the next one may take more bytes; from there on, no more than usual."""


class Drained(NamedTuple):
    """What one drain brought."""

    spans: SpanList
    """All that came, for exporters that take whole traces."""
    sent: Sequence[SpanList]
    """What the policy lets through now, for all others; none of these is empty."""
    events: int
    dropped: Mapping[str, int]
    """By reason, see ``Health``."""
    figures: Mapping[str, int]
    """What became of the events, since the last drain: see ``ProcessorHealth.spans``."""
    child_time: Mapping[int, int]
    """Time of what ran directly inside spans of the application, ns, by span id."""
    watermark: int = NEVER
    """Unix ns: what happened later comes with a later drain; :data:`NEVER` where nothing is left."""
    steps: Sequence[StepSpan] = ()
    """Of the steps, and of what stands between them, that ended."""


class LiveRecording:
    """Makes spans and sums of what a recording brings: the recorder's events of every thread, while it runs, or a file's.

    :meth:`drain` may be called from any thread; a second waits for the first.

    Args:
        provider: whose rules hold.
        recording: whose batches it takes.
        contexts: which span a context stands for.
        averages: added to with every drain.
        expects_steps: whether the program makes steps, or is going to.
        before_drain: called before every drain.
        budget_bytes: that the recorder may hold; beyond it the oldest events go.
        calls: which calls of functions are left out.
        policy: which steps are traced in full, and how much of each.
        ranks: the other processes of the run, if there are any: its collectives link to theirs.
        step_rule: what ends a step.
        mute: called with whether nothing is to be recorded outside of contexts.
        foresight: of the steps that are left out, to be stopped before the session is; None where every step is recorded.
        health: the states of its sources, and notes.
        now: the time by which spans of the job and of operators without a parent are ended, Unix ns.
        most_buffered: bytes of spans that may wait for their step; None: as the policy has it.
        id_key: of its spans' ids, 64 bits. Default: one that no other recording has.
        on_steps: called with the spans of steps that have ended, after every drain that brought any.
        first_step: number of the first step.
    """

    def __init__(
        self,
        provider: Provider,
        recording: Recording,
        *,
        contexts: ContextTable,
        averages: RunningAverages,
        expects_steps: Callable[[], bool],
        before_drain: Callable[[], None] | None = None,
        budget_bytes: int = 0,
        calls: CallRules = CallRules(),  # noqa: B008 - immutable
        policy: SpanPolicy | None = None,
        ranks: GroupRanks | None = None,
        step_rule: StepRule = StepRule(),  # noqa: B008 - immutable
        mute: Callable[[bool], None] | None = None,
        foresight: Foresight | None = None,
        health: Callable[[], tuple[Mapping[str, str], tuple[str, ...]]] = lambda: ({}, ()),
        now: Callable[[], int] = now_ns,
        most_buffered: int | None = None,
        id_key: int | None = None,
        on_steps: Callable[[Sequence[StepSpan]], None] | None = None,
        first_step: int = 0,
    ) -> None:
        self.provider = provider
        self._recording = recording
        self.health = health
        """What is on, and what is off and why."""
        self._now = now
        self._contexts = contexts
        self._averages = averages
        self._expects_steps = expects_steps
        self._before_drain = before_drain
        self.marks = StepMarks()
        """What the program, or its framework, says of steps, by any thread."""
        self._marks_lock = threads.RLock()  # a signal handler may shut down in the middle
        self._mute = mute
        self._on_steps = on_steps
        self._log = LimitedLog()
        self._lock = threads.RLock()  # an interrupt may leave it held, and the same thread comes again
        self._roots_muted = False
        policy = policy or SpanPolicy()
        self._choice = policy.choice()
        self._job = Job(round(policy.job_interval * 1e9), provider.new_trace, provider.new_span_id)
        self.steps = Steps(
            provider.new_trace,
            provider.new_span_id,
            self._current_span,
            selects=self._selects,
            job=self._job.link,
            first=first_step,
        )
        self.segments = StepSegments(
            self.steps,
            self._job.begin,
            step_rule,
            self._began,
            usage_at,
            mute=self._mute_roots,
            foresight=foresight,
        )
        self._flush_until = 0
        self._slice_bytes, self._budget_bytes = SLICE_BYTES, budget_bytes
        self._figures: Counter[str] = Counter()
        self._reported: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._taken = self._recorded = self._failed = self._undelivered = 0
        self._buffer = SpanBuffer(
            policy.rules(), provider.new_trace_id, provider.new_span_id, share=lambda: provider.budget_share
        )
        self._flows = Flows()
        self._links = LiveCollectives(ranks)
        self._trees = LiveTrees(
            # The generator may give every rank the same: the SDK's asks Python's random numbers, which programs seed.
            key=provider.new_span_id() ^ int.from_bytes(os.urandom(8), "big") if id_key is None else id_key,
            steps=self.steps,
            new_trace=provider.new_trace,
            current_span=self._current_span,
            ended=contexts.ended,
            calls=calls,
            collectives=self._links,
            max_spans=lambda: self._buffer.budget.max_spans,
        )
        if most_buffered is not None:
            self._buffer.max_bytes = most_buffered

    def now(self) -> int:
        """The time by which spans of the job and of operators without a parent are ended, Unix ns."""
        return self._now()

    def take_marks(self) -> None:
        """Makes steps of what the program said: in the drain thread, or at once in the loop's own."""
        with self._marks_lock:
            for mark in self.marks.take():
                self.segments.say(mark, self._contexts.number_of(mark.context))

    def _mute_roots(self, is_muted: bool) -> None:
        if self._mute is not None and is_muted != self._roots_muted:
            self._roots_muted = is_muted
            self._mute(is_muted)

    def keep_step(self) -> None:
        """Keeps the detail of the step that runs, whatever it turns out to be. Any thread; a microsecond."""
        self._buffer.sampler.ask(self.now())

    def span_ended(self, span_id: int) -> None:
        """A span of the application ends now: what begins later is not in it. Any thread; 0.2 us."""
        self._contexts.note_end(span_id)

    def trace_joined(self, trace_id: int) -> None:
        """A span of the application begins in a trace that another process began. Any thread; 0.2 us."""
        self._buffer.join(trace_id)

    @property
    def bytes_buffered(self) -> int:
        """What waits for a drain."""
        return self._recording.batches.stats().bytes_buffered

    @property
    def is_due(self) -> bool:
        """Whether as much waits as the next drain takes, or a quarter of what the recorder may hold."""
        return self.bytes_buffered >= min(self._slice_bytes, self._budget_bytes // 4)

    def flush(self) -> None:
        """Requests the events recorded until now: drains no longer hold them back until their step is known."""
        self._flush_until = self.now()

    def drain(self, *, final: bool = False) -> Drained | None:
        """Makes spans of the oldest batch of records, of some :data:`SLICE_BYTES`, once the steps of its events are known.

        Returns None if all batches still wait for that. Events from before :meth:`flush`, or before the stop, do not wait.

        ``final``: the recording has stopped; the last drain includes the unfinished step.
        """
        with self._lock:
            if self._before_drain is not None:
                self._before_drain()
            self.take_marks()
            held, has_more = self.segments.next(), True
            while held is None and has_more:
                has_more = self._take(final=final)
                held = self.segments.next()
            if held is None:
                return None
            ended = self.steps.take_ended()
            try:
                return self._drained(ended, *held)
            except BaseException:
                self.steps.put_back(ended)
                self._figures["failed"] += self._buffer.dropped + self._undelivered
                self._buffer.dropped = self._undelivered = 0
                raise

    def _take(self, *, final: bool) -> bool:
        """Drains the recorder, and learns from that where steps begin; whether there is more."""
        now = self.now()
        self._contexts.begin_drain(now)
        drained = self._recording.drain(self._slice_bytes)
        self._slice_bytes = _next_slice(self._slice_bytes, len(drained))
        give_way()
        self.take_marks()
        # And not what a profile that runs meanwhile asked for.
        batch = kept(drained, InputKept.INPUTS, Observation.ever_requested)
        begins_at = self.segments.begins_at
        if not self.steps.begun and (self.steps.active or begins_at != NEVER or self._expects_steps()):
            # A step has ended, or a loop begins, or an optimizer was made: what is here is set-up, until the first step begins.
            earliest = int(min(batch["start"].min(initial=now_ns()), batch.opens.start.min(initial=NEVER)))
            self._job.begin(min(earliest, begins_at))
            if self.steps.active:  # the program said where the first one ended
                self.steps.begin(self.segments.first_training(batch) or earliest, setup=earliest)
            elif earliest < begins_at:
                self.steps.begin(earliest, Segment.SETUP)
        flush_until = self._flush_until
        settle = batch.watermark >= flush_until > 0
        if settle and self._flush_until == flush_until:  # and nobody has asked again meanwhile
            self._flush_until = 0
        self.segments.add(batch, now, settle=settle, final=final and batch.is_last)
        return not batch.is_last

    def _drained(self, ended: list[Step], batch: Batch, final: bool) -> Drained:
        now, watermark = self.now(), batch.watermark
        placed = self._trees.place(batch)
        give_way()
        ended, later = self._complete(ended, batch)
        if final:  # only now: the running step gets its span with its first event, which may be in this batch
            ended = ended + self.steps.take_ended(everything=True)
        step_spans = _unsent(span for step in ended for span in step.spans.values())
        self._job.note(step_spans)
        roots = self._trees.ended_roots(min(watermark, now), final=final)
        jobs = self._job.ended(self.now(), final=final)
        spans, sent = self._spans(len(batch), placed, [*step_spans, *_unsent(roots)], jobs, final=final)
        give_way()
        add_up(self._averages, placed, step_spans)
        give_way()
        child_time = child_times(placed, step_spans)
        self._contexts.end_drain(watermark, still_open=batch.opens.context.tolist())
        self.steps.forget_contexts(lambda number: self._contexts.get(number) is not None)
        self._trees.forget_roots(roots)
        self.steps.put_back(later)  # only now: where anything of this fails, all of them are put back
        self._report_steps(step_spans)
        self._undelivered = 0
        whole = [span for span in step_spans if span.is_whole and not span.is_running]
        return Drained(spans, sent, *self._settled(), child_time, watermark, whole)

    def _report_steps(self, spans: Sequence[StepSpan]) -> None:
        """Metrics of the program's own: what they raise costs no span."""
        try:
            if self._on_steps is not None and spans:
                self._on_steps(spans)
        except Exception as error:  # noqa: BLE001 - as above
            self._log.warning(
                "the durations of %d steps were not recorded: %s: %s", len(spans), type(error).__name__, error
            )

    def _figures_of(self, events: int, placed: Placed, spans: int) -> Counter[str]:
        """So many events were taken, and so many spans made of those that were placed, and of steps and the like."""
        sampled = np.array([trace_group.trace.exported for trace_group in placed.trace_groups], dtype=np.bool_)[
            placed.trace_group
        ]
        count, of_events = int(sampled.sum()), int(traced_events(placed).sum())
        filtered = events - len(sampled) + count - of_events
        return Counter(not_sampled=len(sampled) - count, filtered=filtered, added=spans - of_events)

    def _settled(self) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """Returns the numbers of recorded events, of dropped events by reason, and of outcomes, since the last call.

        Events that the recorder has handed over, and that neither were recorded nor wait for their step, count as dropped: ``failed``.
        A drain that completes after it was given up reverts that.
        """
        stats = self._recording.batches.stats()
        recorded, self._recorded = self._recorded, 0
        dropped = Counter(stats.dropped)
        held = self.segments.events
        dropped["failed"] = self._failed = self._failed + stats.recorded - held - self._taken - recorded
        self._taken = stats.recorded - held
        figures = Counter({**self._buffer.figures, **self._figures, "buffered": self._buffer.spans + held})
        before, self._reported = self._reported, (dropped, figures)
        return recorded, _since(dropped, before[0]), _since(figures, before[1])

    def abandon(self) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """After the stop, where a drain hangs or fails: throws away what is left in the recorder; as :meth:`_settled`. Any thread."""
        with suppress(NativeError):  # it is being read
            self._recording.batches.discard()
        return self._settled()

    def _complete(self, ended: list[Step], batch: Batch) -> tuple[list[Step], list[Step]]:
        """Splits ended steps into those whose events were all drained, and those that wait for a later drain.

        The last step waits while an event that began in it is open: torch's own label of the optimizer ends a little after the step.
        """
        count = next((at for at, step in enumerate(ended) if (step.end or 0) > batch.watermark), len(ended))
        if count and not batch.is_last:
            last = ended[count - 1]
            opened = batch.opens.start
            count -= bool(((opened >= last.start) & (opened < (last.end or 0))).any())
        return ended[:count], ended[count:]

    def stop(self) -> None:
        """Stops the recording; again without effect. What there is can be taken as before, and by :meth:`finish`."""
        self._recording.stop()

    def finish(self) -> Drained:
        """After the stop: takes the next of what is left, at the end with the step that is not finished.

        Where that fails it is tried again: what was held has not failed with the last events.
        """
        try:
            return self._last()
        except Exception as error:  # noqa: BLE001 - the events that it took are counted as failed by the second
            self._log.warning("the last events were lost: %s: %s", type(error).__name__, error)
            return self._last()

    def _last(self) -> Drained:
        while (found := self.drain(final=True)) is None:  # nothing waits at the end: it is there the first time
            continue
        return found

    def discard(self) -> None:
        """Records nothing more, and throws away what is left in the recorder, which counts as dropped."""
        with self._lock:
            self._recording.batches.stop()
            self._recording.batches.discard()

    def give_up(self) -> Drained:
        """After the stop: throws away what is left in the recorder, which counts as dropped, and takes the rest."""
        self._recording.batches.discard()
        return self.finish()

    def _current_span(self, context: int) -> tuple[SpanContext, int | None] | None:
        found = self._contexts.get(context)
        return None if found is None else (found.span_context, found.start_ns)

    def _began(self, context: int) -> int | None:
        found = self._contexts.get(context)
        return None if found is None else found.start_ns

    def _selects(self, step: int, trace_id: int) -> bool:
        """Whether a step is to be traced in full; the schedule may be somebody's code."""
        try:
            return self._choice.selects(step, trace_id)
        except Exception as error:  # noqa: BLE001 - it must not stop a training job
            self._log.warning(
                "the schedule failed on step %d, which is recorded: %s: %s", step, type(error).__name__, error
            )
            return True

    def _spans(
        self, events: int, placed: Placed, ended: Sequence[StepSpan], jobs: Sequence[StepSpan], *, final: bool
    ) -> tuple[SpanList, list[SpanList]]:
        """The spans of a drain; and those of this and earlier ones that are due."""
        synthetic = [*ended, *jobs]
        table = drained_spans(
            placed,
            synthetic,
            self._flows,
            collectives=self._links,
            final=final,
        )
        give_way()
        figures = self._figures_of(events, placed, len(table))
        sent = self._buffer.decide(self._pieces(placed, table, ended, jobs, final=final))
        # From here on nothing is undone: what fails now has been recorded, and what was to be sent is lost.
        self._figures.update(figures)
        self._recorded += events
        self._undelivered = sum(map(len, sent))
        whole = self._span_list(table)
        return whole, [whole if each is table else self._span_list(each) for each in sent]

    def _pieces(
        self, placed: Placed, table: SpanTable, ended: Sequence[StepSpan], jobs: Sequence[StepSpan], *, final: bool
    ) -> Pieces:
        synthetic = [trace_group.step for trace_group in placed.trace_groups if trace_group.step is not None]
        for group in placed.trace_groups:
            if group.is_remote:  # below no span of this process
                self._buffer.join(group.trace.trace_id)
        exported = [span for span in (*ended, *jobs) if span.trace.exported]
        is_event = table.row >= 0
        trace_group = table.span_id.copy()
        trace_group[is_event] = placed.root[table.row[is_event]]
        failed = np.flatnonzero(is_event & (table.error != 0))
        return Pieces(
            table,
            trace_group,
            placed.open_roots,
            np.array(
                [u.parent_span_id if u.step is None else _enclosing(u.step) for u in placed.trace_groups]
                + [_enclosing(span) for span in exported],
                dtype=np.uint64,
            ),
            {span.span_id: span for span in (*synthetic, *ended)},
            ended,
            set(trace_group[failed].tolist()),
            final,
        )

    def _span_list(self, table: SpanTable) -> SpanList:
        table = within_limits(table, self.provider.limits)
        return SpanList(table, resource=self.provider.resource, scope=instrumentation_scope())


def _next_slice(used: int, events: int) -> int:
    """How many bytes of records to drain next, where a drain of ``used`` bytes had so many events.

    A drain costs 6 ms of Python whatever it has. Where nearly all records are another session's, as the operators of a black box
    beside ``detail="steps"``, many small drains took a tenth of Python's lock. Not more than four times as much, since what waits is
    memory: the black box's chunks are copied when their place is needed.
    """
    if events >= _MANY_EVENTS:
        return SLICE_BYTES
    return min(2 * used, 4 * SLICE_BYTES) if events < _FEW_EVENTS else used


def _unsent(spans: Iterable[StepSpan]) -> list[StepSpan]:
    """Those that come for the first time: another final drain, or one after a drain that failed late, has them all again."""
    return [span for span in spans if not span.is_sent]


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    return {what: count - before.get(what, 0) for what, count in now.items()}


def _enclosing(step: StepSpan) -> int:
    """The span of the application that a step is below; 0 for none."""
    return step.parent.span_id if step.parent is not None and step.is_enclosed else 0
