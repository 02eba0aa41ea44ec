"""Receivers that send and read too slowly, too much or without end: a message is answered for at its deadline."""

from __future__ import annotations

import itertools
import socket
import struct
import threading

import pytest
from certificates import make_tls
from fault_server import LONG, HttpReceiver
from slow_receiver import (
    ACCEPTED,
    CHUNKED,
    CONTINUATION,
    DATA,
    HEAD,
    HEADERS,
    PING,
    READY,
    SETTINGS,
    WINDOW_UPDATE,
    SlowReceiver,
    answering,
    called,
    field,
    frame,
    reading_slowly,
    silent,
)
from span_tables import span_list
from threaded import in_threads

from otel_torchprof import OTLPExporter
from otel_torchprof._export.grpc import GrpcTransport
from otel_torchprof._export.http import HttpTransport
from otel_torchprof._export.queue import ExportQueue, QueueSettings
from otel_torchprof._export.response import Outcome
from otel_torchprof._export.settings import Settings
from otel_torchprof._process import threads
from otel_torchprof._process.deadline import THREAD_NAME, Deadline
from otel_torchprof.health import ProcessorHealth

SHORT = 0.3
"""Seconds until a deadline that is meant to be missed."""
BODY = b"\x0a\x00"
LARGE = BODY * (2 << 20)
TIMED_OUT = (Outcome.RETRY, "TimeoutError")
BROKE_OFF = (Outcome.ACCEPTED, "the receiver's response broke off")
repeat, chain = itertools.repeat, itertools.chain


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Calls that went on without their caller end with the receiver."""
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(LONG)
            assert not thread.is_alive()


def http_transport(url, **keywords):
    return HttpTransport(Settings.from_environment({}, endpoint=url, protocol="http/protobuf", **keywords))


def grpc_transport(url, **keywords):
    return GrpcTransport(Settings.from_environment({}, endpoint=url, **keywords))


def sent(transport, body=BODY):
    """Outcome and first words of the response to one attempt. On a thread of its own, since it would wait for ever if it did not keep its deadline."""
    answers = []
    in_threads(lambda: answers.append(transport.send(body, SHORT)))
    transport.close()
    assert answers, "the deadline was not kept"
    return answers[0].outcome, answers[0].reason.split(":")[0]


# ---- HTTP ----


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (silent, TIMED_OUT),
        (answering(b"HTTP/1.1 2", then=repeat(b"0")), TIMED_OUT),
        (answering(then=repeat(b"HTTP/1.1 100 Continue\r\n\r\n")), TIMED_OUT),
        (answering(ACCEPTED, b"X: ", then=repeat(b"y")), BROKE_OFF),
        (answering(ACCEPTED, CHUNKED, b"5;", then=repeat(b"e")), BROKE_OFF),
        (answering(ACCEPTED, b"Content-Length: 1000\r\n\r\n", then=repeat(b"b")), BROKE_OFF),
        (
            answering(
                ACCEPTED, b"Content-Encoding: gzip\r\n\r\n", b"\x1f\x8b\x08\x08\0\0\0\0\0\xff", then=repeat(b"n")
            ),
            BROKE_OFF,
        ),
        (answering(b"HTTP/1.1 503 Busy\r\n", b"X: ", then=repeat(b"y")), (Outcome.RETRY, "HTTP 503 Busy")),
        (answering(b"HTTP/1.1 400 No\r\n", b"X: ", then=repeat(b"y")), (Outcome.REFUSED, "HTTP 400 No")),
        (
            answering(b"HTTP/1.1 301 Moved\r\nLocation: /x\r\n\r\n", then=repeat(b"y")),
            (Outcome.REFUSED, "HTTP 301 Moved"),
        ),
    ],
    ids=[
        "silence",
        "status line",
        "100 Continue",
        "header",
        "chunk extension",
        "body",
        "gzip header",
        "header of a 503",
        "header of a 400",
        "body of a redirection",
    ],
)
@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_http_keeps_its_deadline(script, expected, encrypted, tls):
    """Wherever a byte comes now and then: it ends at the deadline, hangs up, and a status that came whole is what counts."""
    keywords = {"certificate_file": tls.path("ca.pem")} if encrypted else {}
    with SlowReceiver(script, tls=tls if encrypted else None) as receiver:
        assert sent(http_transport(receiver.url, **keywords)) == expected
        assert receiver.hung_up.wait(LONG)


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_http_keeps_its_deadline_while_it_sends(encrypted, tls):
    """A receiver that takes the request a byte at a time costs the timeout."""
    keywords = {"certificate_file": tls.path("ca.pem")} if encrypted else {}
    with SlowReceiver(reading_slowly, tls=tls if encrypted else None) as receiver:
        assert sent(http_transport(receiver.url, **keywords), LARGE) == TIMED_OUT


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (answering(then=repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)), Outcome.RETRY),
        (answering(ACCEPTED, CHUNKED, b"5;", then=repeat(b"e" * 65_536)), Outcome.ACCEPTED),
        (answering(b"HTTP/1.1 301 Moved\r\nLocation: /x\r\n\r\n", then=repeat(b"y" * 65_536)), Outcome.REFUSED),
    ],
    ids=["100 Continue", "chunk extension", "body of a redirection"],
)
def test_http_reads_so_much_and_no_more(script, outcome):
    """A response without end is left after a megabyte, long before its deadline would be over."""
    with SlowReceiver(script, pause=0) as receiver:
        transport = http_transport(receiver.url)
        assert transport.send(BODY, 10 * LONG).outcome is outcome
        transport.close()
        assert receiver.hung_up.wait(LONG)


@pytest.mark.parametrize(
    "script",
    [silent, lambda _: chain([b"\x16\x03\x03\x40\x00"], repeat(b"\0"))],
    ids=["silence", "a byte at a time"],
)
def test_a_tls_handshake_keeps_the_deadline(script):
    """A receiver that does not get through with the handshake costs the timeout."""
    with SlowReceiver(script) as receiver:
        assert sent(http_transport(receiver.url.replace("http", "https"))) == TIMED_OUT


@pytest.mark.parametrize(
    "script",
    [
        answering(b"HTTP/1.1 200", then=repeat(b" ")),
        answering(ACCEPTED, b"\r\n"),
        answering(ACCEPTED, then=repeat(b"x")),
    ],
    ids=["status line", "handshake behind it", "header"],
)
def test_a_proxy_keeps_the_deadline(script, monkeypatch):
    """So does a proxy on the way; what it says of itself is not taken for the receiver's response."""
    with SlowReceiver(script) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        assert sent(http_transport("https://receiver.invalid/v1/traces")) == TIMED_OUT


