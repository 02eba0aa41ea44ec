"""The transports against real servers that go wrong as told: what arrives, what each response means, and TLS."""

from __future__ import annotations

import gzip
import threading
from dataclasses import replace

import grpc
import pytest
from certificates import make_tls
from fault_server import LONG, SILENCE, Abort, GrpcReceiver, HttpReceiver, Relay, free_port, raw, silence, status
from google.rpc.status_pb2 import Status
from slow_receiver import SlowReceiver, answering

from otel_torchprof._export.grpc import GrpcTransport
from otel_torchprof._export.http import HttpTransport
from otel_torchprof._export.response import Outcome, Response
from otel_torchprof._export.settings import Settings

BODY = b"\x0a\x00"
LARGE = BODY * (1 << 20)
CODES = grpc.StatusCode
PROTOCOLS = {"grpc": (GrpcTransport, GrpcReceiver), "http/protobuf": (HttpTransport, HttpReceiver)}


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    return request.param


@pytest.fixture
def receiver(protocol):
    with PROTOCOLS[protocol][1]() as server:
        yield server


@pytest.fixture
def grpc_receiver():
    with GrpcReceiver() as server:
        yield server


@pytest.fixture
def http_receiver():
    with HttpReceiver() as server:
        yield server


def transport(protocol, endpoint, **keywords):
    return PROTOCOLS[protocol][0](Settings.from_environment({}, endpoint=endpoint, protocol=protocol, **keywords))


def sent(protocol, endpoint, body=BODY, timeout=LONG, **keywords):
    """The response to one attempt, on a transport of its own."""
    sender = transport(protocol, endpoint, **keywords)
    try:
        return sender.send(sender.prepare(body), timeout)
    finally:
        sender.close()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_what_arrives(protocol, receiver, compression):
    """The bytes arrive as they are, with our name and the headers; over HTTP at the path, as protobuf, whatever the headers of the user say."""
    headers = {"Tenant": "a b"} | ({"Content-Type": "text/plain"} if protocol == "http/protobuf" else {})
    assert sent(protocol, receiver.url, headers=headers, compression=compression) == Response(Outcome.ACCEPTED)
    (arrived,) = receiver.arrived
    assert (arrived.body, arrived.headers["tenant"]) == (BODY, "a b")
    assert arrived.headers["user-agent"].startswith("otel-torchprof/")
    if protocol == "http/protobuf":
        assert (arrived.path, arrived.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        assert arrived.headers.get("content-encoding", "none") == compression


def test_nobody_there(protocol):
    """A refused connection can be tried again; over HTTP the reason is the system's, without the URL."""
    response = sent(protocol, f"http://user:secret@127.0.0.1:{free_port()}")
    assert response.outcome is Outcome.RETRY
    assert "Connection refused" in response.reason
    if protocol == "http/protobuf":
        assert response == Response(Outcome.RETRY, "ConnectionRefusedError: [Errno 111] Connection refused")


# ---- gRPC ----


def test_less_goes_over_the_wire(grpc_receiver):
    """With gzip a message arrives whole, and less goes over the wire."""
    with Relay(grpc_receiver.port) as relay:
        sender = transport("grpc", f"http://127.0.0.1:{relay.port}", compression="gzip")
        assert sender.send(BODY * 500_000, LONG).outcome is Outcome.ACCEPTED
        sender.close()
    assert grpc_receiver.arrived[0].body == BODY * 500_000
    assert relay.sent < 10_000


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (CODES.CANCELLED, Outcome.RETRY),
        (CODES.UNKNOWN, Outcome.REFUSED),
        (CODES.INVALID_ARGUMENT, Outcome.REFUSED),
        (CODES.DEADLINE_EXCEEDED, Outcome.RETRY),
        (CODES.NOT_FOUND, Outcome.REFUSED),
        (CODES.PERMISSION_DENIED, Outcome.REFUSED),
        (CODES.RESOURCE_EXHAUSTED, Outcome.REFUSED),
        (CODES.ABORTED, Outcome.RETRY),
        (CODES.OUT_OF_RANGE, Outcome.RETRY),
        (CODES.UNIMPLEMENTED, Outcome.REFUSED),
        (CODES.INTERNAL, Outcome.REFUSED),
        (CODES.UNAVAILABLE, Outcome.RETRY),
        (CODES.DATA_LOSS, Outcome.RETRY),
        (CODES.UNAUTHENTICATED, Outcome.REFUSED),
    ],
)
def test_codes(grpc_receiver, code, outcome):
    """Exactly those that OTLP lists are retried; the reason is the code and what the receiver said.

    Whether it took the message is not known with those that gRPC says by itself too, where there was no response.
    """
    grpc_receiver.turns = [Abort(code, "as\n told")]
    unknown = code in {CODES.CANCELLED, CODES.DEADLINE_EXCEEDED, CODES.UNAVAILABLE}
    answered = code not in {CODES.CANCELLED, CODES.DEADLINE_EXCEEDED}
    response = sent("grpc", grpc_receiver.url)._replace(advice="")
    assert response == Response(outcome, f"{code.name}: as told", may_have_arrived=unknown, answered=answered)


