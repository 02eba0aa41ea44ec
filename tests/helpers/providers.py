"""Providers of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import TracerProvider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


def new_provider(*processors: SpanProcessor, **options: Any) -> TracerProvider:
    """A provider with these processors, which is not shut down at exit."""
    provider = TracerProvider(shutdown_on_exit=False, **options)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider
