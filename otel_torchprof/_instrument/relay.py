"""Bringing a processor to a TracerProvider, and away again, which the SDK has no way for."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import SpanProcessor

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span


class _Relay(SpanProcessor):
    """One per provider, added once and never taken away; without a target it does nothing."""

    def __init__(self) -> None:
        self.target: SpanProcessor | None = None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if (target := self.target) is not None:
            target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        if (target := self.target) is not None:
            target.on_end(span)

    def shutdown(self) -> None:
        if (target := self.target) is not None:
            target.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        target = self.target
        return True if target is None else target.force_flush(timeout_millis)


_relays: weakref.WeakKeyDictionary[Any, _Relay] = weakref.WeakKeyDictionary()


def relay(tracer_provider: Any, target: SpanProcessor | None) -> None:
    """Lets a provider's spans, flushes and shutdown reach ``target`` from now on, or nobody for None."""
    found = _relays.get(tracer_provider)
    if found is None:
        if target is None:
            return
        found = _relays[tracer_provider] = _Relay()
        tracer_provider.add_span_processor(found)
    found.target = target


def processors_of(holder: Any) -> tuple[SpanProcessor, ...]:
    """The processors of a provider, those in groups of processors too. The SDK has them in private places; others are not found."""
    if active := getattr(holder, "_active_span_processor", None):
        return processors_of(active)
    found = getattr(holder, "_span_processors", ())
    return tuple(each for processor in found for each in (processor, *processors_of(processor)))
