"""``TorchInstrumentor``: torch's work in the traces of any service, as other libraries' instrumentations do for theirs."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from . import _operator_metrics, config
from ._device_source import checked_device_events, checked_events
from ._export.from_environment import exporters_from_environment
from ._export.provider import Provider, is_sdk_provider
from ._instrumentation import Instrumentation
from ._live_device_source import DeviceChoice
from ._live_recording import KINDS
from ._metrics_instrumentation import MetricsInstrumentation
from ._native import frames, gc_pauses
from ._operator_metrics import DEFAULT_OPERATORS, metrics_of
from ._recording import checked_memory_limit
from ._relay import processors_of, relay
from .frame_filter import ALL_FRAMES, checked_filter
from .health import ON, ProcessorHealth
from .metrics import GpuMetrics
from .processor import TorchSpanProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from .frame_filter import FrameFilter
    from .health import GpuHealth

_logger = logging.getLogger("otel_torchprof")

T = TypeVar("T")

_NOT_INSTRUMENTED = "not instrumented"
_OVERHEAD = 0.01
"""Share of the time that metrics may cost when nobody says otherwise."""
_WORKER_SECONDS = 3.0
"""What a worker process may take to send its last spans: a DataLoader gives its workers five seconds to end."""
_LOOK_SECONDS = 0.5
"""How often a TracerProvider is looked for when there was none yet."""


class TorchInstrumentor(BaseInstrumentor):
    """Instruments torch: ``TorchInstrumentor().instrument(tracer_provider=provider)``, or ``opentelemetry-instrument``.

    ``instrument()`` takes:

    - ``tracer_provider``: the SDK's; by default the global one, also when that is set later.
    - ``detail``: ``"off"``, ``"metrics"``, ``"steps"`` (default), ``"modules"``, ``"ops"`` or ``"frames"``; by default as
      ``OTEL_TORCHPROF_DETAIL`` says. ``"metrics"`` makes no spans and needs no TracerProvider.
    - ``meter_provider``: gets the durations of steps and figures of the recorder; with ``"metrics"`` also those of operators,
      and then it is the global one by default, also when that is set later.
    - ``overhead``: share of the time that ``"metrics"`` may cost, above 0, up to 1, by which every step is recorded; by
      default as ``OTEL_TORCHPROF_OVERHEAD`` says, else 0.01.
    - ``max_operators``: how many operators have series of their own with ``"metrics"``; by default as
      ``OTEL_TORCHPROF_MAX_OPERATORS`` says, else 50.
    - ``record_shapes``: keep the shapes of operators' inputs, with ``"ops"`` and ``"frames"``.
    - ``use_device``: the type of device whose times are recorded, ``"cuda"`` for one, from when the program first uses it
      (``docs/devices.md``); by default as ``OTEL_TORCHPROF_DEVICE`` says, else none. With ``"steps"`` the energy alone.
    - ``device_events``: for which events, as for :class:`profile`; by default as ``OTEL_TORCHPROF_DEVICE_EVENTS`` says, else
      ``"ops"``.
    - ``gpu_metrics``: False: no :class:`GpuMetrics` for the ``meter_provider``; by default there are, unless
      ``OTEL_TORCHPROF_GPU_DEVICES`` is ``none``.
    - ``frames``: which of Python's calls are recorded, with ``"frames"``: a :class:`FrameFilter`; by default as the environment
      says (``OTEL_TORCHPROF_FRAMES_*``), else all.

    Spans go to the :class:`TorchSpanProcessor` that was added to the provider. Where there is none, one is made whose
    exporters are those that ``OTEL_TRACES_EXPORTER`` names (``otlp`` by default).

    Works before and after torch is imported, and imports nothing of it. In a forked process it goes on by itself.
    ``uninstrument()`` takes every hook and callback back and sends what was recorded.
    """

    _running: Instrumentation | MetricsInstrumentation | None = None
    _waiting: threading.Event | None = None
    _processor: TorchSpanProcessor | None = None
    _own: TorchSpanProcessor | None = None
    _gpus: GpuMetrics | None = None
    _off = _NOT_INSTRUMENTED
    """Why nothing is recorded, where nothing is."""
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

    @property
    def health(self) -> ProcessorHealth:
        """What is on, what is off and why; with ``detail="metrics"`` also how many steps are recorded, and what that costs.

        With the other details it is that of the :class:`TorchSpanProcessor`. Where GPU metrics were asked for, ``gpus`` among
        the sources says of them what :attr:`GpuMetrics.health` does.
        """
        gpus = self._gpus
        if isinstance(self._running, MetricsInstrumentation):
            found = self._running.health
        elif self._processor is not None:
            found = self._processor.health
        else:
            return ProcessorHealth({"recording": f"off: {self._off}"}, 0, {}, {})
        return found if gpus is None else _with_gpus(found, gpus.health)

    def _instrument(self, **kwargs: Any) -> None:
        options = _checked_options(kwargs)
        if not config.enabled() or options.detail == "off":
            self._stay_off("detail is 'off'" if config.enabled() else f"{config.OTEL_TORCHPROF_ENABLED} is false")
            return
        if options.detail == "metrics":
            self._start_metrics(options)
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

    def _stay_off(self, reason: str) -> None:
        self._off = reason
        _logger.info("torch is not instrumented: %s", reason)

    def _uninstrument(self, **_: Any) -> None:
        self._off = _NOT_INSTRUMENTED
        if self._waiting is not None:
            self._waiting.set()
            self._waiting = None
        if self._running is not None:
            self._running.stop()
        self._running = self._processor = None
        if self._gpus is not None:
            self._gpus.stop()
            self._gpus = None
        if self._own is not None:
            self._own.shutdown()
            self._own = None
            provider = self._relayed()
            if provider is not None:
                relay(provider, None)

    def _start_metrics(self, options: _Options) -> None:
        meters = options.meter_provider or metrics.get_meter_provider()
        if isinstance(meters, metrics.NoOpMeterProvider) or getattr(meters, "_disabled", False):
            self._stay_off("the MeterProvider is switched off")
            return
        processor = _processor_of(options.tracer_provider or trace.get_tracer_provider())
        found = metrics_of(options.meter_provider)
        found.begin(options.max_operators)
        self._running = MetricsInstrumentation(
            found,
            options.meter_provider,
            overhead=options.overhead,
            memory_limit=checked_memory_limit(None),
            exporters=tuple if processor is None else lambda: processor.exporter_figures,
            device=options.device if options.device is not None and options.device.is_timed else None,
        )
        self._watch_gpus(options)
        try:
            self._running.start()
        except BaseException:
            self._uninstrument()
            raise

    def _start(self, tracer_provider: Any, options: _Options) -> None:
        provider = Provider(tracer_provider)
        if provider.disabled:
            self._stay_off("the TracerProvider is switched off")
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
                device=options.device,
                metrics=None if options.meter_provider is None else metrics_of(options.meter_provider),
            )
            self._running.start()
        except BaseException:
            self._uninstrument()
            raise
        if options.meter_provider is not None:
            self._watch_gpus(options)
        _watch_worker_processes(self)

    def _watch_gpus(self, options: _Options) -> None:
        if options.gpu_metrics:
            self._gpus = GpuMetrics(options.meter_provider).start()

    def _wait_for_provider(self, options: _Options) -> None:
        """Many programs instrument first and configure the SDK later; until then nothing is recorded."""
        given_up = self._waiting = threading.Event()
        self._off = "no TracerProvider of opentelemetry-sdk is set yet"

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
        _operator_metrics.after_fork_in_child()
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
        overhead: float | None = None,
        max_operators: int | None = None,
        use_device: str | None = None,
        device_events: str | None = None,
        gpu_metrics: bool | None = None,
    ) -> None:
        allowed = ("off", "metrics", *KINDS)
        if detail is not None and detail not in allowed:
            raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, allowed))}")
        if meter_provider is not None and not callable(getattr(meter_provider, "get_meter", None)):
            raise TypeError(f"meter_provider is {meter_provider!r}; it must be a MeterProvider")
        self.overhead = _setting("overhead", overhead, config.OTEL_TORCHPROF_OVERHEAD, config.share) or _OVERHEAD
        self.max_operators = (
            _setting("max_operators", max_operators, config.OTEL_TORCHPROF_MAX_OPERATORS, config.whole_number)
            or DEFAULT_OPERATORS
        )
        self.device = _device_choice(use_device, device_events)
        if gpu_metrics is not None and not isinstance(gpu_metrics, bool):
            raise TypeError(f"gpu_metrics is {gpu_metrics!r}; it must be True, False, or None: as the environment says")
        self.gpu_metrics = config.gpu_devices() != "none" if gpu_metrics is None else gpu_metrics
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.detail = config.detail(allowed) if detail is None else detail
        self.record_shapes = bool(record_shapes)
        wanted = self.detail == "frames" or frames is not None
        self.frame_filter = checked_filter(frames) if wanted else ALL_FRAMES


def _checked_options(given: dict[str, Any]) -> _Options:
    """The arguments of ``instrument()``.

    Raises:
        TypeError, ValueError: one is wrong, or there is none of that name.
    """
    allowed = _Options.__init__.__kwdefaults__ or {}
    for name in given:
        if name not in allowed:
            raise TypeError(f"{name} is no argument of instrument(); allowed are {', '.join(allowed)}")
    return _Options(**given)


def _with_gpus(health: ProcessorHealth, gpus: GpuHealth) -> ProcessorHealth:
    """With the state of the GPU metrics: ``gpus`` in a word, and a note where a GPU lacks one."""
    states = {name: state for name, state in gpus.sources.items() if state != ON and name != "nvml"}
    notes = () if gpus.sources["nvml"] != ON else tuple(f"{name} {state}" for name, state in states.items())
    sources = {**health.sources, "gpus": gpus.sources["nvml"]}
    return replace(health, sources=sources, notes=(*health.notes, *notes, *gpus.notes))


def _device_choice(device: str | None, events: str | None) -> DeviceChoice | None:
    """What is timed on devices, as given, else as the environment says.

    Raises:
        TypeError, ValueError: ``use_device`` is no name, ``device_events`` is nothing that can be timed.
    """
    if device is not None and not isinstance(device, str):
        raise TypeError(f"use_device is {device!r}; it must be the name of a type of device, such as 'cuda', or None")
    chosen = _setting("use_device", device, config.OTEL_TORCHPROF_DEVICE, config.type_of_device)
    found = checked_device_events(events, 1)
    if events is None:
        found = config.value_of(config.OTEL_TORCHPROF_DEVICE_EVENTS, checked_events) or found
    return DeviceChoice(chosen, found) if chosen else None


def _setting(name: str, value: object, variable: str, parse: Callable[[Any], T]) -> T | None:
    """The keyword, else the variable; None where there is neither.

    Raises:
        ValueError: the keyword is wrong.
    """
    if value is None:
        return config.value_of(variable, parse)
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {value!r}; {error}") from None


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


def _running_metrics() -> MetricsInstrumentation | None:
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    running = None if instance is None else instance._running  # noqa: SLF001 - our own
    return running if isinstance(running, MetricsInstrumentation) and running.is_running else None


def _before_fork() -> None:
    if (running := _running_metrics()) is not None:
        running.before_fork()


def _after_fork_in_parent() -> None:
    if (running := _running_metrics()) is not None:
        running.after_fork_in_parent()


def _after_fork_in_child() -> None:
    """Processors first: what they hold is the parent's."""
    TorchSpanProcessor.after_fork_in_child()
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    if instance is not None:
        instance._after_fork_in_child()  # noqa: SLF001 - our own


# First: what is the parent's is off when the child's is started.
frames.at_process_changes()
gc_pauses.at_process_changes()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
