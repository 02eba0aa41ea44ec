"""Detects variables with names like those of this package or OpenTelemetry that nothing reads, such as misspelt ones."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof import config
from otel_torchprof.errors import once, warn_once
from otel_torchprof.parsers import nearest

from .variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_torchprof.config import Option


# All standard variables in one table: the reader in each kind of use, and the meaning for torch's spans and metrics.
# Includes the variables that this package reads, from :mod:`.variables`, and those that the SDK reads.
# The documentation is made of it, and a misspelt variable is compared with it.

US = "us"
SDK = "SDK"
NOT = "—"


@dataclass(frozen=True)
class VariableRow:
    """Variables with the same meaning; the first one that is set is used."""

    names: tuple[str, ...]
    default: str
    zero_code: str
    """Reader under ``opentelemetry-instrument``: :data:`US`, :data:`SDK`, or :data:`NOT` if it has no effect."""
    in_code: str
    """Reader if a program creates its providers and calls ``instrument()``."""
    alone: str
    """Reader if a program profiles without a provider."""
    meaning: str
    argument: str = ""


def _read_here(option: Option, alone: str) -> VariableRow:
    return VariableRow(option.variables, option.displayed_default, US, US, alone, option.meaning, option.argument)


def _limit(default: str, meaning: str, *names: str) -> VariableRow:
    return VariableRow(names, default, SDK, SDK, SDK, meaning)


def _metrics(suffix: str, default: str, meaning: str, in_code: str = SDK) -> VariableRow:
    return VariableRow((f"OTEL_EXPORTER_OTLP_METRICS_{suffix}",), default, SDK, in_code, NOT, meaning)


_OF_ALL = (
    VariableRow(
        ("OTEL_SDK_DISABLED",),
        "`false`",
        SDK,
        SDK,
        US,
        "`true`: disables telemetry. `instrument()` has no effect, and `prof.export(exporter)` exports nothing and "
        "returns 0. Profiles still record: averages, tables, `prof.spans()` and files written by code are not "
        "telemetry",
    ),
    VariableRow(("OTEL_SERVICE_NAME",), "`unknown_service`", SDK, SDK, SDK, "`service.name` of spans and metrics"),
    VariableRow(
        ("OTEL_RESOURCE_ATTRIBUTES",),
        "none",
        SDK,
        SDK,
        SDK,
        "resource attributes as `name=value,name=value`, percent-encoded",
    ),
    VariableRow(
        ("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",),
        "`otel`",
        SDK,
        SDK,
        SDK,
        "resource detectors, such as `process,host`",
    ),
    VariableRow(
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
    VariableRow(
        ("OTEL_PROPAGATORS",),
        "`tracecontext,baggage`",
        NOT,
        NOT,
        NOT,
        "has no effect on torch's spans, which are children of the current span, whichever propagator extracted its "
        "remote parent",
    ),
    VariableRow(
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",),
        "none",
        SDK,
        NOT,
        NOT,
        "instrumentations to disable: `torch` is this one, `*` all",
    ),
)

_OF_TRACES = (
    VariableRow(
        ("OTEL_TRACES_EXPORTER",),
        "`otlp`",
        US,
        US,
        NOT,
        "exporters if the provider has no `TorchSpanProcessor`, separated by commas: `otlp` (this package's, with "
        "the protocol below), `otlp_proto_grpc`, `otlp_proto_http`, `chrome` and `otlp_file` (files), the name of "
        "any installed exporter, or `none`",
    ),
    VariableRow(
        ("OTEL_TRACES_SAMPLER",),
        "`parentbased_always_on`",
        SDK,
        SDK,
        NOT,
        "sampler, called once for each trace that begins here, such as a step; traces that it drops are neither "
        "recorded nor sent. Profiles in code are not sampled",
    ),
    VariableRow(
        ("OTEL_TRACES_SAMPLER_ARG",),
        "`1.0`",
        SDK,
        SDK,
        NOT,
        "with `traceidratio` and `parentbased_traceidratio`: the sampled share of steps",
    ),
    VariableRow(("OTEL_PYTHON_ID_GENERATOR",), "`random`", SDK, NOT, NOT, "generator of trace and span ids"),
    *(_read_here(option, US) for option in VARIABLES.values() if option.variable.startswith("OTEL_EXP")),
    *(_read_here(option, NOT) for option in VARIABLES.values() if option.variable.startswith("OTEL_BSP")),
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
    VariableRow(
        ("OTEL_METRICS_EXPORTER",),
        "`otlp`",
        SDK,
        NOT,
        NOT,
        "metric exporters; with `none`, metrics are not measured",
    ),
    VariableRow(
        ("OTEL_METRIC_EXPORT_INTERVAL",), "`60000`", SDK, SDK, NOT, "interval between two exports, in milliseconds"
    ),
    VariableRow(("OTEL_METRIC_EXPORT_TIMEOUT",), "`30000`", SDK, SDK, NOT, "timeout of an export, in milliseconds"),
    VariableRow(
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
    """Returns all variables that affect torch's spans and metrics."""
    return frozenset(name for rows in SECTIONS.values() for row in rows for name in row.names)


