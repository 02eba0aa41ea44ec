"""Operators and steps as OpenTelemetry metrics: the instruments of one MeterProvider, and the sums behind them."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import metrics, trace
from opentelemetry.metrics import Observation

from otel_torchprof import config
from otel_torchprof._columns import generation
from otel_torchprof._columns.generation import INPUT_TOKENS, MODEL, OPERATION, OUTPUT_TOKENS, PROVIDER
from otel_torchprof._columns.phases import LOADED, Segment
from otel_torchprof._export.sdk import SCHEMA_URL
from otel_torchprof._model.averages import OperatorSums
from otel_torchprof._process import process_changes, threads
from otel_torchprof.version import __version__

from .collective_waits import CollectiveWaits
from .line_metrics import LINE_TIME, LineSums
from .recorder_metrics import RecorderMetrics
from .sampler import Allowance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.metrics import Meter, MeterProvider

    from otel_torchprof._answers.line_reading import TakenSamples
    from otel_torchprof._columns.generation import Generation
    from otel_torchprof._model.averages import Average
    from otel_torchprof._model.step_spans import StepSpan


# ---- Calls of transformers' ``generate`` as the metrics of OpenTelemetry's conventions for generative AI ----

SCOPE = "otel_torchprof.generate"
"""The instrumentation scope, whose schema URL differs from that of this package's other metrics."""
ERROR = "error.type"

DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS = tuple(4**power for power in range(14))
"""Upper bounds of the conventions, in seconds or tokens."""


class _TokenUsage:
    """The metric and the attribute that an open change of the conventions for generative AI takes out: all that there is of them."""

    def __init__(self, meter: Meter) -> None:
        self._histogram = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of prompt tokens and of generated tokens.",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )

    def record(self, known: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Those tokens of a call that are known; the attributes are those of its other metrics."""
        for token_type, key in (("input", INPUT_TOKENS), ("output", OUTPUT_TOKENS)):
            if (tokens := known[key]) is not None:
                self._histogram.record(tokens, {**attributes, "gen_ai.token.type": token_type})


class GenerationMetrics:
    """Histograms of calls of ``generate``. Thread-safe; costs some 50 us per call, on its thread. Exemplars link to its current span.

    A program that calls ``generate`` serves its model, so the metrics are those of a server. For tokens, the conventions only have
    a client's metric; it is reported unless another instrumentation has a span for the call and counts the tokens itself.

    Args:
        meter: meter of the scope :data:`SCOPE`.
        is_heard: returns whether the provider has a reader.
    """

    def __init__(self, meter: Meter, is_heard: Callable[[], bool]) -> None:
        self.meter = meter
        self._is_heard = is_heard
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Duration of a call of generate.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to the first token of a call of generate that returned.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per further token of a sequence after the first, for calls of generate that returned.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS,
        )
        self._token_usage = _TokenUsage(meter)

    def record(self, generation: Generation) -> None:
        """Records a call; of a failed call, only its duration."""
        if not self._is_heard():
            return
        known = generation.gen_ai()
        attributes: dict[str, Any] = {key: known[key] for key in (OPERATION, PROVIDER, MODEL)}
        if generation.error_type:
            self._duration.record(generation.duration, {**attributes, ERROR: generation.error_type})
            return
        self._duration.record(generation.duration, attributes)
        if (seconds := generation.time_to_first_token) is not None:
            self._first_token.record(seconds, attributes)
        if (seconds := generation.time_per_output_token) is not None:
            self._per_token.record(seconds, attributes)
        if not generation.has_own_span:
            self._token_usage.record(known, attributes)


"""Operators that have series of their own."""

OPERATOR = "torch.op.name"
GROUP = "torch.collective.group"
PHASE = "torch.phase.name"
SAMPLED = "torch.sampled"

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Upper bounds for the durations of steps, in seconds: three for each power of ten."""

PHASE_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, *STEP_BUCKETS, 200.0, 500.0, 1000.0)
"""Upper bounds for parts of steps, in seconds, from 10 µs on."""

_SECONDS = 1e-9


