"""What the settings of an OTLP exporter may be; each function takes a text or a keyword's value, and raises ValueError saying what is allowed."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

Number = TypeVar("Number", int, float)

GRPC = "grpc"
HTTP = "http/protobuf"
GZIP = "gzip"
NONE = "none"

_COMPRESSIONS = {"none": NONE, "nocompression": NONE, "gzip": GZIP}
"""By the names that the enums of grpc and of OpenTelemetry's exporters have for them, in lower case."""
_RESOLVERS = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"}
"""Schemes that gRPC itself makes something of."""


def protocol(value: str) -> str:
    found = value.strip().lower()
    if found not in {GRPC, HTTP}:
        raise ValueError(f"allowed are {GRPC!r} and {HTTP!r}")
    return found


def grpc_endpoint(value: str) -> tuple[str, str]:
    """The scheme where it says something about TLS, and the target. User and password mean nothing to gRPC."""
    parts = _split(value)
    if not parts.netloc or parts.scheme in _RESOLVERS:
        scheme, target = "", value.rpartition("@")[2]
    else:
        scheme, target = parts.scheme, parts.netloc.rpartition("@")[2]
    if not target or re.search(r"\s", target) or (parts.netloc and scheme and not parts.hostname):
        raise ValueError("allowed is http://host:port, https://host:port or host:port")
    return scheme, target


def http_endpoint(value: str) -> str:
    parts = _split(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname or re.search(r"\s", value):
        raise ValueError("allowed is a URL that begins with http:// or https://")
    return value


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for one that is no number)
    except ValueError:
        raise ValueError("allowed is a URL with a host, and a port from 0 to 65535") from None
    return parts


def seconds(value: Any) -> float:
    seconds = _number(value, float)
    if not 0 < seconds < math.inf:
        raise ValueError("allowed is a number of seconds above 0")
    return seconds


def above_zero(value: Any, kind: type[Number]) -> Number:
    number = _number(value, kind)
    if not 0 < number < math.inf:
        raise ValueError(f"allowed is a {'whole ' if kind is int else ''}number above 0")
    return number


def _number(value: Any, kind: type[Number]) -> Number:
    """The value as a number, 0 where it is none: 0 is allowed nowhere here."""
    try:
        number = kind(value)
        return number if number == float(value) else kind(0)
    except (TypeError, ValueError, OverflowError):
        return kind(0)


def compression(value: Any) -> str:
    found = _COMPRESSIONS.get(str(getattr(value, "name", value)).strip().lower())
    if found is None:
        raise ValueError(f"allowed are {GZIP!r} and {NONE!r}")
    return found


def boolean(value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise ValueError("allowed are true and false")
    return value.lower() == "true"


def readable(value: Any) -> str:
    path = os.fspath(value)
    try:
        with Path(path).open("rb"):
            return str(path)
    except OSError as error:
        raise ValueError(f"it must be a file that can be read ({error.strerror})") from None
