"""``TorchInstrumentor``: torch's work in the traces of any service, as other libraries' instrumentations do for theirs."""

from __future__ import annotations

import functools
import logging
import os
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_torchprof import config
from otel_torchprof._blackbox.box import BlackBox
from otel_torchprof._distributed.rank_environment import identity_in
from otel_torchprof._distributed.ranks import Ranks
from otel_torchprof._export.provider import Provider, is_sdk_provider
from otel_torchprof._export.sdk import OTEL_SDK_DISABLED, is_disabled
from otel_torchprof._metrics import operator_metrics
from otel_torchprof._metrics.gpu_polling import GpuMetrics
from otel_torchprof._metrics.metrics_instrumentation import MetricsInstrumentation
from otel_torchprof._metrics.operator_metrics import has_sdk, is_heard, metrics_of
from otel_torchprof._process import fork
from otel_torchprof._process.workers import is_loader_worker
from otel_torchprof._record.recording import checked_memory_limit
from otel_torchprof.health import ProcessorHealth

from .combined_health import combined
from .default_processor import DefaultProcessor, added_processor, is_shut_down
from .instrumentation import Instrumentation
from .options import Options, checked_options, takes_arguments_of
from .provider_wait import ProviderWait
from .sigterm import SigtermFlush
from .unused_processor import unused

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from opentelemetry.trace import SpanContext

    from .processor import TorchSpanProcessor

_logger = logging.getLogger("otel_torchprof")

_NOT_INSTRUMENTED = "not instrumented"
_SDK_DISABLED = f"{OTEL_SDK_DISABLED} is true"
_WORKER_SECONDS = 3.0
"""What a worker process may take to send its last spans: a DataLoader gives its workers five seconds to end."""
_LOADER_WORKER = "this is a worker of a DataLoader, see loader_workers"


class TorchInstrumentor(BaseInstrumentor):
    """Instruments torch: ``TorchInstrumentor().instrument(tracer_provider=provider)``, or ``opentelemetry-instrument``.

    ``instrument()`` takes:

    - ``tracer_provider``: the SDK's; by default the global one, also when that is set later.
    - ``detail``: ``"off"``, ``"metrics"``, ``"steps"`` (default), ``"modules"``, ``"ops"`` or ``"frames"``; by default as
      ``OTEL_TORCHPROF_DETAIL`` says. ``"metrics"`` makes no spans and needs no TracerProvider.
    - ``meter_provider``: gets the durations of steps and figures of the recorder; with ``"metrics"`` also those of operators;
      by default the global one, also when that is set later.
    - ``overhead``: share of the time that ``"metrics"`` may cost, above 0, up to 1, by which every step is recorded; by
      default as ``overhead=`` in ``OTEL_TORCHPROF_METRICS`` says, else 0.01.
    - ``max_operators``: how many operators have series of their own with ``"metrics"``; by default as
      ``max_operators=`` in ``OTEL_TORCHPROF_METRICS`` says, else 50.
    - ``record_shapes``: keep the shapes of operators' inputs, with ``"ops"`` and ``"frames"``.
    - ``use_device``: the type of device whose times are recorded, ``"cuda"`` for one, from when the program first uses it
      (``docs/devices.md``); by default as ``OTEL_TORCHPROF_DEVICE`` says, else none. With ``"steps"`` the energy alone.
    - ``device_events``: for which events, as for :class:`profile`; by default as ``events=`` in ``OTEL_TORCHPROF_DEVICE`` says, else
      ``"ops"``.
    - ``energy``: whether the energy counters of NVIDIA's GPUs are read, ten times a second, on a thread of its own; by default
      where ``use_device`` is ``"cuda"``.
    - ``gpu_metrics``: False: no :class:`GpuMetrics` for the ``meter_provider``; by default there are, where somebody reads them, unless
      ``OTEL_TORCHPROF_GPU_DEVICES`` is ``none``.
    - ``frames``: which of Python's calls are recorded, with ``"frames"``: a :class:`FrameFilter`; by default as the environment
      says (``OTEL_TORCHPROF_FRAMES``), else all.
    - ``export_ranks``: which ranks of a distributed program record and export: ``"all"`` (default), ``"node"``, the first of each
      node, ``"one"``, or a share above 0, up to 1; by default as ``export=`` in ``OTEL_TORCHPROF_RANKS`` says. The others record
      nothing. ``"metrics"`` is not affected.
    - ``ranks``: ``"apart"`` (default), a trace per step and rank, or ``"together"``, one per step for all ranks; by default as
      ``OTEL_TORCHPROF_RANKS`` says.
    - ``loader_workers``: True: worker processes of a ``DataLoader`` record and export too, each for itself; by default as
      ``OTEL_TORCHPROF_LOADER_WORKERS`` says, else they do not.
    - ``sigterm_timeout``: seconds in which what was recorded is sent at SIGTERM, where the program does not handle it
      (``docs/delivery.md``); 0: SIGTERM is left alone; by default as ``OTEL_TORCHPROF_SIGTERM_TIMEOUT`` says, else 5.
    - ``blackbox``: ``"steps"`` or ``"ops"``: keep the latest events in memory that outlives the process, whatever ends it
      (``docs/blackbox.md``), in ``"ops,/a/folder,32M"`` with a folder and a size; by default as ``OTEL_TORCHPROF_BLACKBOX`` says,
      else not.
    - ``steps``: what ends a step of training: ``"auto"`` (default), a rule that is learned from the loop itself; ``"program"``:
      :meth:`step` alone; an optimizer; or a ``DataLoader``, each of whose batches is a step. With ``"auto"``, trainers of Hugging Face and
      Lightning say it (``docs/frameworks.md``). Whatever it is, :meth:`step` ends one.
    - ``policy``: which steps are traced in full, and how much of each: a :class:`SpanPolicy`; by default as the environment
      says.

    Spans go to the :class:`TorchSpanProcessor` that was added to the provider. Where there is none, one is made whose
    exporters are those that ``OTEL_TRACES_EXPORTER`` names (``otlp`` by default), until one is added. A second ``instrument()`` changes
    what it is given, and nothing else.

    Works before and after torch is imported, and imports nothing of it. In a forked process it continues by itself, but in the workers
    of a ``DataLoader``.
    ``uninstrument()`` takes every hook and callback back and sends what was recorded.
    """

    _running: Instrumentation | MetricsInstrumentation | None = None
    _waiting: ProviderWait | None = None
    _processor: TorchSpanProcessor | None = None
    _own: DefaultProcessor | None = None
    _given: Mapping[str, Any] = MappingProxyType({})
    """The arguments that it was instrumented with."""
    _gpus: GpuMetrics | None = None
    _ranks: Ranks | None = None
    _sigterm: SigtermFlush | None = None
    _box: BlackBox | None = None
    _sessions = 0
    _loader_workers = False
    _off = _NOT_INSTRUMENTED
    """Why nothing is recorded, where nothing is."""
    _lock = threading.RLock()

    @takes_arguments_of(Options)
    def instrument(self, **given: Any) -> None:
        """Begins; see the class. Again after the provider's shutdown, which has ended it, without :meth:`uninstrument`.

        While torch is instrumented, arguments other than those in force are applied, with one warning, in a new recording; those that are
        not given stay as they are.

        Raises:
            TypeError, ValueError: a bad argument; the message names it, its value and what is allowed.
        """
        with self._lock:
            unused.note_recording()
            if self._running is not None and not self._running.is_running:
                super().uninstrument()
            if self.is_instrumented_by_opentelemetry:
                whole = checked_options({**self._given, **given})
                differences = whole.differences(checked_options(self._given))
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
        """Takes every hook and callback back and sends what was recorded."""
        with self._lock:
            super().uninstrument()

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of torch that are instrumented."""
        return ("torch >= 2.6",)

    def step(self, attributes: Mapping[str, Any] | None = None) -> None:
        """Says that a step of the loop has ended, and the next begins; from then on nothing else does.

        Does nothing where nothing is instrumented. Costs some 15 us.

        Args:
            attributes: of the span of the step that has ended, ``{"torch.step.loss": 2.31}``: numbers, booleans, texts.
        """
        if self._running is not None:
            self._running.step(attributes)

    def keep_step(self) -> None:
        """Keeps the detail of the step that runs, where the policy keeps that of slow steps only: somebody saw something odd.

        Does nothing where no spans are made. Costs some 10 us; any thread.
        """
        if isinstance(self._running, Instrumentation):
            self._running.keep_step()

    @property
    def health(self) -> ProcessorHealth:
        """What is on, what is off and why; with ``detail="metrics"`` also how many steps are recorded, and what that costs.

        With the other details it is that of the :class:`TorchSpanProcessor`. Where GPU metrics are read, ``gpus`` among
        the sources says of them what :attr:`GpuMetrics.health` does.
        """
        found = ProcessorHealth({"recording": f"off: {self._off}"}, 0, {}, {})
        if isinstance(self._running, MetricsInstrumentation):
            found = self._running.health
        elif self._processor is not None:
            found = self._processor.health
        return combined(found, self._gpus, self._box)

    def _instrument(self, **given: Any) -> None:
        options = checked_options(given)
        if not config.ENABLED.read() or options.detail == "off":
            self._stay_off("detail is 'off'" if config.ENABLED.read() else f"{config.ENABLED} is false")
            return
        self._loader_workers = options.loader_workers or is_loader_worker()  # whose own code it is that asks
        _watch_worker_processes(self)
        if options.blackbox is not None and (options.loader_workers or not is_loader_worker()):
            self._box = BlackBox(options.blackbox, identity_in(os.environ), running_step=self._running_step)
            self._box.start()
        if options.detail == "metrics":
            self._start_metrics(options)
            return
        self._sessions += 1
        self._ranks = Ranks(options.export_ranks, options.ranks, session=self._sessions, on_silence=self._fall_silent)
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
        """All but the black box, which ranks that export nothing have too."""
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
        if self._sigterm is not None:  # last: until then there is something to send
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
        found = metrics_of(options.meter_provider)
        found.begin(options.max_operators)
        self._running = MetricsInstrumentation(
            found,
            options.meter_provider,
            overhead=options.overhead,
            memory_limit=checked_memory_limit(None),
            exporters=tuple if processor is None else lambda: processor.exporter_figures,
            recording=options.recording,
            is_unwanted=self._is_unwanted,
        )
        self._watch_gpus(options)
        self._sigterm = SigtermFlush(options.sigterm_timeout, None, None, options.meter_provider)
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
            config.warn_once(
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
        """Whether this is a rank that does not export, as far as is known: then nothing is begun."""
        if self._ranks is None:
            return False
        self._ranks.look()
        if (why := self._ranks.silence) is not None:
            self._stay_off(why)
        return why is not None

    def _is_unwanted(self) -> bool:
        """Whether this turns out to be a worker of a DataLoader that was started anew; then it is stopped."""
        if self._loader_workers or not is_loader_worker():
            return False
        self._fall_silent(_LOADER_WORKER)
        return True

    def _fall_silent(self, why: str | None = None) -> None:
        """It turns out now, in the middle of the program's ``init_process_group`` or of a drain."""
        ranks, running, given = self._ranks, self._running, self._given

        def stop() -> None:
            with self._lock:
                if running is None or self._running is not running:
                    return
                (self._uninstrument if why == _LOADER_WORKER else self._end)()
                self._ranks, self._given = ranks, given
                self._stay_off(why or (ranks and ranks.silence) or _NOT_INSTRUMENTED)

        threading.Thread(target=stop, name="otel-torchprof-silence", daemon=True).start()

    def _watch_gpus(self, options: Options) -> None:
        if options.gpu_metrics:
            is_read = options.meter_provider is not None or is_heard(metrics.get_meter_provider())
            self._gpus = GpuMetrics(options.meter_provider).start(look=is_read)

    def _give_way(self, processor: TorchSpanProcessor) -> None:
        """A processor was added after ``instrument()``: it gets torch's spans from now on, and the one that was made is shut down."""
        if not self._lock.acquire(
            blocking=False
        ):  # it is being begun or ended; the next look is a quarter of a second away
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
        """Many programs instrument first and configure the SDK later; until then nothing is recorded."""
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
            except Exception:  # on a thread of our own nobody else would say so
                _logger.exception("torch is not instrumented")

    def _begin_in_worker(self) -> None:
        """In a process of ``multiprocessing``, before what it is for."""
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
    """Lets processes of ``multiprocessing`` send what they have when they end: they skip what others do at exit.

    Workers of a DataLoader are stopped unless asked for: in every list they would be processes without steps beside the one that trains.
    """
    from multiprocessing import util

    def in_worker(inherited: TorchInstrumentor) -> None:
        try:
            inherited._begin_in_worker()  # noqa: SLF001 - our own
        except Exception:  # the child continues
            _logger.exception("torch stays instrumented in this worker process")

    util.register_after_fork(instrumentor, in_worker)


def running_ranks() -> Ranks | None:
    """What this process knows of its ranks, while torch is instrumented."""
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    return None if instance is None else instance._ranks  # noqa: SLF001 - our own


def _running_metrics() -> MetricsInstrumentation | None:
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    running = None if instance is None else instance._running  # noqa: SLF001 - our own
    return running if isinstance(running, MetricsInstrumentation) and running.is_running else None


class _Forking(threading.local):
    """A thread that forks. Another instrumentation may run when the fork is over, and this module may be imported only then."""

    has_lock = False
    """Whether it took the instrumentor's lock."""
    prepared: tuple[MetricsInstrumentation, bool] | None = None
    """The instrumentation, and whether its lock was taken."""


_forking = _Forking()


def _before_fork() -> None:
    """Lets a start or stop on another thread end first, if it does within a second: the child would get half of it."""
    _forking.prepared = None
    _forking.has_lock = TorchInstrumentor._lock.acquire(timeout=fork.LONGEST_WAIT)  # noqa: SLF001 - our own
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
    # After the processors, whose module is imported first: what they hold is the parent's.
    TorchInstrumentor._lock = threading.RLock()  # noqa: SLF001 - our own
    instance = TorchInstrumentor._instance  # noqa: SLF001 - where BaseInstrumentor keeps the one there is
    if instance is not None:
        instance._after_fork_in_child()  # noqa: SLF001 - our own


fork.call_late(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
