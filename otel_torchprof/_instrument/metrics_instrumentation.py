"""The instrumentation of ``detail="metrics"``: sums over the operators of some steps, and the duration of every step."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import metrics as otel_metrics

from otel_torchprof._columns.schema import Kind
from otel_torchprof._export.draining import Drainer, Ending, most_bytes, waiting_share
from otel_torchprof._export.ledger import Ledger
from otel_torchprof._export.sdk import current_resource
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import CHUNK_BYTES, Session, notes_on_names
from otel_torchprof._native.torch_library import Requested
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.cleanup import without_waiting
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._record.catalog import SourceRequest, requested
from otel_torchprof._record.contexts import SUPPRESSION_KEYS
from otel_torchprof._record.recording import Recording
from otel_torchprof._record.source import Operators
from otel_torchprof._record.step_marks import RawMarks, StepTracker, recorder_ahead_ns
from otel_torchprof._record.torch_hooks import OptimizerHooks
from otel_torchprof.errors import TorchProfError
from otel_torchprof.health import ON, ProcessorHealth

from .control_verbs import socket as control_socket
from .operator_metrics import ThinnedDurations, has_sdk, is_heard
from .recorder_metrics import RecorderFigures
from .sampler import Sampler
from .step_log import StepLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource

    from otel_torchprof._native.torch_library import TorchLibrary
    from otel_torchprof._record.source import RecordingOptions

    from .operator_metrics import TorchMetrics
    from .recorder_metrics import ExporterFigures


# ---- The cost of recording an operator, measured at run time ----

_ROUNDS = 7
_OPERATORS = 100
_LEAST, _MOST = 3e-8, 2e-5


def event_cost(library: TorchLibrary) -> float:
    """Measures the cost of recording an operator in a tight loop, in seconds; between 30 ns and 20 us.

    The difference of the best of 7 rounds of 100 small operators with and without recording; takes a millisecond. Call it on
    a thread of this package: its events are discarded, and suppressed in other recordings that follow contexts.

    Raises:
        TorchLibraryError, NativeError: operators cannot be recorded.
    """
    import torch

    token = otel_context.attach(otel_context.set_value(SUPPRESSION_KEYS[0], True))
    try:
        with torch.no_grad():
            number = torch.ones((), device="cpu")
            alone = _fastest(number.neg_)
            session = Session(CHUNK_BYTES, keep_newest=True, kinds=(Kind.OPERATOR,))
            session.start()
            observation = library.observe(session)
            try:
                recorded = _fastest(number.neg_)
            finally:
                observation.stop()
                session.stop()
    finally:
        otel_context.detach(token)
    return min(max(recorded - alone, _LEAST), _MOST)


def _fastest(operator: Callable[[], object]) -> float:
    durations = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_OPERATORS):
            operator()
        durations.append(time.perf_counter() - begin)
    return min(durations) / _OPERATORS


_logger = logging.getLogger("otel_torchprof")

_WINDOW_SECONDS = 0.05
"""Length of a recorded window in a program without steps."""
_STOP_SECONDS = 30.0
_MARK_SECONDS = 2e-6
"""Upper bound of the cost of noting the end of a step on the loop's thread (measured: 1 us)."""
_MARKS_AT_ONCE = 50
"""Most marks that the loop's thread turns into steps itself, at 3 us each; if there are more, the drain thread does."""
_DURATIONS_SHARE = 0.25
"""Part of the overhead budget for the histogram of step durations."""
_MOST_DURATIONS = 100_000


