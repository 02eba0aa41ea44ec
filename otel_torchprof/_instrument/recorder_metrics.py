"""Metrics of the recorder itself: recorded and dropped events, and outcomes of spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import Observation

from otel_torchprof._export.ledger import OUTAGE, QUEUE_FULL
from otel_torchprof._native.recorder import recorder_stats
from otel_torchprof._record.process_memory import allocators, resident_memory

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
DEVICE_TYPE, DEVICE_INDEX = "torch.device.type", "torch.device.index"
_REDUCTIONS = ("aggregated", "collapsed", "detail_dropped")
_DECISIONS = ("sampled", "root_only")


@dataclass(frozen=True)
class ExporterFigures:
    """Figures of an exporter and its queue."""

    name: str
    """Unique among exporters of its type."""
    type: str
    """Name of its class."""
    stats: QueueStats
    capacity: int
    """Maximum number of spans in the queue."""


@dataclass(frozen=True)
class RecorderFigures:
    """State of a recording."""

    entries: Entries
    """Outcomes of its events so far."""
    buffer_bytes: int
    """Memory of the recorder for events."""
    buffer_limit: int
    """Limit of that memory."""
    share: float | None = None
    """Share of the time that recording cost; None if it is not measured."""
    exporters: Sequence[ExporterFigures] = field(default=())


def exporter_figures(queues: Sequence[ExportQueue], capacity: int) -> list[ExporterFigures]:
    """The figures of a processor's exporters."""
    return [ExporterFigures(queue.component_name, queue.component_type, queue.stats, capacity) for queue in queues]


def _recorded(figures: RecorderFigures) -> list[Observation]:
    return [Observation(figures.entries.recorded)]


def _dropped(figures: RecorderFigures) -> list[Observation]:
    return [Observation(count, {ERROR: reason}) for reason, count in figures.entries.dropped.items()]


def _names(_figures: RecorderFigures) -> list[Observation]:
    return [Observation(count, {NAME_KIND: kind}) for kind, count in recorder_stats().names_refused.items()]


def _reduced(figures: RecorderFigures) -> list[Observation]:
    spans = figures.entries.spans
    return [Observation(spans[how], {REDUCTION: how}) for how in _REDUCTIONS if how in spans]


def _decided(figures: RecorderFigures) -> list[Observation]:
    spans = figures.entries.spans
    return [Observation(spans[how], {DECISION: how}) for how in _DECISIONS if how in spans]


def _resident(_figures: RecorderFigures) -> list[Observation]:
    resident = resident_memory()
    return [] if resident is None else [Observation(resident)]


def _of_allocators(quantity: str) -> Callable[[RecorderFigures], list[Observation]]:
    def observe(_figures: RecorderFigures) -> list[Observation]:
        return [
            Observation(getattr(each, quantity), {DEVICE_TYPE: "cuda", DEVICE_INDEX: each.device})
            for each in allocators()
        ]

    return observe


def _buffer(figures: RecorderFigures) -> list[Observation]:
    return [Observation(figures.buffer_bytes)]


def _limit(figures: RecorderFigures) -> list[Observation]:
    return [Observation(figures.buffer_limit)]


def _share(figures: RecorderFigures) -> list[Observation]:
    return [] if figures.share is None else [Observation(figures.share)]


def _exported(figures: RecorderFigures) -> list[Observation]:
    observations = []
    for exporter in figures.exporters:
        stats, attributes = exporter.stats, {NAME: exporter.name, TYPE: exporter.type}
        observations.append(Observation(stats.exported_spans, attributes))
        rejected = stats.rejected_spans
        failed = {"export_failed": stats.failed_spans - rejected, **({"rejected": rejected} if rejected else {})}
        for reason, count in {**failed, **stats.dropped_passed}.items():
            observations.append(Observation(count, {**attributes, ERROR: reason}))
    return observations


def _processed(figures: RecorderFigures) -> list[Observation]:
    observations = []
    for exporter in figures.exporters:
        attributes = _queue_of(exporter)
        observations.append(Observation(exporter.stats.passed_spans, attributes))
        dropped = Counter(exporter.stats.dropped) - Counter(exporter.stats.dropped_passed)
        dropped[QUEUE_FULL] += dropped.pop(OUTAGE, 0)  # to the conventions, an outage is a full queue
        observations += [Observation(count, {**attributes, ERROR: reason}) for reason, count in dropped.items()]
    return observations


def _inflight(figures: RecorderFigures) -> list[Observation]:
    observations = []
    for exporter in figures.exporters:
        stats = exporter.stats
        ended = stats.exported_spans + stats.failed_spans + sum(stats.dropped_passed.values())
        observations.append(Observation(stats.passed_spans - ended, {NAME: exporter.name, TYPE: exporter.type}))
    return observations


