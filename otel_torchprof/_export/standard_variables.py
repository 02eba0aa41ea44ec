"""Every standard variable, in one table: who reads it in which use, and what it means for torch's spans and metrics.

Those that this package reads itself are in :mod:`.variables`; here they are together with those that the SDK reads. The
documentation is made of it, and a misspelt variable is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .variables import VARIABLES

if TYPE_CHECKING:
    from otel_torchprof.config import Setting

US = "us"
SDK = "SDK"
NOT = "—"


@dataclass(frozen=True)
class Row:
    """Variables of one meaning, of which the first that is set counts."""

    names: tuple[str, ...]
    default: str
    zero_code: str
    """Who reads it under ``opentelemetry-instrument``: :data:`US`, :data:`SDK` or, where it has no effect, :data:`NOT`."""
    in_code: str
    """... where a program makes its providers and calls ``instrument()``."""
    alone: str
    """... where a program profiles and has no provider."""
    meaning: str
    keyword: str = ""


def _read_here(setting: Setting, alone: str) -> Row:
    return Row(setting.variables, setting.default, US, US, alone, setting.meaning, setting.keyword)


def _limit(default: str, meaning: str, *names: str) -> Row:
    return Row(names, default, SDK, SDK, SDK, meaning)


def _metrics(suffix: str, default: str, meaning: str, in_code: str = SDK) -> Row:
    return Row((f"OTEL_EXPORTER_OTLP_METRICS_{suffix}",), default, SDK, in_code, NOT, meaning)


_OF_ALL = (
    Row(
        ("OTEL_SDK_DISABLED",),
        "`false`",
        SDK,
        SDK,
        US,
        "`true`: disables telemetry. `instrument()` has no effect, and `prof.export(exporter)` exports nothing and "
        "returns 0. Profiles still record: averages, tables, `prof.spans()` and files written by code are not "
        "telemetry",
    ),
    Row(("OTEL_SERVICE_NAME",), "`unknown_service`", SDK, SDK, SDK, "`service.name` of spans and metrics"),
    Row(
        ("OTEL_RESOURCE_ATTRIBUTES",),
        "none",
        SDK,
        SDK,
        SDK,
        "resource attributes as `name=value,name=value`, percent-encoded",
    ),
    Row(
        ("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",),
        "`otel`",
        SDK,
        SDK,
        SDK,
        "resource detectors, such as `process,host`",
    ),
    Row(
        ("OTEL_CONFIG_FILE",),
        "none",
        SDK,
        NOT,
        NOT,
        "declarative configuration file of the providers. Its resource, sampler and span limits apply to torch's "
        "spans, its metric readers receive torch's metrics, and its `chrome` and `otlp_file` exporters receive "
        "torch's spans; without such exporters, `OTEL_TRACES_EXPORTER` selects those of torch's spans, with one "
        "warning. `instrumentation/development` is read too",
    ),
    Row(
        ("OTEL_PROPAGATORS",),
        "`tracecontext,baggage`",
        NOT,
        NOT,
        NOT,
        "has no effect on torch's spans, which are children of the current span, whichever propagator extracted its "
        "remote parent",
    ),
    Row(
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",),
        "none",
        SDK,
        NOT,
        NOT,
        "instrumentations to disable: `torch` is this one, `*` all",
    ),
)

_OF_TRACES = (
    Row(
        ("OTEL_TRACES_EXPORTER",),
        "`otlp`",
        US,
        US,
        NOT,
        "exporters if the provider has no `TorchSpanProcessor`, separated by commas: `otlp` (this package's, with "
        "the protocol below), `otlp_proto_grpc`, `otlp_proto_http`, `chrome` and `otlp_file` (files), the name of "
        "any installed exporter, or `none`",
    ),
    Row(
        ("OTEL_TRACES_SAMPLER",),
        "`parentbased_always_on`",
        SDK,
        SDK,
        NOT,
        "sampler, called once for each trace that begins here, such as a step; traces that it drops are neither "
        "recorded nor sent. Profiles in code are not sampled",
    ),
    Row(
        ("OTEL_TRACES_SAMPLER_ARG",),
        "`1.0`",
        SDK,
        SDK,
        NOT,
        "with `traceidratio` and `parentbased_traceidratio`: the sampled share of steps",
    ),
    Row(("OTEL_PYTHON_ID_GENERATOR",), "`random`", SDK, NOT, NOT, "generator of trace and span ids"),
    *(
        _read_here(VARIABLES[setting], US)
        for setting in VARIABLES
        if VARIABLES[setting].variable.startswith("OTEL_EXP")
    ),
    *(
        _read_here(VARIABLES[setting], NOT)
        for setting in VARIABLES
        if VARIABLES[setting].variable.startswith("OTEL_BSP")
    ),
    _limit(
        "`128`",
        "maximum number of attributes per span; the first are kept, the others are counted on the span",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_ATTRIBUTE_COUNT_LIMIT",
    ),
    _limit(
        "none",
        "maximum length of attribute values, in characters",
        "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    ),
    _limit(
        "`128`",
        "maximum number of links per span; the first are kept, the others are counted on the span",
        "OTEL_SPAN_LINK_COUNT_LIMIT",
    ),
    _limit(
        "`128`", "maximum number of attributes per link; torch's links have none", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT"
    ),
    _limit("`128`", "maximum number of events per span; torch's spans have none", "OTEL_SPAN_EVENT_COUNT_LIMIT"),
    _limit(
        "`128`",
        "maximum number of attributes per span event; torch's spans have no events",
        "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    ),
)

_OF_METRICS = (
    Row(
        ("OTEL_METRICS_EXPORTER",),
        "`otlp`",
        SDK,
        NOT,
        NOT,
        "metric exporters; with `none`, metrics are not measured",
    ),
    Row(("OTEL_METRIC_EXPORT_INTERVAL",), "`60000`", SDK, SDK, NOT, "interval between two exports, in milliseconds"),
    Row(("OTEL_METRIC_EXPORT_TIMEOUT",), "`30000`", SDK, SDK, NOT, "timeout of an export, in milliseconds"),
    Row(
        ("OTEL_METRICS_EXEMPLAR_FILTER",),
        "`trace_based`",
        SDK,
        SDK,
        NOT,
        "step durations with an exemplar that points to their span: `trace_based` (those of sampled steps), "
        "`always_on` or `always_off`",
    ),
    _metrics("PROTOCOL", "as for traces", "`grpc` or `http/protobuf`", NOT),
    _metrics("ENDPOINT", "as for traces", "receiver; over HTTP, used as is"),
    _metrics("INSECURE", "`false`", "gRPC: `true` disables TLS"),
    _metrics("HEADERS", "none", "request headers as `name=value,name=value`, percent-encoded"),
    _metrics("TIMEOUT", "`10`", "timeout per message, in seconds"),
    _metrics("COMPRESSION", "`none`", "`gzip`, `deflate` or `none`"),
    _metrics("CERTIFICATE", "those of the system", "PEM file with the certificates to trust"),
    _metrics("CLIENT_KEY", "none", "PEM file with the private key of the client certificate"),
    _metrics("CLIENT_CERTIFICATE", "none", "PEM file with the client certificate"),
    _metrics("TEMPORALITY_PREFERENCE", "`cumulative`", "`cumulative`, `delta` or `lowmemory`"),
    _metrics(
        "DEFAULT_HISTOGRAM_AGGREGATION",
        "`explicit_bucket_histogram`",
        "`explicit_bucket_histogram` (this package's buckets for step durations) or `base2_exponential_bucket_histogram`",
    ),
)


def standard_names() -> frozenset[str]:
    """All that matter for torch's spans and metrics."""
    return frozenset(name for rows in SECTIONS.values() for row in rows for name in row.names)


SECTIONS = {"All signals": _OF_ALL, "Traces": _OF_TRACES, "Metrics": _OF_METRICS}


def standard_variables_markdown() -> str:
    """The tables for the documentation."""
    parts = []
    for title, rows in SECTIONS.items():
        lines = [
            f"| {'<br>'.join(f'`{name}`' for name in row.names)} | {f'`{row.keyword}`' if row.keyword else ''} | {row.default} "
            f"| {row.zero_code} | {row.in_code} | {row.alone} | {row.meaning} |"
            for row in rows
        ]
        head = [
            "| Variable | Keyword | Default | `opentelemetry-instrument` | in code | profile alone | Meaning |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        parts.append("\n".join([f"### {title}", "", *head, *lines, ""]))
    return "\n".join(parts)
