"""Recordings and exporters for tests of the span processor."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from live_batches import Event, Service
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import otel_torchprof as otp
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.sdk import instrumentation_scope
from otel_torchprof._instrument.live_recording import Drained

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Recording:
    """What a LiveRecording is to a processor: batches that somebody else wrote."""

    def __init__(self) -> None:
        self.service = Service()
        self.waiting: list[tuple[Event, ...]] = []
        self.inside: dict[int, int] = {}
        self.watermarks: list[int] = []
        """Of the next drains; then nothing is left behind any."""
        self.stopped = self.finished = False
        self.drained = threading.Event()
        self.fails = 0
        self.meanwhile: Callable[[], object] = bool
        """Called in the middle of every drain."""

    bytes_buffered = 0

    def look(self) -> None:
        """Looks at nothing."""

    @property
    def backlog(self) -> float:
        return 0

    @property
    def is_due(self) -> bool:
        return False

    def health(self) -> tuple[dict[str, str], tuple[str, ...]]:
        return {}, ()

    def span_ended(self, _span_id: int) -> None:
        """Its events are written by hand, in contexts that nothing ends."""

    def flush(self) -> None:
        """Nothing waits here to be told its step."""

    def drain(self) -> Drained:
        if self.fails:
            self.fails -= 1
            raise MemoryError("no memory for a drain")
        self.meanwhile()
        events = self.waiting.pop(0) if self.waiting else ()
        spans = SpanList(self.service.table(*events), resource=Resource({}), scope=instrumentation_scope())
        inside, self.inside = self.inside, {}
        self.drained.set()
        watermark = self.watermarks.pop(0) if self.watermarks else NEVER
        return Drained(
            spans, [spans] if len(spans) else [], len(events), {"evicted": 1} if events else {}, {}, inside, watermark
        )

    def stop(self) -> None:
        self.stopped = True

    def finish(self) -> Drained:
        assert self.stopped
        self.finished = True
        return self.drain()

    def abandon(self) -> tuple[int, dict[str, int], dict[str, int]]:
        return 0, {"deadline": sum(map(len, self.waiting))}, {}

    def give_up(self) -> Drained:
        left, self.watermarks, self.waiting = sum(map(len, self.waiting)), [], []
        return self.finish()._replace(dropped={"deadline": left})


class Hanging(SpanExporter):
    """Never comes back from an export until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.outlasted = False
        """Whether it came back before it was let go: somebody waited for it."""
        self.got = []
        """The spans of each export."""

    def export(self, spans):
        self.got.append(spans)
        self.outlasted |= not self.let_go.wait(60)
        return SpanExportResult.SUCCESS


def attached(recording: Recording, *exporters: SpanExporter, **options) -> otp.TorchSpanProcessor:
    processor = otp.TorchSpanProcessor(*exporters, **options)
    processor.attach(recording)
    return processor


def names(exporter: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exporter.get_finished_spans()]
