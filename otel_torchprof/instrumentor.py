"""``TorchInstrumentor``: torch's work in the traces of any service, as other libraries' instrumentations do for theirs."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from . import config
from ._export.from_environment import exporters_from_environment
from ._export.provider import Provider, is_sdk_provider
from ._instrumentation import Instrumentation
from ._live_recording import KINDS
from ._native import frames, gc_pauses
from ._relay import processors_of, relay
from .frame_filter import ALL_FRAMES, checked_filter
from .processor import TorchSpanProcessor

if TYPE_CHECKING:
    from collections.abc import Collection

    from .frame_filter import FrameFilter

_logger = logging.getLogger("otel_torchprof")

_WORKER_SECONDS = 3.0
"""What a worker process may take to send its last spans: a DataLoader gives its workers five seconds to end."""
_LOOK_SECONDS = 0.5
"""How often a TracerProvider is looked for when there was none yet."""


class TorchInstrumentor(BaseInstrumentor):
    """Instruments torch: ``TorchInstrumentor().instrument(tracer_provider=provider)``, or ``opentelemetry-instrument``.

    ``instrument()`` takes:

    - ``tracer_provider``: the SDK's; by default the global one, also when that is set later.
    - ``detail``: ``"off"``, ``"steps"`` (default), ``"modules"``, ``"ops"`` or ``"frames"``; by default as
      ``OTEL_TORCHPROF_DETAIL`` says.
    - ``meter_provider``: accepted, as by every instrumentor; there are no metrics yet.
    - ``record_shapes``: keep the shapes of operators' inputs, with ``"ops"`` and ``"frames"``.
    - ``frames``: which of Python's calls are recorded, with ``"frames"``: a :class:`FrameFilter`; by default as the environment
      says (``OTEL_TORCHPROF_FRAMES_*``), else all.

    Spans go to the :class:`TorchSpanProcessor` that was added to the provider. Where there is none, one is made whose
    exporters are those that ``OTEL_TRACES_EXPORTER`` names (``otlp`` by default).

    Works before and after torch is imported, and imports nothing of it. In a forked process it goes on by itself.
    ``uninstrument()`` takes every hook and callback back and sends what was recorded.
    """

    _running: Instrumentation | None = None
    _waiting: threading.Event | None = None
    _processor: TorchSpanProcessor | None = None
    _own: TorchSpanProcessor | None = None
    _lock = threading.RLock()

    def instrument(self, **kwargs: Any) -> None:
        """Begins; see the class. Again after the provider's shutdown, which has ended it, without :meth:`uninstrument`."""
        with self._lock:
            if self._running is not None and not self._running.is_running:
                super().uninstrument()
            super().instrument(**kwargs)

    def uninstrument(self, **kwargs: Any) -> None:
        """Takes every hook and callback back and sends what was recorded."""
        with self._lock:
            super().uninstrument(**kwargs)

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of torch that are instrumented."""
        return ("torch >= 2.6",)

    def step(self) -> None:
        """Says that a step of the loop has ended, and the next begins; from then on optimizers no longer do.

        Does nothing where nothing is instrumented. Costs some 10 us.
        """
        if self._running is not None:
            self._running.step()

    def _instrument(self, **kwargs: Any) -> None:
        options = _Options(**kwargs)
        if not config.enabled() or options.detail == "off":
            _logger.info("torch is not instrumented: switched off")
            return
        provider = options.tracer_provider or trace.get_tracer_provider()
        if is_sdk_provider(provider):
            self._start(provider, options)
        elif options.tracer_provider is None:
            self._wait_for_provider(options)
        else:
            raise TypeError(
                f"tracer_provider is {provider!r}; it must be a TracerProvider of opentelemetry-sdk, which decides about "
                "sampling and ids"
            )

    def _uninstrument(self, **_: Any) -> None:
        if self._waiting is not None:
            self._waiting.set()
            self._waiting = None
        if self._running is not None:
            self._running.stop()
        self._running = self._processor = None
        if self._own is not None:
            self._own.shutdown()
            self._own = None
            provider = self._relayed()
            if provider is not None:
                relay(provider, None)

    def _start(self, tracer_provider: Any, options: _Options) -> None:
        provider = Provider(tracer_provider)
        if provider.disabled:
            _logger.info("torch is not instrumented: the TracerProvider is switched off")
            return
        processor = _processor_of(tracer_provider)
        if processor is None:
            processor = self._own = TorchSpanProcessor(*exporters_from_environment(), sdk_spans=False)
            relay(tracer_provider, processor)
            self._relayed = weakref.ref(tracer_provider)
        self._processor = processor
        try:
            self._running = Instrumentation(
                provider,
                processor,
                detail=options.detail,
                record_shapes=options.record_shapes,
                frame_filter=options.frame_filter,
            )
            self._running.start()
        except BaseException:
            self._uninstrument()
            raise
        _watch_worker_processes(self)

    def _wait_for_provider(self, options: _Options) -> None:
        """Many programs instrument first and configure the SDK later; until then nothing is recorded."""
        given_up = self._waiting = threading.Event()

        def look() -> None:
            while not is_sdk_provider(trace.get_tracer_provider()):
                if given_up.wait(_LOOK_SECONDS):
                    return
            # A program that has just set its provider is about to add processors, one of ours maybe among them.
            given_up.wait(_LOOK_SECONDS)
            with self._lock:
                if not given_up.is_set():
                    self._waiting = None
                    self._start_late(options)

        self._look = look
        threading.Thread(target=look, name="otel-torchprof-wait", daemon=True).start()

    def _start_late(self, options: _Options) -> None:
        try:
            self._start(trace.get_tracer_provider(), options)
        except Exception:  # on a thread of our own nobody else would say so
            _logger.exception("torch is not instrumented")

    def _at_end_of_worker(self) -> None:
        if self._processor is not None:
            self._processor.shutdown_within(_WORKER_SECONDS)

    def _after_fork_in_child(self) -> None:
        TorchInstrumentor._lock = threading.RLock()
        if self._running is not None:
            try:
                self._running.restart_in_child()
            except Exception:  # the child goes on
                _logger.exception("torch is not instrumented in this forked process")
        elif self._waiting is not None:
            threading.Thread(target=self._look, name="otel-torchprof-wait", daemon=True).start()


class _Options:
    """The arguments of ``instrument()``, checked.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(
        self,
        *,
        tracer_provider: Any = None,
        meter_provider: Any = None,
        detail: str | None = None,
        record_shapes: bool = False,
        frames: FrameFilter | None = None,
    ) -> None:
        allowed = ("off", *KINDS)
        if detail is not None and detail not in allowed:
            raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, allowed))}")
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.detail = config.detail(allowed) if detail is None else detail
        self.record_shapes = bool(record_shapes)
        wanted = self.detail == "frames" or frames is not None
        self.frame_filter = checked_filter(frames) if wanted else ALL_FRAMES


