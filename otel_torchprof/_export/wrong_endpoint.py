"""Advice about a receiver that does not accept, by what it answered: another protocol, another path, other headers."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - what a host's name is encoded with: a thread that asks one must import nothing
import os
import re
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .otlp_values import GRPC, HTTP
from .settings import TRACES_PATH
from .variables import VARIABLES

if TYPE_CHECKING:
    from .settings import Settings

_HTTP_1 = "Trying to connect an http1.x server"
"""In the words of gRPC's core: the first that came was no HTTP/2."""
_HTTP_2 = re.compile(r"http2 header with status: 4(04|05|15)")
"""Likewise: a server of web pages, which speaks HTTP/2 too, does not know the path of the call, the method or the type."""
_SETTINGS, _HEAD_BYTES, _HTTP_PORT = b"\x04", 9, 80
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + bytes(5)
"""What a client of HTTP/2 says first, with an empty frame of settings; a server answers with one of its own."""
_REQUEST, _STATUS_LINE = b"HEAD / HTTP/1.0\r\n\r\n", b"HTTP/1."
_NO_SUCH_PATH = frozenset({404, 405})
_NOT_ALLOWED = frozenset({401, 403})
_NO_TLS = "WRONG_VERSION_NUMBER"
"""In the words of OpenSSL and BoringSSL: the first that came was no TLS."""


def is_http(details: str) -> bool:
    """Whether a call of gRPC failed with these details since the peer speaks HTTP."""
    return _HTTP_1 in details or _HTTP_2.search(details) is not None


def speaks_http(settings: Settings) -> str:
    """Advice for an exporter of gRPC."""
    return f"{_place(settings)} speaks HTTP: set {_variable('protocol')}={HTTP}"


def speaks_grpc(settings: Settings) -> str:
    """Advice for an exporter of HTTP/1.1 to which the peer answered in HTTP/2."""
    return f"{_place(settings)} speaks gRPC: set {_variable('protocol')}={GRPC}"


def answers_http_2(settings: Settings, seconds: float) -> bool:
    """Whether the peer answers the greeting of HTTP/2 as a server of it, on a connection of its own; directly, not by a proxy.

    Raises:
        OSError: it cannot be asked.
    """
    return _first_bytes(settings.endpoint, _GREETING, seconds)[3:4] == _SETTINGS


def answers_http_1(settings: Settings, seconds: float) -> bool:
    """Whether the peer of an exporter of gRPC answers a request of HTTP/1.0, in the same way.

    Raises:
        OSError, ValueError: it cannot be asked.
    """
    url = f"//{settings.endpoint}"
    if not settings.insecure or urlsplit(url).port is None:  # TLS, a socket's path, a name for a resolver of gRPC's
        return False
    return _first_bytes(url, _REQUEST, seconds).startswith(_STATUS_LINE)


def _first_bytes(url: str, said: bytes, seconds: float) -> bytes:
    """What the peer says first to one who says this."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or _HTTP_PORT), seconds) as connection:
        connection.sendall(said)
        return connection.recv(_HEAD_BYTES)


def refused(status: int, settings: Settings) -> str:
    """Advice for an exporter of HTTP that got this status; empty where it is about neither the headers nor the path."""
    if status in _NOT_ALLOWED:
        return not_allowed(settings)
    return _other_path(settings) if status in _NO_SUCH_PATH else ""


def not_allowed(settings: Settings) -> str:
    """Advice for an exporter that the receiver knows to be nobody who may send spans."""
    variable = _variable("headers")
    if settings.headers:
        return (
            f"the receiver does not accept the headers sent, {', '.join(sorted(settings.headers))}: correct {variable}"
        )
    return f"no headers are sent, and the receiver wants credentials: set {variable}, as authorization=Bearer%20TOKEN"


def no_traces(settings: Settings) -> str:
    """Advice for an exporter of gRPC whose receiver lacks the method."""
    return f"{_place(settings)} takes no traces: set {_variable('endpoint')} to a receiver with a pipeline for traces"


def _other_path(settings: Settings) -> str:
    parts = urlsplit(settings.endpoint)
    path = parts.path.rstrip("/")
    if path.endswith(TRACES_PATH * 2):
        general = VARIABLES["endpoint"].variables[1]
        return f"the endpoint has {TRACES_PATH} twice, since it is appended to {general}: leave it off there"
    if path.endswith(TRACES_PATH):
        return f"nothing takes traces at {path} there: set {_variable('endpoint')} to a receiver with a pipeline for traces"
    url = settings.displayed_endpoint.partition("?")[0].rstrip("/")
    return (
        f"the endpoint has the path {parts.path or '/'!r}, and receivers take spans at {TRACES_PATH}: "
        f"set {VARIABLES['endpoint'].variable}={url}{TRACES_PATH}"
    )


def without_tls(reason: str, settings: Settings) -> str:
    """Advice for an exporter that uses TLS and failed for that reason; empty where the peer uses it too."""
    return f"{_place(settings)} does not speak TLS: the endpoint is to begin with http://" if _NO_TLS in reason else ""


def _place(settings: Settings) -> str:
    """The port where there is one, by which people know their receivers."""
    host = urlsplit(settings.endpoint).netloc if settings.protocol == HTTP else settings.endpoint
    port = host.rpartition(":")[2]
    return f"port {port}" if port.isdecimal() else f"{settings.displayed_endpoint!r}"


def _variable(setting: str) -> str:
    """The one that counts: the one for traces where it is set, else the general one."""
    for_traces, general = VARIABLES[setting].variables
    return for_traces if os.environ.get(for_traces, "").strip() else general