class _Amount(NamedTuple):
    name: str
    unit: str
    description: str
    value: Callable[[Average], float]
    of_device: bool = False


_AMOUNTS = (
    _Amount("torch.op.calls", "{call}", "Number of recorded calls of an operator.", lambda sums: sums.calls),
    _Amount("torch.op.time", "s", "Total time of recorded calls of an operator.", lambda sums: sums.total * _SECONDS),
    _Amount(
        "torch.op.self_time",
        "s",
        "Self time of recorded calls of an operator.",
        lambda sums: sums.self_time * _SECONDS,
    ),
    _Amount(
        "torch.op.device.time",
        "s",
        "Total device time of recorded calls of an operator.",
        lambda sums: sums.device_total * _SECONDS,
        of_device=True,
    ),
    _Amount(
        "torch.op.device.self_time",
        "s",
        "Device self time of recorded calls of an operator.",
        lambda sums: sums.device_self_time * _SECONDS,
        of_device=True,
    ),
)


class StepDurations:
    """The histograms of training steps and of their parts. Not thread-safe.

    Args:
        meter: meter of the histograms.
        is_heard: returns whether the provider has a reader; without one, :meth:`record_spans` does nothing.
    """

    def __init__(self, meter: Meter, is_heard: Callable[[], bool]) -> None:
        self._is_heard = is_heard
        self._histogram = meter.create_histogram(
            "torch.step.duration",
            "s",
            "Duration of a training step.",
            explicit_bucket_boundaries_advisory=STEP_BUCKETS,
        )
        self._phases = meter.create_histogram(
            "torch.phase.duration",
            "s",
            "Time of a training step in a phase, without phases inside it.",
            explicit_bucket_boundaries_advisory=PHASE_BUCKETS,
        )
        self._waits = meter.create_histogram(
            "torch.collective.wait.duration",
            "s",
            "Time of a training step from the call of collectives to their end: until the last rank arrives, and the transfer.",
            explicit_bucket_boundaries_advisory=PHASE_BUCKETS,
        )

    def record(self, seconds: float, context: Context | None) -> None:
        """Records a step; its exemplar links to the current span of the context, if that is sampled."""
        self._histogram.record(max(seconds, 0.0), context=context)

    def record_spans(self, steps: Iterable[StepSpan], waits: CollectiveWaits) -> None:
        """Records training steps that have spans, once each; exemplars link to these spans if they are exported.

        ``waits``: the collectives of these steps.
        """
        if not self._is_heard():
            return
        training = [step for step in steps if step.thread is not None and step.segment is Segment.STEP]
        waited: dict[StepSpan, list[tuple[str, float]]] = {}
        for step, group, seconds in waits.of_steps(training):
            waited.setdefault(step, []).append((group, seconds))
        for step in training:
            own = step.span_context
            context = None if own is None else trace.set_span_in_context(trace.NonRecordingSpan(own))
            duration = step.end - step.start
            self.record(duration * _SECONDS, context)
            if step.phases is not None:
                for name, time in step.phases.on_thread(step.thread, duration).items():
                    self._phases.record(time * _SECONDS, {PHASE: name}, context=context)
            for group, seconds in waited.get(step, ()):
                self._waits.record(seconds, {GROUP: group}, context=context)


class ThinnedDurations:
    """Records durations of steps within an overhead budget: steps that would exceed it are left out.

    Not thread-safe.
    """

    def __init__(self, durations: StepDurations, share: float, now: float) -> None:
        self._durations = durations
        self._allowance = Allowance(share, now)
        self._cost = 0.0
        self._thins = share < 1

    def record(self, steps: Sequence[tuple[float, float, Context]]) -> None:
        """Records ``steps``: end and duration, both in seconds, and context of each."""
        begin, recorded = time.thread_time(), 0
        for end, seconds, context in steps:
            if self._thins and end < self._allowance.free_at:
                continue
            self._durations.record(seconds, context)
            self._allowance.spend(self._cost, end)
            recorded += 1
        if recorded:
            cost = (time.thread_time() - begin) / recorded
            self._cost = cost if not self._cost else 0.8 * self._cost + 0.2 * cost