def test_a_proxy_is_used(monkeypatch):
    """A proxy that the environment names gets the request."""
    with HttpReceiver() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1/traces"))
        transport = http_transport("http://receiver.invalid/v1/traces")
        assert transport.send(BODY, LONG).outcome is Outcome.ACCEPTED
        transport.close()
    assert [arrived.path for arrived in proxy.arrived] == ["http://receiver.invalid/v1/traces"]


@pytest.fixture
def dead_address():
    """An address on which somebody listens and accepts no more connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()
        for client in waiting:
            client.close()


def resolved(monkeypatch, *addresses):
    """Has the name ``receiver.invalid`` mean these addresses."""
    real = socket.getaddrinfo

    def getaddrinfo(host, *arguments, flags=0, **keywords):
        if host != "receiver.invalid" or flags:
            return real(host, *arguments, flags=flags, **keywords)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_all_addresses_share_the_deadline(dead_address, monkeypatch):
    """A name with several addresses, none of which answers, costs the timeout once, and each has its share."""
    given, connect = [], socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: given.append(self.gettimeout()) or connect(self, to))
    resolved(monkeypatch, dead_address, dead_address, dead_address)
    assert sent(http_transport("http://receiver.invalid/")) == TIMED_OUT
    assert len(given) == 3
    assert sum(given) <= SHORT


def test_an_address_that_does_not_answer(dead_address, monkeypatch):
    """It leaves enough of the time for the next one."""
    with HttpReceiver() as receiver:
        resolved(monkeypatch, dead_address, ("127.0.0.1", receiver.port))
        transport = http_transport("http://receiver.invalid/")
        assert transport.send(BODY, 1.0).outcome is Outcome.ACCEPTED
        transport.close()


def test_a_look_up_that_hangs(monkeypatch):
    """A name server that says nothing costs the timeout."""
    released, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host, *arguments, flags=0, **keywords):
        return real(host, *arguments, flags=flags, **keywords) if flags else released.wait(LONG)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert sent(http_transport("http://receiver.invalid/")) == TIMED_OUT
    released.set()


def test_a_call_without_threads(monkeypatch):
    """Where no thread can be started, what has no deadline of its own is called all the same."""

    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.Thread, "start", refused)
    assert Deadline.after(LONG).bound(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        Deadline.after(LONG).bound(divmod, 7, 0)


# ---- gRPC ----

BEGUN = called(
    frame(HEADERS, 4, 1, HEAD), frame(DATA, 0, 1, b"\0" + struct.pack(">I", 1000)), then=repeat(frame(DATA, 0, 1, b"x"))
)
SLOW_PEERS = {
    "silence": silent,
    "settings a byte at a time": lambda _: map(bytes, zip(frame(SETTINGS, 0, 0, b"\0\3\0\0\0\1" * 1000), strict=True)),
    "no response": called(),
    "headers without end": called(frame(HEADERS, 0, 1, HEAD), then=repeat(frame(CONTINUATION, 0, 1, field(b"x", b"")))),
    "a response a byte at a time": BEGUN,
    "reading a byte at a time": lambda connection: chain([READY], reading_slowly(connection)),
}
FLOODS = {
    "pings": frame(PING, 0, 0, b"12345678"),
    "settings": frame(SETTINGS, 0, 0),
    "window updates": frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
}


def flood(what):
    """Sends these frames as fast as it can, and reads nothing."""
    return lambda _: chain([READY], repeat(FLOODS[what] * 50))


@pytest.mark.parametrize("size", [BODY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("peer", SLOW_PEERS)
def test_grpc_keeps_its_deadline(peer, size):
    """Whatever a peer is slow at, the message is answered for at its deadline and may be sent again."""
    with SlowReceiver(SLOW_PEERS[peer]) as receiver:
        assert sent(grpc_transport(receiver.url), size) == (Outcome.RETRY, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("what", FLOODS)
def test_grpc_keeps_its_deadline_in_a_flood(what):
    """Nor does it wait for ever where gRPC's core does, and neither does ``close``."""
    with SlowReceiver(flood(what), pause=0) as receiver:
        assert sent(grpc_transport(receiver.url), LARGE) == (Outcome.RETRY, "DEADLINE_EXCEEDED")


