"""``TorchSpanProcessor``: adds torch's spans to the traces of a service."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

from opentelemetry.sdk.trace import SpanProcessor

from otel_torchprof import config
from otel_torchprof._answers.rank_reading import LiveSteps
from otel_torchprof._answers.verdicts import explained
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._export.draining import Drainer, Ending
from otel_torchprof._export.ledger import Ledger
from otel_torchprof._export.queue import Deadline, ExportQueue, QueueSettings
from otel_torchprof._export.sdk import is_disabled, takes_whole_traces
from otel_torchprof._model.averages import RunningAverages, count_span
from otel_torchprof._model.devices import device_name
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import process_changes
from otel_torchprof._process.heap import Heap
from otel_torchprof._process.quiet import LimitedLog
from otel_torchprof._profile.events import averages_list
from otel_torchprof._ranks.ranks import starts_loader_worker
from otel_torchprof._record.recording import checked_memory_limit
from otel_torchprof.errors import TorchProfError, warn_once
from otel_torchprof.health import ON, ProcessorHealth

from .recorder_metrics import ExporterFigures, RecorderFigures, exporter_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.trace.export import SpanExporter

    from otel_torchprof._answers.explanation import Explanation
    from otel_torchprof._model.request_spans import RequestSpans
    from otel_torchprof._profile.events import EventList, FunctionEventAvg

    from .live_recording import Drained, LiveRecording

    _Ended = tuple[int, int | None, str, int, int, ReadableSpan | None]
    """An ended span: end, start (Unix ns; None: it is in no averages), name as given, id, id of the parent (0 for none or a remote
    one), and the span itself if an exporter takes it."""

_SHUTDOWN_SECONDS = 30.0
_UNANSWERED_SECONDS = 5.0
"""Limit of a shutdown if no receiver has ever responded: it probably does not exist, and the program should not wait for it."""
_REFRESH_SECONDS = 1.0
_MAX_OPEN_SPANS = 100_000
"""Most application spans whose child time is stored, which limits memory if spans never end."""
_MAX_ENDED = 100_000
"""Most ended application spans that wait for a drain; the oldest of more are not in the averages."""
_SPAN_BYTES = 2800
"""Memory of a span object of the SDK, for the queue's limit (measured with five attributes)."""


