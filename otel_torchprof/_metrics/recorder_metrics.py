"""How the recorder itself does, as OpenTelemetry metrics: what it recorded and lost, what became of the spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import Observation

from otel_torchprof._export.ledger import QUEUE_FULL
from otel_torchprof._native.recorder import recorder_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.metrics import Meter

    from otel_torchprof._export.ledger import Entries
    from otel_torchprof._export.queue import ExportQueue
    from otel_torchprof.health import QueueStats

NAME = "otel.component.name"
TYPE = "otel.component.type"
ERROR = "error.type"
REDUCTION = "torch.reduction"
DECISION = "torch.decision"
NAME_KIND = "torch.name.kind"
_REDUCTIONS = ("aggregated", "collapsed", "detail_dropped")
_DECISIONS = ("sampled", "root_only")


@dataclass(frozen=True)
class ExporterFigures:
    """One exporter and its queue."""

    name: str
    """Distinguishes it from others of its type."""
    type: str
    """Its class."""
    stats: QueueStats
    capacity: int
    "Maximum number of spans in the queue of an exporter."


@dataclass(frozen=True)
class RecorderFigures:
    """State of a recording."""

    entries: Entries
    """What became of its events so far."""
    buffer_bytes: int
    """What the recorder holds."""
    buffer_limit: int
    """What it may hold."""
    share: float | None = None
    """Of the time that recording cost; None where that is not measured."""
    exporters: Sequence[ExporterFigures] = field(default=())


def exporter_figures(queues: Sequence[ExportQueue], capacity: int) -> list[ExporterFigures]:
    """The figures of a processor's exporters; the names hold for the life of the processor."""
    found = []
    for number, queue in enumerate(queues):
        kind = f"{type(queue.exporter).__module__}.{type(queue.exporter).__qualname__}"
        found.append(ExporterFigures(f"{kind}/{number}", kind, queue.stats, capacity))
    return found