@pytest.mark.parametrize("code", [CODES.UNAVAILABLE, CODES.RESOURCE_EXHAUSTED])
def test_retry_info(grpc_receiver, code):
    """The wait in a RetryInfo is read; with one, an exhausted receiver is tried again."""
    grpc_receiver.turns = [Abort(code, "busy", wait=0.25)]
    assert sent("grpc", grpc_receiver.url) == Response(Outcome.RETRY, f"{code.name}: busy", wait=0.25, answered=True)


def test_status_details_that_cannot_be_read(grpc_receiver, monkeypatch):
    """They are as if they were not there."""
    monkeypatch.setattr(Status, "SerializeToString", lambda self: b"\xff\xff")
    grpc_receiver.turns = [Abort(CODES.UNAVAILABLE, "busy", wait=1)]
    assert sent("grpc", grpc_receiver.url) == Response(
        Outcome.RETRY, "UNAVAILABLE: busy", may_have_arrived=True, answered=True
    )


@pytest.mark.parametrize(
    "abort",
    [
        Abort(CODES.RESOURCE_EXHAUSTED, "grpc: received message larger than max (5000000 vs. 4194304)"),
        Abort(CODES.RESOURCE_EXHAUSTED, "gRPC message exceeds maximum size 4194304: 5000000"),
        Abort(CODES.OUT_OF_RANGE, "Error, decoded message length too large: found 5000000 bytes"),
    ],
)
def test_too_large_in_the_words_of_others(grpc_receiver, abort):
    """Go's, Java's and Rust's servers are understood."""
    grpc_receiver.turns = [abort]
    assert sent("grpc", grpc_receiver.url).outcome is Outcome.TOO_LARGE


def test_too_large(grpc_receiver):
    """A message over the receiver's limit is known for what it is."""
    grpc_receiver.stop()
    grpc_receiver.max_message_bytes = 1000
    with grpc_receiver:
        sender = transport("grpc", grpc_receiver.url)
        assert sender.send(BODY * 1000, LONG).outcome is Outcome.TOO_LARGE
        sender.close()


def test_one_channel_for_all(grpc_receiver):
    """Messages of several threads go over one connection; one that fails does not cut off another."""
    grpc_receiver.turns = [SILENCE, Abort(CODES.UNAVAILABLE), None]
    sender = transport("grpc", grpc_receiver.url)
    slow = []
    thread = threading.Thread(target=lambda: slow.append(sender.send(BODY, LONG)))
    thread.start()
    grpc_receiver.wait_for(1)
    assert sender.send(BODY, LONG).outcome is Outcome.RETRY
    assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    grpc_receiver.ended.set()
    thread.join()
    assert slow == [Response(Outcome.ACCEPTED)]
    first, second, third = (arrived.peer for arrived in grpc_receiver.arrived)
    assert first == second != third
    sender.close()


def test_close_ends_what_is_being_sent(grpc_receiver):
    """A message under way ends at once when the transport is closed; after that nothing is sent."""
    grpc_receiver.turns = [SILENCE]
    sender = transport("grpc", grpc_receiver.url)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(sender.send(BODY, LONG)))
    thread.start()
    grpc_receiver.wait_for(1)
    sender.close()
    thread.join(LONG)
    assert [response.outcome for response in answers] == [Outcome.RETRY]
    assert sender.send(BODY, LONG) == Response(Outcome.REFUSED, "the exporter is shut down")


