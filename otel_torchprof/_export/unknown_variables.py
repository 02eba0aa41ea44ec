"""Variables that are called as if this package or OpenTelemetry had them, and that nobody reads: misspelt ones, above all."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof import config
from otel_torchprof.parsers import nearest

from .standard_variables import standard_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STANDARD, _OURS = "OTEL_", "OTEL_TORCHPROF_"
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
"""All that OpenTelemetry specifies, which nobody warns of: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
and, of OTLP, https://opentelemetry.io/docs/specs/otel/protocol/exporter/; earlier and experimental names too."""
_OF_PYTHON = (
    "opentelemetry.environment_variables",
    "opentelemetry.sdk.environment_variables",
    "opentelemetry.instrumentation.environment_variables",
)
"""Modules that have one constant for each variable that OpenTelemetry for Python reads besides."""


class UnknownVariable(NamedTuple):
    """A variable that is set, and that nobody reads."""

    name: str
    fault: str
    """In words, with the name."""
    hint: str
    """What may be meant; empty where nothing is near."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[UnknownVariable]:
    """Those that begin as this package's do, and those that are almost called as one of OpenTelemetry's that matters here."""
    found = []
    for name in sorted(name for name in environ if name.startswith(_STANDARD)):
        if name.startswith(_OURS):
            if name not in _VARIABLES:
                meant = nearest(name.removeprefix(_OURS), _NAMES)
                found.append(_unknown(name, "this package's", meant and _NAMES[meant]))
        elif name not in _SPECIFIED:
            near = nearest(name.removeprefix(_STANDARD), (each.removeprefix(_STANDARD) for each in standard_names()))
            if near and name not in {*standard_names(), *_names_of_python()}:
                found.append(_unknown(name, "OpenTelemetry's", f"{_STANDARD}{near}"))
    return found


@config.once
def warn_of_unknown_variables() -> None:
    """Warns once of variables of the process that nobody reads. Who starts something that reads others calls it first."""
    for _, fault, hint in unknown_variables():
        config.warn_once(f"{fault}, and has no effect{hint and '; '}{hint}")


def _unknown(name: str, whose: str, meant: str) -> UnknownVariable:
    return UnknownVariable(name, f"{name} is none of {whose} variables", f"did you mean {meant}?" if meant else "")


def _our_names() -> Iterator[tuple[str, str]]:
    """By what somebody may write behind the prefix: how it is written."""
    for setting in config.SETTINGS:
        short = setting.variable.removeprefix(_OURS)
        yield short, setting.variable
        if setting.key:  # as variables of their own they would be called so
            part, key = f"{setting.variable}={setting.key}=...", setting.key.upper()
            yield from ((key, part), (f"{short}_{key}", part))


_VARIABLES = frozenset(setting.variable for setting in config.SETTINGS)
_NAMES = dict(_our_names())


def _names_of_python() -> set[str]:
    return {
        name for module in _OF_PYTHON for name in vars(importlib.import_module(module)) if name.startswith(_STANDARD)
    }