class TorchMetrics:
    """The instruments of one MeterProvider, and their sums, which only grow, also over several recordings.

    An observable instrument cannot be removed from a provider, so there is one set of them per provider: :func:`metrics_of`.
    Reading is thread-safe; times are in seconds.

    Args:
        meter: meter of the instruments.
        generations: metrics of calls of ``generate`` of the same provider.
        is_heard: returns whether the provider has a reader.
    """

    def __init__(
        self, meter: Meter, generations: GenerationMetrics, is_heard: Callable[[], bool] = lambda: True
    ) -> None:
        self._meter = meter
        self.generations = generations
        self._is_heard = is_heard
        self.durations, self.waits = StepDurations(meter, is_heard), CollectiveWaits()
        self.refresh: Callable[[], None] | None = None
        """Called before sums are read, to update them."""
        self.times: Callable[[], tuple[float, float] | None] | None = None
        """Returns the seconds with and without recording of operators so far; None if unknown."""
        self._lock = threads.Lock()
        self._make_sums(config.MAX_OPERATORS.fallback)
        for amount in _AMOUNTS:
            meter.create_observable_counter(
                amount.name, [self._observing(amount)], unit=amount.unit, description=amount.description
            )
        meter.create_observable_counter(
            "torch.steps", [self._observe_steps], unit="{step}", description="Number of ended training steps."
        )
        for key, unit in zip(LOADED, ("{token}", "{sample}"), strict=True):
            of = f"Number of {unit[1:-1]}s in the batches of training steps."
            meter.create_observable_counter(key, [self._observing_loaded(key)], unit=unit, description=of)
        meter.create_observable_counter(
            "otel_torchprof.sampling.time",
            [self._observe_times],
            unit="s",
            description="Time with and without recording of operators.",
        )
        meter.create_observable_counter(
            LINE_TIME,
            [self._observe_lines],
            unit="s",
            description="Sampled time of loops by phase and line of the program; 20 lines, others together.",
        )
        self.recorder = RecorderMetrics(meter)

    def _make_sums(self, most: int) -> None:
        self._most = most
        self._operators, self._lines = OperatorSums(most), LineSums()
        self._steps = {True: 0, False: 0}
        self._loaded = dict.fromkeys(LOADED, 0)
        self._earlier = [0.0, 0.0]

    def begin(self, most_operators: int) -> None:
        """Prepares a recording. A changed limit of operators with series of their own restarts the sums."""
        if most_operators != self._most:
            with self._lock:
                self._make_sums(most_operators)

    def add(self, batch: Any) -> None:
        """Adds the operators of a drained batch."""
        with self._lock:
            self._operators.add(batch)

    def add_spans(self, steps: Sequence[StepSpan], samples: TakenSamples | None) -> None:
        """Adds training steps that have spans, and samples of Python stacks."""
        for step in steps:
            if step.thread is not None and step.segment is Segment.STEP:
                self.add_loaded(step.attributes)
        if self._is_heard():
            self.durations.record_spans(steps, self.waits)
            with self._lock:
                self._lines.add(samples, {step.thread for step in steps if step.thread is not None})

    def add_step(self, *, sampled: bool) -> None:
        """Counts an ended step; ``sampled``: its operators were recorded."""
        self._steps[sampled] += 1

    def add_loaded(self, attributes: Mapping[str, Any]) -> None:
        """Adds the tokens and samples of a step, from its attributes."""
        for key in LOADED:
            if isinstance(count := attributes.get(key), int):
                self._loaded[key] += count

    def end(self) -> None:
        """Stores the times of a recording that ends, and stops reading from it."""
        times = self._times_now()
        if times is not None:
            self._earlier = [earlier + time for earlier, time in zip(self._earlier, times, strict=True)]
        self.times = self.refresh = None
        self.waits.stop()

    def _times_now(self) -> tuple[float, float] | None:
        times = self.times  # once: another thread may end the recording
        return None if times is None else times()

    def after_fork_in_child(self) -> None:
        """Restarts the sums in a forked child, and releases locks of the SDK that a reader of the parent may have held."""
        process_changes.release_locks(self._meter, "opentelemetry.")
        process_changes.release_locks(self.generations.meter, "opentelemetry.")
        self._lock = threads.Lock()
        self._make_sums(self._most)
        self.times = self.refresh = None
        self.waits = CollectiveWaits()
        self.recorder.source = None

    def _observing(self, amount: _Amount) -> Callable[[Any], list[Observation]]:
        def observe(_options: Any) -> list[Observation]:
            refresh = self.refresh  # once: another thread may end the recording
            if (
                amount is _AMOUNTS[0] and refresh is not None
            ):  # readers collect the instrument that was created first first
                refresh()
            with self._lock:
                if amount.of_device and not self._operators.has_devices:
                    return []
                averages = self._operators.read()
            return [Observation(amount.value(sums), {OPERATOR: sums.name}) for sums in averages]

        return observe

    def _observe_lines(self, _options: Any) -> list[Observation]:
        with self._lock:
            return [Observation(seconds, attributes) for seconds, attributes in self._lines.read()]

    def _observe_steps(self, _options: Any) -> list[Observation]:
        if not any(self._steps.values()):
            return []
        return [Observation(count, {SAMPLED: sampled}) for sampled, count in self._steps.items()]

    def _observing_loaded(self, key: str) -> Callable[[Any], list[Observation]]:
        return lambda _options: [Observation(self._loaded[key])] if self._loaded[key] else []

    def _observe_times(self, _options: Any) -> list[Observation]:
        now = self._times_now() or (0.0, 0.0)
        sums = [earlier + time for earlier, time in zip(self._earlier, now, strict=True)]
        return [
            Observation(time, {SAMPLED: sampled})
            for time, sampled in zip(sums, (True, False), strict=True)
            if any(sums)
        ]