def _waiting(figures: RecorderFigures) -> list[Observation]:
    return [Observation(exporter.stats.waiting_spans, _queue_of(exporter)) for exporter in figures.exporters]


def _waiting_bytes(figures: RecorderFigures) -> list[Observation]:
    return [Observation(exporter.stats.waiting_bytes, _queue_of(exporter)) for exporter in figures.exporters]


def _outage(figures: RecorderFigures) -> list[Observation]:
    return [
        Observation(exporter.stats.outage_seconds, {NAME: exporter.name, TYPE: exporter.type})
        for exporter in figures.exporters
    ]


def _capacity(figures: RecorderFigures) -> list[Observation]:
    return [Observation(exporter.capacity, _queue_of(exporter)) for exporter in figures.exporters]


def _queue_of(exporter: ExporterFigures) -> dict[str, str]:
    kind = "otel_torchprof.TorchSpanProcessor"
    return {NAME: f"{kind}/{exporter.name}", TYPE: kind}


_INSTRUMENTS = (
    ("up_down_counter", "process.memory.usage", "By", _resident, "The amount of physical memory in use."),
    (
        "up_down_counter",
        "torch.allocator.allocated",
        "By",
        _of_allocators("allocated"),
        "Memory of tensors on a device, as torch's allocator counts it.",
    ),
    (
        "up_down_counter",
        "torch.allocator.reserved",
        "By",
        _of_allocators("reserved"),
        "Memory that torch's allocator has of a device.",
    ),
    ("gauge", "torch.allocator.peak", "By", _of_allocators("peak"), "The most memory of tensors so far on a device."),
    ("counter", "otel_torchprof.events.recorded", "{event}", _recorded, "Number of recorded events."),
    ("counter", "otel_torchprof.events.dropped", "{event}", _dropped, "Number of dropped events, by reason."),
    (
        "counter",
        "otel_torchprof.spans.reduced",
        "{span}",
        _reduced,
        "Number of spans that the policy aggregated, collapsed, or dropped with the detail of their step.",
    ),
    (
        "counter",
        "otel_torchprof.names.refused",
        "{use}",
        _names,
        "Number of uses of names beyond the limit of their kind, which share one name.",
    ),
    ("counter", "otel_torchprof.steps.decided", "{step}", _decided, "Number of steps, by sampling decision."),
    (
        "counter",
        "otel.sdk.exporter.span.exported",
        "{span}",
        _exported,
        "Number of spans for which the export has finished, successfully or not.",
    ),
    (
        "counter",
        "otel.sdk.processor.span.processed",
        "{span}",
        _processed,
        "Number of spans that were passed to an exporter, or dropped from its queue before that.",
    ),
    ("up_down_counter", "otel_torchprof.buffer.usage", "By", _buffer, "Memory of the recorder for events."),
    ("up_down_counter", "otel_torchprof.buffer.limit", "By", _limit, "Memory limit of the recorder for events."),
    (
        "up_down_counter",
        "otel.sdk.processor.span.queue.size",
        "{span}",
        _waiting,
        "Number of spans queued for an exporter.",
    ),
    (
        "up_down_counter",
        "otel_torchprof.queue.usage",
        "By",
        _waiting_bytes,
        "Memory of the spans queued for an exporter.",
    ),
    (
        "up_down_counter",
        "otel.sdk.exporter.span.inflight",
        "{span}",
        _inflight,
        "Number of spans that were passed to an exporter and are neither exported nor failed.",
    ),
    (
        "up_down_counter",
        "otel.sdk.processor.span.queue.capacity",
        "{span}",
        _capacity,
        "Maximum number of queued spans.",
    ),
    ("gauge", "otel_torchprof.overhead", "1", _share, "Measured cost of recording, as a share of the time."),
    (
        "gauge",
        "otel_torchprof.exporter.outage",
        "s",
        _outage,
        "Time for which the receiver has accepted nothing; 0 while it accepts spans.",
    ),
)


class RecorderMetrics:
    """The instruments of the recorder; without a :attr:`source` they report nothing. Reading is thread-safe.

    Spans in queues and exporters have the metrics of OpenTelemetry's conventions for SDKs (``otel.sdk.*``), in which the queue of
    each exporter is a processor.
    """

    def __init__(self, meter: Meter) -> None:
        self.source: Callable[[], RecorderFigures] | None = None
        for kind, name, unit, observe, description in _INSTRUMENTS:
            create = getattr(meter, f"create_observable_{kind}")
            create(name, [self._observing(observe)], unit=unit, description=description)

    def _observing(self, observe: Callable[[RecorderFigures], list[Observation]]) -> Callable[[Any], list[Observation]]:
        def observed(_options: Any) -> list[Observation]:
            source = self.source
            return [] if source is None else observe(source())

        return observed
