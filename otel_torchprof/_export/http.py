"""OTLP over HTTP: protobuf in the body of a POST, by the requests package."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - encodes host names: the thread that resolves one must import nothing
import gzip
import http.client
import io
import os
import re
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from http.client import BadStatusLine
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Timeout
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError

from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof.version import __version__

from .otlp_wire import GRPC, GZIP, HTTP
from .response import Outcome, Response, accepted, causes, is_tls_fault, one_line, root_cause, seconds_or_none
from .settings import TRACES_PATH
from .variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .settings import Settings

# ---- Connections with one deadline for all waits ----
# Name look-up, connecting, TLS, sending, and reading the response: the timeouts of urllib3 and of sockets bound each of
# these, and each read, separately: a receiver that sends single bytes slowly could block its caller forever.

_LONGEST_RESPONSE = 1 << 20
"""Bytes. http.client bounds the status line and the headers, but neither responses with 100 Continue nor chunk extensions."""
_TLS_RECORD = 16_384
"""Bytes. Over TLS the socket's timeout bounds each record, not a whole ``sendall``."""


class HttpRequest(threads.local):
    """The request that this thread is sending. A thread sends one at a time, on one connection."""

    deadline: Deadline
    status: tuple[int, str] | None = None
    """Code and reason, once the status line of the receiver (not of a proxy) is there."""
    sent: bool | None = None
    """Whether any part of it was sent to the receiver; None if unknown, as with a SOCKS proxy."""

    def begin(self, deadline: Deadline) -> None:
        """Another one."""
        self.deadline, self.status, self.sent = deadline, None, None


current_request = HttpRequest()