SECTIONS = {"All signals": _OF_ALL, "Traces": _OF_TRACES, "Metrics": _OF_METRICS}


def standard_variables_markdown() -> str:
    """The tables for the documentation."""
    parts = []
    for title, rows in SECTIONS.items():
        lines = [
            f"| {'<br>'.join(f'`{name}`' for name in row.names)} | {f'`{row.argument}`' if row.argument else ''} | {row.default} "
            f"| {row.zero_code} | {row.in_code} | {row.alone} | {row.meaning} |"
            for row in rows
        ]
        head = [
            "| Variable | Argument | Default | `opentelemetry-instrument` | in code | profile alone | Meaning |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        parts.append("\n".join([f"### {title}", "", *head, *lines, ""]))
    return "\n".join(parts)


_STANDARD, _OUR_WORD = "OTEL_", "TORCHPROF"
_OURS = f"{_STANDARD}{_OUR_WORD}_"
_SIGNALS = ("", "TRACES_", "METRICS_", "LOGS_", "PROFILES_")
_OF_OTLP = (
    *("ENDPOINT", "PROTOCOL", "INSECURE", "HEADERS", "TIMEOUT", "COMPRESSION"),
    *("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"),
)
_BATCHES = ("SCHEDULE_DELAY", "EXPORT_TIMEOUT", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE")
_SPECIFIED = frozenset(
    {
        *(f"OTEL_EXPORTER_OTLP_{signal}{name}" for signal in _SIGNALS for name in _OF_OTLP),
        *("OTEL_EXPORTER_OTLP_SPAN_INSECURE", "OTEL_EXPORTER_OTLP_METRIC_INSECURE"),
        *(f"OTEL_EXPORTER_OTLP_METRICS_{name}" for name in ("TEMPORALITY_PREFERENCE", "DEFAULT_HISTOGRAM_AGGREGATION")),
        *(f"OTEL_{processor}_{name}" for processor in ("BSP", "BLRP") for name in _BATCHES),
        *(f"OTEL_{signal}_EXPORTER" for signal in ("TRACES", "METRICS", "LOGS")),
        *("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_PROPAGATORS", "OTEL_LOG_LEVEL"),
        *("OTEL_SDK_DISABLED", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME", "OTEL_ENTITIES"),
        *("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE"),
        *(f"OTEL_{kind}ATTRIBUTE_COUNT_LIMIT" for kind in ("", "SPAN_", "EVENT_", "LINK_", "LOGRECORD_")),
        *(f"OTEL_{kind}ATTRIBUTE_VALUE_LENGTH_LIMIT" for kind in ("", "SPAN_", "LOGRECORD_")),
        *("OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_LINK_COUNT_LIMIT"),
        *("OTEL_METRICS_EXEMPLAR_FILTER", "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_METRIC_EXPORT_TIMEOUT"),
        *(f"OTEL_EXPORTER_ZIPKIN_{name}" for name in ("ENDPOINT", "TIMEOUT", "PROTOCOL")),
        *(f"OTEL_EXPORTER_PROMETHEUS_{name}" for name in ("HOST", "PORT")),
    }
)
"""All variables that OpenTelemetry specifies; these cause no warning. See https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
and, for OTLP, https://opentelemetry.io/docs/specs/otel/protocol/exporter/. Includes earlier and experimental names."""
_OF_PYTHON = (
    "opentelemetry.environment_variables",
    "opentelemetry.sdk.environment_variables",
    "opentelemetry.instrumentation.environment_variables",
)
"""Modules with a constant for each further variable of OpenTelemetry for Python."""


_OF_A_SERVICE = "_SERVICE_HOST"
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?", re.ASCII
)
"""Suffixes after a Service's name: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables."""


class UnknownVariable(NamedTuple):
    """A variable that is set but never read."""

    name: str
    fault: str
    """The fault as text, with the name."""
    hint: str
    """Similar known variables; may be empty."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[UnknownVariable]:
    """Variables with this package's prefix, and those with a name similar to one of this package's or OpenTelemetry's."""
    named = {name for name in environ if name.startswith(_STANDARD)} - _SPECIFIED - _VARIABLES
    maybe = [_of_ours(name) or _of_opentelemetry(name) for name in sorted(named - _service_links(environ))]
    return [variable for variable in maybe if variable is not None]


def _of_ours(name: str) -> UnknownVariable | None:
    word, _, rest = name.removeprefix(_STANDARD).partition("_")
    if not (word.startswith(_OUR_WORD) or nearest(word, (_OUR_WORD,))):
        return None
    meant = nearest(rest, _NAMES)
    if not meant and word != _OUR_WORD:  # a variable of other software
        return None
    return _unknown(name, "this package's", meant and _NAMES[meant])


def _of_opentelemetry(name: str) -> UnknownVariable | None:
    known = standard_names() | _SPECIFIED
    near = nearest(name.removeprefix(_STANDARD), (variable.removeprefix(_STANDARD) for variable in known | _VARIABLES))
    if not near or name in known or name in _names_of_python():
        return None
    return _unknown(name, "OpenTelemetry's", f"{_STANDARD}{near}")


def _service_links(environ: Mapping[str, str]) -> set[str]:
    """Returns the variables that Kubernetes sets in each pod for a Service, which may be called ``otel-torchprof``."""
    services = [name.removesuffix(_OF_A_SERVICE) for name in environ if name.endswith(_OF_A_SERVICE)]
    return {
        name
        for service in services
        for name in environ
        if name.startswith(service) and _SERVICE_LINK.fullmatch(name, len(service))
    }


@once
def warn_of_unknown_variables() -> None:
    """Warns once of variables of the process that are never read. Called first by everything that reads variables."""
    for _, fault, hint in unknown_variables():
        warn_once(f"{fault}, and has no effect{hint and '; '}{hint}")


def _unknown(name: str, whose: str, meant: str) -> UnknownVariable:
    return UnknownVariable(name, f"{name} is none of {whose} variables", f"did you mean {meant}?" if meant else "")


def _our_names() -> Iterator[tuple[str, str]]:
    """Yields pairs of a likely spelling after the prefix, and the correct variable."""
    for option in config.OPTIONS:
        short = option.variable.removeprefix(_OURS)
        yield short, option.variable
        if option.key:  # spelled as a variable of its own
            part, key = f"{option.variable}={option.key}=...", option.key.upper()
            yield from ((key, part), (f"{short}_{key}", part))


_VARIABLES = frozenset(option.variable for option in config.OPTIONS)
_NAMES = dict(_our_names())


def _names_of_python() -> set[str]:
    return {
        name for module in _OF_PYTHON for name in vars(importlib.import_module(module)) if name.startswith(_STANDARD)
    }
