"""Advice about a receiver that does not accept; that real peers are recognized is in tests/torch/test_wrong_setups.py."""

from __future__ import annotations

import socket
import struct

import pytest
from fault_server import LONG
from slow_receiver import READY, SlowReceiver

from otel_torchprof._export.grpc import GrpcTransport
from otel_torchprof._export.http import HttpTransport, is_http, not_allowed, refused, speaks_http
from otel_torchprof._export.response import Outcome
from otel_torchprof._export.settings import Settings


def settings(endpoint: str, protocol: str = "http/protobuf") -> Settings:
    return Settings.from_environment({}, endpoint=endpoint, protocol=protocol)


@pytest.mark.parametrize(
    ("details", "known"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Trying to connect an http1.x server",
            True,
        ),
        ("Received http2 header with status: 404", True),
        ("Received http2 header with status: 415", True),
        ("Received http2 header with status: 401", False),
        ("Received http2 header with status: 503", False),
        ("Socket closed", False),
    ],
)
def test_what_speaks_http(details, known):
    """A server of pages is known by what it answers to a call; one that refuses a caller, or is overloaded, may be a proxy of the right one."""
    assert is_http(details) is known


@pytest.mark.parametrize(
    ("endpoint", "status", "url"),
    [
        ("http://host:4318", 404, "http://host:4318/v1/traces"),
        ("http://host:4318/", 405, "http://host:4318/v1/traces"),
        ("http://user:secret@host/otlp?key=secret", 404, "http://***@host/otlp/v1/traces"),
        ("http://host:4318/v1/traces", 400, None),
        ("http://host:4318/v1/traces/v1/traces", 500, None),
        ("http://host:4318", 413, None),
    ],
)
def test_a_path_that_is_missing(endpoint, status, url):
    """Said only where the receiver found nothing there and the path is not the one of traces; without what is secret."""
    said = refused(status, settings(endpoint))
    assert said.endswith(f"set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT={url}") if url else said == ""
    assert "secret" not in said


def test_a_path_that_is_there_twice():
    """The variable for all signals gets the path of traces appended, which is said."""
    said = refused(404, settings("http://host:4318/v1/traces/v1/traces"))
    assert said == (
        "the endpoint has /v1/traces twice, since it is appended to OTEL_EXPORTER_OTLP_ENDPOINT: leave it off there"
    )


def test_credentials(monkeypatch):
    """Where some were sent, their names are said and never their values; the variable is the one that counts."""
    sent = Settings.from_environment({}, headers={"Api-Key": "s3cret", "Tenant": "s3cret"})
    assert not_allowed(sent) == (
        "the receiver does not accept the headers sent, api-key, tenant: correct OTEL_EXPORTER_OTLP_HEADERS"
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=s3cret")
    assert not_allowed(sent).endswith("correct OTEL_EXPORTER_OTLP_TRACES_HEADERS")


@pytest.mark.parametrize(("endpoint", "place"), [("host:4318", "port 4318"), ("unix:///run/x", "'unix:///run/x'")])
def test_the_variable_that_counts(endpoint, place, monkeypatch):
    """The variable for traces is named where it is set, since it counts before the general one."""
    assert (
        speaks_http(settings(endpoint, "grpc")) == f"{place} speaks HTTP: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    assert speaks_http(settings(endpoint, "grpc")).endswith("set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf")


@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"HTTP/1.0 505 Not Supported\r\n\r\n", "port N speaks HTTP: set"), (b"220 mail", "expects TLS")],
)
def test_a_peer_to_which_grpc_cannot_connect(answer, said):
    """It is asked whether it speaks HTTP/1, whatever it has said to gRPC; spans are kept, since it may be one that restarts."""

    def script(connection):
        if connection.recv(65_536).startswith(b"HEAD"):
            return [answer]
        connection.close()
        return []

    with SlowReceiver(script) as receiver:
        transport = GrpcTransport(settings(receiver.url, "grpc"))
        response = transport.send(b"", LONG)
        transport.close()
    assert response.outcome is Outcome.RETRY
    assert said in response.advice.replace(str(receiver.port), "N")


@pytest.mark.parametrize(("greets", "said"), [(True, "perhaps port N speaks gRPC: set"), (False, "https:// does this")])
def test_a_peer_that_hangs_up(greets, said):
    """Where HTTP/1.1 is cut off without a word, the peer is asked whether it speaks HTTP/2, as receivers of gRPC do."""

    def script(connection):
        if connection.recv(65_536).startswith(b"PRI") and greets:
            return [READY]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        connection.close()
        return []

    with SlowReceiver(script) as receiver:
        transport = HttpTransport(settings(receiver.url))
        response = transport.send(b"", LONG)
        transport.close()
    assert response.outcome is Outcome.RETRY
    assert said in response.advice.replace(str(receiver.port), "N")
