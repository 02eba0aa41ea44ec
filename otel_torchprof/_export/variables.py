"""OpenTelemetry's variables that this package reads itself: options like its own (:mod:`.standard_variables` has all others too).

A bad value is warned of once and counts as not set, as OpenTelemetry requires. Values that may be secret are never shown.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof.config import Option

from .otlp_wire import GRPC, NONE, above_zero, boolean, compression, grpc_endpoint, protocol, readable, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping


def _otlp(argument: str, suffix: str, default: str, meaning: str, **rest: Any) -> Option:
    variable, general = f"OTEL_EXPORTER_OTLP_TRACES_{suffix}", f"OTEL_EXPORTER_OTLP_{suffix}"
    return Option(variable, meaning, default=default, general=general, argument=argument, **rest)


def _queue(argument: str, suffix: str, fallback: int, meaning: str) -> Option:
    check = functools.partial(above_zero, kind=int)
    return Option(f"OTEL_BSP_{suffix}", meaning, check=check, fallback=fallback, argument=argument)


_TABLE = (
    _otlp("protocol", "PROTOCOL", "`grpc`", "`grpc` or `http/protobuf`", check=protocol, fallback=GRPC),
    _otlp(
        "endpoint",
        "ENDPOINT",
        "`http://localhost:4317` (gRPC), `http://localhost:4318` (HTTP)",
        "receiver; over HTTP, `/v1/traces` is appended to the general variable, and the variable for traces is used as is",
        check=grpc_endpoint,
    ),
    _otlp(
        "insecure",
        "INSECURE",
        "`false`",
        "gRPC: `true` disables TLS if the endpoint has no scheme; otherwise `http://` or `https://` decides",
        check=boolean,
        fallback=False,
    ),
    _otlp(
        "headers",
        "HEADERS",
        "none",
        "request headers as `name=value,name=value`, percent-encoded; invalid headers are ignored",
    ),
    _otlp(
        "timeout",
        "TIMEOUT",
        "`10`",
        "timeout per message including its retries, in seconds; in a `TorchSpanProcessor`, which retries for longer, per attempt",
        check=seconds,
        fallback=10.0,
    ),
    _otlp("compression", "COMPRESSION", "`none`", "`gzip` or `none`", check=compression, fallback=NONE),
    _otlp(
        "certificate_file",
        "CERTIFICATE",
        "those of the system",
        "PEM file with the certificates to trust",
        check=readable,
    ),
    _otlp(
        "client_key_file",
        "CLIENT_KEY",
        "none",
        "PEM file with the private key of the client certificate",
        check=readable,
    ),
    _otlp(
        "client_certificate_file",
        "CLIENT_CERTIFICATE",
        "none",
        "PEM file with the client certificate and, if there is no separate key file, its private key",
        check=readable,
    ),
    _queue("schedule_delay_millis", "SCHEDULE_DELAY", 5000, "interval between two exports, in milliseconds"),
    _queue(
        "max_queue_size",
        "MAX_QUEUE_SIZE",
        10000000,
        "maximum number of queued spans; beyond it, the oldest are dropped",
    ),
    config.MAX_QUEUE_BYTES,
    _queue(
        "max_export_batch_size",
        "MAX_EXPORT_BATCH_SIZE",
        512,
        "maximum number of spans per call of other exporters; this package's exporters take all queued spans and "
        "split them by size",
    ),
    _queue(
        "export_timeout_millis",
        "EXPORT_TIMEOUT",
        30000,
        "timeout of an export, in milliseconds; with this package's exporters, which retry, of an attempt",
    ),
)

VARIABLES: Mapping[str, Option] = {option.argument: option for option in _TABLE}
"""Variables by argument."""
