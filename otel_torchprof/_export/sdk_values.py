"""Values of the variables that OpenTelemetry's SDK reads, as ``otel-torchprof doctor`` checks them."""

from __future__ import annotations

import functools
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from otel_torchprof import parsers
from otel_torchprof.errors import displayed

from .otlp_values import above_zero, boolean, protocol, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_RATIOS = ("traceidratio", "parentbased_traceidratio")
_LIMITS = (
    "ATTRIBUTE_COUNT",
    "ATTRIBUTE_VALUE_LENGTH",
    "SPAN_ATTRIBUTE_COUNT",
    "SPAN_ATTRIBUTE_VALUE_LENGTH",
    "SPAN_EVENT_COUNT",
    "SPAN_LINK_COUNT",
    "EVENT_ATTRIBUTE_COUNT",
    "LINK_ATTRIBUTE_COUNT",
)
_RECORDS = ("SCHEDULE_DELAY", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE", "EXPORT_TIMEOUT")


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("allowed is a whole number from 0 on, or nothing for no limit")
    return int(text)


def _ratio(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise ValueError("allowed is a number from 0 to 1")
    return found


def _installed(text: str, group: str, *more: str) -> None:
    known = {*more, *(each.name for each in entry_points(group=f"opentelemetry_{group}"))}
    for name in text.split(","):
        if name.strip() not in known:
            raise ValueError(f"allowed is what installed packages have: {', '.join(sorted(known))}")


def _names(group: str, *more: str) -> Callable[[str], None]:
    return lambda text: _installed(text, group, *more)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    **{f"OTEL_{name}_LIMIT": _limit for name in _LIMITS},
    **{f"OTEL_BLRP_{name}": functools.partial(above_zero, kind=int) for name in _RECORDS},
    "OTEL_SDK_DISABLED": boolean,
    "OTEL_TRACES_SAMPLER": _names("traces_sampler"),
    "OTEL_PROPAGATORS": _names("propagator", "none"),
    "OTEL_PYTHON_TRACER_PROVIDER": _names("tracer_provider"),
    "OTEL_PYTHON_METER_PROVIDER": _names("meter_provider"),
    "OTEL_PYTHON_ID_GENERATOR": _names("id_generator"),
    "OTEL_PYTHON_CONTEXT": _names("context"),
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": _names("resource_detector", "*"),
    "OTEL_METRICS_EXPORTER": _names("metrics_exporter", "none"),
    "OTEL_LOGS_EXPORTER": _names("logs_exporter", "none"),
    "OTEL_METRICS_EXEMPLAR_FILTER": parsers.one_of("trace_based", "always_on", "always_off"),
    "OTEL_METRIC_EXPORT_INTERVAL": functools.partial(above_zero, kind=float),
    "OTEL_METRIC_EXPORT_TIMEOUT": functools.partial(above_zero, kind=float),
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": protocol,
    "OTEL_EXPORTER_OTLP_METRICS_INSECURE": boolean,
    "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": seconds,
    "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": parsers.one_of("gzip", "deflate", "none"),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": parsers.one_of("cumulative", "delta", "lowmemory"),
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": parsers.one_of(
        "explicit_bucket_histogram", "base2_exponential_bucket_histogram"
    ),
}


def bad_values(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Each variable of the SDK with a value that it refuses or ignores, and what is allowed."""
    checks = dict(_PARSERS)
    if environ.get("OTEL_TRACES_SAMPLER", "").strip() in _RATIOS:
        checks["OTEL_TRACES_SAMPLER_ARG"] = _ratio
    for name, parse in checks.items():
        if text := environ.get(name, "").strip():
            try:
                parse(text)
            except ValueError as error:
                yield f"{name}={displayed(text)} is not valid: {error}"
