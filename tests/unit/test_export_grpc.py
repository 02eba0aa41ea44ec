"""The gRPC transport against a real server that goes wrong as told."""

from __future__ import annotations

import threading

import grpc
import pytest
from fault_server import LONG, SILENCE, Abort, GrpcReceiver, Relay, Reply, free_port, partial_success

from otel_torchprof._export.grpc import GrpcTransport
from otel_torchprof._export.response import Outcome, Response
from otel_torchprof._export.settings import Settings

BODY = b"\x0a\x00"
CODES = grpc.StatusCode


@pytest.fixture
def receiver():
    with GrpcReceiver() as server:
        yield server


def transport(endpoint, **keywords):
    return GrpcTransport(Settings.from_environment({}, endpoint=endpoint, **keywords))


def sent(endpoint, timeout=LONG, **keywords):
    """The response to one attempt, on a transport of its own."""
    sender = transport(endpoint, **keywords)
    try:
        return sender.send(sender.prepare(BODY), timeout)
    finally:
        sender.close()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_what_arrives(receiver, compression):
    """The bytes arrive as they are, with our name and the headers in lower case."""
    assert sent(receiver.url, headers={"Tenant": "a b"}, compression=compression) == Response(Outcome.ACCEPTED)
    (arrived,) = receiver.arrived
    assert arrived.body == BODY
    assert arrived.headers["tenant"] == "a b"
    assert arrived.headers["user-agent"].startswith("otel-torchprof/")


def test_gzip(receiver):
    """With gzip a message arrives whole, and less goes over the wire."""
    with Relay(receiver.port) as relay:
        sender = transport(f"http://127.0.0.1:{relay.port}", compression="gzip")
        assert sender.send(BODY * 500_000, LONG).outcome is Outcome.ACCEPTED
        sender.close()
    assert receiver.arrived[0].body == BODY * 500_000
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
def test_codes(receiver, code, outcome):
    """Exactly those that OTLP lists are retried; the reason is the code and what the receiver said.

    Whether it took the message is not known with those that gRPC says by itself too, where there was no response.
    """
    receiver.turns = [Abort(code, "as\n told")]
    unknown = code in {CODES.CANCELLED, CODES.DEADLINE_EXCEEDED, CODES.UNAVAILABLE}
    answered = code not in {CODES.CANCELLED, CODES.DEADLINE_EXCEEDED}
    response = sent(receiver.url)._replace(advice="")
    assert response == Response(outcome, f"{code.name}: as told", may_have_arrived=unknown, answered=answered)


@pytest.mark.parametrize("code", [CODES.UNAVAILABLE, CODES.RESOURCE_EXHAUSTED])
def test_retry_info(receiver, code):
    """The wait in a RetryInfo is read; with one, an exhausted receiver is tried again."""
    receiver.turns = [Abort(code, "busy", wait=0.25)]
    assert sent(receiver.url) == Response(Outcome.RETRY, f"{code.name}: busy", wait=0.25, answered=True)


def test_status_details_that_cannot_be_read(receiver, monkeypatch):
    """They are as if they were not there."""
    from google.rpc.status_pb2 import Status

    monkeypatch.setattr(Status, "SerializeToString", lambda self: b"\xff\xff")
    receiver.turns = [Abort(CODES.UNAVAILABLE, "busy", wait=1)]
    assert sent(receiver.url) == Response(Outcome.RETRY, "UNAVAILABLE: busy", may_have_arrived=True, answered=True)


@pytest.mark.parametrize(
    "abort",
    [
        Abort(CODES.RESOURCE_EXHAUSTED, "grpc: received message larger than max (5000000 vs. 4194304)"),
        Abort(CODES.RESOURCE_EXHAUSTED, "gRPC message exceeds maximum size 4194304: 5000000"),
        Abort(CODES.OUT_OF_RANGE, "Error, decoded message length too large: found 5000000 bytes"),
    ],
)
def test_too_large_in_the_words_of_others(receiver, abort):
    """Go's, Java's and Rust's servers are understood."""
    receiver.turns = [abort]
    assert sent(receiver.url).outcome is Outcome.TOO_LARGE


def test_too_large(receiver):
    """A message over the receiver's limit is known for what it is."""
    receiver.stop()
    receiver.max_message_bytes = 1000
    with receiver:
        sender = transport(receiver.url)
        assert sender.send(BODY * 1000, LONG).outcome is Outcome.TOO_LARGE
        sender.close()


def test_partial_success(receiver):
    """Spans that the receiver says it rejected, and why; a response that cannot be read is a yes."""
    receiver.turns = [Reply(partial_success(3, "too old")), Reply(b"\xff\xff")]
    assert sent(receiver.url) == Response(Outcome.ACCEPTED, "too old", rejected_spans=3)
    unreadable = sent(receiver.url)
    assert (unreadable.outcome, unreadable.reason) == (Outcome.ACCEPTED, "the receiver's response cannot be read")


def test_no_response(receiver):
    """A receiver that never answers costs the timeout, and can be tried again."""
    receiver.turns = [SILENCE]
    response = sent(receiver.url, timeout=0.05)
    assert response.outcome is Outcome.RETRY
    assert response.reason.startswith("DEADLINE_EXCEEDED")


def test_nobody_there():
    """A refused connection can be tried again."""
    response = sent(f"http://127.0.0.1:{free_port()}")
    assert response.outcome is Outcome.RETRY
    assert "Connection refused" in response.reason


def test_a_receiver_that_returns():
    """After a receiver has died and come back on its port, the same transport reaches it at the first attempt."""
    with GrpcReceiver() as receiver:
        sender = transport(receiver.url)
        assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    assert sender.send(BODY, LONG).outcome is Outcome.RETRY
    with receiver:
        assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    sender.close()


def test_one_channel_for_all(receiver):
    """Messages of several threads go over one connection; one that fails does not cut off another."""
    receiver.turns = [SILENCE, Abort(CODES.UNAVAILABLE), None]
    sender = transport(receiver.url)
    slow = []
    thread = threading.Thread(target=lambda: slow.append(sender.send(BODY, LONG)))
    thread.start()
    receiver.wait_for(1)
    assert sender.send(BODY, LONG).outcome is Outcome.RETRY
    assert sender.send(BODY, LONG).outcome is Outcome.ACCEPTED
    receiver.ended.set()
    thread.join()
    assert slow == [Response(Outcome.ACCEPTED)]
    first, second, third = (arrived.peer for arrived in receiver.arrived)
    assert first == second != third
    sender.close()


def test_close_ends_what_is_being_sent(receiver):
    """A message under way ends at once when the transport is closed; after that nothing is sent."""
    receiver.turns = [SILENCE]
    sender = transport(receiver.url)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(sender.send(BODY, LONG)))
    thread.start()
    receiver.wait_for(1)
    sender.close()
    thread.join(LONG)
    assert [response.outcome for response in answers] == [Outcome.RETRY]
    assert sender.send(BODY, LONG) == Response(Outcome.REFUSED, "the exporter is shut down")
