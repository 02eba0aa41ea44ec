"""Ids, sampling, resource and limits of a TracerProvider of the SDK; read at each use, since a fork changes some of them."""

from __future__ import annotations

import logging
import os
import random
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, DEFAULT_ON, Decision
from opentelemetry.trace import Link, NoOpTracer, SpanContext, SpanKind, TraceFlags

from otel_torchprof._encode.process_resource import of_this_process
from otel_torchprof._model.span_table import STEP_NUMBER
from otel_torchprof._model.step_spans import NO_ATTRIBUTES, Trace
from otel_torchprof._process import process_changes
from otel_torchprof.version import __version__

from .sdk import SCHEMA_URL, span_limits

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    from otel_torchprof._ranks.rank_ids import StepIds

_logger = logging.getLogger("otel_torchprof")
_NAME = "otel_torchprof"
_MOST_COMING = 20_000
"""Most trace ids of steps that have not begun."""


def is_sdk_provider(provider: Any) -> bool:
    """Whether the provider is the SDK's or a compatible one; the API's placeholder is not."""
    return all(hasattr(provider, name) for name in ("resource", "sampler", "id_generator", "add_span_processor"))


class RankRules(Protocol):
    """Settings that depend on the rank of the process, if it is one of several."""

    @property
    def budget_share(self) -> int:
        """Number of ranks that share one trace's size limit."""

    def step_ids(self, step: int) -> StepIds | None:
        """The ids of a step; None if the provider generates them."""

    def resource(self, own: Resource) -> Resource:
        """Returns the provider's resource with the attributes of the rank."""


class Provider:
    """The rules of one TracerProvider. Thread-safe as far as the provider's own sampler and id generator are.

    Args:
        tracer_provider: the SDK's.
        ranks: decide the ids of steps, and add to the resource.
    """

    def __init__(self, tracer_provider: TracerProvider, ranks: RankRules | None = None) -> None:
        self.tracer_provider = tracer_provider
        self._ranks = ranks
        self._logged: set[str] = set()
        self._coming: dict[tuple[int, int], int] = {}
        """Trace ids of steps that have not begun, by process, as a forked child has other ones, and by number."""

    @property
    def resource(self) -> Resource:
        """The resource as it is now."""
        own = of_this_process(self.tracer_provider.resource)
        return own if self._ranks is None else self._ranks.resource(own)

    @property
    def budget_share(self) -> int:
        """Number of ranks that share one trace's size limit; 1 unless ranks share traces."""
        return 1 if self._ranks is None else self._ranks.budget_share

    @property
    def disabled(self) -> bool:
        """Whether the provider gives this package no tracer: ``OTEL_SDK_DISABLED``, or its tracer configuration."""
        tracer = self.tracer_provider.get_tracer(_NAME, __version__, SCHEMA_URL)
        # The switch for single scopes is not public yet; where it is not there, the scope is on.
        is_enabled = getattr(tracer, "_is_enabled", None)
        return isinstance(tracer, NoOpTracer) or (callable(is_enabled) and not is_enabled())

    @property
    def limits(self) -> SpanLimits:
        """Returns the provider's span limits; those of the environment if it has none."""
        return span_limits(self.tracer_provider)

    @property
    def samples_everything(self) -> bool:
        """Whether the sampler samples every root span, so that its decision is known before a step begins."""
        try:
            description = self.tracer_provider.sampler.get_description()
        except Exception:  # noqa: BLE001 - a foreign sampler; its errors are reported when it is called for a span
            return False
        return description.startswith(("AlwaysOnSampler", "ParentBased{root:AlwaysOnSampler,"))

    def new_span_id(self) -> int:
        """A span id of the provider's generator; a random one where that fails."""
        return self._id("generate_span_id", 64)

    def new_trace_id(self) -> int:
        """A trace id of the provider's generator; a random one where that fails."""
        return self._id("generate_trace_id", 128)

    def new_trace(self, name: str, step: int, link: tuple[int, int] | None) -> Trace:
        """Asks the sampler about a span that would be the root of a trace; a step has a number, from 0.

        A sampler that raises is taken to have said yes, and said so once: a profiler must not stop a training job.
        """
        ids = self._ids_of_ranks(step)
        if ids is None:
            trace_id = (self._coming and self._coming.pop((os.getpid(), step), 0)) or self.new_trace_id()
        else:
            trace_id = ids.trace_id
        trace = Trace(trace_id, True, True, attributes=NO_ATTRIBUTES)
        if ids is not None:
            parent = _rank_span(trace_id, ids.parent_span_id, is_remote=True) if ids.parent_span_id else None
            trace.span_id, trace.parent, trace.links = ids.span_id, parent, ids.links
        try:
            sampler = self.tracer_provider.sampler
            if (
                sampler is DEFAULT_ON or sampler is ALWAYS_ON
            ):  # as in nearly all programs: asking takes half of this call
                return trace
            attributes = {STEP_NUMBER: step} if step >= 0 else {}
            links = [Link(_rank_span(*to)) for to in ((link,) if link else ()) + trace.links]
            # An empty context: this span has no parent in this process, regardless of the current context.
            result = sampler.should_sample(Context(), trace_id, name, SpanKind.INTERNAL, attributes, links)
            state = result.trace_state.to_header() if result.trace_state else ""
            added = {key: value for key, value in (result.attributes or {}).items() if attributes.get(key) != value}
            decision = result.decision
            trace.recorded, trace.exported = decision is not Decision.DROP, decision is Decision.RECORD_AND_SAMPLE
            trace.trace_state, trace.attributes = state, added or NO_ATTRIBUTES
        except Exception as error:  # noqa: BLE001 - it must not stop a training job
            self._say_once("the sampler failed on %r; such spans are recorded", name, error)
        return trace

    def coming_trace_id(self, step: int) -> int:
        """The trace id that the step of a number will have if it is the root of a trace. One thread at a time."""
        if (ids := self._ids_of_ranks(step)) is not None:
            return ids.trace_id
        key = os.getpid(), step
        if (coming := self._coming.get(key)) is None:
            coming = self._coming[key] = self.new_trace_id()
            if len(self._coming) > _MOST_COMING:  # of steps that never began
                self._coming.pop(next(iter(self._coming)), None)
        return coming

    def _ids_of_ranks(self, step: int) -> StepIds | None:
        """The ids that a step has on all ranks."""
        return self._ranks.step_ids(step) if self._ranks is not None and step >= 0 else None

    def _id(self, generate: str, bits: int) -> int:
        generator = self.tracer_provider.id_generator
        if type(generator) is RandomIdGenerator:
            # It uses Python's global random numbers: a program that seeds them equally on all ranks would get the same ids on
            # all, and other numbers than without a profiler. An own generator avoids both.
            return _random.getrandbits(bits) or 1
        failure = None
        try:
            generated: int = getattr(generator, generate)()
            if 0 < generated < 1 << bits:
                return generated
        except Exception as error:  # noqa: BLE001 - a foreign generator must not stop a training job
            failure = error
        self._say_once(
            "the id generator %r gives no valid ids; random ones are taken", type(generator).__name__, failure
        )
        fallback: int = getattr(RandomIdGenerator(), generate)()
        return fallback

    def _say_once(self, what: str, about: str, error: Exception | None) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _logger.error(what, about, exc_info=error)


# Asking the system for each id would cost 40 us in a virtual machine (measured).
_random = random.Random()  # noqa: S311 - ids are no secrets
process_changes.at_fork(process_changes.Order.STATE, in_child=_random.seed)


def _rank_span(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    """A span of another step, or of another rank."""
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))
