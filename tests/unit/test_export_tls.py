"""TLS that works and TLS that cannot: the response names the fault, and is final where a retry cannot help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from certificates import make_tls
from fault_server import LONG, GrpcReceiver, HttpReceiver
from slow_receiver import SlowReceiver, answering

from otel_torchprof._export.grpc import GrpcTransport
from otel_torchprof._export.http import HttpTransport
from otel_torchprof._export.response import Outcome
from otel_torchprof._export.settings import Settings

SMALL = b"\x0a\x00"
LARGE = SMALL * (1 << 20)
PROTOCOLS = {"grpc": (GrpcTransport, GrpcReceiver), "http/protobuf": (HttpTransport, HttpReceiver)}


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    return request.param


def sent(protocol, endpoint, body=SMALL, **files):
    """The response to one attempt, on a transport of its own."""
    transport = PROTOCOLS[protocol][0](Settings.from_environment({}, endpoint=endpoint, protocol=protocol, **files))
    try:
        return transport.send(transport.prepare(body), LONG)
    finally:
        transport.close()


def receiver(protocol, **keywords):
    return PROTOCOLS[protocol][1](**keywords)


def test_an_authority_of_ones_own(protocol, tls):
    """With the certificate of its authority the receiver is trusted; gRPC also without a scheme."""
    with receiver(protocol, tls=tls) as server:
        assert sent(protocol, server.url, certificate_file=tls.path("ca.pem")).outcome is Outcome.ACCEPTED
        if protocol == "grpc":
            endpoint = f"localhost:{server.port}"
            assert sent(protocol, endpoint, certificate_file=tls.path("ca.pem")).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("file", [None, "stranger.pem"])
def test_a_receiver_that_is_not_trusted(protocol, tls, file):
    """Signed by an authority that is not known: final."""
    files = {"certificate_file": tls.path(file)} if file else {}
    with receiver(protocol, tls=tls) as server:
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
    with receiver(protocol, tls=replace(tls, server=certificate)) as server:
        response = sent(protocol, server.url, certificate_file=tls.path("ca.pem"))
    assert response.outcome is Outcome.REFUSED
    assert said[protocol] in response.reason


@pytest.mark.parametrize("names", [("client.pem", "client.key"), ("client.both", None)])
def test_a_client_certificate(protocol, tls, names):
    """A receiver that asks for one gets it, with the key in a file of its own or in the same one."""
    certificate, key = names
    files = {"client_certificate_file": tls.path(certificate), "client_key_file": key and tls.path(key)}
    with receiver(protocol, tls=tls, client_certificates=True) as server:
        assert sent(protocol, server.url, certificate_file=tls.path("ca.pem"), **files).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
def test_a_client_certificate_that_is_missing(protocol, tls, body):
    """Over HTTP the receiver's alert says so, and it is final; gRPC tells nothing, and the response what it may be."""
    with receiver(protocol, tls=tls, client_certificates=True) as server:
        response = sent(protocol, server.url, body, certificate_file=tls.path("ca.pem"))
    if protocol == "grpc":
        assert response.outcome is Outcome.RETRY
        assert response.advice == "a receiver that asks for a client certificate does this too"
    else:
        assert (response.outcome, "CERTIFICATE_REQUIRED" in response.reason) == (Outcome.REFUSED, True)


def test_a_client_certificate_that_is_not_taken(protocol, tls):
    """One of another authority's: final."""
    files = {"client_certificate_file": tls.path("stranger.pem"), "client_key_file": tls.path("stranger.key")}
    with receiver(protocol, tls=tls, client_certificates=True) as server:
        response = sent(protocol, server.url, certificate_file=tls.path("ca.pem"), **files)
    assert response.outcome is Outcome.REFUSED


def test_tls_to_a_receiver_without(protocol, tls):
    """Final: what it answers is no TLS."""
    with receiver(protocol) as server:
        response = sent(protocol, server.url.replace("http", "https"), certificate_file=tls.path("ca.pem"))
    assert (response.outcome, "WRONG_VERSION_NUMBER" in response.reason) == (Outcome.REFUSED, True)


def test_no_tls_to_a_receiver_with(protocol, tls):
    """The receiver hangs up without a word, as one that dies does: it may be tried again, and the response says what it may be."""
    with receiver(protocol, tls=tls) as server:
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
    response = transport.send(SMALL, LONG)
    transport.close()
    assert response.outcome is Outcome.REFUSED
    assert "No such file" in response.reason or f"invalid path: {path}" in response.reason
