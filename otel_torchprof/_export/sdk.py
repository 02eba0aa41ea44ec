"""Resource, ids, limits and exporters of the OpenTelemetry SDK in use."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from opentelemetry import context, trace

from otel_torchprof import parsers
from otel_torchprof._encode.process_resource import of_this_process
from otel_torchprof.errors import ExportError, displayed, warn_once
from otel_torchprof.version import __version__

from .otlp_wire import above_zero, boolean, protocol, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

_logger = logging.getLogger("otel_torchprof")

OTEL_SDK_DISABLED = "OTEL_SDK_DISABLED"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the semantic conventions that the attribute names follow."""


def is_disabled() -> bool:
    """Whether ``OTEL_SDK_DISABLED`` switches OpenTelemetry off, understood as the SDK does. A provider that is there knows better."""
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def current_resource() -> Resource:
    """Returns the resource of the global TracerProvider if that is the SDK's, else the one of the environment."""
    from opentelemetry.sdk.resources import Resource

    resource = getattr(trace.get_tracer_provider(), "resource", None)
    return of_this_process(resource) if isinstance(resource, Resource) else Resource.create()


def id_generator() -> IdGenerator:
    """The id generator of the global TracerProvider where that is the SDK's, else the SDK's default."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

    generator = getattr(trace.get_tracer_provider(), "id_generator", None)
    return generator if isinstance(generator, IdGenerator) else RandomIdGenerator()


class SameIds:
    """The ids of one recording, the same at every restart from the first one. Not thread-safe."""

    def __init__(self) -> None:
        self._trace_ids: list[int] = []
        self._span_ids: list[int] = []

    def from_start(self) -> tuple[Callable[[], int], Callable[[], int]]:
        """Returns functions that return trace ids and span ids, both from the first one on."""
        generator = id_generator()
        return _from_first(self._trace_ids, generator.generate_trace_id), _from_first(
            self._span_ids, generator.generate_span_id
        )


def _from_first(known: list[int], new: Callable[[], int]) -> Callable[[], int]:
    places = itertools.count()

    def following() -> int:
        place = next(places)
        if place == len(known):
            known.append(new())
        return known[place]

    return following


def current_span() -> SpanContext | None:
    """The span that the calling thread (or task) is in, if any."""
    context = trace.get_current_span().get_span_context()
    return context if context.is_valid else None


def instrumentation_scope() -> InstrumentationScope:
    """The scope of all spans of this package."""
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("otel_torchprof", __version__, SCHEMA_URL)


def span_limits(provider: Any = None) -> SpanLimits:
    """The span limits of a TracerProvider of the SDK (default: the global one); with any other, the environment's."""
    from opentelemetry.sdk.trace import SpanLimits

    limits = getattr(provider or trace.get_tracer_provider(), "_span_limits", None)
    return limits if isinstance(limits, SpanLimits) else span_limits_of_environment()


def span_limits_of_environment() -> SpanLimits:
    """The span limits that the variables set; where one is not valid, the defaults, with a warning."""
    from opentelemetry.sdk.trace import SpanLimits

    try:
        return SpanLimits()
    except ValueError as error:
        warn_once(f"{error}: the span limits are OpenTelemetry's defaults")
    count, none = 128, SpanLimits.UNSET
    return SpanLimits(count, count, count, count, count, count, none, none)


@contextlib.contextmanager
def suppressed() -> Iterator[None]:
    """Suppresses tracing of the calling thread, by instrumentations and by this package, inside the context."""
    token = context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))  # noqa: SLF001 - the SDK's own way
    try:
        yield
    finally:
        context.detach(token)


def takes_whole_traces(exporter: Any) -> bool:
    """Whether an exporter takes all recorded spans, without trace size limits."""
    return getattr(exporter, "takes_whole_traces", False) is True


def export(spans: Sequence[ReadableSpan], exporter: SpanExporter, *, batch_size: int) -> int:
    """Passes spans to an exporter, ``batch_size`` at a time, or all at once if it takes span lists; returns their number.

    Suppresses instrumentation, so that an exporter with an instrumented transport does not trace itself. If ``OTEL_SDK_DISABLED`` is true,
    nothing is exported, with a warning once.

    Raises:
        TypeError: it is not an exporter.
        ValueError: the batch size is below 1.
        ExportError: the exporter returned FAILURE.
    """
    if not callable(getattr(exporter, "export", None)):
        raise TypeError(f"exporter is {exporter!r}; it must be a SpanExporter, such as otel_torchprof.OTLPExporter()")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if is_disabled():
        warn_once(f"{OTEL_SDK_DISABLED} is true: spans are not handed to exporters")
        return 0
    if getattr(exporter, "takes_span_lists", False):
        batch_size = max(len(spans), 1)
    with suppressed():
        for first in range(0, len(spans), batch_size):
            _export_one(spans[first : first + batch_size], exporter, first, len(spans))
    return len(spans)


def _export_one(batch: Sequence[Any], exporter: SpanExporter, done: int, total: int) -> None:
    from opentelemetry.sdk.trace.export import SpanExportResult

    result = exporter.export(batch)
    if result is not SpanExportResult.SUCCESS:
        reason = getattr(getattr(exporter, "stats", None), "last_error", "")
        error = ExportError(
            f"{type(exporter).__name__} answered {result} to spans {done} to {done + len(batch)} of {total}"
            f"{': ' if reason else ''}{reason}; the recording is still there: export again, or write it with export_otlp()"
        )
        error.reason = reason
        raise error


# ---- values of the variables that OpenTelemetry's SDK reads, as ``otel-torchprof doctor`` checks them ----


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
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError("allowed is a number from 0 to 1")
    return ratio


def _installed(text: str, group: str, *more: str) -> None:
    known = {*more, *(entry.name for entry in entry_points(group=f"opentelemetry_{group}"))}
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
    """Yields the variables of the SDK with a value that it rejects or ignores, and the allowed values."""
    checks = dict(_PARSERS)
    if environ.get("OTEL_TRACES_SAMPLER", "").strip() in _RATIOS:
        checks["OTEL_TRACES_SAMPLER_ARG"] = _ratio
    for name, parse in checks.items():
        if text := environ.get(name, "").strip():
            try:
                parse(text)
            except ValueError as error:
                yield f"{name}={displayed(text)} is not valid: {error}"
