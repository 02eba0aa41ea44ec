"""The least work that a receiver of traces can do: by HTTP and by gRPC it reads each message into one buffer, counts and accepts it.

A program; ``receiver.py`` starts it. Nothing is parsed beyond where a message ends, and nothing is kept. Its gRPC asks for large frames and windows,
so that the sender is not slowed down by either.
"""

from __future__ import annotations

import os
import re
import socketserver
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from children import answer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_BUFFER_BYTES = 16 << 20
_MOST_HEADERS = 64 << 10
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END_OF_HEADERS = b"\r\n\r\n"
_ACCEPTED = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"

# HTTP/2, as far as a gRPC client's unary calls need it (RFC 9113).
_PREFACE_BYTES = 24
_HEAD_BYTES = 9
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_MOST = (1 << 31) - 1
_GRPC_PREFIX_BYTES = 5
"""Before each message: whether it is compressed, and its length."""


class Counts(NamedTuple):
    """What came since the last time."""

    requests: int
    size: int
    """Bytes of the messages, as they came."""
    processor_ns: int
    """Processor time of this process."""


class _Counter:
    """Counts of all connections. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._size = 0
        self._processor_ns = time.process_time_ns()

    def add(self, size: int) -> None:
        with self._lock:
            self._requests += 1
            self._size += size

    def take(self) -> Counts:
        now = time.process_time_ns()
        with self._lock:
            found = Counts(self._requests, self._size, now - self._processor_ns)
            self._requests = self._size = 0
        self._processor_ns = now
        return found


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, handler: type[socketserver.BaseRequestHandler], count: Callable[[int], None]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.count = count
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Connection(socketserver.BaseRequestHandler):
    request: socket.socket
    server: _Server

    def handle(self) -> None:
        """Until the sender hangs up."""
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        try:
            self.serve()
        except ConnectionError:
            return

    def serve(self) -> None:
        """Never returns."""

    def read(self, into: memoryview) -> None:
        """Fills it."""
        while into:
            into = into[self.received(into) :]

    def received(self, into: memoryview) -> int:
        """Bytes that came."""
        count = self.request.recv_into(into)
        if not count:
            raise ConnectionResetError
        return count


class _Http(_Connection):
    def serve(self) -> None:
        while True:
            filled = 0
            while (end := bytes(self.buffer[:filled]).find(_END_OF_HEADERS)) < 0:
                filled += self.received(self.buffer[filled : filled + _MOST_HEADERS])
            found = _LENGTH.search(self.buffer[:end])
            assert found is not None
            length, body = int(found[1]), self.buffer[end + len(_END_OF_HEADERS) :]
            self.read(body[filled - end - len(_END_OF_HEADERS) : length])
            self.server.count(length)
            self.request.sendall(_ACCEPTED)


class _Grpc(_Connection):
    def serve(self) -> None:
        self.request.sendall(
            _frame(_SETTINGS, 0, 0, b"".join(_setting(*one) for one in ((3, 100), (4, _MOST), (5, _BUFFER_BYTES - 1))))
            + _frame(_WINDOW_UPDATE, 0, 0, _number(_MOST - 65_535))
        )
        self.read(self.buffer[:_PREFACE_BYTES])
        came = 0
        head = memoryview(bytearray(_HEAD_BYTES))
        while True:
            self.read(head)
            length, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], bytes(head[5:])
            payload = self.buffer[:length]
            self.read(payload)
            if kind == _DATA:
                came += length
                if flags & _END_STREAM:
                    self.server.count(came - _GRPC_PREFIX_BYTES)
                    self.request.sendall(_frame(_WINDOW_UPDATE, 0, 0, _number(came)) + _accepted(stream))
                    came = 0
            elif kind in {_SETTINGS, _PING} and not flags & _ACK:
                self.request.sendall(_frame(kind, _ACK, 0, bytes(payload) if kind == _PING else b""))


def _accepted(stream: bytes) -> bytes:
    """An empty response: headers, a message without bytes, trailers."""
    number = int.from_bytes(stream, "big")
    headers = b"\x88" + _header(b"content-type", b"application/grpc")  # 8 of HPACK's table is :status 200
    return (
        _frame(_HEADERS, _END_HEADERS, number, headers)
        + _frame(_DATA, 0, number, bytes(_GRPC_PREFIX_BYTES))
        + _frame(_HEADERS, _END_HEADERS | _END_STREAM, number, _header(b"grpc-status", b"0"))
    )


def _header(name: bytes, value: bytes) -> bytes:
    """One that is written out, and not to be indexed."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _setting(number: int, value: int) -> bytes:
    return number.to_bytes(2, "big") + _number(value)


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + _number(stream) + payload


def _main() -> None:
    counter = _Counter()
    http, rpc = _Server(_Http, counter.add), _Server(_Grpc, counter.add)
    answer({"http": http.server_address[1], "grpc": rpc.server_address[1]})
    for _ in sys.stdin:
        answer(counter.take()._asdict())
    os._exit(0)


if __name__ == "__main__":
    _main()
