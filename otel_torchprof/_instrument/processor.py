"""``TorchSpanProcessor``: the model's work, inside the traces of the service."""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from opentelemetry.sdk.trace import SpanProcessor

from otel_torchprof._averages.running import RunningAverages
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._events.averages_list import averages_list
from otel_torchprof._explain.live_rank import LiveSteps
from otel_torchprof._explain.verdicts import explained
from otel_torchprof._export.chrome import ChromeTraceExporter
from otel_torchprof._export.draining import Drainer, Ending
from otel_torchprof._export.ledger import Ledger
from otel_torchprof._export.queue import Deadline, ExportQueue, QueueSettings
from otel_torchprof._export.sdk import takes_whole_traces
from otel_torchprof._metrics.recorder_metrics import ExporterFigures, RecorderFigures, exporter_figures
from otel_torchprof._native.recorder import SLICE_BYTES, now_ns
from otel_torchprof._process import fork
from otel_torchprof._process.heap import Heap
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof._record.recording import checked_memory_limit
from otel_torchprof._tree.displayed_devices import device_name
from otel_torchprof.errors import TorchProfError
from otel_torchprof.health import ON, ProcessorHealth

from .unused_processor import unused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.trace.export import SpanExporter

    from otel_torchprof._events.events import EventList, FunctionEventAvg
    from otel_torchprof._explain.explanation import Explanation

    from .live_recording import Drained, LiveRecording

    _Ended = tuple[int, int | None, str, int, int, ReadableSpan | None]
    """Of a span: when it ended, and for the averages when it began (Unix ns; None: it is in none), its name as it was given, its id and
    that of its parent, 0 for one elsewhere; and itself where an exporter takes it."""

_SHUTDOWN_SECONDS = 30.0
_UNANSWERED_SECONDS = 5.0
"""For the same where no receiver has answered so far: it is probably not there, and a program that ends should not wait for it."""
_REFRESH_SECONDS = 1.0
_MAX_OPEN_SPANS = 100_000
"""Spans of the application whose self time is computed; one that never ends its spans costs no more memory than that."""
_MAX_ENDED = 100_000
"""Ended spans of the application that may wait for a drain; the oldest of more are not in the averages."""
_SPAN_BYTES = 2800
"""What a span object of the SDK takes, for the queue's account (measured with five attributes)."""


@dataclass(frozen=True, eq=False)
class _Attached:
    """A recording, from :meth:`TorchSpanProcessor.attach` to :meth:`TorchSpanProcessor.detach`."""

    recording: LiveRecording
    release: Callable[[Deadline], None]
    sources: Mapping[str, str]
    notes: Callable[[], Sequence[str]]