def time_left() -> float:
    """Seconds until the request's deadline. Raises TimeoutError where there are none."""
    left = current_request.deadline.remaining()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Response(http.client.HTTPResponse):
    """Reads until the deadline, and notes the status before the headers are read."""

    def __init__(self, sock: socket.socket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(sock, *arguments, **keywords)
        self.fp = io.BufferedReader(_ResponseReader(sock, self.fp))

    def begin(self) -> None:
        try:
            super().begin()
        finally:
            if isinstance(self.status, int):
                current_request.status = self.status, self.reason


class _ResponseReader(io.RawIOBase):
    """The receiving side of a socket."""

    def __init__(self, sock: socket.socket, file: io.BufferedIOBase) -> None:
        self._socket = sock
        self._file = file
        """Keeps the socket open, which the connection may close before the response is read."""
        self._left = _LONGEST_RESPONSE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise OSError(f"the response is longer than {_LONGEST_RESPONSE} bytes")
        self._socket.settimeout(time_left())
        size = self._socket.recv_into(buffer)
        self._left -= size
        return size

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _WithinDeadline(HTTPConnection):
    """A connection that keeps the deadline of the current_request."""

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        current_request.sent = False
        addresses = _addresses(self._dns_host, self.port)
        for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
            sock = socket.socket(family, kind, protocol)
            try:
                for option in self.socket_options or ():
                    sock.setsockopt(*option)
                # An address that does not answer leaves the others their share.
                sock.settimeout(time_left() / (len(addresses) - number + 1))
                sock.connect(address)
                sock.settimeout(time_left())
            except OSError:
                sock.close()
                if number == len(addresses):
                    raise
            else:
                return sock
        raise OSError(f"no address was found for {self.host!r}")

    def _tunnel(self) -> None:
        super()._tunnel()
        self.sock.settimeout(time_left())  # for the TLS handshake with the receiver

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        current_request.sent = True
        self.sock.settimeout(time_left())
        super().send(data)


class _TlsWithinDeadline(_WithinDeadline, HTTPSConnection):
    def send(self, data: Any) -> None:
        view = memoryview(data)
        try:
            for first in range(0, len(view), _TLS_RECORD):
                super().send(view[first : first + _TLS_RECORD])
        except TimeoutError:
            raise
        except OSError:
            # With TLS 1.3 a client certificate is refused after the handshake, by an alert that recv raises.
            if self.sock is not None:
                self.sock.settimeout(time_left())
                self.sock.recv(1)
            raise


class _Pool(HTTPConnectionPool):
    ConnectionCls = _WithinDeadline


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsWithinDeadline


class Adapter(HTTPAdapter):
    """Has ``requests`` use these connections, directly and through HTTP proxies. A SOCKS proxy brings its own."""

    def init_poolmanager(self, *arguments: Any, **keywords: Any) -> None:
        super().init_poolmanager(*arguments, **keywords)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def proxy_manager_for(self, proxy: str, **keywords: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **keywords)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        return manager


def _addresses(host: str, port: int) -> list[Any]:
    """The addresses of a host. Raises TimeoutError where the look-up of a name does not end in time."""
    host = host.strip("[]")
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    return current_request.deadline.bound(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)


_PROTOBUF = "application/x-protobuf"
_RETRYABLE = frozenset({429, 502, 503, 504})
"""The specification's list; every other 4xx and 5xx is final."""
_TOO_LARGE = 413
_GZIP_LEVEL = 1
_SHORTEST_TIMEOUT = 0.001
"""Seconds; urllib3 refuses 0."""
_LONGEST_BODY = 4096
"""Limit of the bytes read of a response: a partial success takes a hundred, error pages may take more."""

_sessions_of_parents: list[Any] = []


class HttpTransport:
    """Sends messages to one URL. Thread-safe; connections are kept and shared between threads."""

    def __init__(self, settings: Settings) -> None:
        # Modules that requests imports for its first request, and to read an error.
        process_changes.import_now("netrc", "google.rpc.status_pb2")
        self._settings = settings
        self._headers = {"user-agent": f"otel-torchprof/{__version__}", **settings.headers, "content-type": _PROTOBUF}
        if settings.compression == GZIP:
            self._headers["content-encoding"] = "gzip"
        certificate, key = settings.client_certificate_file, settings.client_key_file
        self._certificate = (certificate, key) if certificate and key else certificate
        self._session = self._new_session()

    def _new_session(self) -> requests.Session:
        session = requests.Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, Adapter())
        return session

    def prepare(self, message: bytes | memoryview) -> bytes | memoryview:
        """The body to send, made once for all attempts."""
        return gzip.compress(message, _GZIP_LEVEL, mtime=0) if self._settings.compression == GZIP else message

    def send(self, body: bytes | memoryview, timeout: float) -> Response:
        """Sends once, within ``timeout`` seconds. Raises nothing that has to do with the network."""
        request = current_request
        request.begin(Deadline.after(timeout))
        try:
            with self._session.post(
                self._settings.endpoint,
                data=body,
                headers=self._headers,
                # For a SOCKS proxy only: all other connections keep the deadline.
                timeout=Timeout(total=max(timeout, _SHORTEST_TIMEOUT)),  # type: ignore[arg-type]
                # Passed with each request: REQUESTS_CA_BUNDLE would override the session's.
                verify=self._settings.certificate_file or True,
                cert=self._certificate,
                allow_redirects=False,
                stream=True,
            ) as response:
                return self._response(response.status_code, response.reason, response.headers, _body(response))
        except (requests.RequestException, HTTPError, OSError, ValueError) as error:
            if request.status is not None:  # all of the status came, not all of the headers
                return self._response(*request.status, {}, None)
            failed = _no_response(error, self._settings)
            return failed._replace(may_have_arrived=request.sent is not False)

    def close(self) -> None:
        """Closes unused connections; those in use end with their timeout."""
        self._session.close()

    def after_fork_in_child(self) -> None:
        """The parent's connections stay the parent's: kept, so that not even their destructors touch them."""
        _sessions_of_parents.append(self._session)
        self._session = self._new_session()

    def _response(self, status: int, reason: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        if 200 <= status < 300:  # noqa: PLR2004 (HTTP's range of success)
            # The status is complete, so the message was accepted: sending it again would duplicate it.
            return Response(Outcome.ACCEPTED, "the receiver's response broke off") if body is None else accepted(body)
        said = _error_text(headers, body or b"")
        reason = f"HTTP {status} {reason}".rstrip() + (f": {said}" if said else "")
        if status in _RETRYABLE:
            return Response(Outcome.RETRY, reason, wait=retry_after(headers.get("retry-after", "")), answered=True)
        outcome = Outcome.TOO_LARGE if status == _TOO_LARGE else Outcome.REFUSED
        return Response(outcome, reason, advice=refused(status, self._settings), answered=True)


def _body(response: requests.Response) -> bytes | None:
    """The body, or its beginning; None where it broke off or took too long."""
    body = bytearray()
    try:
        for piece in response.iter_content(_LONGEST_BODY):
            body += piece
            if len(body) >= _LONGEST_BODY:
                break
    except (requests.RequestException, OSError):
        return None
    return bytes(body[:_LONGEST_BODY])


def _no_response(error: Exception, settings: Settings) -> Response:
    """Returns the outcome of a message without a response: a retry, unless the error is permanent."""
    for cause in causes(error):
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            reason = f"{type(cause).__name__}: {cause}"
            outcome = Outcome.REFUSED if is_tls_fault(reason) else Outcome.RETRY
            return Response(outcome, reason, advice=without_tls(reason, settings), answered=True)
        if isinstance(cause, ConnectionResetError):  # so is RemoteDisconnected, which is a BadStatusLine too
            return Response(Outcome.RETRY, root_cause(error), advice=_why_closed(settings))
        if isinstance(cause, BadStatusLine) and not (line := str(cause)).startswith("HTTP/"[: len(line)]):
            return _other_protocol(line, settings)
    may_pass = isinstance(error, (requests.ConnectionError, requests.Timeout))
    return Response(Outcome.RETRY if may_pass else Outcome.REFUSED, root_cause(error))


def _why_closed(settings: Settings) -> str:
    """Why a receiver may have closed the connection before it said anything."""
    if not settings.endpoint.startswith("http:"):
        return ""
    try:
        deadline = current_request.deadline
        is_direct = not requests.utils.get_environ_proxies(settings.endpoint)
        if is_direct and deadline.bound(answers_http_2, settings, time_left()):
            return f"it answers in HTTP/2: perhaps {speaks_grpc(settings)}"
    except OSError:
        pass  # it says nothing of it either
    return "a receiver that expects https:// does this too, or one for the protocol 'grpc'"


def _other_protocol(line: str, settings: Settings) -> Response:
    """The response to what begins with that line, and is no HTTP/1.1."""
    if line.startswith("\0"):
        return Response(Outcome.REFUSED, "its answer is HTTP/2", advice=speaks_grpc(settings))
    if line.startswith("\x15\x03"):
        return Response(Outcome.REFUSED, "its answer is TLS", advice="the endpoint is to begin with https://")
    return Response(Outcome.REFUSED, "its answer is no HTTP/1.1", answered=True)


def _error_text(headers: Mapping[str, str], body: bytes) -> str:
    """Message of an unsuccessful response: a ``google.rpc.Status`` according to OTLP; text from proxies."""
    if _PROTOBUF not in headers.get("content-type", ""):
        return one_line(body.decode("utf-8", "replace"))
    from google.protobuf.message import DecodeError
    from google.rpc.status_pb2 import Status

    try:
        return one_line(Status.FromString(body).message)
    except DecodeError:
        return ""


def retry_after(value: str) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, as a number or as a date; None where it says neither."""
    try:
        return seconds_or_none(float(value))
    except ValueError:
        pass
    try:
        return seconds_or_none(parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


# ---- Advice about a receiver that does not accept ----


_HTTP_1 = "Trying to connect an http1.x server"
"""Message of gRPC's core if the peer does not speak HTTP/2."""
_HTTP_2 = re.compile(r"http2 header with status: 4(04|05|15)")
"""Message of gRPC's core about a web server that speaks HTTP/2 but rejects path, method or content type of the call."""
_SETTINGS, _HEAD_BYTES, _HTTP_PORT = b"\x04", 9, 80
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + bytes(5)
"""First bytes of an HTTP/2 client, with an empty settings frame; a server responds with a settings frame."""
_REQUEST, _STATUS_LINE = b"HEAD / HTTP/1.0\r\n\r\n", b"HTTP/1."
_NO_SUCH_PATH = frozenset({404, 405})
_NOT_ALLOWED = frozenset({401, 403})
_NO_TLS = "WRONG_VERSION_NUMBER"
"""Message of OpenSSL and BoringSSL if the peer does not speak TLS."""


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
    """First bytes of the peer's response to the given bytes."""
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
    """Returns advice for an exporter that the receiver does not authorize."""
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
    """Returns the variable to name: the one for traces if it is set, else the general one."""
    for_traces, general = VARIABLES[setting].variables
    return for_traces if os.environ.get(for_traces, "").strip() else general
