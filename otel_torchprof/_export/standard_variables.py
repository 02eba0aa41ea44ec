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
        "`true`: no telemetry. `instrument()` stays off, and `prof.export(exporter)` hands nothing over and answers 0. A profile "
        "records as ever: averages, tables, `prof.spans()` and the files that code asks for are no telemetry",
    ),
    Row(("OTEL_SERVICE_NAME",), "`unknown_service`", SDK, SDK, SDK, "`service.name` of spans and metrics"),
    Row(
        ("OTEL_RESOURCE_ATTRIBUTES",),
        "none",
        SDK,
        SDK,
        SDK,
        "`name=value,name=value`, percent-encoded: attributes of the resource",
    ),
    Row(
        ("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",),
        "`otel`",
        SDK,
        SDK,
        SDK,
        "what else finds out attributes of the resource, such as `process,host`",
    ),
    Row(
        ("OTEL_CONFIG_FILE",),
        "none",
        SDK,
        NOT,
        NOT,
        "providers as a file describes them. Resource, sampler and limits hold for torch's spans, and its readers get torch's "
        "metrics. Exporters of this package in it, `chrome` and `otlp_file`, get torch's spans; where it has none, `OTEL_TRACES_EXPORTER` names "
        "those that do, and one warning says so. `instrumentation/development` in it is read too",
    ),
    Row(
        ("OTEL_PROPAGATORS",),
        "`tracecontext,baggage`",
        NOT,
        NOT,
        NOT,
        "nothing to do: whatever extracted a remote parent, torch's spans are under the span that is current",
    ),
    Row(
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",),
        "none",
        SDK,
        NOT,
        NOT,
        "instrumentations that are not to be started: `torch` is this one, `*` all",
    ),
)

_OF_TRACES = (
    Row(
        ("OTEL_TRACES_EXPORTER",),
        "`otlp`",
        US,
        US,
        NOT,
        "where the provider has no `TorchSpanProcessor`: `otlp` (ours, by the protocol below), `otlp_proto_grpc`, `otlp_proto_http`, "
        "`chrome` and `otlp_file` (files), `none`, the name of any installed exporter, or several, separated by commas",
    ),
    Row(
        ("OTEL_TRACES_SAMPLER",),
        "`parentbased_always_on`",
        SDK,
        SDK,
        NOT,
        "asked once for each trace that begins here, a step for one; what it refuses is neither recorded nor sent. A profile that "
        "code asks for is whole",
    ),
    Row(
        ("OTEL_TRACES_SAMPLER_ARG",),
        "`1.0`",
        SDK,
        SDK,
        NOT,
        "with `traceidratio` and `parentbased_traceidratio`: the share of steps",
    ),
    Row(("OTEL_PYTHON_ID_GENERATOR",), "`random`", SDK, NOT, NOT, "what makes the ids of traces and spans"),
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
        "attributes of a span; the first are kept, the others counted on the span",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_ATTRIBUTE_COUNT_LIMIT",
    ),
    _limit(
        "none",
        "characters of an attribute's text",
        "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    ),
    _limit(
        "`128`",
        "links of a span; the first are kept, the others counted on the span",
        "OTEL_SPAN_LINK_COUNT_LIMIT",
    ),
    _limit("`128`", "attributes of a link; torch's links have none", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT"),
    _limit("`128`", "events of a span; torch's spans have none", "OTEL_SPAN_EVENT_COUNT_LIMIT"),
    _limit("`128`", "attributes of an event of a span; torch's spans have none", "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT"),
)

_OF_METRICS = (
    Row(
        ("OTEL_METRICS_EXPORTER",),
        "`otlp`",
        SDK,
        NOT,
        NOT,
        "exporters of metrics; with `none` nobody reads any, and nothing is measured for them",
    ),
    Row(("OTEL_METRIC_EXPORT_INTERVAL",), "`60000`", SDK, SDK, NOT, "milliseconds between two exports"),
    Row(("OTEL_METRIC_EXPORT_TIMEOUT",), "`30000`", SDK, SDK, NOT, "milliseconds that one may take"),
    Row(
        ("OTEL_METRICS_EXEMPLAR_FILTER",),
        "`trace_based`",
        SDK,
        SDK,
        NOT,
        "which durations of steps point to their span: `trace_based`, those whose step is sampled, `always_on` or `always_off`",
    ),
    _metrics("PROTOCOL", "as for traces", "`grpc` or `http/protobuf`", NOT),
    _metrics("ENDPOINT", "as for traces", "where to send; over HTTP taken as it is"),
    _metrics("INSECURE", "`false`", "gRPC: whether to go without TLS"),
    _metrics("HEADERS", "none", "`name=value,name=value`, percent-encoded"),
    _metrics("TIMEOUT", "`10`", "seconds that a message may take"),
    _metrics("COMPRESSION", "`none`", "`gzip`, `deflate` or `none`"),
    _metrics("CERTIFICATE", "the system's", "PEM file: whom to trust"),
    _metrics("CLIENT_KEY", "none", "PEM file: the key of the client certificate"),
    _metrics("CLIENT_CERTIFICATE", "none", "PEM file: the client certificate"),
    _metrics("TEMPORALITY_PREFERENCE", "`cumulative`", "`cumulative`, `delta` or `lowmemory`"),
    _metrics(
        "DEFAULT_HISTOGRAM_AGGREGATION",
        "`explicit_bucket_histogram`",
        "or `base2_exponential_bucket_histogram`, instead of our buckets for the durations of steps",
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