# ---- HTTP ----


def test_the_body_is_compressed():
    """With gzip, before anything is sent."""
    sender = transport("http/protobuf", "http://localhost:1", compression="gzip")
    body = sender.prepare(BODY * 1000)
    assert len(body) < 100
    assert gzip.decompress(body) == BODY * 1000
    sender.close()


def test_connections_are_kept(http_receiver):
    """Messages one after the other go over one connection."""
    sender = transport("http/protobuf", http_receiver.url)
    for _ in range(3):
        assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    sender.close()
    assert len({arrived.peer for arrived in http_receiver.arrived}) == 1


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
def test_statuses(http_receiver, code, outcome):
    """Exactly those that OTLP lists are retried; a redirection is not followed."""
    http_receiver.turns = [status(code, {"Location": "/elsewhere"})]
    assert sent("http/protobuf", http_receiver.url).outcome is outcome
    assert len(http_receiver.arrived) == 1


def test_what_an_error_says(http_receiver):
    """A text, or the message of a google.rpc.Status where it is protobuf; what is no Status says nothing."""
    protobuf = {"Content-Type": "application/x-protobuf"}
    http_receiver.turns = [
        status(400, body=b"no\n\n such  tenant"),
        status(400, protobuf, Status(message="no such tenant").SerializeToString()),
        status(400, protobuf, b"\xff\xff"),
        status(400, body=b"<html>" * 100_000),
    ]
    first, second, third, fourth = (sent("http/protobuf", http_receiver.url).reason for _ in range(4))
    assert first == second == "HTTP 400 Bad Request: no such tenant"
    assert third == "HTTP 400 Bad Request"
    assert len(fourth) < 400


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
def test_half_an_answer(http_receiver, response, expected):
    """Without a status nothing is known and it is sent again; with one, the message is not sent a second time."""
    http_receiver.turns = [raw(response)]
    answered = sent("http/protobuf", http_receiver.url)
    assert answered.outcome is expected
    assert answered.reason


def test_no_time_at_all(http_receiver):
    """Nor is a timeout of 0 an error of its own."""
    http_receiver.turns = [silence]
    assert sent("http/protobuf", http_receiver.url, timeout=0).outcome is Outcome.RETRY


# ---- TLS ----


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_tls(tmp_path_factory.mktemp("tls"))


def with_tls(protocol, **keywords):
    return PROTOCOLS[protocol][1](**keywords)


def test_an_authority_of_ones_own(protocol, tls):
    """With the certificate of its authority the receiver is trusted; gRPC also without a scheme."""
    with with_tls(protocol, tls=tls) as server:
        assert sent(protocol, server.url, certificate_file=tls.path("ca.pem")).outcome is Outcome.ACCEPTED
        if protocol == "grpc":
            endpoint = f"localhost:{server.port}"
            assert sent(protocol, endpoint, certificate_file=tls.path("ca.pem")).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("file", [None, "stranger.pem"])
def test_a_receiver_that_is_not_trusted(protocol, tls, file):
    """Signed by an authority that is not known: final."""
    files = {"certificate_file": tls.path(file)} if file else {}
    with with_tls(protocol, tls=tls) as server:
        response = sent(protocol, server.url, **files)
    assert (response.outcome, "CERTIFICATE_VERIFY_FAILED" in response.reason) == (Outcome.REFUSED, True)


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        ("elsewhere", {"grpc": "Hostname Verification Check failed", "http/protobuf": "Hostname mismatch"}),
        ("expired", {"grpc": "certificate has expired", "http/protobuf": "certificate has expired"}),
    ],
)
def test_a_certificate_that_is_not_valid(protocol, tls, certificate, said):
    """For another host, or expired: final."""
    with with_tls(protocol, tls=replace(tls, server=certificate)) as server:
        response = sent(protocol, server.url, certificate_file=tls.path("ca.pem"))
    assert response.outcome is Outcome.REFUSED
    assert said[protocol] in response.reason


