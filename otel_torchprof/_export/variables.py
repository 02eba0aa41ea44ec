"""The standard variables that this package reads itself, and how they are read (:mod:`.standard_variables` has all).

A bad value is warned of once and counts as not set, as OpenTelemetry requires. Values that may be secret are never shown.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from otel_torchprof import config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_logger = logging.getLogger("otel_torchprof")

T = TypeVar("T")


@dataclass(frozen=True)
class Variable:
    """A setting, and the variables that it is read from."""

    setting: str
    """The keyword of the same meaning."""
    names: tuple[str, ...]
    """The first one that is set, and not badly, counts."""
    default: str
    meaning: str


def _otlp(setting: str, suffix: str, default: str, meaning: str) -> Variable:
    return Variable(setting, (f"OTEL_EXPORTER_OTLP_TRACES_{suffix}", f"OTEL_EXPORTER_OTLP_{suffix}"), default, meaning)


def _queue(setting: str, suffix: str, default: str, meaning: str) -> Variable:
    return Variable(setting, (f"OTEL_BSP_{suffix}",), default, meaning)


_TABLE = (
    _otlp("protocol", "PROTOCOL", "`grpc`", "`grpc` or `http/protobuf`"),
    _otlp(
        "endpoint",
        "ENDPOINT",
        "`http://localhost:4317` (gRPC), `http://localhost:4318` (HTTP)",
        "where to send; over HTTP the general one gets `/v1/traces` appended, the one for traces is taken as it is",
    ),
    _otlp(
        "insecure",
        "INSECURE",
        "`false`",
        "gRPC, and only where the endpoint has no scheme: whether to go without TLS; `http://` and `https://` decide alone",
    ),
    _otlp("headers", "HEADERS", "none", "`name=value,name=value`, percent-encoded; one that is no header is left out"),
    _otlp(
        "timeout",
        "TIMEOUT",
        "`10`",
        "seconds that a message may take with all its retries; in a TorchSpanProcessor, which retries for longer, an attempt",
    ),
    _otlp("compression", "COMPRESSION", "`none`", "`gzip` or `none`"),
    _otlp("certificate_file", "CERTIFICATE", "the system's", "PEM file: whom to trust"),
    _otlp("client_key_file", "CLIENT_KEY", "none", "PEM file: the key of the client certificate"),
    _otlp(
        "client_certificate_file",
        "CLIENT_CERTIFICATE",
        "none",
        "PEM file: the client certificate, and its key where that has no file of its own",
    ),
    _queue("schedule_delay_millis", "SCHEDULE_DELAY", "`5000`", "milliseconds between two looks at what was recorded"),
    _queue("max_queue_size", "MAX_QUEUE_SIZE", "`10000000`", "spans that may wait; beyond it the oldest are dropped"),
    Variable(
        "max_queue_bytes",
        (config.MAX_QUEUE_BYTES.variable,),
        "`256M`",
        "memory that spans may wait in, while the backend is down for one, with `K`, `M` or `G`; beyond it the oldest are dropped",
    ),
    _queue(
        "max_export_batch_size",
        "MAX_EXPORT_BATCH_SIZE",
        "`512`",
        "spans that another exporter is handed at a time; ours take what there is and cut it by bytes",
    ),
    _queue(
        "export_timeout_millis",
        "EXPORT_TIMEOUT",
        "`30000`",
        "milliseconds that an export may take; of ours, which tries again, an attempt",
    ),
)

VARIABLES: Mapping[str, Variable] = {variable.setting: variable for variable in _TABLE}
"""By the name of the setting."""


def read(environ: Mapping[str, str], names: tuple[str, ...], parse: Callable[[str], T]) -> T | None:
    """The first of the variables that is set and can be parsed; ``parse`` raises ValueError saying what is allowed."""
    for name in names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            return parse(text)
        except ValueError as error:
            config.warn_once(f"{name}={displayed(text)} is ignored: {error}")
    return None


def keyword(name: str, value: object, parse: Callable[[Any], T]) -> T:
    """The keyword's value, parsed.

    Raises ValueError with the name, the value and what is allowed.
    """
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {displayed(value)}; {error}") from None


def displayed(value: object) -> str:
    """The value as messages may show it: without what a URL may carry of credentials."""
    return repr(without_credentials(value) if isinstance(value, str) else value)


def without_credentials(url: str) -> str:
    """The URL with ``***`` for user and password, and for the query.

    Works on text, not on its parts: it also has to hide what is in a URL that cannot be taken apart.
    """
    return re.sub(r"\?.+", "?***", re.sub(r"^((?:[\w+.-]+:)?//)?.*@", r"\1***@", url, flags=re.DOTALL), flags=re.DOTALL)
