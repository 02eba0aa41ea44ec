"""OTLP over gRPC: bytes in, bytes out, by the grpc package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.deadline import Deadline
from otel_torchprof.version import __version__

from .http import answers_http_1, is_http, no_traces, not_allowed, speaks_http, without_tls
from .otlp_wire import GZIP
from .response import CLOSED, Outcome, Response, accepted, is_tls_fault, one_line, root_cause, seconds_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from .settings import Settings

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

_RETRYABLE = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
_SIZE_CODES = frozenset({"RESOURCE_EXHAUSTED", "OUT_OF_RANGE"})
"""Error messages of servers for a message that is too large (the second is from Rust's tonic)."""
_OPTIONS = (
    ("grpc.primary_user_agent", f"otel-torchprof/{__version__}"),
    # gRPC's own waits before it connects again grow to two minutes, past any of our deadlines.
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Otherwise a new channel would get the old one's broken connection and its waits.
    ("grpc.use_local_subchannel_pool", 1),
)

_ABOUT_THE_RESPONSE = ("metadata", "CLIENT: ")
"""Words in messages of gRPC's core about a response, not a request, that is too large."""
_MOST_UNENDED = 4
"""Channels with calls past their deadline. Each keeps a thread, a connection and a message."""
_NOT_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed")
"""Prefixes of gRPC's messages about failed connections."""
_NO_ANSWER = frozenset({"CANCELLED", "DEADLINE_EXCEEDED"})
_OF_THE_CONNECTION_TOO = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"})
"""Codes that gRPC's core also returns without a response of the receiver; the two cases look the same (1.85)."""
_SECONDS_TO_ASK = 1.0
_ADVICE = {"UNAUTHENTICATED": not_allowed, "PERMISSION_DENIED": not_allowed, "UNIMPLEMENTED": no_traces}
"""Advice for a receiver's refusals, by code."""

_channels_of_parents: list[Any] = []


class GrpcTransport:
    """Sends messages to one target. Thread-safe; all threads share one channel, created at the first message.

    A channel whose receiver could not be reached or did not respond in time is replaced, and closed after its last use.
    """

    def __init__(self, settings: Settings) -> None:
        import grpc

        # Modules that grpc imports for its first channel, and to read the details of an error.
        process_changes.import_now(
            "grpc._channel", "grpc.experimental", "google.rpc.error_details_pb2", "google.rpc.status_pb2"
        )
        self._grpc = grpc
        self._settings = settings
        self._metadata = tuple(settings.headers.items())
        self._lock = threads.Lock()
        self._current: _Connection | None = None
        self._unended: set[_Connection] = set()
        self._closed = False

    def prepare(self, message: bytes | memoryview) -> bytes:
        """The message itself, which gRPC compresses. It takes nothing but ``bytes``, and a call that does not end keeps them."""
        return bytes(message)

    def send(self, body: bytes, timeout: float) -> Response:
        """Sends once, within ``timeout`` seconds. Raises nothing that has to do with the network."""
        if len(self._unended) >= _MOST_UNENDED:
            return Response(Outcome.RETRY, f"{_MOST_UNENDED} connections hold calls that do not end")
        try:
            connection = self._acquire()
        except OSError as error:  # a certificate file that was there when the exporter was made
            return Response(Outcome.REFUSED, root_cause(error))
        if connection is None:
            return Response(Outcome.REFUSED, CLOSED)
        try:
            # gRPC's own deadline is not kept while a receiver sends PING or SETTINGS frames faster than it reads (1.85).
            deadline = Deadline.after(timeout)
            return deadline.bound(self._call, connection, body, deadline)
        except TimeoutError:
            self._leave(connection)
            return Response(Outcome.RETRY, "DEADLINE_EXCEEDED: the call did not end in time", may_have_arrived=True)

    def _call(self, connection: _Connection, body: bytes, deadline: Deadline) -> Response:
        replace = False
        try:
            return accepted(connection.export(body, timeout=deadline.remaining(), metadata=self._metadata))
        except self._grpc.RpcError as error:
            replace = error.code() in (self._grpc.StatusCode.UNAVAILABLE, self._grpc.StatusCode.DEADLINE_EXCEEDED)
            response = self._response(error)
            is_connected = not (error.details() or "").startswith(_NOT_CONNECTED)
            if not is_connected and self._is_http(deadline):
                return response._replace(advice=speaks_http(self._settings), answered=True)
            answered = response.outcome is not Outcome.RETRY or (is_connected and error.code().name not in _NO_ANSWER)
            return response._replace(answered=answered)
        except ValueError as error:
            return Response(Outcome.REFUSED, CLOSED if self._closed else str(error))
        finally:
            self._release(connection, replace)

    def close(self) -> None:
        """Closes the channel; running calls end at once, as cancelled."""
        with self._lock:
            self._closed = True
            connection, self._current = self._current, None
        if connection is not None:
            connection.channel.close()

    def after_fork_in_child(self) -> None:
        """The parent's channel stays the parent's: kept, since its destructor would tell the receiver goodbye."""
        self._lock = threads.Lock()
        _channels_of_parents.extend((self._current, self._unended))
        self._current, self._unended = None, set()

    def _acquire(self) -> _Connection | None:
        with self._lock:
            if self._closed:
                return None
            if self._current is None:
                self._current = _Connection(self._new_channel())
            self._current.users += 1
            return self._current

    def _release(self, connection: _Connection, replace: bool) -> None:
        with self._lock:
            connection.users -= 1
            if replace and connection is self._current:
                self._current = None
            unused = connection is not self._current and not connection.users
            if unused:
                self._unended.discard(connection)
        if unused:
            connection.channel.close()

    def _leave(self, connection: _Connection) -> None:
        """A call of it is past its deadline; the call's own thread releases the connection when it ends."""
        with self._lock:
            if connection is self._current:
                self._current = None
            if connection.users:
                self._unended.add(connection)

    def _response(self, error: Any) -> Response:
        code, details = error.code().name, error.details() or ""
        reason = f"{code}: {one_line(details)}"
        wait = _retry_info(error)
        if code in _SIZE_CODES and _is_about_the_size(details):
            return Response(Outcome.TOO_LARGE, reason)
        if is_http(details):
            return Response(Outcome.REFUSED, reason, advice=speaks_http(self._settings))
        if details.startswith(_NOT_CONNECTED):
            if is_tls_fault(details):
                return Response(Outcome.REFUSED, reason, advice=without_tls(reason, self._settings))
            if details.endswith("Socket closed"):
                return Response(Outcome.RETRY, reason, advice=self._hint())
        # Permanent (a quota), unless the receiver sends a time to wait.
        if code in _RETRYABLE or (code == "RESOURCE_EXHAUSTED" and wait is not None):
            unknown = code in _OF_THE_CONNECTION_TOO and wait is None and not details.startswith(_NOT_CONNECTED)
            return Response(Outcome.RETRY, reason, wait=wait, may_have_arrived=unknown)
        advice = _ADVICE.get(code)
        return Response(Outcome.REFUSED, reason, advice=advice(self._settings) if advice else "")

    def _is_http(self, deadline: Deadline) -> bool:
        """Whether the peer speaks HTTP/1. Probes it, as gRPC's messages about this differ with the response and the version."""
        try:
            return answers_http_1(self._settings, min(_SECONDS_TO_ASK, deadline.remaining() / 2))
        except (OSError, ValueError):
            return False

    def _hint(self) -> str:
        """Why a receiver may have closed the connection before it said anything: gRPC does not tell."""
        settings = self._settings
        if settings.insecure:
            return "a receiver that expects TLS does this too: the endpoint is to begin with https://"
        return "" if settings.client_certificate_file else "a receiver that asks for a client certificate does this too"

    def _new_channel(self) -> Any:
        grpc, settings = self._grpc, self._settings
        compression = grpc.Compression.Gzip if settings.compression == GZIP else grpc.Compression.NoCompression
        if settings.insecure:
            return grpc.insecure_channel(settings.endpoint, options=_OPTIONS, compression=compression)
        # Read again for each channel: certificates are renewed while a service runs.
        certificate = _read(settings.client_certificate_file)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(settings.certificate_file),
            private_key=_read(settings.client_key_file) or certificate,
            certificate_chain=certificate,
        )
        return grpc.secure_channel(settings.endpoint, credentials, options=_OPTIONS, compression=compression)


class _Connection:
    """A channel, and how many are using it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.users = 0
        self.export: Callable[..., bytes] = channel.unary_unary(
            METHOD, request_serializer=None, response_deserializer=None
        )


def _read(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _is_about_the_size(details: str) -> bool:
    of_the_response = any(part in details for part in _ABOUT_THE_RESPONSE)
    return ("larg" in details or "size" in details) and not of_the_response


def _retry_info(error: Any) -> float | None:
    """Seconds that a ``google.rpc.RetryInfo`` among the status's details asks for."""
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    for name, value in error.trailing_metadata() or ():
        if name != "grpc-status-details-bin":
            continue
        try:
            for detail in Status.FromString(value).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return seconds_or_none(info.retry_delay.ToTimedelta().total_seconds())
        except (DecodeError, OverflowError):
            return None
    return None
