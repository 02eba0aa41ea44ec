"""The default processor, used while the TracerProvider has no TorchSpanProcessor, and the wait for a TracerProvider.

A program may instrument first and configure the SDK later: the instrumentation waits for its TracerProvider, and warns if none is set.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor

from otel_torchprof._export.file_exporter import FileSpanExporter
from otel_torchprof._export.from_environment import (
    OTEL_CONFIG_FILE,
    OTEL_TRACES_EXPORTER,
    described,
    destination,
    exporters_from_environment,
)
from otel_torchprof._export.provider import is_sdk_provider
from otel_torchprof._export.variables import VARIABLES
from otel_torchprof._process import process_changes, threads
from otel_torchprof.errors import warn_once

from .processor import TorchSpanProcessor

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.trace.export import SpanExporter

    from .live_recording import Drained

# ---- Waiting for the TracerProvider ----


_LOOK_SECONDS = 0.5
"""Seconds between two looks for a TracerProvider."""
_BY_THE_COMMAND = "opentelemetry.instrumentation.auto_instrumentation"
"""Module that is imported if ``opentelemetry-instrument`` has started the program."""
_LOOKS_UNTIL_SAID = 20
"""Looks with torch imported before the warning: ten seconds, in which most programs that set a provider have done so."""


class ProviderWait:
    """Waits on its own thread for a global TracerProvider of the SDK, until there is one or :meth:`give_up` is called.

    Warns once if torch is imported and there is still none ten seconds later, or at exit.

    Args:
        on_provider: called once on that thread, with this object, soon after the provider is set.
    """

    def __init__(self, on_provider: Callable[[ProviderWait], None]) -> None:
        self._on_provider = on_provider
        self._given_up = threads.Event()
        self._call_off = process_changes.before_exit(self._at_exit)
        threads.Thread(target=self._run, name="otel-torchprof-wait", daemon=True).start()

    @property
    def is_given_up(self) -> bool:
        """Whether :meth:`give_up` was called."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Ends the wait. May be called repeatedly."""
        self._given_up.set()
        self._call_off()

    def _run(self) -> None:
        looks = 0
        while not is_sdk_provider(trace.get_tracer_provider()):
            if self._given_up.wait(_LOOK_SECONDS):
                return
            looks += "torch" in sys.modules
            if looks == _LOOKS_UNTIL_SAID:
                _warn()
        # A program that has just set its provider may be about to add a TorchSpanProcessor.
        self._given_up.wait(_LOOK_SECONDS)
        self._on_provider(self)

    def _at_exit(self) -> None:
        if "torch" in sys.modules and not is_sdk_provider(trace.get_tracer_provider()):
            _warn()


def sets_up_the_sdk() -> bool:
    """Whether a package that sets up a TracerProvider for ``opentelemetry-instrument`` is installed, such as opentelemetry-distro."""
    return any(entry_points(group=group) for group in ("opentelemetry_configurator", "opentelemetry_distro"))


def _warn() -> None:
    if _BY_THE_COMMAND in sys.modules and not sets_up_the_sdk():
        why = (
            "opentelemetry-distro is not installed, without which opentelemetry-instrument sets no TracerProvider: pip install "
            "opentelemetry-distro, or call opentelemetry.trace.set_tracer_provider()"
        )
    else:
        why = (
            "no TracerProvider of opentelemetry-sdk is set: call opentelemetry.trace.set_tracer_provider(), give "
            "instrument(tracer_provider=...), or start the program with opentelemetry-instrument"
        )
    warn_once(f"torch is instrumented, and nothing is recorded, since {why}")


# ---- A removable processor of a TracerProvider: the SDK can add processors but not remove them ----


class _Relay(SpanProcessor):
    """Forwards to a target, if it has one. Added once to a provider and never removed."""

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
    """Forwards a provider's spans, flushes and shutdown to ``target`` from now on; to nothing if it is None."""
    provider_relay = _relays.get(tracer_provider)
    if provider_relay is None:
        if target is None:
            return
        provider_relay = _relays[tracer_provider] = _Relay()
        tracer_provider.add_span_processor(provider_relay)
    provider_relay.target = target


def processors_of(holder: Any) -> tuple[SpanProcessor, ...]:
    """The processors of a provider, including those inside groups of processors. Read from private attributes of the SDK."""
    if active := getattr(holder, "_active_span_processor", None):
        return processors_of(active)
    processors = getattr(holder, "_span_processors", ())
    return tuple(member for processor in processors for member in (processor, *processors_of(processor)))