def test_calls_that_do_not_end_are_few(monkeypatch):
    """With four of them nothing more is sent, which may be tried again; when they have ended it is."""
    released = threading.Event()
    transport = grpc_transport("http://127.0.0.1:1")
    monkeypatch.setattr(GrpcTransport, "_call", _hanging(released, GrpcTransport._call))
    answers = [transport.send(BODY, 0.001) for _ in range(5)]
    assert [response.outcome for response in answers] == [Outcome.RETRY] * 5
    assert answers[-1].reason == "4 connections hold calls that do not end"
    released.set()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(LONG)
    assert not transport._unended
    assert "Connection refused" in transport.send(BODY, LONG).reason
    transport.close()


def _hanging(released, call):
    def hanging(self, connection, message, _deadline):
        assert released.wait(LONG)
        return call(self, connection, message, Deadline.after(LONG))

    return hanging


@pytest.mark.parametrize(
    "script",
    [
        called(frame(HEADERS, 0, 1, HEAD), *[frame(CONTINUATION, 0, 1, field(b"x", b"y" * 10_000))] * 3),
        # Above gRPC's hard limit of 16 KiB, as it counts: 32 bytes more for each field. Below it, it draws lots.
        called(frame(HEADERS, 4, 1, HEAD + field(b"x", b"y" * 40) * 300)),
        called(frame(HEADERS, 4, 1, HEAD), frame(DATA, 0, 1, b"\0" + struct.pack(">I", 8 << 20))),
    ],
    ids=["metadata", "metadata in one frame", "response"],
)
def test_a_response_that_is_too_large(script):
    """It is the response and not the message that is too large: it is not sent again in halves."""
    with SlowReceiver(script) as receiver:
        transport = grpc_transport(receiver.url)
        response = transport.send(BODY, LONG)
        transport.close()
        assert (response.outcome, response.reason.split(":")[0]) == (Outcome.REFUSED, "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize(
    ("protocol", "script", "reason"),
    [
        ("http/protobuf", answering(b"HTTP/1.1 2", then=repeat(b"0")), "TimeoutError: timed out"),
        ("grpc", BEGUN, "DEADLINE_EXCEEDED"),
        ("grpc", flood("pings"), "DEADLINE_EXCEEDED"),
    ],
)
def test_health_shows_it(protocol, script, reason):
    """A receiver that never gets to an end is an outage, with its seconds and why; flush and shutdown keep their deadlines."""
    with SlowReceiver(script) as receiver:
        queue = ExportQueue(OTLPExporter(receiver.url, protocol=protocol, timeout=SHORT / 3), QueueSettings())
        queue.put(span_list("a"), 100)
        assert not queue.force_flush(Deadline.after(2 * SHORT))
        stats = queue.stats
        assert stats.outage_seconds > 0
        assert stats.last_error.startswith(reason)
        health = str(ProcessorHealth({}, 1, {}, {"OTLPExporter": stats}))
        assert f"it is tried again: {reason}" in health
        assert not queue.shutdown(Deadline.after(SHORT))
        assert queue.stats.dropped == {"no_response": 1}
