"""Receivers that go wrong as told: real servers on ports of their own, one for OTLP/HTTP and one for OTLP/gRPC.

Each takes a list of *turns*, one per request; when the list is used up, everything is accepted. What arrived is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LONG = 60.0
"""Seconds after which a test that waits for something has failed; no test takes that long."""


def partial_success(rejected: int, message: str = "") -> bytes:
    """What a receiver answers that took a message but not all spans in it."""
    partial = ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    return ExportTraceServiceResponse(partial_success=partial).SerializeToString()


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Relay:
    """Hands one connection on to another port, and counts the bytes that the client sends."""

    def __init__(self, port: int) -> None:
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._there = socket.create_connection(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        here, _ = self._listener.accept()
        back = threading.Thread(target=self._copy, args=(self._there, here))
        back.start()
        self.sent = self._copy(here, self._there)
        back.join()
        here.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> int:
        copied = 0
        while data := source.recv(65_536):
            copied += len(data)
            target.sendall(data)
        with contextlib.suppress(OSError):  # the other side may have ended first
            target.shutdown(socket.SHUT_WR)
        return copied

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(LONG)
        self._there.close()
        self._listener.close()


@dataclass(frozen=True)
class Arrived:
    """One request as the receiver saw it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    """Uncompressed."""
    peer: str
    """The client's address: the same for requests over one connection."""

    @property
    def names(self) -> list[str]:
        """The names of the spans, in order."""
        request = ExportTraceServiceRequest.FromString(self.body)
        return [span.name for r in request.resource_spans for scope in r.scope_spans for span in scope.spans]


@dataclass(frozen=True)
class Tls:
    """Files of a certificate authority made for a test, a server's certificate and a client's."""

    folder: Path
    server: str = "server"
    """The certificate that a server shows."""

    def path(self, name: str) -> str:
        """``ca``, ``server`` or ``client``, with ``.pem``, ``.key`` or (both in one file) ``.both`` after it."""
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        """The file's contents."""
        return (self.folder / name).read_bytes()


@dataclass
class Receiver:
    """What both receivers have: turns, and what arrived."""

    turns: list[Any] = field(default_factory=list)
    tls: Tls | None = None
    client_certificates: bool = False
    port: int = 0
    arrived: list[Arrived] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the receiver closes: a turn that never answers waits for it."""
    came: threading.Condition = field(default_factory=threading.Condition)
    outlasted: bool = False
    """Whether a client waited for an answer that never came until we gave up."""

    def note(self, arrived: Arrived) -> Any:
        """Keeps a request and gives the turn that it gets."""
        with self.came:
            self.arrived.append(arrived)
            self.came.notify_all()
            return self.turns.pop(0) if self.turns else None

    def wait_for(self, requests: int) -> None:
        """Waits until so many have arrived."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.arrived) >= requests, LONG)

    def stay_silent(self) -> None:
        """Waits for the receiver's end."""
        self.outlasted |= not self.ended.wait(LONG)

    @property
    def names(self) -> list[str]:
        """The names of all spans that arrived."""
        return [name for arrived in self.arrived for name in arrived.names]

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# ---- HTTP ----

HttpTurn = Callable[["_Handler"], None]


def status(code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> HttpTurn:
    """Answers this."""

    def turn(handler: _Handler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return turn


def raw(answer: bytes) -> HttpTurn:
    """Sends these bytes and hangs up."""

    def turn(handler: _Handler) -> None:
        handler.wfile.write(answer)
        handler.close_connection = True

    return turn


def silence(handler: _Handler) -> None:
    """Reads the request and never answers."""
    handler.server.receiver.stay_silent()
    handler.close_connection = True


class _Server(http.server.ThreadingHTTPServer):
    receiver: Receiver

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: list[socket.socket] = []

    def handle_error(self, *_: object) -> None:
        """A client that hung up is part of the test."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        headers = {name.lower(): value for name, value in self.headers.items()}
        turn = self.server.receiver.note(Arrived(self.path, headers, body, str(self.client_address)))
        (turn or status(200))(self)

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


class HttpReceiver(Receiver):
    """OTLP/HTTP; its turns are made by :func:`status`, :func:`raw` and :func:`silence`."""

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.receiver = self
        self.port = self._server.server_address[1]
        self.ended.clear()
        if self.tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.tls.path("ca.pem"))
            context.load_cert_chain(self.tls.path(f"{self.tls.server}.pem"), self.tls.path(f"{self.tls.server}.key"))
            context.verify_mode = ssl.CERT_REQUIRED if self.client_certificates else ssl.CERT_NONE
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self._server.connections:  # as when the process dies; a kept connection would go on
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """What to give an exporter."""
        return f"http{'s' if self.tls else ''}://localhost:{self.port}/v1/traces"


# ---- gRPC ----


@dataclass(frozen=True)
class Abort:
    """Answers with this status, and with a RetryInfo where a wait is given."""

    code: Any
    details: str = ""
    wait: float | None = None


@dataclass(frozen=True)
class Reply:
    """Answers with these bytes."""

    body: bytes


@dataclass(frozen=True)
class Held:
    """Answers once so many requests have arrived, with either protocol."""

    requests: int

    def __call__(self, handler: _Handler) -> None:
        handler.server.receiver.wait_for(self.requests)
        status(200)(handler)


SILENCE = object()
"""Never answers."""


class GrpcReceiver(Receiver):
    """OTLP/gRPC; its turns are :class:`Abort`, :class:`Reply`, :class:`Held` and :data:`SILENCE`."""

    max_message_bytes = 64 << 20

    def start(self) -> None:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", self.max_message_bytes)]
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=options)
        export = grpc.unary_unary_rpc_method_handler(self._export)
        for service in ("trace.v1.TraceService", "metrics.v1.MetricsService"):
            name = f"opentelemetry.proto.collector.{service}"
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": export}),))
        self.ended.clear()
        address = f"127.0.0.1:{self.port}"
        if self.tls:
            credentials = grpc.ssl_server_credentials(
                [(self.tls.read(f"{self.tls.server}.key"), self.tls.read(f"{self.tls.server}.pem"))],
                root_certificates=self.tls.read("ca.pem"),
                require_client_auth=self.client_certificates,
            )
            self.port = self._server.add_secure_port(address, credentials)
        else:
            self.port = self._server.add_insecure_port(address)
        self._server.start()

    def stop(self) -> None:
        self.ended.set()
        self._server.stop(grace=None).wait()

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        headers = {item.key: item.value for item in context.invocation_metadata()}
        turn = self.note(Arrived("", headers, body, context.peer()))
        if turn is SILENCE:
            self.stay_silent()
        if isinstance(turn, Held):
            self.wait_for(turn.requests)
        if isinstance(turn, Abort):
            if turn.wait is not None:
                info = RetryInfo(retry_delay=Duration(seconds=int(turn.wait), nanos=int(turn.wait % 1 * 1e9)))
                details = Status(code=turn.code.value[0], message=turn.details)
                details.details.add().Pack(info)
                context.set_trailing_metadata((("grpc-status-details-bin", details.SerializeToString()),))
            context.abort(turn.code, turn.details)
        return turn.body if isinstance(turn, Reply) else b""

    @property
    def url(self) -> str:
        """What to give an exporter."""
        return f"http{'s' if self.tls else ''}://localhost:{self.port}"
