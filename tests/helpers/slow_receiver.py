"""Receivers that never come to an end: each connection gets what a script sends, until the client hangs up."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
from typing import TYPE_CHECKING, Any

from fault_server import LONG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fault_server import Tls

PAUSE = 0.01
"""Seconds between two pieces."""


class SlowReceiver:
    """Serves every connection with the pieces of a script, ``pause`` seconds apart, and then says nothing.

    A script is given the connection and returns the pieces.
    """

    def __init__(
        self, script: Callable[[socket.socket], Iterable[bytes]], *, pause: float = PAUSE, tls: Tls | None = None
    ) -> None:
        self.hung_up = threading.Event()
        """Set once a client has closed its connection before the end."""
        self._script = script
        self._pause = pause
        self._tls = tls
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        """What to give an exporter."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def __enter__(self) -> Any:
        self._begin(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for connection in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LONG)

    def _begin(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._begin(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(LONG)
        self._connections.append(connection)
        try:
            if self._tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self._tls.path("server.pem"), self._tls.path("server.key"))
                connection = context.wrap_socket(connection, server_side=True)
                self._connections.append(connection)
            for piece in self._script(connection):
                connection.sendall(piece)
                if self._ended.wait(self._pause):
                    return
            connection.settimeout(PAUSE)
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(65_536):
                        break
            else:
                return
            self.hung_up.set()
        except OSError:
            self.hung_up.set()
        finally:
            connection.close()


# ---- HTTP ----

ACCEPTED = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def answering(*beginning: bytes, then: Iterable[bytes] = ()) -> Any:
    """Reads the head of a request, then sends the beginning at once and the rest byte for byte."""

    def script(connection: socket.socket) -> Iterator[bytes]:
        got = b""
        while b"\r\n\r\n" not in got and (data := connection.recv(65_536)):
            got += data
        return itertools.chain([b"".join(beginning)], then)

    return script


def reading_slowly(connection: socket.socket) -> Iterator[bytes]:
    """Takes a byte of the request at a time."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while connection.recv(1):
        yield b""


def silent(_: socket.socket) -> Iterable[bytes]:
    """Says nothing, and reads nothing for as long as nothing was said."""
    return ()


# ---- HTTP/2 ----


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 6, 8, 9
READY = frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
"""What a server says first: its settings, and that it has the client's."""


def field(name: bytes, value: bytes) -> bytes:
    """A header as HPACK has it, without compression."""

    def text(data: bytes) -> bytes:
        if len(data) < 127:
            return bytes([len(data)]) + data
        rest, size = len(data) - 127, bytearray([127])
        while rest >= 128:
            size.append(rest % 128 + 128)
            rest //= 128
        return bytes([*size, rest]) + data

    return b"\0" + text(name) + text(value)


HEAD = field(b":status", b"200") + field(b"content-type", b"application/grpc")


def called(*answers: bytes, then: Iterable[bytes] = ()) -> Any:
    """Waits for the call's headers, then sends the frames at once and the rest piece by piece."""

    def script(connection: socket.socket) -> Iterator[bytes]:
        yield READY
        got = b""
        while b"TraceService/Export" not in got and (data := connection.recv(65_536)):
            got += data
        yield b"".join(answers)
        yield from then

    return script
