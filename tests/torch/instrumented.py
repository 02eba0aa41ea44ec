"""A service with torch instrumented, and what its traces show, for tests."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Place = tuple[str, int, "int | None"]
"""A span's name, its trace id and the span id of its parent."""


class Collecting(SpanExporter):
    """Keeps every span that it is sent, as an object."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS


class Instrumented:
    """A provider with a TorchSpanProcessor, and the spans of torch that come out of it.

    Args:
        drained_every: milliseconds between two drains; None: as usual, which is longer than a test lasts.
        provider: arguments of the TracerProvider.
    """

    def __init__(self, *, drained_every: float | None = None, **provider: Any) -> None:
        self.exporter = Collecting()
        self.processor = otp.TorchSpanProcessor(self.exporter, schedule_delay_millis=drained_every)
        self.provider = TracerProvider(shutdown_on_exit=False, **provider)
        self.provider.add_span_processor(self.processor)
        self.tracer = self.provider.get_tracer("application")

    @contextmanager
    def on(self, detail: str = "ops", **options: Any) -> Iterator[None]:
        """Instruments torch for a while; ends with the provider's shutdown.

        As in a process in which nobody has made an optimizer yet: earlier tests did.
        """
        instrumentor = otp.TorchInstrumentor()
        with patch("otel_torchprof._record.step_marks._optimizer_classes", lambda: iter(())):
            instrumentor.instrument(tracer_provider=self.provider, detail=detail, **options)
            try:
                yield
            finally:
                instrumentor.uninstrument()
                self.provider.shutdown()

    def spans(self) -> list[ReadableSpan]:
        """All of torch's spans up to now; each is there once."""
        assert self.provider.force_flush()
        ids = [span.context.span_id for span in self.exporter.spans]
        assert len(ids) == len(set(ids))
        return list(self.exporter.spans)

    def spans_at_end(self) -> list[ReadableSpan]:
        """Those that were sent when the provider was shut down, too."""
        return list(self.exporter.spans)

    def operators(self) -> Counter[Place]:
        """How often each operator ran under each parent."""
        return places(span for span in self.spans() if span.name.startswith("aten::"))


@contextmanager
def instrumented(*, detail: str = "ops", **options: Any) -> Iterator[Instrumented]:
    """A service of its own, instrumented for a while."""
    service = Instrumented(**options)
    with service.on(detail):
        yield service


def places(spans: Iterator[ReadableSpan]) -> Counter[Place]:
    """How often there is a span of that name under that parent."""
    return Counter((span.name, span.context.trace_id, span.parent and span.parent.span_id) for span in spans)


def under(parent: Any, **times: int) -> Counter[Place]:
    """So many of each operator directly under a span (or its context): ``under(span, neg=3)``."""
    context = parent if not hasattr(parent, "get_span_context") else parent.get_span_context()
    return Counter({(f"aten::{name}", context.trace_id, context.span_id): count for name, count in times.items()})