class TorchSpanProcessor(SpanProcessor):
    """Brings torch's work into the traces of a service, and sends it to exporters of its own.

    Add it to a TracerProvider, then ``TorchInstrumentor().instrument(tracer_provider=provider)``; until then there is nothing
    to process. The application's own spans pass through it as through any processor: they are nodes of the
    tree that averages are made of, and parents of what ran inside them. They are *sent* by the application's own processors,
    not by this one, except to a :class:`ChromeTraceExporter`, whose file would be incomplete without them.

    Nothing it does waits on the application's threads: ``on_start`` and ``on_end`` take a microsecond, recording some tens of
    nanoseconds per operator, and all else is done by two threads of its own. Safe from any thread, and after a fork.

    Args:
        exporters: any SpanExporter; :class:`OTLPExporter` and :class:`ChromeTraceExporter` take the spans as columns, at some
            100 ns each, others as objects, at some 20 us.
        sdk_spans: None: the application's spans go to Chrome files only, while torch is instrumented; True: to every exporter,
            also while it is not (a provider that has no other processor); False: to none.
        memory_limit: bytes that the recorder may hold, by default 512 MiB (``OTEL_TORCHPROF_MEMORY_LIMIT``); beyond it the
            oldest events go, and are counted.
        max_queue_size: spans that may wait per exporter; beyond it the oldest go, and are counted (``OTEL_BSP_MAX_QUEUE_SIZE``).
        max_queue_bytes: memory that spans may wait in, per exporter, by default 256 MiB (``OTEL_TORCHPROF_MAX_QUEUE_BYTES``). While a
            backend is down this is what bounds how much of it is made up for, at some 120 bytes per span.
        schedule_delay_millis: time between two exports (``OTEL_BSP_SCHEDULE_DELAY``).
        max_export_batch_size: spans per call of an exporter that takes objects (``OTEL_BSP_MAX_EXPORT_BATCH_SIZE``).
        export_timeout_millis: for one call of an exporter (``OTEL_BSP_EXPORT_TIMEOUT``).

    Raises:
        TypeError, ValueError: a bad argument, which the message names.
    """

    _living: ClassVar[weakref.WeakSet[TorchSpanProcessor]] = weakref.WeakSet()

    def __init__(
        self,
        *exporters: SpanExporter,
        sdk_spans: bool | None = None,
        memory_limit: int | None = None,
        max_queue_size: int | None = None,
        max_queue_bytes: int | None = None,
        schedule_delay_millis: float | None = None,
        max_export_batch_size: int | None = None,
        export_timeout_millis: float | None = None,
    ) -> None:
        _check_exporters(exporters)
        fork.import_now("numpy.ma")  # numpy.unique would
        self.memory_limit = checked_memory_limit(memory_limit)
        self._settings = QueueSettings.from_environment(
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_bytes,
            schedule_delay_millis=schedule_delay_millis,
            max_export_batch_size=max_export_batch_size,
            export_timeout_millis=export_timeout_millis,
        )
        self._ledger = Ledger()
        self._queues = [ExportQueue(exporter, self._settings, ledger=self._ledger) for exporter in exporters]
        self._sdk_queues = [queue for queue in self._queues if _takes_sdk_spans(queue.exporter, sdk_spans)]
        # Where this is the provider's only processor, its spans are sent whether torch is instrumented or not.
        self._sends_alone = sdk_spans is True
        self._log = LimitedLog()
        self._down = self._is_shut = False
        self._reset()
        self._living.add(self)
        if not self._sends_alone:
            unused.note_processor()

    def _reset(self) -> None:
        """What belongs to one process: after a fork the child has no threads, and maybe locks that nobody will release."""
        self._attached: _Attached | None = None
        self._drainer = Drainer(self._settings.schedule_delay_millis / 1000, self._hand_on, self._is_due)
        self._ended: deque[_Ended] = deque(maxlen=_MAX_ENDED)
        self.averages = RunningAverages()
        self._child_times: dict[int, int] = {}
        self._steps = LiveSteps()
        self._lag = self._unseen = self._held = 0
        self._heap = Heap()

    # ---- what the SDK calls ----

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """A span of the application has begun: nothing to do, whoever runs in it finds it by itself."""

    def on_end(self, span: ReadableSpan) -> None:
        """A span of the application has ended; it is looked at with the next drain. Costs a microsecond."""
        attached = self._attached
        if self._down or (attached is None and not self._sends_alone):
            return
        if len(self._ended) == _MAX_ENDED:
            self._unseen += 1
        ended = _ended(span, span if self._sdk_queues else None)
        self._ended.append(ended)
        if attached is not None:
            attached.recording.span_ended(ended[3])
        if self._sends_alone and not self._drainer.has_thread:
            self._drainer.start()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends what has been recorded so far; False when ``timeout_millis`` was not enough, or an exporter refused."""
        deadline = Deadline.after(timeout_millis / 1000)
        drained = self._flush(deadline)
        # All are asked, also when one of them is too slow: each has its own thread, and they share the deadline.
        flushed = [queue.force_flush(deadline) for queue in self._queues]
        return drained and all(flushed)

    def shutdown(self) -> None:
        """Stops recording, sends the rest, shuts the exporters down: within 30 seconds. Further calls do nothing.

        An exporter whose receiver has not answered at all so far is given 5 seconds, several share them.
        """
        self._shut_down(_SHUTDOWN_SECONDS, _UNANSWERED_SECONDS)

    def shutdown_within(self, seconds: float) -> None:
        """:meth:`shutdown` within so many seconds, whether the receivers have answered or not."""
        self._shut_down(seconds, math.inf)

    def _shut_down(self, seconds: float, unanswered_seconds: float) -> None:
        if self._is_shut:
            return
        self._down = True
        deadline, of_recording = Deadline.after(seconds), Deadline.after(seconds / 2)
        try:
            if (attached := self._attached) is not None:
                attached.release(of_recording)
            self.detach(of_recording)
        except Exception as error:  # noqa: BLE001 - the exporters are shut down whatever this is
            self._log.warning("stopping the recording failed: %s: %s", type(error).__name__, error)
        for left, queue in zip(range(len(self._queues), 0, -1), self._queues, strict=True):
            # One that hangs must not take the time of those after it, whose exporters may have files to close.
            share = deadline.remaining() / left
            queue.shutdown(Deadline.after(share), unanswered_seconds / len(self._queues))
        self._heap.look(0)
        self._is_shut = True  # only now: a shutdown that was interrupted is to be called again

    # ---- what users ask ----

    def key_averages(self) -> EventList[FunctionEventAvg]:
        """Sums and counts by name, over the life of this processor, up to now: torch's operators, labels, modules, steps.

        The spans of the application are in it too, with the time that was neither in their children nor in torch as their
        own. Takes what has been recorded first (some 0.3 us per event since the last drain). Memory is constant: it grows
        with the number of names only. Any thread, at any time, also after the shutdown. An operator that only calls one of
        its own name is one with it, as in torch's lists; where a drain comes between their ends, they count as two.
        """
        self._flush(Deadline.after(_SHUTDOWN_SECONDS))
        sums, device = self.averages.read(), self.averages.device_type
        return averages_list(sums, None if device is None else device_name(device))

    def explain(self) -> Explanation:
        """What the last 1,000 steps were bound by, with the evidence: as :func:`otel_torchprof.explain` of a file, of this rank.

        By phases, and by what the system says of each step: operators, gaps between them and collectives are in files only. Takes what
        has been recorded first; some 10 ms. Any thread, at any time, also after the shutdown.

        Raises:
            TorchProfError: no step has ended.
        """
        self._flush(Deadline.after(_SHUTDOWN_SECONDS))
        health = self.health
        rank = self._steps.rank(events=health.recorded, dropped=sum(health.dropped.values()))
        if rank is None:
            raise TorchProfError("no step has ended yet: train for some steps, or call TorchInstrumentor().step()")
        return explained([rank])

    @property
    def health(self) -> ProcessorHealth:
        """What is on, what is off and why, what was recorded, dropped, sent and refused; at any time."""
        attached = self._attached
        # Who is asked for the notes brings the sources up to date.
        notes = () if attached is None else tuple(attached.notes())
        if self._lag:
            notes += (
                f"the events taken last were {self._lag / 1e9:.1f} s old: the oldest go where that fills the memory",
            )
        with self._ledger.lock:
            entries = self._ledger.read()
            exporters = {
                f"{number} {type(queue.exporter).__name__}": queue.stats for number, queue in enumerate(self._queues)
            }
        sources = {"recording": "off: not instrumented"} if attached is None else {"recording": ON, **attached.sources}
        return ProcessorHealth(sources, entries.recorded, entries.dropped, exporters, notes, entries.spans)

    # ---- what the instrumentor calls ----

    @property
    def exporter_figures(self) -> list[ExporterFigures]:
        """What became of the spans, for metrics."""
        return exporter_figures(self._queues, self._settings.max_queue_size)

    def figures(self) -> RecorderFigures:
        """What was recorded, lost and sent so far, for metrics; any thread."""
        with self._ledger.lock:
            entries, exporters = self._ledger.read(), self.exporter_figures
        return RecorderFigures(entries, self._recorder_bytes(), self.memory_limit, exporters=exporters)

    def refresh(self) -> None:
        """Takes what has been recorded so far, for a second at most; any thread. Before metrics are read."""
        self._drain(Deadline.after(_REFRESH_SECONDS))

    @property
    def is_shut_down(self) -> bool:
        """Whether :meth:`shutdown` was called."""
        return self._down

    def attach(
        self,
        recording: LiveRecording,
        release: Callable[[Deadline], None],
        sources: Mapping[str, str],
        notes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Lets it drain a recording from now on; ``release`` stops the instrumentation when the provider shuts down.

        ``sources`` and ``notes`` are for :attr:`health`, which shows what they are when it is asked.
        """
        with self._drainer.lock:  # else a shutdown between the two would leave a thread behind
            self._attached = _Attached(recording, release, sources, notes)
            self._drainer.start()

    def detach(self, deadline: Deadline | None = None) -> None:
        """Ends that: stops the recording and takes the rest, within 30 seconds. Its exporters stay open."""
        attached = self._attached
        try:
            with self._ledger.let_go():
                self._drainer.end(deadline or Deadline.after(_SHUTDOWN_SECONDS), self._claim)
        except KeyboardInterrupt:
            self._attached = self._attached or attached  # for the next call
            raise

    def hand_over(self, to: TorchSpanProcessor) -> None:
        """Lets another processor drain the recording from now on, and has the averages so far; what waits for exporters stays here."""
        attached, self._attached = self._attached, None
        self._drainer.end(Deadline.after(_SHUTDOWN_SECONDS))
        if attached is None:
            return
        to.averages = self.averages
        with self._ledger.lock, to._ledger.lock:
            buffered = self._ledger.read().spans.get("buffered", 0)
            self._ledger.add(-buffered, {}, {"buffered": -buffered})
            to._ledger.add(buffered, {}, {"buffered": buffered})
        to.attach(attached.recording, attached.release, attached.sources, attached.notes)

    # ---- within ----

    def _claim(self) -> Ending | None:
        attached, self._attached = self._attached, None
        if attached is None:
            return None
        recording = attached.recording
        return Ending(
            recording.stop,
            lambda: self._hand_on(recording.finish),
            lambda: self._hand_on(recording.give_up),
            lambda: self._ledger.add(*recording.abandon()),
        )

    def _recorder_bytes(self) -> int:
        attached = self._attached
        return 0 if attached is None else attached.recording.bytes_buffered

    def _is_due(self) -> bool:
        """Whether so much waits that it is to be taken before it is time; gives memory back where a backlog is over."""
        held, before = self._recorder_bytes(), self._held
        self._held = held
        self._heap.look(held + sum(queue.stats.waiting_bytes for queue in self._queues), is_idle=held == before)
        attached = self._attached
        full = attached is not None and attached.recording.holds(SLICE_BYTES)
        return full or len(self._ended) >= _MAX_ENDED // 8

    def _flush(self, deadline: Deadline) -> bool:
        """As :meth:`_drain`, and nothing that was recorded until now waits to be told its step."""
        if (attached := self._attached) is not None:
            attached.recording.flush()
        return self._drain(deadline)

    def _drain(self, deadline: Deadline) -> bool:
        """Hands on what was recorded until now; False where there was no time or it failed."""
        with self._ledger.let_go():
            return self._drainer.drain(deadline)

    def _hand_on(self, take: Callable[[], Drained | None] | None = None) -> int:
        attached, ended = self._attached, len(self._ended)
        if take is None and attached is not None:
            take = attached.recording.drain
        drained = None if take is None else take()
        if drained is None and take is not None:  # what ran inside of the application's spans waits, and so do they
            if attached is not None and len(self._ended) >= _MAX_ENDED // 8:
                attached.recording.flush()
            return NEVER
        watermark = NEVER if drained is None else drained.watermark
        self._lag = 0 if watermark == NEVER else max(now_ns() - watermark, 0)
        if drained is not None:
            self._hand_on_spans(drained)
        self._hand_on_application(ended, watermark)
        return watermark

    def _hand_on_spans(self, drained: Drained) -> None:
        ready = []
        for queue in self._queues:
            spans = drained.spans if takes_whole_traces(queue.exporter) else drained.sent
            if len(spans):
                ready.append((queue, spans.packed() if queue.is_behind else spans))
        with self._ledger.lock:  # until they wait in the queues they are nowhere
            self._ledger.add(drained.events, drained.dropped, drained.figures)
            for queue, spans in ready:
                queue.add(spans, spans.nbytes)
        for queue in self._queues:
            queue.say()
        self._steps.add(drained.steps)
        for span_id, time_ns in drained.child_time.items():
            self._child_times[span_id] = self._child_times.get(span_id, 0) + time_ns

    def _hand_on_application(self, count: int, watermark: int) -> None:
        """The application's spans, so many that had ended before the drain, as far as what ran inside of them was drained."""
        ended: list[_Ended] = []
        while len(ended) < count and self._ended and self._ended[0][0] <= watermark:
            ended.append(self._ended.popleft())
        spans = [span for *_, span in ended if span is not None and span.context is not None]
        sampled = [span for span in spans if span.context.trace_flags.sampled]
        unseen, self._unseen = self._unseen, 0
        with self._ledger.lock:
            self._ledger.add(0, {"unseen_spans": unseen}, {"application": len(sampled)})
            for queue in self._sdk_queues if sampled else ():
                queue.add(sampled, _SPAN_BYTES * len(sampled))
        for queue in self._sdk_queues:
            queue.say()
        self._add_up(ended)

    def _add_up(self, ended: Sequence[_Ended]) -> None:
        """Adds spans of the application to the averages; children come before their parents, or are not counted there."""
        for end, start, name, span_id, parent_id, _span in ended:
            if start is None:
                continue
            duration = max(end - start, 0)  # the SDK reads a wall clock that may have been set back
            own = duration - self._child_times.pop(span_id, 0)
            self.averages.add_span(_text_of(name), duration, max(own, 0))
            if parent_id:
                self._child_times[parent_id] = self._child_times.get(parent_id, 0) + duration
        while len(self._child_times) > _MAX_OPEN_SPANS:  # spans that never end: the oldest go
            del self._child_times[next(iter(self._child_times))]

    @classmethod
    def after_fork_in_child(cls) -> None:
        """Lets every processor of a forked child begin anew: the parent sends what the parent recorded."""
        for processor in list(cls._living):
            processor._log.after_fork_in_child()  # noqa: SLF001 - its own class
            processor._reset()  # noqa: SLF001


