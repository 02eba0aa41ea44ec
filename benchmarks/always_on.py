"""What it adds to a training step, and to a request, to leave metrics or operators on: beside nothing, over seconds.

Few steps are recorded, and these take longer: so what counts is the mean over many, not the median.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from harness import EMPTY, OURS, Budget, Recorder, Row, Settings, in_abba, rows
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from receiver import Receiver
from recorders import empty_callback, instrumented
from workloads import gpt2_step, small_model, small_operators_step

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 2.0
"""Of a run: some recorded steps. Runs are short and many, since a machine drifts by more than a percent within a minute."""
_SETTLING = 1.0
"""Before one with metrics, in which is learnt what an event costs."""
_ROUNDS, _REQUEST_ROUNDS = 8, 3
_LIMIT_PERCENT = 1.0
_OF_SMALL_OPERATORS: dict[str, tuple[str, dict[str, Any], float]] = {
    "steps": ("steps", {}, 1.0),
    "modules": ("modules", {}, 4.0),
    "ops": ("ops", {}, 15.0),
    "ops, keep=slow": ("ops", {"keep": "slow"}, 10.0),
    "ops, every=10": ("ops", {"every": 10}, 4.0),
}
"""Detail and policy, and percent that they may add to a step of small operators."""


class _Encoding(MetricExporter):
    """Makes of metrics what would be sent."""

    def export(self, metrics_data, timeout_millis=10_000, **kwargs):  # noqa: ARG002 - the SDK's signature
        encode_metrics(metrics_data).SerializeToString()
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000):  # noqa: ARG002 - the SDK's signature
        return True

    def shutdown(self, timeout_millis=30_000, **kwargs):
        """There is nothing to close."""


def measure(settings: Settings) -> list[Row]:
    """The GPT-2 training step, a request to a small model, then a step of small operators; in percent."""
    with Receiver() as receiver:
        reader = PeriodicExportingMetricReader(_Encoding(), export_interval_millis=5000)
        meters = MeterProvider([reader], resource=Resource.get_empty(), shutdown_on_exit=False)
        tracers = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
        tracers.add_span_processor(otp.TorchSpanProcessor(otp.OTLPExporter(endpoint=receiver.grpc)))
        contestants = {
            f"{OURS}, {detail}": functools.partial(instrumented, tracers, detail, meter_provider=meters)
            for detail in ("metrics", "steps")
        }
        budget = {who: Budget(plus=_LIMIT_PERCENT) for who in contestants}
        table: list[Row] = []
        for what, work, usual in (
            ("GPT-2 training step", gpt2_step(), _ROUNDS),
            ("request to a model of 4 modules", torch.inference_mode()(small_model()), _REQUEST_ROUNDS),
        ):
            run = functools.partial(_run, work, _SECONDS / (5 if settings.quick else 1))
            added = in_abba(run, contestants, settings.rounds_or(usual), percent=True)
            limits = budget if what.startswith("GPT") else {}
            table += rows(f"{what}, always on, mean", "%", added, limits)
        contestants = {
            f"{OURS}, {who}": functools.partial(
                instrumented, tracers, detail, meter_provider=meters, policy=otp.SpanPolicy(**policy)
            )
            for who, (detail, policy, _) in _OF_SMALL_OPERATORS.items()
        }
        floors = {EMPTY: empty_callback, f"{OURS}, profile": otp.profile}
        run = functools.partial(_run, small_operators_step(), _SECONDS / (5 if settings.quick else 1))
        added = in_abba(run, {**floors, **contestants}, settings.rounds_or(_ROUNDS), percent=True)
        limits = {f"{OURS}, {who}": Budget(plus=most) for who, (*_, most) in _OF_SMALL_OPERATORS.items()}
        table += rows("training step of 1,700 small operators, mean", "%", added, limits)
        meters.shutdown()
        tracers.shutdown()
    return table


def _run(work: Callable[[], None], seconds: float, recorder: Recorder) -> float:
    """Mean of ns per piece of work."""
    with recorder() as recorded:
        if recorded is not None:
            _repeated(work, min(_SETTLING, seconds))
        return _repeated(work, seconds)


def _repeated(work: Callable[[], None], seconds: float) -> float:
    begin, count = time.perf_counter_ns(), 0
    end = begin + seconds * 1e9
    while (now := time.perf_counter_ns()) < end:
        work()
        count += 1
    return (now - begin) / count