@pytest.mark.parametrize("names", [("client.pem", "client.key"), ("client.both", None)])
def test_a_client_certificate(protocol, tls, names):
    """A receiver that asks for one gets it, with the key in a file of its own or in the same one."""
    certificate, key = names
    files = {"client_certificate_file": tls.path(certificate), "client_key_file": key and tls.path(key)}
    with with_tls(protocol, tls=tls, client_certificates=True) as server:
        assert sent(protocol, server.url, certificate_file=tls.path("ca.pem"), **files).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("body", [BODY, LARGE], ids=["small", "large"])
def test_a_client_certificate_that_is_missing(protocol, tls, body):
    """Over HTTP the receiver's alert says so, and it is final; gRPC tells nothing, and the response what it may be."""
    with with_tls(protocol, tls=tls, client_certificates=True) as server:
        response = sent(protocol, server.url, body, certificate_file=tls.path("ca.pem"))
    if protocol == "grpc":
        assert response.outcome is Outcome.RETRY
        assert response.advice == "a receiver that asks for a client certificate does this too"
    else:
        assert (response.outcome, "CERTIFICATE_REQUIRED" in response.reason) == (Outcome.REFUSED, True)


def test_a_client_certificate_that_is_not_taken(protocol, tls):
    """One of another authority's: final."""
    files = {"client_certificate_file": tls.path("stranger.pem"), "client_key_file": tls.path("stranger.key")}
    with with_tls(protocol, tls=tls, client_certificates=True) as server:
        response = sent(protocol, server.url, certificate_file=tls.path("ca.pem"), **files)
    assert response.outcome is Outcome.REFUSED


def test_tls_to_a_receiver_without(protocol, tls):
    """Final: what it answers is no TLS."""
    with with_tls(protocol) as server:
        response = sent(protocol, server.url.replace("http", "https"), certificate_file=tls.path("ca.pem"))
    assert (response.outcome, "WRONG_VERSION_NUMBER" in response.reason) == (Outcome.REFUSED, True)


def test_no_tls_to_a_receiver_with(protocol, tls):
    """The receiver hangs up without a word, as one that dies does: it may be tried again, and the response says what it may be."""
    with with_tls(protocol, tls=tls) as server:
        response = sent(protocol, server.url.replace("https", "http"))
    assert response.outcome is Outcome.RETRY
    assert "a receiver that expects" in response.advice


@pytest.mark.parametrize(
    ("answered", "hint"),
    [
        (b"\x15\x03\x01\0\x02\x02\x46\n", "its answer is TLS; the endpoint is to begin with https://"),
        (b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0\x40\0\n", "speaks gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "its answer is no HTTP/1.1"),
    ],
    ids=["TLS", "HTTP/2", "something else"],
)
def test_a_receiver_of_another_protocol(answered, hint):
    """Final: what it answers is no HTTP/1.1, and often it can be told what it is."""
    with SlowReceiver(answering(answered)) as server:
        response = sent("http/protobuf", server.url)
    assert response.outcome is Outcome.REFUSED
    assert hint in response.text


def test_a_file_that_has_gone(protocol, tls, tmp_path):
    """A certificate file that was there when the exporter was made: final, and the system's words say that it is missing."""
    path = tmp_path / "ca.pem"
    path.write_bytes(tls.read("ca.pem"))
    settings = Settings.from_environment({}, endpoint="https://localhost:1", protocol=protocol, certificate_file=path)
    path.unlink()
    transport = PROTOCOLS[protocol][0](settings)
    response = transport.send(BODY, LONG)
    transport.close()
    assert response.outcome is Outcome.REFUSED
    assert "No such file" in response.reason or f"invalid path: {path}" in response.reason


def test_the_authority_counts_before_the_environment(tls, monkeypatch):
    """REQUESTS_CA_BUNDLE, which is for everybody, does not replace the authority that was given to this exporter."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls.path("stranger.pem"))
    with HttpReceiver(tls=tls) as receiver:
        assert sent("http/protobuf", receiver.url, certificate_file=tls.path("ca.pem")).outcome is Outcome.ACCEPTED