def _processor_of(tracer_provider: Any) -> TorchSpanProcessor | None:
    """The TorchSpanProcessor that was added to a provider."""
    found = [p for p in processors_of(tracer_provider) if isinstance(p, TorchSpanProcessor) and not p.is_shut_down]
    if len(found) > 1:
        _logger.warning("the TracerProvider has %s TorchSpanProcessors; the first gets torch's spans", len(found))
    return found[0] if found else None


@functools.cache
def _watch_worker_processes(instrumentor: TorchInstrumentor) -> None:
    """Lets processes of ``multiprocessing`` send what they have when they end: they skip what others do at exit."""
    from multiprocessing import util

    def in_worker(inherited: TorchInstrumentor) -> None:
        util.Finalize(None, inherited._at_end_of_worker, exitpriority=0)  # noqa: SLF001 - our own

    util.register_after_fork(instrumentor, in_worker)


def _after_fork_in_child() -> None:
    """Processors first: what they hold is the parent's."""
    TorchSpanProcessor.after_fork_in_child()
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    if instance is not None:
        instance._after_fork_in_child()  # noqa: SLF001 - our own


# First: what is the parent's is off when the child's is started.
frames.at_process_changes()
gc_pauses.at_process_changes()
os.register_at_fork(after_in_child=_after_fork_in_child)