class MetricsInstrumentation:
    """The recording between ``instrument()`` and ``uninstrument()`` in one process.

    :meth:`start` and :meth:`stop` may be called repeatedly and from any thread; a stop removes all hooks from torch. Outside of
    recorded segments, the only callback in torch is the one for optimizers, which takes a microsecond.

    Args:
        metrics: metrics to update.
        provider: their MeterProvider; None: the global one, which may be set later.
        overhead: share of the time that recording may cost; 1 records everything.
        memory_limit: memory limit of the recorder, in bytes.
        exporters: returns the figures of span exporters.
        recording: options for device times.
        is_unwanted: returns whether this process is not to be recorded after all; it then stops the instrumentation itself.
    """

    def __init__(
        self,
        metrics: TorchMetrics,
        provider: Any = None,
        *,
        overhead: float,
        memory_limit: int,
        exporters: Callable[[], Sequence[ExporterFigures]] = tuple,
        recording: RecordingOptions,
        is_unwanted: Callable[[], bool] = bool,
    ) -> None:
        self._metrics = metrics
        self._is_unwanted = is_unwanted
        self._provider = provider
        process_changes.import_now("numpy.ma")  # numpy.unique would
        self._overhead = overhead
        self._memory_limit = memory_limit
        self._exporters = exporters
        # Operators are switched on and off per step, so they are not a source here; sources without sums are left out.
        self._options = replace(
            recording, operators=False, compilations=False, frames=False, sources={**recording.sources, "energy": False}
        )
        self._optimizers = OptimizerHooks()
        self._recording = Recording()
        self._ended = True
        self._library: TorchLibrary | None = None
        self._operators: Operators | None = None
        self._event_cost: float | None = None
        names = ("steps", "operators") if not self._options.times_device else ("steps", "operators", "devices")
        self._states = dict.fromkeys(names, "off: torch is not imported")
        self._ledger = Ledger()
        self._marks = RawMarks(self._at_boundary)
        self._begin()

    def _begin(self) -> None:
        """Creates the state of one process."""
        self._drainer = Drainer(math.inf, self._take_over, self._look, self._backlog)
        self._marks.clear()
        self._steps = StepTracker(self._on_boundary, clock=lambda: self._mark_ns)
        self._mark_ns = self._boundary_ns = 0
        self._context: Context | None = None
        self._durations: deque[tuple[float, float, Context]] = deque(maxlen=_MOST_DURATIONS)
        self._marks_taken = 0
        self.step_log = StepLog(recorder_ahead_ns)
        """The latest ended steps."""
        now = time.monotonic()
        share = 1.0 if self._overhead >= 1 else self._overhead * _DURATIONS_SHARE
        self._thinned = ThinnedDurations(self._metrics.durations, share, now)
        self._sampler = Sampler(self._overhead, now, self._switch)
        # With contexts, which are never set, so that it can be muted: observers of other recordings would otherwise record
        # events into it between its segments.
        self._session = Session(
            self._memory_limit,
            keep_newest=True,
            all_threads=True,
            kinds=(Kind.OPERATOR,),
            contexts=True,
            devices=self._options.times_device,
        )
        self._session.mute_roots(True)

    # ---- from start to stop ----

    @without_waiting
    def start(self) -> None:
        """Starts; hooks of torch are installed as soon as torch is imported."""
        with self._lock:
            self._attach()
        self._recording.when_torch(self._on_torch)

    def _attach(self) -> None:
        self._ended = False
        for stop in (self._optimizers.remove, self._unobserve):
            self._recording.cleanup.push(stop)
        self._recording.start(self._session)
        self._metrics.times = lambda: self._sampler.times(time.monotonic())
        self._metrics.refresh = self.refresh
        self._metrics.recorder.source = self._figures
        self._drainer.start()
        self._recording.cleanup.push(functools.partial(control_socket.leave, self))
        control_socket.enter(self)

    @property
    def _lock(self) -> Any:
        return self._recording.lock

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._recording.running

    def step(self, attributes: Mapping[str, Any] | None = None) -> None:
        """Ends a step, for ``step()`` of the program. Costs some microseconds."""
        if attributes:
            self._metrics.add_loaded(attributes)
        self._marks.note(None)

    def stop(self, _deadline: Any = None) -> None:
        """Removes all hooks, and adds the remaining events to the sums. The next call completes a stop that was interrupted."""
        with self._lock:
            if self.is_running:
                self._take_marks()
                self._sampler.stop(time.monotonic())
                self._marks.ask_at = float("inf")
            self._recording.stop()
        if self._ended:
            return
        ending = Ending(lambda: None, self._take_over, self._give_up, self._abandon)
        self._drainer.end(Deadline.after(_STOP_SECONDS), lambda: ending)
        self._metrics.end()
        self._metrics.recorder.source = None
        self._ended = True

    def status(self) -> dict[str, Any]:
        """Detail, sources and steps for the control socket."""
        return {"detail": "metrics", **self.step_log.status(), "sources": dict(self.health.sources)}

    def ask_drain(self) -> None:
        """Does nothing: ends of steps are taken four times a second."""

    @property
    def raised(self) -> RecordingOptions:
        """What a recording in more detail takes over: neither phases nor modules, whose hooks are not installed."""
        return self._options

    @property
    def resource(self) -> Resource:
        """Resource of the spans of such a recording."""
        return current_resource()

    @property
    def health(self) -> ProcessorHealth:
        """States of the sources, number of recorded steps, and overhead."""
        states = {"recording": ON if self.is_running else "off: not instrumented", **self._states}
        states |= self._recording.states()
        recorded, dropped, _ = self._ledger.read()
        return ProcessorHealth(states, recorded, dropped, {}, (*self._notes(), *notes_on_names()))

    def _notes(self) -> list[str]:
        sampler, now = self._sampler, time.monotonic()
        on, off = sampler.times(now)
        if sampler.always:
            return ["operators of every step are recorded"] if sampler.is_on else []
        line = f"operators are recorded in {on:.3g} of {on + off:.3g} seconds"
        if sampler.recorded_steps:
            line += f", 1 step in {sampler.steps / sampler.recorded_steps:.3g}"
        share = sampler.share(now)
        return [f"{line}; that took {share:.2%} of the time, {self._overhead:.2%} is allowed"]

    def _figures(self) -> RecorderFigures:
        share = None if self._sampler.always else self._sampler.share(time.monotonic())
        buffered = self._session.stats().bytes_buffered if self.is_running else 0
        return RecorderFigures(self._ledger.read(), buffered, self._memory_limit, share, tuple(self._exporters()))

    # ---- forks ----

    def before_fork(self) -> bool:
        """Removes the observer from torch: the child could not, since another thread may hold torch's lock.

        Returns whether the lock was taken, for :meth:`after_fork_in_parent`: other threads may fork at the same time.
        """
        has_lock: bool = self._lock.acquire(timeout=process_changes.LONGEST_WAIT)
        try:
            self._sampler.break_off(time.monotonic())
        except BaseException:  # an interrupt: after_fork_in_parent() will not be called
            if has_lock:
                self._lock.release()
            raise
        return has_lock

    def after_fork_in_parent(self, has_lock: bool) -> None:
        """Resumes recording; ``has_lock`` is the result of :meth:`before_fork`."""
        try:
            self._sampler.resume(time.monotonic())
            self._follow()
        finally:
            if has_lock:
                self._lock.release()

    def restart_in_child(self) -> None:
        """Continues in a forked child, which has inherited torch's hook, with a new recording and sums from 0."""
        self._operators = None  # the parent's
        self._begin()
        if self.is_running:
            self._attach()
            if self._library is not None:
                self._add_sources()
                self._may_record(0.0 if self._sampler.always else self._event_cost)

    # ---- torch ----

    def _on_torch(self, _torch: Any) -> None:
        self._optimizers.install_bare(self._marks.note)
        self._states["steps"] = ON
        try:
            self._library = torch_library.load()
        except TorchProfError as error:
            self._operators_are_off(error)
            return
        self._states["operators"] = ON
        self._add_sources()
        if self._sampler.always:
            self._may_record(0.0)

    def _add_sources(self) -> None:
        if self._options.times_device:
            for source in requested(SourceRequest(self._options, self._library, self._memory_limit)):
                self._recording.add(source)

    def _may_record(self, cost: float | None) -> None:
        if cost is not None:
            self._sampler.begin(cost, time.monotonic())
            self._follow()

    def _switch(self, on: bool) -> bool:
        """Starts or stops recording operators; returns False if torch refused, and notes the reason for health."""
        self._unobserve()
        self._session.mute_roots(not on)
        if on and self._library is not None:
            self._operators = Operators(
                self._library, Requested.DEVICES if self._options.times_device else Requested(0)
            )
            try:
                self._operators.start(self._session)
            except Exception as error:  # noqa: BLE001 - neither the training loop nor an import of torch may fail
                self._session.mute_roots(True)
                self._operators_are_off(error)
                return False
        return True

    def _unobserve(self) -> None:
        if self._operators is not None:
            self._operators.stop()

    def _operators_are_off(self, error: Exception) -> None:
        self._states["operators"] = f"off: {error}"
        _logger.warning("torch's operators are not counted, steps are: %s", error)

    # ---- steps ----

    def _at_boundary(self, now: int) -> None:
        """Updates the sampler at an end of a step, on the loop's thread. Never waits: the sampler can use the next one instead."""
        if len(self._marks) > _MARKS_AT_ONCE or not self._lock.acquire(blocking=False):
            return
        try:
            self._take_marks()
            if self._boundary_ns == now:  # else this optimizer's step ended no step of the loop
                self._sampler.boundary(now / 1e9)
            self._spend((time.monotonic_ns() - now) / 1e9, now / 1e9)
        except Exception as error:  # noqa: BLE001 - the training loop continues
            self._sampler.stop(now / 1e9)
            self._follow()
            self._operators_are_off(error)
        finally:
            self._lock.release()

    def _follow(self) -> None:
        self._marks.ask_at = self._sampler.ask_at * 1e9

    def _take_marks(self) -> None:
        """Turns noted ends of steps into steps; call it with the lock."""
        for optimizer, at, context, _ in self._marks.take():
            self._mark_ns, self._context = at, context
            self._marks_taken += 1
            if optimizer is None:
                self._steps.step()
            else:
                self._steps.optimizer_stepped(optimizer)
        self._context = None

    def _spend(self, seconds: float, now: float) -> None:
        """Charges ``seconds``, and the cost of the marks taken since the last call, to the sampler."""
        marks, self._marks_taken = self._marks_taken, 0
        self._sampler.spend(seconds + marks * _MARK_SECONDS, now)
        self._follow()

    def _on_boundary(self, number: int, now: int) -> None:
        if number > 1:
            self.step_log.add_step(RecordedStep(number - 1, self._boundary_ns, now))
        self._boundary_ns = now
        duration, sampled = self._sampler.step_ended(now / 1e9)
        self._metrics.add_step(sampled=sampled)
        if duration is not None and self._context is not None:
            self._durations.append((now / 1e9, duration, self._context))

    # ---- on the thread that drains ----

    def _look(self) -> bool:
        """Does the periodic work, every quarter second; returns whether a drain is due."""
        begin = time.thread_time()
        control_socket.look()
        if self._is_unwanted():
            return False
        provider: Any = self._provider or otel_metrics.get_meter_provider()
        if getattr(provider, "_shutdown", False):  # no reader will collect again; the SDK has no notification for it
            self.stop()
            return False
        # A provider that was passed in is always served; the global one only if it has a reader.
        has_reader = has_sdk(provider) if self._provider is not None else is_heard(provider)
        if self._library is not None and self._event_cost is None and not self._sampler.always and has_reader:
            self._event_cost = event_cost(self._library)
            with self._lock:
                if self.is_running:
                    self._may_record(self._event_cost)
        self._record_window()
        with self._lock:
            self._take_marks()
            self._sampler.watch(time.monotonic())
        self._record_durations()
        with self._lock:
            self._spend(time.thread_time() - begin, time.monotonic())
        return self._is_worth_a_drain()

    def _record_window(self) -> None:
        with self._lock:
            self._take_marks()
            now = time.monotonic()
            if not self._sampler.window_may_begin(now, expects_steps=self._steps.expects_steps()):
                return
            self._sampler.open_window(now)
            self._follow()
        threads.sleep(_WINDOW_SECONDS)
        with self._lock:
            self._sampler.break_off(time.monotonic())
            self._follow()

    def _is_worth_a_drain(self) -> bool:
        sampler = self._sampler
        is_much = self._session.stats().bytes_buffered >= most_bytes(self._memory_limit)
        return (sampler.needs_reading and not sampler.is_on) or is_much

    def refresh(self) -> None:
        """Adds the recorded events to the sums, within a second. Thread-safe."""
        self._drainer.drain(Deadline.after(1))

    def _backlog(self) -> float:
        return waiting_share(self._session.stats().bytes_buffered, self._memory_limit)

    def _take_over(self) -> int:
        """Drains a slice of the events and adds it to the sums; returns the watermark, Unix ns."""
        begin = time.thread_time()
        with self._lock:
            self._take_marks()
            is_whole = not self._sampler.is_on
        batch = self._recording.drain(most_bytes(self._memory_limit))
        try:
            self._metrics.add(batch)
        except Exception:
            self._ledger.add(0, {**batch.dropped, "failed": len(batch)})
            raise
        self._ledger.add(len(batch), batch.dropped)
        with self._lock:
            cost, now = time.thread_time() - begin, time.monotonic()
            self._sampler.read_out(len(batch), cost, now, whole=is_whole and batch.is_last)
            self._follow()
        self._record_durations()
        return batch.watermark

    def _give_up(self) -> int:
        self._session.discard()
        return self._take_over()

    def _abandon(self) -> None:
        """Does nothing: the thread that still drains counts its events itself."""

    def _record_durations(self) -> None:
        self._thinned.record([self._durations.popleft() for _ in range(len(self._durations))])
