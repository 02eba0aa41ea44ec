"""What a TracerProvider of the SDK decides: ids, sampling, resource, limits. Asked, never copied: a fork changes some of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NoOpTracer, SpanContext, SpanKind, TraceFlags

from otel_torchprof._model.steps import Trace
from otel_torchprof.version import __version__

from .sdk import SCHEMA_URL, span_limits

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

_logger = logging.getLogger("otel_torchprof")
_NAME = "otel_torchprof"


def is_sdk_provider(provider: Any) -> bool:
    """Whether it is the SDK's, or one that can do what the SDK's does; the API's own placeholder is not."""
    return all(hasattr(provider, name) for name in ("resource", "sampler", "id_generator", "add_span_processor"))


class Provider:
    """The rules of one TracerProvider. Thread-safe as far as the provider's own sampler and id generator are."""

    def __init__(self, tracer_provider: TracerProvider) -> None:
        self.tracer_provider = tracer_provider
        self._said: set[str] = set()

    @property
    def resource(self) -> Resource:
        """The resource as it is now."""
        return self.tracer_provider.resource

    @property
    def disabled(self) -> bool:
        """Whether the provider gives this package no tracer: ``OTEL_SDK_DISABLED``, or its tracer configuration."""
        tracer = self.tracer_provider.get_tracer(_NAME, __version__, SCHEMA_URL)
        # The switch for single scopes is not public yet; where it is not there, the scope is on.
        is_enabled = getattr(tracer, "_is_enabled", None)
        return isinstance(tracer, NoOpTracer) or (callable(is_enabled) and not is_enabled())

    @property
    def limits(self) -> SpanLimits:
        """The provider's limits of spans; those of the environment where it does not tell."""
        return span_limits(self.tracer_provider)

    @property
    def samples_everything(self) -> bool:
        """Whether the sampler takes every trace that begins here, so that nobody needs to wait for its answer."""
        try:
            description = self.tracer_provider.sampler.get_description()
        except Exception:  # noqa: BLE001 - somebody's sampler; it is asked in earnest later, and what it raises told then
            return False
        return description.startswith(("AlwaysOnSampler", "ParentBased{root:AlwaysOnSampler,"))

    def new_span_id(self) -> int:
        """A span id of the provider's generator; a random one where that fails."""
        return self._id("generate_span_id", 64)

    def new_trace(self, name: str, step: int, link: tuple[int, int] | None) -> Trace:
        """Asks the sampler about a span that would be the root of a trace; a step has a number, from 0.

        A sampler that raises is taken to have said yes, and said so once: a profiler must not stop a training job.
        """
        trace_id = self._id("generate_trace_id", 128)
        attributes = {"torch.step": step} if step >= 0 else {}
        links = [Link(SpanContext(*link, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)))] if link else []
        try:
            # An empty context: this span has no parent, whatever the thread that asks is in.
            result = self.tracer_provider.sampler.should_sample(
                Context(), trace_id, name, SpanKind.INTERNAL, attributes, links
            )
            state = result.trace_state.to_header() if result.trace_state else ""
            decision = result.decision
            recorded, exported = decision is not Decision.DROP, decision is Decision.RECORD_AND_SAMPLE
            return Trace(trace_id, recorded, exported, state, dict(result.attributes or {}))
        except Exception as error:  # noqa: BLE001 - it must not stop a training job
            self._say_once("the sampler failed on %r; such spans are recorded", name, error)
            return Trace(trace_id, True, True)

    def _id(self, generate: str, bits: int) -> int:
        generator = self.tracer_provider.id_generator
        failure = None
        try:
            found: int = getattr(generator, generate)()
            if 0 < found < 1 << bits:
                return found
        except Exception as error:  # noqa: BLE001 - somebody's generator, which must not stop a training job
            failure = error
        self._say_once(
            "the id generator %r gives no valid ids; random ones are taken", type(generator).__name__, failure
        )
        fallback: int = getattr(RandomIdGenerator(), generate)()
        return fallback

    def _say_once(self, what: str, about: str, error: Exception | None) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.error(what, about, exc_info=error)