class TorchSpanProcessor(SpanProcessor):
    """Adds torch's spans to the traces of a service and sends them to its own exporters.

    Add it to a TracerProvider, then call ``TorchInstrumentor().instrument(tracer_provider=provider)``; until then it
    has nothing to process. Spans of the application pass through it as through any processor: they are parents of the
    work inside them and part of the averages. The application's own processors send them; this one sends them only to a
    :class:`ChromeTraceExporter`, whose file would be incomplete without them.

    Never blocks the application's threads: ``on_start`` and ``on_end`` take a microsecond, recording takes some tens of
    nanoseconds per operator, and two background threads do the rest. Thread-safe and fork-safe.

    Args:
        exporters: any SpanExporter. :class:`OTLPExporter`, :class:`OTLPFileExporter` and :class:`ChromeTraceExporter`
            take spans as columns, at about 100 ns each; others take objects, at about 20 us each.
        sdk_spans: whether the application's spans go to these exporters: None, to Chrome files only, while torch is
            instrumented; True, to all, even while it is not (for a provider without other processors); False, to none.
            Default: None.
        memory_limit: limit of the recorder in bytes, beyond which the oldest events are dropped and counted. Default:
            ``OTEL_TORCHPROF_MEMORY_LIMIT``, else 512 MiB.
        max_queue_size: limit of spans waiting per exporter, beyond which the oldest are dropped and counted. Default:
            ``OTEL_BSP_MAX_QUEUE_SIZE``.
        max_queue_bytes: memory limit of the spans waiting per exporter, in bytes; it limits the length of an outage
            that loses nothing, at about 120 bytes per span. Default: ``OTEL_TORCHPROF_MAX_QUEUE_BYTES``, else 256 MiB.
        schedule_delay_millis: milliseconds between two exports. Default: ``OTEL_BSP_SCHEDULE_DELAY``.
        max_export_batch_size: spans per call of an exporter that takes objects. Default:
            ``OTEL_BSP_MAX_EXPORT_BATCH_SIZE``.
        export_timeout_millis: milliseconds for one call of an exporter. Default: ``OTEL_BSP_EXPORT_TIMEOUT``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it.

    Examples:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        >>> exporter = InMemorySpanExporter()
        >>> provider = TracerProvider()
        >>> provider.add_span_processor(otp.TorchSpanProcessor(exporter))
        >>> otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops")
        >>> with provider.get_tracer("app").start_as_current_span("request"):
        ...     y = torch.ones(3) + 1
        >>> otp.TorchInstrumentor().uninstrument()
        >>> provider.force_flush()
        True
        >>> [span.name for span in exporter.get_finished_spans() if "add" in span.name]
        ['aten::add']
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
        process_changes.import_now("numpy.ma")  # numpy.unique would
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
        # As the provider's only processor it sends the application's spans even while torch is not instrumented.
        self._sends_alone = sdk_spans is True
        self._log = LimitedLog()
        self._down = self._is_shut = False
        self._reset()
        self._living.add(self)
        if not self._sends_alone:
            unused.note_processor()

    def _reset(self) -> None:
        """Resets the state of one process: a forked child has no threads and may have locks that are never released."""
        self._attached: LiveRecording | None = None
        delay = self._settings.schedule_delay_millis / 1000
        self._drainer = Drainer(delay, self._hand_on, self._is_due, self._backlog)
        self._ended: deque[_Ended] = deque(maxlen=_MAX_ENDED)
        self.averages = RunningAverages()
        self._child_times: dict[int, int] = {}
        self._steps = LiveSteps()
        self._lag = self._unseen = self._buffered_bytes = 0
        self._heap = Heap()

    @property
    def takes_whole_traces(self) -> bool:
        """Whether an exporter takes all spans of a trace, whatever the policy leaves out."""
        return any(takes_whole_traces(queue.exporter) for queue in self._queues)

    # ---- called by the SDK ----

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002 - the SDK's signature
        """Notes a trace that began in another process, for its size limit. Costs 0.1 microseconds.

        Recordings find the current span of the application themselves.
        """
        # spans of other SDKs may have no parent attribute
        attached, parent = self._attached, getattr(span, "parent", None)
        if attached is not None and parent is not None and parent.is_remote:
            attached.trace_joined(parent.trace_id)

    def on_end(self, span: ReadableSpan) -> None:
        """Queues an ended span of the application for the next drain. Costs a microsecond."""
        attached = self._attached
        if self._down or (attached is None and not self._sends_alone):
            return
        if len(self._ended) == _MAX_ENDED:
            self._unseen += 1
        ended = _ended(span, span if self._sdk_queues else None)
        self._ended.append(ended)
        if attached is not None:
            attached.span_ended(ended[3])
        if self._sends_alone and not self._drainer.has_thread:
            self._drainer.start()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends everything that was recorded so far.

        Args:
            timeout_millis: limit in milliseconds, shared by all exporters.

        Returns:
            False after the timeout, or if an exporter failed; else True.
        """
        deadline = Deadline.after(timeout_millis / 1000)
        drained = self._flush(deadline)
        # All queues are flushed, even if one is too slow: each has its own thread, and they share the deadline.
        flushed = [queue.force_flush(deadline) for queue in self._queues]
        return drained and all(flushed)

    def shutdown(self) -> None:
        """Stops recording, sends the remaining spans and shuts the exporters down, within 30 seconds.

        Further calls do nothing. Exporters whose receivers have never responded share 5 seconds.
        """
        self._shut_down(_SHUTDOWN_SECONDS, _UNANSWERED_SECONDS)

    def shutdown_within(self, seconds: float) -> None:
        """Like :meth:`shutdown`, within a limit in seconds for all receivers, whether they have responded or not."""
        self._shut_down(seconds, math.inf)

    def _shut_down(self, seconds: float, unanswered_seconds: float) -> None:
        if self._is_shut:
            return
        self._down = True
        deadline, of_recording = Deadline.after(seconds), Deadline.after(seconds / 2)
        try:
            self.detach(of_recording)
        except Exception as error:  # noqa: BLE001 - the exporters are shut down after any error
            self._log.warning("stopping the recording failed: %s: %s", type(error).__name__, error)
        for left, queue in zip(range(len(self._queues), 0, -1), self._queues, strict=True):
            # A hanging exporter must not use up the time of those after it, which may have files to close.
            share = deadline.remaining() / left
            queue.shutdown(Deadline.after(share), unanswered_seconds / len(self._queues))
        self._heap.look(0)
        self._is_shut = True  # last, so that an interrupted shutdown can be called again

    # ---- queries ----

    def key_averages(self) -> EventList[FunctionEventAvg]:
        """Returns sums and counts by name since the start: operators, labels, modules, steps, application spans.

        Covers the life of this processor. The self time of an application span is the time outside its children and
        outside torch. An operator that only calls one of its own name counts once, as in torch's lists, unless a drain
        comes between their ends. Drains the recorder first (about 0.3 us per event since the last drain). Memory grows
        with the number of names only. Thread-safe; also works after the shutdown. Times are in microseconds.
        """
        self._flush(Deadline.after(_SHUTDOWN_SECONDS))
        sums, device = self.averages.read(), self.averages.device_type
        return averages_list(sums, None if device is None else device_name(device))

    def explain(self) -> Explanation:
        """Explains the last 1,000 steps of this rank, with evidence, as :func:`otel_torchprof.explain` explains a file.

        Uses phases, operating system counters and samples of the Python stack of each step; operators and collectives are
        only in files. Drains the recorder first; costs about 10 ms. Thread-safe; also works after the shutdown.

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
        """State of every source, and counts of recorded, dropped, sent and refused events and spans. Thread-safe."""
        attached = self._attached
        states, notes = ({}, ()) if attached is None else attached.health()
        if self._lag:
            notes += (
                f"the events taken last were {self._lag / 1e9:.1f} s old: the oldest go where that fills the memory",
            )
        with self._ledger.lock:
            entries = self._ledger.read()
            exporters = {
                f"{number} {type(queue.exporter).__name__}": queue.stats for number, queue in enumerate(self._queues)
            }
        sources = {"recording": "off: not instrumented"} if attached is None else {"recording": ON, **states}
        return ProcessorHealth(sources, entries.recorded, entries.dropped, exporters, notes, entries.spans)

    # ---- called by the instrumentor ----

    @property
    def exporter_figures(self) -> list[ExporterFigures]:
        """Outcomes of the spans, for metrics."""
        return exporter_figures(self._queues, self._settings.max_queue_size)

    def figures(self) -> RecorderFigures:
        """Returns counts of recorded, dropped and sent events and spans, for metrics. Thread-safe."""
        with self._ledger.lock:
            entries, exporters = self._ledger.read(), self.exporter_figures
        return RecorderFigures(entries, self._recorder_bytes(), self.memory_limit, exporters=exporters)

    def refresh(self) -> None:
        """Drains the recorder before metrics are read, for a second at most. Thread-safe."""
        self._drain(Deadline.after(_REFRESH_SECONDS))

    @property
    def is_shut_down(self) -> bool:
        """Whether :meth:`shutdown` was called."""
        return self._down

    def attach(self, recording: LiveRecording) -> None:
        """Starts draining a recording, which ends with :meth:`detach` or when the provider shuts down."""
        with self._drainer.lock:  # a shutdown between the two lines would leave a thread running
            self._attached = recording
            self._drainer.start()

    def detach(self, deadline: Deadline | None = None) -> None:
        """Stops the recording and drains the rest, within 30 seconds. The exporters stay open."""
        attached = self._attached
        try:
            with self._ledger.let_go():
                self._drainer.end(deadline or Deadline.after(_SHUTDOWN_SECONDS), self._claim)
        except (KeyboardInterrupt, SystemExit):
            self._attached = self._attached or attached  # for the next call
            raise

    def hand_over(self, to: TorchSpanProcessor) -> None:
        """Moves the recording and its averages to another processor; spans that wait for exporters stay in this one."""
        attached, self._attached = self._attached, None
        self._drainer.end(Deadline.after(_SHUTDOWN_SECONDS))
        if attached is None:
            return
        to.averages = self.averages
        with self._ledger.lock, to._ledger.lock:
            buffered = self._ledger.read().spans.get("buffered", 0)
            self._ledger.add(-buffered, {}, {"buffered": -buffered})
            to._ledger.add(buffered, {}, {"buffered": buffered})
        to.attach(attached)

    # ---- within ----

    def _claim(self) -> Ending | None:
        recording, self._attached = self._attached, None
        if recording is None:
            return None
        return Ending(
            recording.stop,
            lambda: self._hand_on(recording.finish),
            lambda: self._hand_on(recording.give_up),
            lambda: self._ledger.add(*recording.abandon()),
        )

    def _recorder_bytes(self) -> int:
        attached = self._attached
        return 0 if attached is None else attached.bytes_buffered

    def _is_due(self) -> bool:
        """Whether a drain is due before its time; also frees memory after a backlog, and looks at the control socket."""
        buffered, before = self._recorder_bytes(), self._buffered_bytes
        self._buffered_bytes = buffered
        self._heap.look(buffered + sum(queue.stats.waiting_bytes for queue in self._queues), is_idle=buffered == before)
        attached = self._attached
        if attached is not None:
            attached.look()
        return (attached is not None and attached.is_due) or len(self._ended) >= _MAX_ENDED // 8

    def _backlog(self) -> float:
        """Returns the share of the events, or of the ended application spans, that may wait and do."""
        attached = self._attached
        return max(0 if attached is None else attached.backlog, len(self._ended) / (_MAX_ENDED // 2))

    def _flush(self, deadline: Deadline) -> bool:
        """Drains, including events that wait for the end of their step."""
        if (attached := self._attached) is not None:
            attached.flush()
        return self._drain(deadline)

    def _drain(self, deadline: Deadline) -> bool:
        """Drains the recorder; False if the time was over or the drain failed."""
        with self._ledger.let_go():
            return self._drainer.drain(deadline)

    def _hand_on(self, take: Callable[[], Drained | None] | None = None) -> int:
        attached, ended = self._attached, len(self._ended)
        if take is None and attached is not None:
            take = attached.drain
        drained = None if take is None else take()
        if (
            drained is None and take is not None
        ):  # events are still buffered, so the enclosing application spans wait too
            if attached is not None and len(self._ended) >= _MAX_ENDED // 8:
                attached.flush()
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
            is_whole = takes_whole_traces(queue.exporter)
            parts = [drained.spans] if is_whole else list(drained.sent)
            if drained.requests is not None:
                parts.append(drained.requests[0] if is_whole else drained.requests[1])
            ready += [(queue, spans.packed() if queue.is_behind else spans) for spans in parts if len(spans)]
        with self._ledger.lock:  # so that no reader of the counts sees the spans between recorder and queues
            self._ledger.add(drained.events, drained.dropped, drained.figures)
            for queue, spans in ready:
                queue.add(spans, spans.nbytes)
        for queue in self._queues:
            queue.say()
        self._steps.add(drained.steps, drained.samples)
        for span_id, time_ns in drained.child_time.items():
            self._child_times[span_id] = self._child_times.get(span_id, 0) + time_ns
        if drained.requests is not None:
            self._add_up_requests(drained.requests[2])

    def _hand_on_application(self, count: int, watermark: int) -> None:
        """Queues the first ``count`` ended spans of the application, up to those whose inner events were drained."""
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
        """Adds spans of the application to the averages; children must come before their parents to count there."""
        sums: dict[str, list[int]] = {}
        for end, start, name, span_id, parent_id, _span in ended:
            if start is None:
                continue
            duration = max(end - start, 0)  # the SDK reads a wall clock that may have been set back
            own = max(duration - self._child_times.pop(span_id, 0), 0)
            count_span(sums, _text_of(name), duration, own)
            if parent_id:
                self._child_times[parent_id] = self._child_times.get(parent_id, 0) + duration
        for text, of_name in sums.items():
            self.averages.add_spans(text, of_name)
        while len(self._child_times) > _MAX_OPEN_SPANS:  # spans that never end: the oldest are removed
            del self._child_times[next(iter(self._child_times))]

    def _add_up_requests(self, spans: RequestSpans) -> None:
        """Adds spans of requests and batches to the averages."""
        for name, sums in spans.sums.items():
            self.averages.add_spans(name, sums)
        for span_id, time_ns in spans.child_time.items():
            self._child_times[span_id] = self._child_times.get(span_id, 0) + time_ns
        for name, span_id, duration in spans.others:
            own = duration - self._child_times.pop(span_id, 0)
            self.averages.add_span(name, duration, max(own, 0))

    @classmethod
    def after_fork_in_child(cls) -> None:
        """Resets every processor of a forked child: the parent sends the parent's recording."""
        for processor in list(cls._living):
            processor._log.after_fork_in_child()  # noqa: SLF001 - its own class
            processor._reset()  # noqa: SLF001


