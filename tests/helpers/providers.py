"""Providers of tests, and their instrumentation."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import SpanProcessor


def new_provider(*processors: SpanProcessor, **options: Any) -> TracerProvider:
    """A provider with these processors, which is not shut down at exit."""
    provider = TracerProvider(shutdown_on_exit=False, **options)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


@contextmanager
def instrumented(provider: TracerProvider | None = None, **options: Any) -> Iterator[otp.TorchInstrumentor]:
    """Torch is instrumented while a block runs; a provider of spans is shut down after it."""
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=provider, **options)
    try:
        yield instrumentor
    finally:
        instrumentor.uninstrument()
        if provider is not None:
            provider.shutdown()
