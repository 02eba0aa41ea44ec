"""The processor that ``instrument()`` makes where the TracerProvider has none, and that gives way to one that is added later.

A program may instrument first and configure the SDK later: its TracerProvider is waited for, and where it does not come, that is said.
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
"""How often a TracerProvider is looked for."""
_BY_THE_COMMAND = "opentelemetry.instrumentation.auto_instrumentation"
"""Imported where ``opentelemetry-instrument`` has started the program."""
_LOOKS_UNTIL_SAID = 20
"""Ten seconds with torch: a program that is to set a provider has mostly done so."""


class ProviderWait:
    """Looks for a global TracerProvider of the SDK on a thread of its own, from its making until there is one or :meth:`give_up`.

    Where torch is imported, and there is none ten seconds later or at exit, one warning says so.

    Args:
        on_provider: called on that thread, once, soon after the provider is there; with this wait.
    """

    def __init__(self, on_provider: Callable[[ProviderWait], None]) -> None:
        self._on_provider = on_provider
        self._given_up = threads.Event()
        self._call_off = process_changes.before_exit(self._at_exit)
        threads.Thread(target=self._run, name="otel-torchprof-wait", daemon=True).start()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants to know any more."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Ends it. Again without effect."""
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
        # A program that has just set its provider is about to add processors, one of ours maybe among them.
        self._given_up.wait(_LOOK_SECONDS)
        self._on_provider(self)

    def _at_exit(self) -> None:
        if "torch" in sys.modules and not is_sdk_provider(trace.get_tracer_provider()):
            _warn()


def sets_up_the_sdk() -> bool:
    """Whether ``opentelemetry-instrument`` finds anything that sets up a TracerProvider, as opentelemetry-distro does."""
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


# ---- Bringing a processor to a TracerProvider, and away again, which the SDK has no way for ----


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


_logger = logging.getLogger("otel_torchprof")

# ---- The processor ----


_SAY_WHERE_TO = (OTEL_TRACES_EXPORTER, OTEL_CONFIG_FILE, *VARIABLES["endpoint"].variables)
"""Variables by which somebody has said where torch's spans are to go."""


class DefaultProcessor(TorchSpanProcessor):
    """Sends torch's spans to where ``OTEL_TRACES_EXPORTER`` says, or to a Collector on this host.

    Args:
        tracer_provider: whose spans, flushes and shutdown reach it until :meth:`leave`.
        give_way: called with a TorchSpanProcessor that was added to the provider meanwhile.
    """

    def __init__(self, tracer_provider: Any, give_way: Callable[[TorchSpanProcessor], None]) -> None:
        super().__init__(*_exporters_for(tracer_provider), sdk_spans=False)
        self._tracer_provider = weakref.ref(tracer_provider)
        self._give_way = give_way
        self._has_compared = False
        relay(tracer_provider, self)

    def leave(self) -> None:
        """Leaves the provider, which has no way to remove a processor."""
        if (provider := self._tracer_provider()) is not None:
            relay(provider, None)

    def look(self) -> None:
        """Gives way where the provider has a TorchSpanProcessor by now. A microsecond where it has none; any thread."""
        provider = self._tracer_provider()
        if provider is not None and (found := added_processor(provider)) is not None:
            self._give_way(found)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """As :meth:`TorchSpanProcessor.force_flush`, of what is still to be sent from here."""
        self.look()
        return super().force_flush(timeout_millis)

    def _shut_down(self, seconds: float, unanswered_seconds: float) -> None:
        self.look()
        super()._shut_down(seconds, unanswered_seconds)

    def _is_due(self) -> bool:
        self.look()
        return super()._is_due()

    def _hand_on_spans(self, drained: Drained) -> None:
        # Only now: a program may add its processors after instrument().
        if drained.sent and not self._has_compared:
            self._has_compared = True
            self._compare()
        super()._hand_on_spans(drained)

    def _compare(self) -> None:
        """Warns where nobody said where torch's spans are to go, and the application's go elsewhere."""
        if any(os.environ.get(name, "").strip() for name in _SAY_WHERE_TO):
            return
        ours = [queue.exporter for queue in self._queues]
        theirs = _exporters_of(self._tracer_provider())
        if theirs and not {destination(each) for each in ours} & {destination(each) for each in theirs}:
            warn_once(
                f"torch's spans go to {', '.join(map(described, ours))} by default, and the application's to "
                f"{', '.join(map(described, theirs))}: add TorchSpanProcessor(exporter) to the TracerProvider, or set "
                f"{OTEL_TRACES_EXPORTER} or {VARIABLES['endpoint'].general}"
            )


def _exporters_for(tracer_provider: Any) -> list[SpanExporter]:
    """Those of this package that a configuration file names, else those that the environment names.

    A file that the application's own processor writes is shared with it: each of two exporters would replace the other's.
    """
    theirs = [each for each in _exporters_of(tracer_provider) if isinstance(each, FileSpanExporter)]
    if theirs and os.environ.get(OTEL_CONFIG_FILE):
        return [each.shared() for each in theirs]
    return exporters_from_environment()


def added_processor(tracer_provider: Any) -> TorchSpanProcessor | None:
    """The TorchSpanProcessor that was added to a provider, if any."""
    found = [each for each in _torch_processors(tracer_provider) if not each.is_shut_down]
    if len(found) > 1:
        _logger.warning("the TracerProvider has %s TorchSpanProcessors; the first gets torch's spans", len(found))
    return found[0] if found else None


def is_shut_down(tracer_provider: Any) -> bool:
    """Whether a provider has a TorchSpanProcessor, and none that is not shut down: as after the provider's own shutdown."""
    found = _torch_processors(tracer_provider)
    return bool(found) and all(each.is_shut_down for each in found)


def _torch_processors(tracer_provider: Any) -> list[TorchSpanProcessor]:
    return [each for each in processors_of(tracer_provider) if isinstance(each, TorchSpanProcessor)]


def _exporters_of(tracer_provider: Any) -> list[object]:
    """The exporters of the SDK's own processors, and of those that have one under the same name."""
    found = (getattr(processor, "span_exporter", None) for processor in processors_of(tracer_provider))
    return [exporter for exporter in found if exporter is not None]