def _ended(span: ReadableSpan, exported: ReadableSpan | None) -> _Ended:
    """Extracts the needed fields of an ended span.

    Spans wait for a drain by the thousand. As objects, each is a dozen objects that the garbage collector visits again
    and again: 66 us of collections per request of 36 us (measured). A plain tuple of plain values is untracked after
    the first visit; a subclass such as a NamedTuple is not, nor is a tuple with another one inside that was not
    visited.
    """
    context, parent, start, end = span.context, span.parent, span.start_time, span.end_time
    if context is None or end is None:
        return end or 0, None, "", 0, 0, exported
    return end, start, span.name, context.span_id, 0 if parent is None or parent.is_remote else parent.span_id, exported


def _text_of(name: object) -> str:
    """Returns the name as text.

    The SDK accepts any object; its ``__str__`` may be application code, which runs on the drain's thread.
    """
    try:
        return str(name)
    except Exception:  # noqa: BLE001 - no error may lose the events of this drain
        return f"({type(name).__name__})"


def _check_exporters(exporters: Sequence[SpanExporter]) -> None:
    for exporter in exporters:
        if not callable(getattr(exporter, "export", None)):
            raise TypeError(
                f"{exporter!r} is no SpanExporter: pass exporters, such as OTLPExporter() or ChromeTraceExporter(path)"
            )


