"""Settings of the OTLP exporter: keywords, else the standard ``OTEL_EXPORTER_OTLP_*`` variables."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import unquote

from otel_torchprof._encode.otlp import DEFAULT_MAX_BYTES, PROTOBUF_MAX_BYTES
from otel_torchprof.errors import checked, warn_once, without_credentials

from .otlp_wire import GRPC, HTTP, above_zero, grpc_endpoint, http_endpoint
from .variables import VARIABLES

TRACES_PATH = "/v1/traces"
_DEFAULT_GRPC_ENDPOINT = "http://localhost:4317"
_DEFAULT_HTTP_ENDPOINT = "http://localhost:4318" + TRACES_PATH

_HTTP_NAME = r"[!#$%&'*+.^_`|~0-9a-z-]+"
_GRPC_NAME = r"[0-9a-z_.-]+"
_ENCODED_ITEM = r"[^\s=]+\s*=\s*[^\s\",;\\]*"
"""A header as the specification has it. One with spaces in its value is taken too, then as it is."""
_SHORTEST_SECRET = 4

HeadersArgument = Mapping[str, str] | Iterable[tuple[str, str]] | str


@dataclass(frozen=True, repr=False)
class Settings:
    """Settings of an OTLP exporter. Immutable; its repr shows no header values and no credentials."""

    protocol: str
    """:data:`GRPC` or :data:`HTTP`."""
    endpoint: str
    """HTTP: the URL. gRPC: host and port, or another target that gRPC resolves."""
    insecure: bool
    """Without TLS."""
    headers: Mapping[str, str]
    """Names in lower case."""
    timeout: float
    """Seconds that one message may take with all its retries."""
    compression: str
    """:data:`GZIP` or :data:`NONE`."""
    certificate_file: str | None
    client_key_file: str | None
    client_certificate_file: str | None
    max_request_bytes: int

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        endpoint: str | None = None,
        protocol: str | None = None,
        headers: HeadersArgument | None = None,
        timeout: float | None = None,
        compression: Any = None,
        insecure: bool | None = None,
        certificate_file: str | os.PathLike[str] | None = None,
        client_key_file: str | os.PathLike[str] | None = None,
        client_certificate_file: str | os.PathLike[str] | None = None,
        max_request_bytes: int = DEFAULT_MAX_BYTES,
    ) -> Settings:
        """Returns the settings from keywords; for a keyword that is None or empty, from ``environ`` (default: the process's).

        Headers of both are sent; for a name in both, the keyword's. ``insecure=False`` requires TLS for any scheme of the
        endpoint; True does not change ``https://``.

        Raises ValueError with a bad keyword, its value (never that of a header) and the allowed values.
        """
        source = _Source(os.environ if environ is None else environ)
        chosen = source.take("protocol", protocol)
        target, plain = source.endpoint(chosen, endpoint, insecure)
        certificate, key = source.client_certificate(client_certificate_file, client_key_file)
        return cls(
            protocol=chosen,
            endpoint=target,
            insecure=plain,
            headers=source.headers(headers, _GRPC_NAME if chosen == GRPC else _HTTP_NAME),
            timeout=source.take("timeout", timeout),
            compression=source.take("compression", compression),
            certificate_file=source.take("certificate_file", certificate_file),
            client_key_file=key,
            client_certificate_file=certificate,
            max_request_bytes=checked("max_request_bytes", max_request_bytes, _message_size),
        )

    @property
    def displayed_endpoint(self) -> str:
        """The endpoint as messages may show it."""
        return without_credentials(self.endpoint)

    def redacted(self, text: str) -> str:
        """Text that came from outside, without what this exporter sent in its headers."""
        for value in self.headers.values():
            for secret in sorted({value, *value.split()}, key=len, reverse=True):
                if len(secret) >= _SHORTEST_SECRET:
                    text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return (
            f"Settings(protocol={self.protocol!r}, endpoint={self.displayed_endpoint!r}, insecure={self.insecure}, "
            f"headers of {sorted(self.headers)}, timeout={self.timeout}, compression={self.compression!r}, "
            f"certificate_file={self.certificate_file!r}, client_certificate_file={self.client_certificate_file!r}, "
            f"max_request_bytes={self.max_request_bytes})"
        )


@dataclass(frozen=True)
class QueueSettings:
    """Limits of an export queue, named as in OpenTelemetry's BatchSpanProcessor.

    Raises ValueError for a value that is not above 0.
    """

    schedule_delay_millis: float = 5_000.0
    """Time between two drains of the recorder; the queue itself exports without delay."""
    max_export_batch_size: int = 512
    """Spans per call of an exporter that does not take a SpanList whole."""
    max_queue_size: int = 10_000_000
    """Limit of queued spans. By default the bytes are the limit: OpenTelemetry's default, 2,048 spans, is less than one training step."""
    export_timeout_millis: float = 30_000.0
    """Time for one batch, for exporters that accept a timeout."""
    max_queue_bytes: int = 256 << 20
    """Limit of the queued spans' memory, in bytes: spans of an outage are buffered up to it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = int if isinstance(field.default, int) else float
            checked(field.name, getattr(self, field.name), functools.partial(above_zero, kind=kind))

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        schedule_delay_millis: float | None = None,
        max_export_batch_size: int | None = None,
        max_queue_size: int | None = None,
        export_timeout_millis: float | None = None,
        max_queue_bytes: int | None = None,
    ) -> QueueSettings:
        """The keywords; where one is None, the ``OTEL_BSP_*`` variables, and ours, of ``environ`` (by default the process's)."""
        keywords = {
            "schedule_delay_millis": schedule_delay_millis,
            "max_export_batch_size": max_export_batch_size,
            "max_queue_size": max_queue_size,
            "export_timeout_millis": export_timeout_millis,
            "max_queue_bytes": max_queue_bytes,
        }
        source = os.environ if environ is None else environ
        for name in [name for name, value in keywords.items() if value is None]:
            keywords[name] = VARIABLES[name].read(source)
        return cls(**{name: value for name, value in keywords.items() if value is not None})  # type: ignore[arg-type]


class _Source:
    """Keywords before variables, variables before defaults."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def take(self, option: str, value: object) -> Any:
        return VARIABLES[option].given(None if value == "" else value, self._environ)

    def endpoint(self, protocol: str, value: str | None, insecure: bool | None) -> tuple[str, bool]:
        """Returns the endpoint, and whether it is used without TLS."""
        option = VARIABLES["endpoint"]
        if protocol == HTTP:
            for_all = replace(option, variable=option.general, general="", check=_http_endpoint_of_all)
            for_traces = replace(option, general="", check=http_endpoint)
            url = for_traces.given(value or None, self._environ) or for_all.read(self._environ)
            return url or _DEFAULT_HTTP_ENDPOINT, (url or _DEFAULT_HTTP_ENDPOINT).startswith("http:")
        scheme, target = self.take("endpoint", value) or grpc_endpoint(_DEFAULT_GRPC_ENDPOINT)
        if scheme == "https" or insecure is False:
            return target, False
        if insecure or scheme == "http":
            return target, True
        return target, self.take("insecure", None)

    def headers(self, value: HeadersArgument | None, names: str) -> dict[str, str]:
        """The variables' headers, overridden by the keyword's."""
        names_of = VARIABLES["headers"].variables
        variable = next((name for name in names_of if self._environ.get(name, "").strip()), "")
        headers, problems = _headers(self._environ.get(variable, ""), names)
        for problem in problems:
            warn_once(f"{variable}: {problem}; it is left out")
        given, problems = _headers(value or "", names)
        if problems:
            raise ValueError(f"headers is not allowed: {problems[0]}")
        return headers | given

    def client_certificate(self, certificate: Any, key: Any) -> tuple[str | None, str | None]:
        """The client's certificate and its key; a certificate without a file for its key has the key in it."""
        certificate_file = self.take("client_certificate_file", certificate)
        key_file = self.take("client_key_file", key)
        if certificate_file or not key_file:
            return certificate_file, key_file
        if key:
            raise ValueError(f"client_key_file is {os.fspath(key)!r}, but there is no client_certificate_file to it")
        warn_once(f"the client key {key_file!r} is ignored: there is no client certificate to it")
        return None, None


def _http_endpoint_of_all(text: str) -> str:
    return http_endpoint(text).removesuffix("/") + TRACES_PATH


def _message_size(value: Any) -> int:
    if not isinstance(value, int) or not 1 <= value <= PROTOBUF_MAX_BYTES:
        raise ValueError(f"allowed is from 1 to {PROTOBUF_MAX_BYTES} bytes; gRPC receivers take 4 MiB by default")
    return value


def _headers(value: HeadersArgument, names: str) -> tuple[dict[str, str], list[str]]:
    """Returns the headers, with names in lower case, and the errors of bad ones, never with their values."""
    headers, problems = {}, []
    for number, (name, text) in enumerate(_header_pairs(value), start=1):
        key = str(name).lower()
        if not re.fullmatch(names, key):
            problems.append(f"item {number} is not name=value with an allowed name and a percent-encoded value")
        elif not (isinstance(text, str) and text.isascii() and text.isprintable()):
            problems.append(f"the value of {key!r} is not a str of printable ASCII")
        else:
            headers[key] = text
    return headers, problems


def _header_pairs(value: HeadersArgument) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [_header(item.strip()) for item in value.split(",") if item.strip()]
    try:
        return [(name, text) for name, text in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise ValueError("headers must be a mapping, pairs of name and value, or a str of name=value,...") from None


def _header(item: str) -> tuple[str, str]:
    """Parses an item of a list of headers; the name is empty if it is not a header."""
    name, equals, value = item.partition("=")
    if re.fullmatch(_ENCODED_ITEM, item):
        name, value = unquote(name), unquote(value)
    elif not equals or any(character in value for character in '";\\'):
        name = ""
    return name.strip(), value.strip()