class RecorderMetrics:
    """The instruments; without a :attr:`source` they show nothing. Reading is for any thread.

    Names are those of OpenTelemetry's conventions for what an SDK reports about itself (``otel.sdk.*``) where it is the same thing: spans
    in queues and exporters. An exporter's queue is what a processor is there: one each.
    """

    def __init__(self, meter: Meter) -> None:
        self.source: Callable[[], RecorderFigures] | None = None
        for name, unit, observe, description in (
            ("otel_torchprof.events.recorded", "{event}", self._recorded, "Number of recorded events."),
            ("otel_torchprof.events.dropped", "{event}", self._dropped, "Number of dropped events, by reason."),
            (
                "otel_torchprof.spans.reduced",
                "{span}",
                self._reduced,
                "Number of spans that the policy aggregated, collapsed, or dropped with the detail of their step.",
            ),
            (
                "otel_torchprof.names.refused",
                "{use}",
                self._names,
                "Number of uses of names beyond the limit of their kind, which share one name.",
            ),
            ("otel_torchprof.steps.decided", "{step}", self._decided, "Number of steps, by sampling decision."),
            (
                "otel.sdk.exporter.span.exported",
                "{span}",
                self._exported,
                "Number of spans for which the export has finished, successfully or not.",
            ),
            (
                "otel.sdk.processor.span.processed",
                "{span}",
                self._processed,
                "Number of spans that left the queue of an exporter, exported or not.",
            ),
        ):
            meter.create_observable_counter(name, [self._observing(observe)], unit=unit, description=description)
        for name, unit, observe, description in (
            ("otel_torchprof.buffer.usage", "By", self._buffer, "Memory of the recorder for events."),
            ("otel_torchprof.buffer.limit", "By", self._limit, "Memory limit of the recorder for events."),
            ("otel.sdk.processor.span.queue.size", "{span}", self._waiting, "Number of spans queued for an exporter."),
            (
                "otel_torchprof.queue.usage",
                "By",
                self._waiting_bytes,
                "Memory of the spans queued for an exporter.",
            ),
            ("otel.sdk.processor.span.queue.capacity", "{span}", self._capacity, "Maximum number of queued spans."),
        ):
            meter.create_observable_up_down_counter(
                name, [self._observing(observe)], unit=unit, description=description
            )
        for name, unit, observe, description in (
            ("otel_torchprof.overhead", "1", self._share, "Measured cost of recording, as a share of the time."),
            (
                "otel_torchprof.exporter.outage",
                "s",
                self._outage,
                "Time for which the receiver has accepted nothing; 0 while it accepts spans.",
            ),
        ):
            meter.create_observable_gauge(name, [self._observing(observe)], unit=unit, description=description)

    def _observing(self, observe: Callable[[RecorderFigures], list[Observation]]) -> Callable[[Any], list[Observation]]:
        def observed(_options: Any) -> list[Observation]:
            source = self.source
            return [] if source is None else observe(source())

        return observed

    @staticmethod
    def _recorded(figures: RecorderFigures) -> list[Observation]:
        return [Observation(figures.entries.recorded)]

    @staticmethod
    def _dropped(figures: RecorderFigures) -> list[Observation]:
        return [Observation(count, {ERROR: reason}) for reason, count in figures.entries.dropped.items()]

    @staticmethod
    def _names(_figures: RecorderFigures) -> list[Observation]:
        return [Observation(count, {NAME_KIND: kind}) for kind, count in recorder_stats().names_refused.items()]

    @staticmethod
    def _reduced(figures: RecorderFigures) -> list[Observation]:
        spans = figures.entries.spans
        return [Observation(spans[how], {REDUCTION: how}) for how in _REDUCTIONS if how in spans]

    @staticmethod
    def _decided(figures: RecorderFigures) -> list[Observation]:
        spans = figures.entries.spans
        return [Observation(spans[how], {DECISION: how}) for how in _DECISIONS if how in spans]

    @staticmethod
    def _buffer(figures: RecorderFigures) -> list[Observation]:
        return [Observation(figures.buffer_bytes)]

    @staticmethod
    def _limit(figures: RecorderFigures) -> list[Observation]:
        return [Observation(figures.buffer_limit)]

    @staticmethod
    def _share(figures: RecorderFigures) -> list[Observation]:
        return [] if figures.share is None else [Observation(figures.share)]

    @staticmethod
    def _exported(figures: RecorderFigures) -> list[Observation]:
        found = []
        for each in figures.exporters:
            about = {NAME: each.name, TYPE: each.type}
            found.append(Observation(each.stats.exported_spans, about))
            found.append(Observation(each.stats.failed_spans, {**about, ERROR: "export_failed"}))
        return found

    @staticmethod
    def _processed(figures: RecorderFigures) -> list[Observation]:
        found = []
        for each in figures.exporters:
            about = _queue_of(each)
            found.append(Observation(each.stats.exported_spans + each.stats.failed_spans, about))
            # The reason of the conventions is there from the beginning, the others when there is something to tell.
            for reason, count in {QUEUE_FULL: 0, **each.stats.dropped}.items():
                found.append(Observation(count, {**about, ERROR: reason}))
        return found

    @staticmethod
    def _waiting(figures: RecorderFigures) -> list[Observation]:
        return [Observation(each.stats.waiting_spans, _queue_of(each)) for each in figures.exporters]

    @staticmethod
    def _waiting_bytes(figures: RecorderFigures) -> list[Observation]:
        return [Observation(each.stats.waiting_bytes, _queue_of(each)) for each in figures.exporters]

    @staticmethod
    def _outage(figures: RecorderFigures) -> list[Observation]:
        return [
            Observation(each.stats.outage_seconds, {NAME: each.name, TYPE: each.type}) for each in figures.exporters
        ]

    @staticmethod
    def _capacity(figures: RecorderFigures) -> list[Observation]:
        return [Observation(each.capacity, _queue_of(each)) for each in figures.exporters]


def _queue_of(exporter: ExporterFigures) -> dict[str, str]:
    kind = "otel_torchprof.TorchSpanProcessor"
    return {NAME: f"{kind}/{exporter.name}", TYPE: kind}
