"""``TorchInstrumentor``: instruments torch, as OpenTelemetry's instrumentations do for other libraries."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_torchprof import config
from otel_torchprof._columns.phases import with_loaded
from otel_torchprof._export.provider import Provider, is_sdk_provider
from otel_torchprof._export.sdk import OTEL_SDK_DISABLED, is_disabled
from otel_torchprof._files.box import BlackBox
from otel_torchprof._process import process_changes, threads
from otel_torchprof._ranks.ranks import Ranks, identity_in, is_loader_worker
from otel_torchprof._record.recording import checked_memory_limit
from otel_torchprof.errors import TorchProfError, warn_once
from otel_torchprof.health import ON, ProcessorHealth

from . import operator_metrics
from .control_verbs import socket as control_socket
from .default_processor import DefaultProcessor, ProviderWait, added_processor, is_shut_down
from .gpu_metrics import NOT_OPENED, GpuMetrics
from .instrumentation import Instrumentation
from .metrics_instrumentation import MetricsInstrumentation
from .operator_metrics import has_sdk, is_heard, metrics_of
from .options import Options, takes_arguments_of
from .processor import unused
from .sigterm import SigtermFlush
from .step_choice import StepRequest
from .step_recording import StepRecording

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from opentelemetry.trace import SpanContext

    from .processor import TorchSpanProcessor


# ---- The health of an instrumentation, its GPU metrics and its black box ----


def combined(health: ProcessorHealth, gpus: GpuMetrics | None, box: BlackBox | None) -> ProcessorHealth:
    """Adds the states of the black box and, once they were read, of the GPU metrics, with a note per missing metric.

    And that of the black box.
    """
    if gpus is not None and (state := gpus.health).sources["nvml"] != NOT_OPENED:
        lacking = {name: why for name, why in state.sources.items() if why != ON and name != "nvml"}
        notes = () if state.sources["nvml"] != ON else tuple(f"{name} {why}" for name, why in lacking.items())
        sources = {**health.sources, "gpus": state.sources["nvml"]}
        health = replace(health, sources=sources, notes=(*health.notes, *notes, *state.notes))
    return health if box is None else replace(health, sources={**health.sources, "black box": box.state})


_logger = logging.getLogger("otel_torchprof")

_NOT_INSTRUMENTED = "not instrumented"
_SDK_DISABLED = f"{OTEL_SDK_DISABLED} is true"
_WORKER_SECONDS = 3.0
"""Limit for a worker process to send its last spans: a DataLoader gives its workers five seconds to end."""
_LOADER_WORKER = "this is a worker of a DataLoader, see loader_workers"


class TorchInstrumentor(BaseInstrumentor):
    """Instruments torch: ``TorchInstrumentor().instrument(tracer_provider=provider)``, or ``opentelemetry-instrument``.

    A singleton, as every instrumentor; thread-safe. ``docs/services.md`` and ``docs/training.md`` are guides. Arguments
    of ``instrument()``:

    - ``tracer_provider``: the SDK's provider. Default: the global one, even if it is set later.
    - ``meter_provider``: receives step durations and recorder metrics, and with ``"metrics"`` operator metrics.
      Default: the global one, even if it is set later.
    - ``steps``: what ends a training step: ``"auto"`` (default), a rule that is learned from the loop, or the trainers
      of Hugging Face and Lightning (``docs/training.md``); ``"program"``, only :meth:`step`; an optimizer; or a
      ``DataLoader``, one step per batch. :meth:`step` always ends a step.
    - ``policy``: a :class:`SpanPolicy`: the steps to trace in full, and trace size limits. Default:
      ``OTEL_TORCHPROF_POLICY``.
    - ``frames``: a :class:`FrameFilter` for ``"frames"``. Default: ``OTEL_TORCHPROF_FRAMES``, else all calls.

    And its options (``docs/settings.md``; of devices, ``docs/measurements.md``; of signals, ``docs/losses.md``; of the
    black box, ``docs/crashes.md``):

    - ``detail``: level of detail of ``TorchInstrumentor``: ``off``, ``metrics``, ``steps``, ``modules``, ``ops`` or
      ``frames``; ``metrics`` creates no spans and needs no TracerProvider. Default: ``OTEL_TORCHPROF_DETAIL``, else
      ``steps``.
    - ``overhead``: share of the time that ``detail=metrics`` may cost, above 0, up to 1; 1 records every step. Default:
      ``overhead=`` of ``OTEL_TORCHPROF_METRICS``, else ``0.01``.
    - ``max_operators``: number of operators with a time series of their own with ``detail=metrics``; all others are
      counted as ``other``. Default: ``max_operators=`` of ``OTEL_TORCHPROF_METRICS``, else ``50``.
    - ``record_shapes``: records the shapes of operators' inputs, with the details ``ops`` and ``frames``. Default:
      ``false``.
    - ``profile_memory``: follows torch's allocations, on the thread that imports torch: of each span, and for the
      report of a program that runs out of memory; torch's own profiler cannot run there meanwhile. Default: ``memory=``
      of ``OTEL_TORCHPROF_DETAIL``, else ``false``.
    - ``use_device``: type of device to time, such as ``cuda``, from its first use on; with ``detail=steps``, energy
      only. Default: ``OTEL_TORCHPROF_DEVICE``, else none.
    - ``device_events``: events to time on the device: ``ops`` (operators that launch device work, labels and modules),
      ``all`` (all operators except views), ``labels`` (labels and modules) or ``off``. Default: ``events=`` of
      ``OTEL_TORCHPROF_DEVICE``, else ``ops``.
    - ``energy``: whether a thread reads the energy counters of NVIDIA GPUs ten times a second. Default: ``true`` if the
      device is ``cuda``.
    - ``sampling``: samples of the loop's Python stack per second, up to 1000; ``true``: 100; ``false``: none. Default:
      ``OTEL_TORCHPROF_SAMPLING``, else ``100``.
    - ``gpu_metrics``: whether ``GpuMetrics`` go to the ``meter_provider``. Default: ``true`` if it has a reader, unless
      ``OTEL_TORCHPROF_GPU_DEVICES`` is ``none``.
    - ``ranks``: ``apart``: one trace per step and rank; ``together``: one trace per step for all ranks. Default:
      ``OTEL_TORCHPROF_RANKS``, else ``apart``.
    - ``export_ranks``: ranks that record and export: ``all``, ``node`` (the first of each node), ``one`` (rank 0), or a
      share above 0, up to 1; others record nothing, except metrics. Default: ``export=`` of ``OTEL_TORCHPROF_RANKS``,
      else ``all``.
    - ``loader_workers``: worker processes of a ``DataLoader`` also record and export, each on its own. Default:
      ``OTEL_TORCHPROF_LOADER_WORKERS``, else ``false``.
    - ``blackbox``: events recorded in the black box, which outlives the process: ``steps`` or ``ops``; optionally with
      a folder (``ops,/scratch/boxes``), a size (``ops,32M``) and the seconds without an event after which a thread of
      the loop counts as hung (``ops,hang=60``; ``ops,hang=60,exit`` then ends the process). Default:
      ``OTEL_TORCHPROF_BLACKBOX``, else none.
    - ``sigterm_timeout``: seconds for ``TorchInstrumentor`` to send the recorded spans at SIGTERM if the program does
      not handle it; 0: SIGTERM is not handled. Default: ``OTEL_TORCHPROF_SIGTERM_TIMEOUT``, else ``5``.

    Spans go to the provider's :class:`TorchSpanProcessor`. Until one is added, a default processor uses the exporters
    of ``OTEL_TRACES_EXPORTER`` (``otlp`` by default). Works before and after the import of torch, and does not import
    it. Continues in a forked process, except in workers of a ``DataLoader``.

    Examples:
        >>> torch_instrumentor = otp.TorchInstrumentor()
        >>> torch_instrumentor.instrument(detail="steps")
        >>> torch_instrumentor.step({"torch.step.loss": 2.31})
        >>> torch_instrumentor.uninstrument()
    """

    _running: Instrumentation | MetricsInstrumentation | None = None
    _waiting: ProviderWait | None = None
    _processor: TorchSpanProcessor | None = None
    _own: DefaultProcessor | None = None
    _given: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the last ``instrument()``."""
    _gpus: GpuMetrics | None = None
    _ranks: Ranks | None = None
    _sigterm: SigtermFlush | None = None
    _box: BlackBox | None = None
    _sessions = 0
    _loader_workers = False
    _off = _NOT_INSTRUMENTED
    """Reason why nothing is recorded, if nothing is."""
    _lock = threads.RLock()

    @takes_arguments_of(Options)
    def instrument(self, **given: Any) -> None:
        """Starts the instrumentation with the arguments that the class describes.

        Restarts it after a provider's shutdown. A second call while torch is instrumented applies the arguments that
        differ, with a warning, in a new recording; other arguments stay in force.

        Raises:
            TypeError, ValueError: a bad argument; the message has its name, its value and the allowed values.
        """
        with self._lock:
            unused.note_recording()
            if self._running is not None and not self._running.is_running:
                super().uninstrument()
            if self.is_instrumented_by_opentelemetry:
                whole = Options(**{**self._given, **given})
                differences = whole.differences(Options(**self._given))
                if not differences:
                    return
                names = ", ".join(name for name in given if name in differences or name not in vars(whole))
                given = {**self._given, **given}
                _logger.warning(
                    "instrument() was called while torch is instrumented, with other arguments (%s): they are applied, and a new "
                    "recording begins; call uninstrument() first where that is meant",
                    names,
                )
                super().uninstrument()
            self._given = given
            try:
                super().instrument(**given)
            except BaseException:  # an interrupt too, wherever it comes
                if self.is_instrumented_by_opentelemetry:
                    super().uninstrument()
                else:
                    self._uninstrument()
                raise

    def uninstrument(self) -> None:
        """Removes every hook and callback and hands the recorded spans over to be sent.

        Sending continues in the background: ``tracer_provider.force_flush()`` waits for it.
        """
        with self._lock:
            super().uninstrument()

    def instrumentation_dependencies(self) -> Collection[str]:
        """Returns the supported versions of torch, for OpenTelemetry's dependency check."""
        return ("torch >= 2.6",)

    def step(
        self,
        attributes: Mapping[str, Any] | None = None,
        *,
        tokens: int | None = None,
        samples: int | None = None,
    ) -> None:
        """Ends the current step of the loop and begins the next one; after the first call nothing else ends a step.

        In every live recording of the process: that of ``instrument()``, of ``otel-torchprof run`` and of a :class:`stream`. Does
        nothing without one. Costs about 15 us.

        Args:
            attributes: attributes for the span of the ended step, ``{"torch.step.loss": 2.31}``: numbers, booleans,
                texts.
            tokens: how many the ended step had. Default: those in the ``input_ids`` of the batches that the loop's thread
                took from a ``DataLoader`` in it, with padding.
            samples: how many it had. Default: the first dimension of the first tensor in these batches.

        Raises:
            TypeError, ValueError: ``tokens`` or ``samples`` is no integer, less than 0, or 2**63 or more.
        """
        if running := control_socket.running:
            loaded = with_loaded(attributes, tokens, samples)
            for each in running:
                each.step(loaded)

    def keep_step(self) -> None:
        """Samples the current step in full, even if the policy keeps slow steps only.

        For a program that detects something unusual. Does nothing if no spans are created. Costs about 10 us;
        thread-safe.
        """
        for each in control_socket.running:
            if isinstance(each, Instrumentation):
                each.keep_step()

    def record(
        self,
        steps: int | None = None,
        *,
        seconds: float | None = None,
        detail: Literal["ops", "frames"] = "ops",
        record_shapes: bool = False,
        at_step: int | None = None,
        keep: Literal["all", "slow", "wait", "memory"] = "all",
        slow_limit: float | None = None,
    ) -> StepRecording:
        """Records the next steps in more detail, on a recording of their own, as ``otel-torchprof record`` does.

        Returns at once; a thread does the rest. ``wait()`` of the result, on another thread than the loop's, waits for
        the steps; then it is read like a finished :class:`profile`. Spans and averages of the instrumentation stay as
        they are.

        Args:
            steps: number of steps. Default: 25, unless ``seconds`` is given.
            seconds: longest time; without ``steps``, all of it is recorded.
            detail: ``"ops"`` or ``"frames"``.
            record_shapes: whether to record the shapes of operators' inputs.
            at_step: number of the first step. Default: the next one.
            keep: ``"all"``, or ``"slow"``: records until a step is slow, and keeps that step and at most
                ``steps - 1`` before it; the rest is dropped as the job runs. ``"wait"``: the same for a
                step that waits long for other ranks; ``"memory"``: for one that raises the memory, of the process at
                its peak or at the end of a step, or the peak of a device, above that of the 200 steps before, by
                three times the median of such rises, 16 MiB and 1 %. If there is none in ``seconds``, nothing is kept,
                and ``error`` says so. Default: ``"all"``.
            slow_limit: with ``"slow"`` and ``"wait"``, seconds from which on a step, or its wait, is slow. Default:
                three times the median of the last 200.

        Raises:
            TorchProfError: torch is not instrumented or not imported, another recording of steps is in progress, or
                ``keep`` is ``"wait"`` or ``"memory"`` and the instrumentation has ``detail="metrics"``.
            TypeError, ValueError: a bad argument; the message names it.
        """
        given = {
            "steps": steps,
            "seconds": seconds,
            "detail": detail,
            "record_shapes": record_shapes,
            "at_step": at_step,
            "keep": keep,
            "slow_limit": slow_limit,
        }
        request, running = StepRequest.checked(**given), self._recorded
        if running is None or not running.is_running:
            raise TorchProfError(f"there are no steps to record: torch is off: {self._off}; call instrument() first")
        recording = StepRecording(running, request)
        recording.start()
        return recording

    @property
    def health(self) -> ProcessorHealth:
        """State of every source; with ``detail="metrics"`` also the number of recorded steps and the overhead.

        With other details it is the health of the :class:`TorchSpanProcessor`. If GPU metrics are read, the source
        ``gpus`` summarizes :attr:`GpuMetrics.health`. Without ``instrument()``, it is that of the first live recording of the
        process, such as that of ``otel-torchprof run``.
        """
        running = self._recorded
        off = ProcessorHealth({"recording": f"off: {self._off}"}, 0, {}, {})
        return combined(off if running is None else running.health, self._gpus, self._box)

    @property
    def _recorded(self) -> Instrumentation | MetricsInstrumentation | None:
        """What ``instrument()`` has started, else the first live recording of the process; None without one."""
        return self._running or next(iter(control_socket.running), None)

    def _instrument(self, **given: Any) -> None:
        options = Options(**given)
        if not config.ENABLED.read() or options.detail == "off":
            self._stay_off("detail is 'off'" if config.ENABLED.read() else f"{config.ENABLED} is false")
            return
        # Also in a worker whose own code calls instrument().
        self._loader_workers = options.loader_workers or is_loader_worker()
        _watch_worker_processes(self)
        if options.blackbox is not None and (options.loader_workers or not is_loader_worker()):
            self._box = BlackBox(options.blackbox, identity_in(os.environ), running_step=self._running_step)
            self._box.start()
        if options.detail == "metrics":
            self._start_metrics(options)
            return
        self._sessions += 1
        self._ranks = Ranks(
            options.export_ranks, options.ranks, session=self._sessions, on_not_exporting=self._stop_exporting
        )
        if self._is_silent():
            return
        provider = options.tracer_provider or trace.get_tracer_provider()
        if is_sdk_provider(provider):
            self._start(provider, options)
        elif options.tracer_provider is None and is_disabled():
            self._stay_off(_SDK_DISABLED)
        elif options.tracer_provider is None:
            self._wait_for_provider(options)
        else:
            raise TypeError(
                f"tracer_provider is {provider!r}; it must be a TracerProvider of opentelemetry-sdk, which decides about "
                "sampling and ids"
            )

    def _running_step(self) -> SpanContext | None:
        return self._running.running_step if isinstance(self._running, Instrumentation) else None

    def _stay_off(self, reason: str) -> None:
        self._off = reason
        _logger.info("torch is not instrumented: %s", reason)

    def _uninstrument(self, **_: Any) -> None:
        self._end()
        if self._box is not None:
            self._box.stop()
            self._box = None

    def _end(self) -> None:
        """Ends everything except the black box, which ranks that export nothing have too."""
        self._off = _NOT_INSTRUMENTED
        if self._waiting is not None:
            self._waiting.give_up()
            self._waiting = None
        if self._own is not None:
            self._own.look()
        if self._running is not None:
            self._running.stop()
        self._running = self._processor = self._ranks = None
        self._given = {}
        if self._gpus is not None:
            self._gpus.stop()
            self._gpus = None
        if self._own is not None:
            self._own.shutdown()
            self._own.leave()
            self._own = None
        if self._sigterm is not None:  # last: until here there are spans to flush
            self._sigterm.stop()
            self._sigterm = None

    def _start_metrics(self, options: Options) -> None:
        meters = options.meter_provider or metrics.get_meter_provider()
        if isinstance(meters, metrics.NoOpMeterProvider) or getattr(meters, "_disabled", False):
            self._stay_off("the MeterProvider is switched off")
            return
        if is_disabled() and not has_sdk(meters):
            self._stay_off(_SDK_DISABLED)
            return
        processor = added_processor(options.tracer_provider or trace.get_tracer_provider())
        torch_metrics = metrics_of(options.meter_provider)
        torch_metrics.begin(options.max_operators)
        self._running = MetricsInstrumentation(
            torch_metrics,
            options.meter_provider,
            overhead=options.overhead,
            memory_limit=checked_memory_limit(None),
            exporters=tuple if processor is None else lambda: processor.exporter_figures,
            recording=options.recording,
            is_unwanted=self._is_unwanted,
        )
        self._watch_gpus(options)
        self._sigterm = SigtermFlush(options.sigterm_timeout, None, options.tracer_provider, options.meter_provider)
        self._running.start()
        self._sigterm.start()

    def _start(self, tracer_provider: Any, options: Options) -> None:
        if self._is_silent():
            return
        provider = Provider(tracer_provider, self._ranks)
        if provider.disabled:
            self._stay_off("the TracerProvider is switched off")
            return
        if is_shut_down(tracer_provider):
            self._stay_off("the TorchSpanProcessor is shut down")
            warn_once(
                "the provider's TorchSpanProcessor is shut down: nothing is recorded; give instrument(tracer_provider=...) another provider, "
                "or call instrument() before the shutdown"
            )
            return
        processor = added_processor(tracer_provider)
        if processor is None:
            processor = self._own = DefaultProcessor(tracer_provider, self._give_way)
        self._processor = processor
        self._sigterm = SigtermFlush(options.sigterm_timeout, processor, tracer_provider, options.meter_provider)
        self._running = Instrumentation(
            provider,
            processor,
            detail=options.detail,
            recording=options.recording,
            metrics=metrics_of(options.meter_provider),
            ranks=self._ranks,
            policy=options.policy,
            step_rule=options.step_rule,
            is_unwanted=self._is_unwanted,
        )
        self._running.start()
        self._sigterm.start()
        self._watch_gpus(options)

    def _is_silent(self) -> bool:
        """Whether this rank is known not to export; then nothing is started."""
        if self._ranks is None:
            return False
        self._ranks.look()
        if (why := self._ranks.not_exporting_reason) is not None:
            self._stay_off(why)
        return why is not None

    def _is_unwanted(self) -> bool:
        """Whether this is a spawned worker of a DataLoader; then it is stopped."""
        if self._loader_workers or not is_loader_worker():
            return False
        self._stop_exporting(_LOADER_WORKER)
        return True

    def _stop_exporting(self, why: str | None = None) -> None:
        """Stops on a thread of its own, since the caller is inside ``init_process_group`` or a drain."""
        ranks, running, given = self._ranks, self._running, self._given

        def stop() -> None:
            with self._lock:
                if running is None or self._running is not running:
                    return
                (self._uninstrument if why == _LOADER_WORKER else self._end)()
                self._ranks, self._given = ranks, given
                self._stay_off(why or (ranks and ranks.not_exporting_reason) or _NOT_INSTRUMENTED)

        threads.Thread(target=stop, name="otel-torchprof-silence", daemon=True).start()

    def _watch_gpus(self, options: Options) -> None:
        if options.gpu_metrics:
            is_read = options.meter_provider is not None or is_heard(metrics.get_meter_provider())
            self._gpus = GpuMetrics(options.meter_provider).start(look=is_read)

    def _give_way(self, processor: TorchSpanProcessor) -> None:
        """Moves to a processor that was added after ``instrument()`` and shuts the default one down."""
        # If the lock is taken, the instrumentation starts or stops; the next look follows in a quarter of a second.
        if not self._lock.acquire(blocking=False):
            return
        try:
            own, running = self._own, self._running
            if own is None or not isinstance(running, Instrumentation) or not running.move_to(processor):
                return
            self._own, self._processor = None, processor
            if self._sigterm is not None:
                self._sigterm.processor = processor
        finally:
            self._lock.release()
        own.leave()
        own.shutdown()

    def _wait_for_provider(self, options: Options) -> None:
        """Waits for the SDK: many programs instrument first and configure it later. Nothing is recorded until then."""
        self._off = "no TracerProvider of opentelemetry-sdk is set yet"
        self._awaiting = options
        self._waiting = ProviderWait(self._start_late)

    def _start_late(self, wait: ProviderWait) -> None:
        with self._lock:
            if wait.is_given_up:
                return
            wait.give_up()
            self._waiting = None
            try:
                self._start(trace.get_tracer_provider(), self._awaiting)
            except Exception:  # nothing else reports an error of this thread
                _logger.exception("torch is not instrumented")

    def _begin_in_worker(self) -> None:
        """Runs in a process of ``multiprocessing`` before its target."""
        from multiprocessing import util

        if is_loader_worker() and not self._loader_workers:
            if isinstance(self._running, Instrumentation):
                self._running.discard()
            self.uninstrument()
            self._stay_off(_LOADER_WORKER)
        else:
            util.Finalize(None, self._at_end_of_worker, exitpriority=0)

    def _at_end_of_worker(self) -> None:
        if self._processor is not None:
            self._processor.shutdown_within(_WORKER_SECONDS)

    def _after_fork_in_child(self) -> None:
        operator_metrics.after_fork_in_child()
        if self._running is not None:
            try:
                self._running.restart_in_child()
            except Exception:  # the child continues
                _logger.exception("torch is not instrumented in this forked process")
        elif self._waiting is not None:
            self._wait_for_provider(self._awaiting)