_logger = logging.getLogger("otel_torchprof")

# ---- The processor ----


_DESTINATION_VARIABLES = (OTEL_TRACES_EXPORTER, OTEL_CONFIG_FILE, *VARIABLES["endpoint"].variables)
"""Variables that select the destination of torch's spans."""


class DefaultProcessor(TorchSpanProcessor):
    """Sends torch's spans to the exporters of ``OTEL_TRACES_EXPORTER``, or to a Collector on this host.

    Args:
        tracer_provider: provider to be added to, until :meth:`leave`.
        give_way: called with a TorchSpanProcessor that the program adds to the provider later.
    """

    def __init__(self, tracer_provider: Any, give_way: Callable[[TorchSpanProcessor], None]) -> None:
        super().__init__(*_exporters_for(tracer_provider), sdk_spans=False)
        self._tracer_provider = weakref.ref(tracer_provider)
        self._give_way = give_way
        self._has_compared = False
        relay(tracer_provider, self)

    def leave(self) -> None:
        """Stops processing the provider's spans."""
        if (provider := self._tracer_provider()) is not None:
            relay(provider, None)

    def look(self) -> None:
        """Calls ``give_way`` if the program has added a TorchSpanProcessor. Costs a microsecond otherwise; thread-safe."""
        provider = self._tracer_provider()
        if provider is not None and (added := added_processor(provider)) is not None:
            self._give_way(added)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """As :meth:`TorchSpanProcessor.force_flush`, after a look for an added TorchSpanProcessor."""
        self.look()
        return super().force_flush(timeout_millis)

    def _shut_down(self, seconds: float, unanswered_seconds: float) -> None:
        self.look()
        super()._shut_down(seconds, unanswered_seconds)

    def _is_due(self) -> bool:
        self.look()
        return super()._is_due()

    def _hand_on_spans(self, drained: Drained) -> None:
        # At the first spans, not before: a program may add its processors after instrument().
        if drained.sent and not self._has_compared:
            self._has_compared = True
            self._compare()
        super()._hand_on_spans(drained)

    def _compare(self) -> None:
        """Warns if torch's spans go to a default destination and the application's spans go elsewhere."""
        if any(os.environ.get(name, "").strip() for name in _DESTINATION_VARIABLES):
            return
        ours = [queue.exporter for queue in self._queues]
        theirs = _exporters_of(self._tracer_provider())
        if theirs and not set(map(destination, ours)) & set(map(destination, theirs)):
            warn_once(
                f"torch's spans go to {', '.join(map(described, ours))} by default, and the application's to "
                f"{', '.join(map(described, theirs))}: add TorchSpanProcessor(exporter) to the TracerProvider, or set "
                f"{OTEL_TRACES_EXPORTER} or {VARIABLES['endpoint'].general}"
            )


def _exporters_for(tracer_provider: Any) -> list[SpanExporter]:
    """The exporters of this package that a configuration file names, else those that the environment names.

    A file that the application's own processor writes is shared with it: two exporters would overwrite each other's file.
    """
    theirs = [exporter for exporter in _exporters_of(tracer_provider) if isinstance(exporter, FileSpanExporter)]
    if theirs and os.environ.get(OTEL_CONFIG_FILE):
        return [exporter.shared() for exporter in theirs]
    return exporters_from_environment()


def added_processor(tracer_provider: Any) -> TorchSpanProcessor | None:
    """The TorchSpanProcessor that was added to a provider, if any."""
    processors = [processor for processor in _torch_processors(tracer_provider) if not processor.is_shut_down]
    if len(processors) > 1:
        _logger.warning("the TracerProvider has %s TorchSpanProcessors; the first gets torch's spans", len(processors))
    return processors[0] if processors else None


def is_shut_down(tracer_provider: Any) -> bool:
    """Whether a provider has TorchSpanProcessors and all of them are shut down, as after the provider's own shutdown."""
    processors = _torch_processors(tracer_provider)
    return bool(processors) and all(processor.is_shut_down for processor in processors)


def _torch_processors(tracer_provider: Any) -> list[TorchSpanProcessor]:
    return [processor for processor in processors_of(tracer_provider) if isinstance(processor, TorchSpanProcessor)]


def _exporters_of(tracer_provider: Any) -> list[object]:
    """The exporters of the SDK's processors, and of others with an attribute ``span_exporter``."""
    exporters = (getattr(processor, "span_exporter", None) for processor in processors_of(tracer_provider))
    return [exporter for exporter in exporters if exporter is not None]
