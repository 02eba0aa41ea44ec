"""The recording behind a span processor: drains the recorder while it runs, and makes spans and sums of the events."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._answers.line_reading import taken_samples
from otel_torchprof._columns.phases import PHASE_PREFIX, UNATTRIBUTED, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._encode.sampled import LiveSamples
from otel_torchprof._encode.spans import SpanList, drained_spans, within_limits
from otel_torchprof._export.draining import most_bytes, waiting_share
from otel_torchprof._export.root_only import without_left_out
from otel_torchprof._export.sdk import instrumentation_scope
from otel_torchprof._export.span_buffer import Pieces, SpanBuffer
from otel_torchprof._export.span_policy import SpanPolicy, TraceChoice
from otel_torchprof._model.averages import count_span
from otel_torchprof._model.collectives import LiveCollectives
from otel_torchprof._model.inputs import InputKept, kept
from otel_torchprof._model.live import LiveTrees
from otel_torchprof._model.live_table import CallRules, Flows
from otel_torchprof._model.peak_flops import note_flops
from otel_torchprof._model.step_spans import Job, note_phases
from otel_torchprof._model.steps import Steps
from otel_torchprof._native.python_sources import usage_at
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._native.torch_library import Observation
from otel_torchprof._process import threads
from otel_torchprof._process.give_way import give_way, with_pauses
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof._record.process_memory import MemoryOfDrains
from otel_torchprof._record.step_marks import StepMarks
from otel_torchprof.errors import NativeError

from .request_log import RequestLog
from .step_log import StepLog
from .step_segments import StepRule, StepSegments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.trace import SpanContext

    from otel_torchprof._answers.line_reading import TakenSamples
    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._export.provider import Provider
    from otel_torchprof._export.root_only import Chosen
    from otel_torchprof._model.averages import RunningAverages
    from otel_torchprof._model.collectives import GroupRanks
    from otel_torchprof._model.placed import Placed
    from otel_torchprof._model.request_spans import RequestSpans
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof._model.step_spans import Step, StepSpan
    from otel_torchprof._record.contexts import ContextTable
    from otel_torchprof._record.recording import Recording

    from .foresight import Foresight


# ---- Sums over the events of a drain: averages by name, and child time of the application's spans ----


_UNATTRIBUTED = f"{PHASE_PREFIX}{UNATTRIBUTED}"


def add_up(averages: RunningAverages, placed: Placed, ended: Sequence[StepSpan]) -> None:
    """Adds the events of a drain, and the steps that ended in it."""
    recorded = np.array([trace_group.trace.recorded for trace_group in placed.trace_groups], dtype=np.bool_)
    counted = None if recorded.all() else recorded[placed.trace_group]
    averages.add(placed.batch, placed.child_time, counted=counted, devices=placed.devices)
    sums: dict[str, list[int]] = {}
    for step in with_pauses(ended):
        # Once per step: not its parts in other traces, and not an unfinished step at the end of the recording.
        if step.trace.recorded and step.thread is not None:
            duration, rest = step.end - step.start, step.unattributed
            own = max(duration - step.child_time, 0)
            if step.phases is not None:  # the self time is in the row of unattributed time
                count_span(sums, _UNATTRIBUTED, rest, min(own, rest))
                own = 0
            count_span(sums, step.name, duration, own)
    for name, of_name in sums.items():
        averages.add_spans(name, of_name)


def child_times(placed: Placed, ended: Sequence[StepSpan]) -> dict[int, int]:
    """Child time of application spans of this process in the events of a drain, ns, by span id."""
    child_time: dict[int, int] = {}
    for trace_group, time in zip(placed.trace_groups, placed.sums.child_time.tolist(), strict=True):
        if trace_group.step is None and trace_group.parent_span_id and not trace_group.is_remote:
            child_time[trace_group.parent_span_id] = child_time.get(trace_group.parent_span_id, 0) + time
    for step in ended:
        if step.parent is not None and not step.parent.is_remote:
            child_time[step.parent.span_id] = child_time.get(step.parent.span_id, 0) + step.end - step.start
    return child_time


_FIRST_DUE_BYTES = 256 << 10
"""Bytes from which the first drain is due, each later one from twice as many on, once it is known what a loop does: that is learned from few
steps."""


class Drained(NamedTuple):
    """Results of a drain."""

    spans: SpanList
    """All spans, for exporters that take whole traces, if there are any."""
    sent: Sequence[SpanList]
    """Spans that the policy releases now, for all other exporters; none of these lists is empty."""
    events: int
    dropped: Mapping[str, int]
    """Dropped events by reason, see ``Health``."""
    figures: Mapping[str, int]
    """Outcomes of the events since the last drain: see ``ProcessorHealth.spans``."""
    child_time: Mapping[int, int]
    """Time of direct children of application spans, ns, by span id."""
    watermark: int = NEVER
    """Unix ns: later events come with a later drain; :data:`NEVER` if nothing is left."""
    steps: Sequence[StepSpan] = ()
    """Spans of ended steps and of segments between steps."""
    samples: TakenSamples | None = None
    """Samples of Python stacks; None without any."""
    requests: tuple[SpanList, SpanList, RequestSpans] | None = None
    """All spans of requests and batches, those that the policy allows, and their sums; None without any."""


class LiveRecording:
    """Makes spans and sums of the events of a recording, while it runs, or of a file.

    :meth:`drain` may be called from any thread; a second call waits for the first.

    Args:
        provider: TracerProvider with its sampler, ids and limits.
        recording: source of the batches.
        contexts: maps contexts to spans.
        averages: updated by every drain.
        expects_steps: returns whether the program has steps, or will have some.
        before_drain: called before every drain.
        budget_bytes: memory limit of the recorder, beyond which it drops the oldest events.
        calls: rules that omit Python calls.
        policy: selects the steps that are traced in full, and limits traces.
        ranks: the other ranks of the run, to whose collectives spans link; None for none.
        step_rule: what ends a step.
        mute: called with True when events outside of contexts are not to be recorded, and with False when they are again.
        foresight: pauses the recording in steps that are left out; stop it before the session. None if every step is recorded.
        health: returns states of the sources, and notes.
        now: returns the time until which job spans and operator roots are ended, Unix ns.
        most_buffered: limit of the span buffer in bytes. Default: None, the limit of the policy.
        id_key: key of the span ids, 64 bits. Default: a unique one.
        on_steps: called after a drain with the spans of ended steps and samples of Python stacks, if there are any.
        on_look: called on the drain thread four times a second.
        needs_all_spans: whether an exporter takes whole traces. Default: always.
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
        on_steps: Callable[[Sequence[StepSpan], TakenSamples | None], None] | None = None,
        on_look: Callable[[], None] | None = None,
        needs_all_spans: Callable[[], bool] = lambda: True,
        first_step: int = 0,
    ) -> None:
        self.provider = provider
        self._recording = recording
        self.health = health
        """Returns states of the sources, and notes."""
        self._now = now
        self._contexts, self.requests = contexts, RequestLog(provider, contexts.note_end)
        self.span_ended = contexts.note_end
        """Notes that an application span ends, by its id: later events are not inside it. Thread-safe; costs 0.2 us."""
        self._averages = averages
        self._expects_steps = expects_steps
        self._before_drain = before_drain
        self.marks = StepMarks()
        """Ends and begins of segments that the program or its framework reports, from any thread."""
        self._marks_lock = threads.RLock()  # a signal handler may shut down in the middle
        self._mute = mute
        self._on_steps, self._needs_all_spans, self._on_look = on_steps, needs_all_spans, on_look
        self._log, self.step_log, self._is_asked = LimitedLog(), StepLog(), False
        self._lock = threads.RLock()  # reentrant: after an interrupt, the same thread may drain again
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
        self._due_bytes, self._budget_bytes = min(_FIRST_DUE_BYTES, most_bytes(budget_bytes)), budget_bytes
        self._figures: Counter[str] = Counter()
        self._reported: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._taken = self._recorded = self._failed = self._undelivered = 0
        self._buffer = self._new_buffer(policy)
        self._flows, self._samples, self._memory = Flows(), LiveSamples(), MemoryOfDrains()
        self._links = LiveCollectives(ranks)
        self._trees = LiveTrees(
            # The provider's ids alone may be equal on all ranks: the SDK uses Python's random numbers, which programs seed.
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

    def _new_buffer(self, policy: SpanPolicy) -> SpanBuffer:
        return SpanBuffer(
            policy.rules(),
            self.provider.new_trace_id,
            self.provider.new_span_id,
            share=lambda: self.provider.budget_share,
            traces=None if self._choice.is_all else TraceChoice(self._selects),
        )

    @property
    def traces(self) -> TraceChoice | None:
        """Selects traces where there are no steps; None if the policy selects all."""
        return self._buffer.traces

    def now(self) -> int:
        """The time until which job spans and operator roots are ended, Unix ns."""
        return self._now()

    def take_marks(self) -> None:
        """Turns reported ends of steps into steps: on the drain thread, or at once on the thread of the loop."""
        with self._marks_lock:
            for mark in self.marks.take():
                self.segments.report(mark, self._contexts.resolve(mark.context))

    def _mute_roots(self, is_muted: bool) -> None:
        if self._mute is not None and is_muted != self._roots_muted:
            self._roots_muted = is_muted
            self._mute(is_muted)

    def keep_step(self) -> None:
        """Samples the current step in full, whatever the policy decides. Thread-safe; costs a microsecond."""
        self._buffer.sampler.ask(self.now())

    def trace_joined(self, trace_id: int) -> None:
        """Notes that an application span begins in a trace of another process. Thread-safe; costs 0.2 us."""
        self._buffer.join(trace_id)

    @property
    def bytes_buffered(self) -> int:
        """Bytes of events that were not drained yet."""
        return self._recording.batches.stats().bytes_buffered

    def ask_drain(self) -> None:
        """Lets the drain thread drain at its next look: somebody waits for steps. Thread-safe."""
        self._is_asked = True

    def look(self) -> None:
        """Calls ``on_look``."""
        if self._on_look is not None:
            self._on_look()

    @property
    def is_due(self) -> bool:
        """Whether enough events or requests are buffered for the next drain, a quarter of the memory is in use, or somebody asked."""
        return self._is_asked or self.requests.is_due or self.bytes_buffered >= self._due_bytes

    @property
    def backlog(self) -> float:
        """Returns the share of the bytes that may wait for drains and do; a small memory limit leaves less room."""
        return waiting_share(self.bytes_buffered, self._budget_bytes)

    def flush(self) -> None:
        """Requests the events recorded until now: drains no longer buffer them until their step is known."""
        self._flush_until = self.now()

    def drain(self, *, final: bool = False) -> Drained | None:
        """Makes spans of the oldest batch of records, of up to :func:`~.draining.most_bytes`, once the steps of its events are known.

        Returns None if all batches still wait for that. Events from before :meth:`flush`, or before the stop, do not wait.

        ``final``: the recording has stopped; the last drain includes the unfinished step.
        """
        with self._lock:
            self._is_asked = False
            if self._before_drain is not None:
                self._before_drain()
            self.take_marks()
            ready, has_more = self.segments.next(), True
            while ready is None and has_more:
                has_more = self._take(final=final)
                ready = self.segments.next()
            if ready is None:
                return None
            ended = self.steps.take_ended()
            try:
                return self._drained(ended, *ready)
            except BaseException:
                self.steps.put_back(ended)
                self._figures["failed"] += self._buffer.dropped + self._undelivered
                self._buffer.dropped = self._undelivered = 0
                raise

    def _take(self, *, final: bool) -> bool:
        """Drains the recorder, and learns where steps begin; returns whether the recorder has more."""
        now = self.now()
        self._contexts.begin_drain(now)
        drained = self._recording.drain(most_bytes(self._budget_bytes))
        if drained.memory is not None:
            self._taken += len(drained.memory["time"])  # no events, which alone are recorded or dropped from here on
        if not self.segments.is_foreseeing:
            self._due_bytes = min(2 * self._due_bytes, most_bytes(self._budget_bytes))
        give_way()
        self.take_marks()
        # Without inputs that only a profile requested that runs at the same time.
        batch = kept(drained, InputKept.INPUTS, Observation.ever_requested)
        begins_at = self.segments.begins_at
        if not self.steps.begun and (self.steps.active or begins_at != NEVER or self._expects_steps()):
            # A step has ended, a loop begins, or an optimizer exists: events before the first step are set-up.
            earliest = int(min(batch["start"].min(initial=now_ns()), batch.opens.start.min(initial=NEVER)))
            self._job.begin(min(earliest, begins_at))
            if self.steps.active:  # the program has reported the end of the first step
                self.steps.begin(self.segments.first_training(batch) or earliest, setup=earliest)
            elif earliest < begins_at:
                self.steps.begin(earliest, Segment.SETUP)
        flush_until = self._flush_until
        settle = batch.watermark >= flush_until > 0
        if settle and self._flush_until == flush_until:  # no later flush was requested meanwhile
            self._flush_until = 0
        self.segments.add(batch, now, settle=settle, final=final and batch.is_last)
        return not batch.is_last

    def _drained(self, ended: list[Step], batch: Batch, final: bool, known_until: int) -> Drained:
        placed = self._trees.place(self._samples.joined(batch))
        give_way()
        ended, later = self._complete(ended, batch, known_until)
        if final:  # after place(): the current step gets its span with its first event, which may be in this batch
            ended = ended + self.steps.take_ended(everything=True)
        step_spans = _unsent(span for step in ended for span in step.spans.values())
        self._memory.note(step_spans)
        note_flops(step_spans)
        note_phases(step_spans)
        self._job.note(step_spans)
        roots = self._trees.ended_roots(min(known_until, self.now()), final=final)
        jobs = self._job.ended(self.now(), final=final)
        spans, sent = self._spans(len(batch), placed, [*step_spans, *_unsent(roots)], jobs, final=final)
        give_way()
        add_up(self._averages, placed, step_spans)
        give_way()
        child_time = child_times(placed, step_spans)
        self._contexts.end_drain(known_until, still_open=batch.opens.context.tolist())
        self.steps.forget_contexts(lambda number: self._contexts.get(number) is not None)
        self._trees.forget_roots(roots)
        self._samples.keep(placed, [*step_spans, *roots], self.steps.open_since(later))
        samples = taken_samples(batch)
        self.steps.put_back(later)  # last: if anything above fails, all of them are put back
        self._report_steps(step_spans, samples)
        self._undelivered = 0
        whole = [span for span in step_spans if span.is_whole and not span.is_running]
        requests = self._request_spans(batch.watermark)
        return Drained(spans, sent, *self._settled(), child_time, batch.watermark, whole, samples, requests)

    def _request_spans(self, watermark: int) -> tuple[SpanList, SpanList, RequestSpans] | None:
        """Returns the spans of requests and batches; None after an error, which is logged, so that the events are sent."""
        try:
            if (spans := self.requests.take(watermark)) is None:
                return None
            sent = [spans.table, self._buffer.within_requests(spans.table, spans.is_inside)]
            whole, within = map(self._span_list, sent)
        except Exception as error:  # noqa: BLE001 - as above
            self._log.warning("spans of requests were dropped: %s: %s", type(error).__name__, error)
            return None
        self._figures["added"] += len(whole)
        return whole, within, spans

    def _report_steps(self, spans: Sequence[StepSpan], samples: TakenSamples | None) -> None:
        """Logs ended steps, and passes their spans and samples to ``on_steps``; its errors are logged, and no span is lost."""
        self.step_log.add(spans)
        try:
            if self._on_steps is not None and (spans or samples is not None):
                self._on_steps(spans, samples)
        except Exception as error:  # noqa: BLE001 - as above
            self._log.warning(
                "the durations of %d steps were not recorded: %s: %s", len(spans), type(error).__name__, error
            )

    def _figures_of(self, events: int, placed: Placed, spans: int) -> Counter[str]:
        """Outcomes of a drain of ``events`` events, of which those in ``placed`` are in a trace, with ``spans`` spans."""
        traced = _events_of(placed, [trace_group.is_traced for trace_group in placed.trace_groups])
        sampled = _events_of(placed, [trace_group.trace.exported for trace_group in placed.trace_groups])
        not_sampled = len(placed.trace_group) - sampled
        return Counter(not_sampled=not_sampled, filtered=events - not_sampled - traced, added=spans - traced)

    def _settled(self) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """Returns the numbers of recorded events, of dropped events by reason, and of outcomes, since the last call.

        Events that the recorder has handed over, and that are neither recorded nor buffered, count as dropped: ``failed``. A drain
        that completes after it was abandoned reverts that.
        """
        stats = self._recording.batches.stats()
        recorded, self._recorded = self._recorded, 0
        dropped = Counter(stats.dropped)
        waiting = self.segments.events
        if self.requests.dropped:
            dropped["unseen_spans"] = self.requests.dropped
        dropped["failed"] = self._failed = self._failed + stats.recorded - waiting - self._taken - recorded
        self._taken = stats.recorded - waiting
        figures = Counter({**self._buffer.figures, **self._figures, "buffered": self._buffer.spans})
        before, self._reported = self._reported, (dropped, figures)
        return recorded, _since(dropped, before[0]), _since(figures, before[1])

    def abandon(self) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """Drops the rest of the recorder after a stop whose drain hangs or fails; returns what :meth:`_settled` does. Thread-safe."""
        with suppress(NativeError):  # a drain is reading it
            self._recording.batches.discard()
        return self._settled()

    def _complete(self, ended: list[Step], batch: Batch, known_until: int) -> tuple[list[Step], list[Step]]:
        """Splits ended steps into those whose events were all drained, and those that wait for a later drain.

        The last step waits while an event that began in it is open: torch's own label of the optimizer ends shortly after the step.
        """
        count = next((at for at, step in enumerate(ended) if (step.end or 0) > known_until), len(ended))
        if count and not batch.is_last:
            last = ended[count - 1]
            opened = batch.opens.start
            count -= bool(((opened >= last.start) & (opened < (last.end or 0))).any())
        return ended[:count], ended[count:]

    def stop(self) -> None:
        """Stops the recording; may be called repeatedly. :meth:`drain` and :meth:`finish` return the remaining events."""
        self._recording.stop()

    def finish(self) -> Drained:
        """Drains the next part of the remaining events after the stop; the last part includes the unfinished step.

        Tries a second time after a failure, which may concern the last events only and not those buffered before.
        """
        try:
            return self._last()
        except Exception as error:  # noqa: BLE001 - the second try counts the events of the first as failed
            self._log.warning("the last events were lost: %s: %s", type(error).__name__, error)
            return self._last()

    def _last(self) -> Drained:
        while (drained := self.drain(final=True)) is None:  # at the end nothing is buffered: the first call returns it
            continue
        return drained

    def discard(self) -> None:
        """Stops recording and drops the rest of the recorder, which counts as dropped."""
        with self._lock:
            self._recording.batches.stop()
            self._recording.batches.discard()

    def give_up(self) -> Drained:
        """Drops the rest of the recorder after the stop, and returns events that were drained and buffered before."""
        self._recording.batches.discard()
        return self.finish()

    def _current_span(self, context: int) -> tuple[SpanContext, int | None] | None:
        span = self._contexts.get(context)
        return None if span is None else (span.span_context, span.start_ns)

    def _began(self, context: int) -> int | None:
        return self._contexts.start_of(context)

    def _selects(self, step: int, trace_id: int) -> bool:
        """Whether a step is to be traced in full; True if the schedule, which may be user code, raises."""
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
        """All spans of a drain, and the spans of this and earlier drains that the policy releases now."""
        steps = {group.step.span_id: group.step for group in placed.trace_groups if group.step is not None}
        steps |= {span.span_id: span for span in ended}
        chosen = self._buffer.choose(placed, steps, ended, final=final, has_steps=self.steps.begun)
        left, needs_all = chosen.left_out, self._needs_all_spans()
        table = drained_spans(
            placed,
            [*ended, *jobs],
            self._flows,
            collectives=self._links,
            final=final,
            left_out=None if left is None or needs_all else left.events,
        )
        give_way()
        figures = self._figures_of(events, placed, len(table) + (0 if left is None or needs_all else left.size))
        due = table if left is None else without_left_out(table, left)
        sent = self._buffer.decide(self._pieces(placed, due, steps, (ended, jobs), chosen=chosen, final=final))
        # From here on nothing is undone: after an error, the events count as recorded and the spans as failed.
        self._figures.update(figures)
        self._recorded += events
        self._undelivered = sum(map(len, sent))
        whole = self._span_list(table)
        return whole, [whole if sent_table is table else self._span_list(sent_table) for sent_table in sent]

    def _pieces(
        self,
        placed: Placed,
        table: SpanTable,
        steps: Mapping[int, StepSpan],
        synthetic: tuple[Sequence[StepSpan], Sequence[StepSpan]],
        *,
        chosen: Chosen,
        final: bool,
    ) -> Pieces:
        """``synthetic``: the roots that have ended, and jobs."""
        for group in placed.trace_groups:
            if group.is_remote:  # its parent is a span of another process
                self._buffer.join(group.trace.trace_id)
        exported = [span for span in chain(*synthetic) if span.trace.exported]
        # The events come after the synthetic spans, usually all of them: then nothing is done per event.
        roots, counts, first = placed.root, None, len(exported)
        if len(table) - first == len(roots):
            counts = np.concatenate((placed.sums.events, np.ones(first, dtype=np.int64)))
        else:
            roots = roots[table.row[first:]]
        return Pieces(
            table,
            roots,
            placed.open_roots,
            np.array(
                [
                    group.parent_span_id if group.step is None else _enclosing(group.step)
                    for group in placed.trace_groups
                ]
                + [_enclosing(span) for span in exported],
                dtype=np.uint64,
            ),
            np.array(
                [group.step is not None and group.step.segment is not None for group in placed.trace_groups]
                + [span.segment is not None for span in exported],
                dtype=np.bool_,
            ),
            steps,
            synthetic[0],
            chosen,
            final,
            np.array(
                [0 if group.step is None else group.step.span_id for group in placed.trace_groups]
                + [span.span_id for span in exported],
                dtype=np.uint64,
            ),
            counts,
        )

    def _span_list(self, table: SpanTable) -> SpanList:
        table = within_limits(table, self.provider.limits)
        return SpanList(table, resource=self.provider.resource, scope=instrumentation_scope())


def _unsent(spans: Iterable[StepSpan]) -> list[StepSpan]:
    """The spans that were not sent before: a repeated final drain, or one after a late failure, has earlier ones again."""
    return [span for span in spans if not span.is_sent]


def _events_of(placed: Placed, is_chosen: Sequence[bool]) -> int:
    """Number of events in the trace groups that are chosen."""
    return int(placed.sums.events[np.array(is_chosen, dtype=np.bool_)].sum())


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    return {what: count - before.get(what, 0) for what, count in now.items()}


def _enclosing(step: StepSpan) -> int:
    """Id of the application span that encloses a step; 0 for none."""
    return step.parent.span_id if step.parent is not None and step.is_enclosed else 0
