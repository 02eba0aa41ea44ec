"""Variables that are called as if this package or OpenTelemetry had them, and that nobody reads: misspelt ones, above all."""

from __future__ import annotations

import importlib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof import config
from otel_torchprof.parsers import nearest

from .standard_variables import standard_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
"""All that OpenTelemetry specifies, which nobody warns of: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
and, of OTLP, https://opentelemetry.io/docs/specs/otel/protocol/exporter/; earlier and experimental names too."""
_OF_PYTHON = (
    "opentelemetry.environment_variables",
    "opentelemetry.sdk.environment_variables",
    "opentelemetry.instrumentation.environment_variables",
)
"""Modules that have one constant for each variable that OpenTelemetry for Python reads besides."""


_OF_A_SERVICE = "_SERVICE_HOST"
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?", re.ASCII
)
"""What follows the Service's name: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables."""


class UnknownVariable(NamedTuple):
    """A variable that is set, and that nobody reads."""

    name: str
    fault: str
    """In words, with the name."""
    hint: str
    """What may be meant; empty where nothing is near."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[UnknownVariable]:
    """Those that begin as this package's do, and those that are almost called as one of this package's or OpenTelemetry's."""
    named = {name for name in environ if name.startswith(_STANDARD)} - _SPECIFIED - _VARIABLES
    maybe = [_of_ours(name) or _of_opentelemetry(name) for name in sorted(named - _service_links(environ))]
    return [each for each in maybe if each is not None]


def _of_ours(name: str) -> UnknownVariable | None:
    word, _, rest = name.removeprefix(_STANDARD).partition("_")
    if not (word.startswith(_OUR_WORD) or nearest(word, (_OUR_WORD,))):
        return None
    meant = nearest(rest, _NAMES)
    if not meant and word != _OUR_WORD:  # somebody else's
        return None
    return _unknown(name, "this package's", meant and _NAMES[meant])


def _of_opentelemetry(name: str) -> UnknownVariable | None:
    known = standard_names() | _SPECIFIED
    near = nearest(name.removeprefix(_STANDARD), (each.removeprefix(_STANDARD) for each in known | _VARIABLES))
    if not near or name in known or name in _names_of_python():
        return None
    return _unknown(name, "OpenTelemetry's", f"{_STANDARD}{near}")


def _service_links(environ: Mapping[str, str]) -> set[str]:
    """The variables by which Kubernetes tells each pod of a Service, which may be called ``otel-torchprof``."""
    services = [name.removesuffix(_OF_A_SERVICE) for name in environ if name.endswith(_OF_A_SERVICE)]
    return {
        name
        for service in services
        for name in environ
        if name.startswith(service) and _SERVICE_LINK.fullmatch(name, len(service))
    }


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