def _ended(span: ReadableSpan, kept: ReadableSpan | None) -> _Ended:
    """What is needed of a span that has ended.

    Spans wait for a drain by the thousand. Kept as they are, each is a dozen objects that the garbage collector goes through
    again and again: 66 us of collections per request of 36 us (measured). A plain tuple of plain values it leaves alone, once
    it has seen it; a subclass such as a NamedTuple it does not, nor one with another inside that it has not seen.
    """
    context, parent, start, end = span.context, span.parent, span.start_time, span.end_time
    if context is None or end is None:
        return end or 0, None, "", 0, 0, kept
    return end, start, span.name, context.span_id, 0 if parent is None or parent.is_remote else parent.span_id, kept


def _text_of(name: object) -> str:
    """The SDK takes any object for a name; the text of one may be somebody's code, which is run on the drain's thread."""
    try:
        return str(name)
    except Exception:  # noqa: BLE001 - whatever it raises, the events of this drain are not lost by it
        return f"({type(name).__name__})"


def _check_exporters(exporters: Sequence[SpanExporter]) -> None:
    for exporter in exporters:
        if not callable(getattr(exporter, "export", None)):
            raise TypeError(
                f"{exporter!r} is no SpanExporter: pass exporters, such as OTLPExporter() or ChromeTraceExporter(path)"
            )


def _takes_sdk_spans(exporter: Any, sdk_spans: bool | None) -> bool:
    return isinstance(exporter, ChromeTraceExporter) if sdk_spans is None else sdk_spans


fork.call_late(after_in_child=TorchSpanProcessor.after_fork_in_child)
