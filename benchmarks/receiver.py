"""A receiver of traces in a process of its own, by gRPC and by HTTP, that is not the slowest part of what is measured.

It keeps the messages that it acknowledges as they come, and counts what is in them when it is asked.
"""

from __future__ import annotations

import gzip
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from children import Child, answer
from counting_receiver import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OK, UNAVAILABLE, SILENT, MOODY = "ok", "unavailable", "silent", "moody"
"""How it answers: it takes everything; says that it cannot (HTTP 503, UNAVAILABLE); takes the connection and says nothing; as
:meth:`Receiver.mood` says, by gRPC alone."""
DEAD = "dead"
"""A mood: nobody listens."""

_THREADS = 4


class Received(NamedTuple):
    """What was acknowledged since the last time."""

    spans: int
    different: int
    """Spans with an id of their own: as many as spans, unless something came twice."""
    requests: int
    size: int
    """Bytes of the messages, as they came."""


class Receiver(Child):
    """Starts the process; ``with`` ends it.

    Args:
        behaviour: one of the constants above.
    """

    def __init__(self, behaviour: str = OK) -> None:
        super().__init__(__file__, behaviour)
        self.grpc, self.http = _addresses(self.said())

    def mood(self, behaviour: str) -> None:
        """How a moody one is from now on: one of the constants above."""
        self.ask(behaviour)

    def take(self) -> Received:
        """Counts what has come since the last call, and forgets it."""
        return Received(**self.ask("count"))


class CountingReceiver(Child):
    """Starts one that costs as little as it can, and counts requests and bytes only; ``with`` ends it."""

    def __init__(self) -> None:
        super().__init__(str(Path(__file__).with_name("counting_receiver.py")))
        self.grpc, self.http = _addresses(self.said())

    def take(self) -> Counts:
        """What has come since the last call, and what that cost the receiver."""
        return Counts(**self.ask("count"))


def _addresses(ports: Mapping[str, int]) -> tuple[str, str]:
    """For gRPC and for HTTP."""
    return f"http://127.0.0.1:{ports['grpc']}", f"http://127.0.0.1:{ports['http']}/v1/traces"


class _Messages:
    """What was acknowledged. Appending to a list needs no lock."""

    def __init__(self) -> None:
        self._messages: list[tuple[bytes, bool]] = []

    def add(self, message: bytes, *, zipped: bool = False) -> None:
        self._messages.append((message, zipped))

    def take(self) -> Received:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        messages, self._messages = self._messages, []
        spans, ids = 0, set()
        for message, zipped in messages:
            request = ExportTraceServiceRequest.FromString(gzip.decompress(message) if zipped else message)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans += len(scope.spans)
                    ids.update(span.span_id for span in scope.spans)
        return Received(spans, len(ids), len(messages), sum(len(message) for message, _ in messages))


def _serve_grpc(
    behaviour: str, keep: Callable[[bytes], None], port: int = 0, let_go: threading.Event | None = None
) -> tuple[Any, int]:
    import grpc

    let_go = let_go or threading.Event()

    def export(message: bytes, context: Any) -> bytes:
        if behaviour == SILENT:
            let_go.wait()
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if behaviour == UNAVAILABLE:
            context.abort(grpc.StatusCode.UNAVAILABLE, "come back later")
        keep(message)
        return b""

    handler = grpc.unary_unary_rpc_method_handler(export)  # without (de)serializers: bytes in, bytes out
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


def _serve_http(behaviour: str, keep: Callable[..., None]) -> tuple[Any, int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            message = self.rfile.read(int(self.headers["Content-Length"]))
            if behaviour == SILENT:
                threading.Event().wait()
            if behaviour == OK:
                keep(message, zipped=self.headers.get("Content-Encoding") == "gzip")
            self.send_response(200 if behaviour == OK else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: requests are counted."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, server.server_address[1]


class _Moody:
    """A gRPC server that changes; it keeps its port when it dies."""

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        self._keep = keep
        self.port = 0
        self._server: Any = None
        self._let_go = threading.Event()
        self.be(OK)

    def be(self, behaviour: str) -> None:
        if self._server is not None:
            # Those that it has kept waiting are told that it is gone.
            self._let_go.set()
            self._server.stop(None).wait()
            self._server = None
        if behaviour != DEAD:
            self._let_go = threading.Event()
            self._server, self.port = _serve_grpc(behaviour, self._keep, self.port, self._let_go)


def _be_moody(messages: _Messages) -> None:
    moody = _Moody(messages.add)
    answer({"grpc": moody.port, "http": 0})
    for line in sys.stdin:
        if (requested := line.strip()) == "count":
            answer(messages.take()._asdict())
        else:
            moody.be(requested)
            answer(requested)
    os._exit(0)


def _main(behaviour: str) -> None:
    messages = _Messages()
    if behaviour == MOODY:
        _be_moody(messages)
    (_grpc_server, grpc_port), (_http_server, http_port) = (
        serve(behaviour, messages.add) for serve in (_serve_grpc, _serve_http)
    )  # the servers are kept: one that nobody refers to stops
    answer({"grpc": grpc_port, "http": http_port})
    for _ in sys.stdin:
        answer(messages.take()._asdict())
    os._exit(0)  # silent handlers would be waited for


if __name__ == "__main__":
    _main(sys.argv[1])