_lock = threads.Lock()
_global: TorchMetrics | None = None
_of_providers: weakref.WeakKeyDictionary[MeterProvider, TorchMetrics] = weakref.WeakKeyDictionary()


def metrics_of(provider: MeterProvider | None) -> TorchMetrics:
    """The metrics of a provider, or of the global one, even if that is set later; one object per provider."""
    global _global  # noqa: PLW0603 - there is one
    with _lock:
        if provider is None or provider is metrics.get_meter_provider():
            # A provider that was in use before it became the global one has its instruments already.
            existing = _of_providers.get(metrics.get_meter_provider())
            if existing is None:
                existing = _global = _global or _made(metrics.get_meter, lambda: is_heard(metrics.get_meter_provider()))
            return existing
        existing = _of_providers.get(provider)
        if existing is None:
            existing = _of_providers[provider] = _made(provider.get_meter, lambda: True)
        return existing


def _made(get_meter: Callable[..., Meter], is_heard: Callable[[], bool]) -> TorchMetrics:
    generations = GenerationMetrics(get_meter(SCOPE, __version__, schema_url=generation.SCHEMA_URL), is_heard)
    return TorchMetrics(get_meter("otel_torchprof", __version__, schema_url=SCHEMA_URL), generations, is_heard)


def has_sdk(provider: Any) -> bool:
    """Whether the program has set a MeterProvider: until then, the API's is a proxy."""
    return type(provider).__name__ != "_ProxyMeterProvider"


def is_heard(provider: Any) -> bool:
    """Whether a provider has a reader: False before one is set, and for one that is disabled or has no reader.

    ``OTEL_METRICS_EXPORTER=none`` makes one without readers. True for a provider whose readers are not known.
    """
    if (
        not has_sdk(provider)
        or isinstance(provider, metrics.NoOpMeterProvider)
        or getattr(provider, "_disabled", False)
    ):
        return False
    of_older = getattr(getattr(provider, "_sdk_config", None), "metric_readers", None)
    readers = getattr(provider, "_metric_readers", of_older)
    return readers is None or len(readers) > 0


def after_fork_in_child() -> None:
    """Restarts the metrics in a forked child: the parent reports its own sums."""
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threads.Lock()
    for torch_metrics in [_global, *_of_providers.values()]:
        if torch_metrics is not None:
            torch_metrics.after_fork_in_child()