@functools.cache
def _watch_worker_processes(instrumentor: TorchInstrumentor) -> None:
    """Lets processes of ``multiprocessing`` send their spans when they end: they skip the usual exit handlers.

    Workers of a DataLoader are stopped unless requested: in every list they would be processes without steps beside the
    one that trains.
    """
    from multiprocessing import util

    def in_worker(inherited: TorchInstrumentor) -> None:
        try:
            inherited._begin_in_worker()  # noqa: SLF001 - our own
        except Exception:  # the child continues
            _logger.exception("torch stays instrumented in this worker process")

    util.register_after_fork(instrumentor, in_worker)


def running_ranks() -> Ranks | None:
    """Returns the ranks of this process while torch is instrumented, else None."""
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    return None if instance is None else instance._ranks  # noqa: SLF001 - our own


def _running_metrics() -> MetricsInstrumentation | None:
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    running = None if instance is None else instance._running  # noqa: SLF001 - our own
    return running if isinstance(running, MetricsInstrumentation) and running.is_running else None


class _Forking(threads.local):
    """State of a forking thread. After the fork, another instrumentation may run, or this module may just have been imported."""

    has_lock = False
    """Whether it took the instrumentor's lock."""
    prepared: tuple[MetricsInstrumentation, bool] | None = None
    """The instrumentation, and whether its lock was taken."""


_forking = _Forking()


def _before_fork() -> None:
    """Waits up to a second for a start or stop on another thread, which the child would inherit half done."""
    _forking.prepared = None
    _forking.has_lock = TorchInstrumentor._lock.acquire(timeout=process_changes.LONGEST_WAIT)  # noqa: SLF001 - our own
    if (running := _running_metrics()) is not None:
        _forking.prepared = running, running.before_fork()


def _after_fork_in_parent() -> None:
    prepared, _forking.prepared = _forking.prepared, None
    if prepared is not None:
        running, has_lock = prepared
        running.after_fork_in_parent(has_lock)
    if _forking.has_lock:
        TorchInstrumentor._lock.release()  # noqa: SLF001 - our own


def _after_fork_in_child() -> None:
    # After the processors, whose module is imported first: their spans are the parent's.
    TorchInstrumentor._lock = threads.RLock()  # noqa: SLF001 - our own
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    if instance is not None:
        instance._after_fork_in_child()  # noqa: SLF001 - our own


process_changes.at_fork(
    process_changes.Order.RECORDINGS,
    before=_before_fork,
    in_parent=_after_fork_in_parent,
    in_child=_after_fork_in_child,
)
