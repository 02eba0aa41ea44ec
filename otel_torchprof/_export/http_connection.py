"""HTTP connections whose every wait ends at one deadline: name look-up, connecting, TLS, sending, and reading the response.

The timeouts of urllib3 and of sockets bound each of these, and each read by itself: a receiver that sends a byte now and then
would hold its caller for ever.
"""

from __future__ import annotations

import http.client
import io
import socket
from typing import TYPE_CHECKING, Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from otel_torchprof._process import threads

if TYPE_CHECKING:
    from otel_torchprof._process.deadline import Deadline

_LONGEST_RESPONSE = 1 << 20
"""Bytes. http.client bounds the status line and the headers, but neither responses with 100 Continue nor chunk extensions."""
_TLS_RECORD = 16_384
"""Bytes. Over TLS the socket's timeout bounds each record, not a whole ``sendall``."""


class Request(threads.local):
    """The request that this thread is sending. A thread sends one at a time, on one connection."""

    deadline: Deadline
    status: tuple[int, str] | None = None
    """Code and reason, once the status line of the receiver (not of a proxy) is there."""
    sent: bool | None = None
    """Whether anything of it was sent to the receiver; None where nobody looked, as with a SOCKS proxy."""

    def begin(self, deadline: Deadline) -> None:
        """Another one."""
        self.deadline, self.status, self.sent = deadline, None, None


request = Request()


def time_left() -> float:
    """Seconds until the request's deadline. Raises TimeoutError where there are none."""
    left = request.deadline.remaining()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Response(http.client.HTTPResponse):
    """Reads until the deadline, and notes the status before the headers are read."""

    def __init__(self, sock: socket.socket, *arguments: Any, **keywords: Any) -> None:
        super().__init__(sock, *arguments, **keywords)
        self.fp = io.BufferedReader(_Reader(sock, self.fp))

    def begin(self) -> None:
        try:
            super().begin()
        finally:
            if isinstance(self.status, int):
                request.status = self.status, self.reason


class _Reader(io.RawIOBase):
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
    """A connection that keeps the deadline of the request."""

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        request.sent = False
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
        request.sent = True
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
    return request.deadline.bound(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
