"""The HTTP transport against a real server that goes wrong as told."""

from __future__ import annotations

import gzip

import pytest
from certificates import make_tls
from fault_server import LONG, HttpReceiver, free_port, partial_success, raw, silence, status
from google.rpc.status_pb2 import Status

from otel_torchprof._export.http import HttpTransport
from otel_torchprof._export.response import Outcome, Response
from otel_torchprof._export.settings import Settings

BODY = b"\x0a\x00"


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def receiver():
    with HttpReceiver() as server:
        yield server


def transport(endpoint, **keywords):
    return HttpTransport(Settings.from_environment({}, endpoint=endpoint, protocol="http/protobuf", **keywords))


def sent(endpoint, timeout=LONG, **keywords):
    """The response to one attempt, on a transport of its own."""
    sender = transport(endpoint, **keywords)
    try:
        return sender.send(sender.prepare(BODY), timeout)
    finally:
        sender.close()


def test_what_arrives(receiver):
    """The bytes are posted to the path, as protobuf, with our name and the headers."""
    assert sent(receiver.url, headers={"Tenant": "a b"}) == Response(Outcome.ACCEPTED)
    (arrived,) = receiver.arrived
    assert (arrived.path, arrived.body) == ("/v1/traces", BODY)
    assert arrived.headers["content-type"] == "application/x-protobuf"
    assert arrived.headers["user-agent"].startswith("otel-torchprof/")
    assert arrived.headers["tenant"] == "a b"
    assert "content-encoding" not in arrived.headers


def test_gzip(receiver):
    """With gzip the body is compressed, which the headers say, whatever the user's headers say."""
    sender = transport(
        receiver.url, compression="gzip", headers={"Content-Type": "text/plain", "content-encoding": "no"}
    )
    body = sender.prepare(BODY * 1000)
    assert len(body) < 100
    assert gzip.decompress(body) == BODY * 1000
    assert sender.send(body, LONG).outcome is Outcome.ACCEPTED
    sender.close()
    (arrived,) = receiver.arrived
    assert arrived.body == BODY * 1000
    assert (arrived.headers["content-type"], arrived.headers["content-encoding"]) == ("application/x-protobuf", "gzip")


def test_connections_are_kept(receiver):
    """Messages one after the other go over one connection."""
    sender = transport(receiver.url)
    for _ in range(3):
        assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    sender.close()
    assert len({arrived.peer for arrived in receiver.arrived}) == 1


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (200, Outcome.ACCEPTED),
        (202, Outcome.ACCEPTED),
        (301, Outcome.REFUSED),
        (400, Outcome.REFUSED),
        (401, Outcome.REFUSED),
        (404, Outcome.REFUSED),
        (408, Outcome.REFUSED),
        (413, Outcome.TOO_LARGE),
        (429, Outcome.RETRY),
        (500, Outcome.REFUSED),
        (501, Outcome.REFUSED),
        (502, Outcome.RETRY),
        (503, Outcome.RETRY),
        (504, Outcome.RETRY),
    ],
)
def test_statuses(receiver, code, outcome):
    """Exactly those that OTLP lists are retried; a redirection is not followed."""
    receiver.turns = [status(code, {"Location": "/elsewhere"})]
    assert sent(receiver.url).outcome is outcome
    assert len(receiver.arrived) == 1


@pytest.mark.parametrize("code", [429, 503])
def test_retry_after(receiver, code):
    """The wait that the receiver asks for is read."""
    receiver.turns = [status(code, {"Retry-After": "7"})]
    assert sent(receiver.url).wait == 7


def test_what_an_error_says(receiver):
    """A text, or the message of a google.rpc.Status where it is protobuf; what is no Status says nothing."""
    protobuf = {"Content-Type": "application/x-protobuf"}
    receiver.turns = [
        status(400, body=b"no\n\n such  tenant"),
        status(400, protobuf, Status(message="no such tenant").SerializeToString()),
        status(400, protobuf, b"\xff\xff"),
        status(400, body=b"<html>" * 100_000),
    ]
    first, second, third, fourth = (sent(receiver.url).reason for _ in range(4))
    assert first == second == "HTTP 400 Bad Request: no such tenant"
    assert third == "HTTP 400 Bad Request"
    assert len(fourth) < 400


def test_partial_success(receiver):
    """Spans that the receiver says it rejected, and why."""
    receiver.turns = [status(200, body=partial_success(3, "too old"))]
    assert sent(receiver.url) == Response(Outcome.ACCEPTED, "too old", rejected_spans=3)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (b"", Outcome.RETRY),
        (b"HTTP/1.", Outcome.RETRY),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", Outcome.ACCEPTED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nha", Outcome.ACCEPTED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xff", Outcome.ACCEPTED),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nhalf", Outcome.RETRY),
    ],
)
def test_half_an_answer(receiver, response, expected):
    """Without a status nothing is known and it is sent again; with one, the message is not sent a second time."""
    receiver.turns = [raw(response)]
    answered = sent(receiver.url)
    assert answered.outcome is expected
    assert answered.reason


def test_no_response(receiver):
    """A receiver that never answers costs the timeout, and can be tried again."""
    receiver.turns = [silence]
    response = sent(receiver.url, timeout=0.05)
    assert (response.outcome, response.reason) == (Outcome.RETRY, "TimeoutError: timed out")


def test_no_time_at_all(receiver):
    """Nor is a timeout of 0 an error of its own."""
    receiver.turns = [silence]
    assert sent(receiver.url, timeout=0).outcome is Outcome.RETRY


def test_nobody_there():
    """A refused connection can be tried again; the reason is the system's, without the URL."""
    response = sent(f"http://user:secret@127.0.0.1:{free_port()}/?key=secret")
    assert response == Response(Outcome.RETRY, "ConnectionRefusedError: [Errno 111] Connection refused")


def test_a_receiver_that_returns():
    """After a receiver has died and come back on its port, the same transport reaches it."""
    with HttpReceiver() as receiver:
        sender = transport(receiver.url)
        assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    assert sender.send(BODY, LONG).outcome is Outcome.RETRY
    with receiver:
        assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    sender.close()


def test_the_authority_counts_before_the_environment(tls, monkeypatch):
    """REQUESTS_CA_BUNDLE, which is for everybody, does not replace the authority that was given to this exporter."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls.path("stranger.pem"))
    with HttpReceiver(tls=tls) as receiver:
        assert sent(receiver.url, certificate_file=tls.path("ca.pem")).outcome is Outcome.ACCEPTED