def _takes_sdk_spans(exporter: Any, sdk_spans: bool | None) -> bool:
    return getattr(exporter, "takes_application_spans", False) is True if sdk_spans is None else sdk_spans


process_changes.at_fork(process_changes.Order.EXPORT, in_child=TorchSpanProcessor.after_fork_in_child)


# ---- Warning about a TorchSpanProcessor in a program that never instruments torch ----


_STARTS_ANEW = (
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_spawn_win32",
    "multiprocessing.popen_forkserver",
)
"""Modules imported when a process is spawned: it runs the program's own code, and may be the one that instruments torch."""


def left_out_by() -> str:
    """``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS`` if it disables torch for ``opentelemetry-instrument``; else empty."""
    disabled = os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "")
    return disabled if {"torch", "*"} & {name.strip() for name in disabled.split(",")} else ""


class UnusedProcessors:
    """Whether the process has created a processor, and whether it has ever started a recording.

    The warning comes at exit: until then the program may still instrument torch. Thread-safe.
    """

    def __init__(self) -> None:
        self._has_processor = self._has_recording = False

    def note_processor(self) -> None:
        """Notes a processor that does nothing while torch is not instrumented."""
        self._has_processor = True

    def note_recording(self) -> None:
        """Notes that the program has started a recording."""
        self._has_recording = True

    def after_fork_in_parent(self) -> None:
        """Forgets the processor, unless the child is a DataLoader's worker: other children may be the ones that record."""
        if self._has_processor and not starts_loader_worker():
            self._has_processor = False

    def after_fork_in_child(self) -> None:
        """Forgets the processor of the parent."""
        self._has_processor = False

    def warn(self) -> None:
        """Warns if a processor was created and no recording was started, unless that may be intended."""
        # First: at exit, a program may already have removed what the rest needs.
        if not self._has_processor or self._has_recording:
            return
        uses_torch = "torch" in sys.modules and not any(name in sys.modules for name in _STARTS_ANEW)
        is_off = not config.ENABLED.read() or config.DETAIL.read() == "off" or is_disabled() or bool(left_out_by())
        if uses_torch and not is_off:
            warn_once(
                "a TorchSpanProcessor was made to which nothing was ever given, since torch was not instrumented: call "
                "TorchInstrumentor().instrument(), or start the program with opentelemetry-instrument"
            )


unused = UnusedProcessors()
"""Instance of the process."""
process_changes.at_exit(process_changes.Order.LAST, unused.warn)
process_changes.at_fork(
    process_changes.Order.STATE, in_parent=unused.after_fork_in_parent, in_child=unused.after_fork_in_child
)
