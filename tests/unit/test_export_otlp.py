"""OTLPExporter over both protocols: what it sends, counts, retries and gives up."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from dataclasses import replace

import grpc
import pytest
from fault_server import (
    LONG,
    SILENCE,
    Abort,
    GrpcReceiver,
    Held,
    HttpReceiver,
    Reply,
    free_port,
    partial_success,
    silence,
    status,
)
from opentelemetry import context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from providers import new_provider
from span_tables import span_list, span_rows
from threaded import in_threads

from otel_torchprof import ExportStats, OTLPExporter
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.response import Backoff

SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
SOON = Backoff(first=0.001, longest=0.001, shortest=0.001)
"""Waits of a test; the real ones are tested with a clock of its own."""
TURNS = {
    "grpc": {
        "busy": Abort(grpc.StatusCode.UNAVAILABLE, "busy"),
        "later": Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", wait=0.01),
        "much later": Abort(grpc.StatusCode.UNAVAILABLE, "busy", wait=3600),
        "bad": Abort(grpc.StatusCode.INVALID_ARGUMENT, "no such tenant: secret-token"),
        "too large": Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max"),
        "partial": Reply(partial_success(1, "too old")),
        "garbage": Reply(b"\xff"),
        "silence": SILENCE,
    },
    "http/protobuf": {
        "busy": status(503, body=b"busy"),
        "later": status(429, {"Retry-After": "0.01"}),
        "much later": status(429, {"Retry-After": "3600"}),
        "bad": status(400, body=b"no such tenant: secret-token"),
        "too large": status(413),
        "partial": status(200, body=partial_success(1, "too old")),
        "garbage": status(200, body=b"\xff"),
        "silence": silence,
    },
}


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request):
    return request.param


@pytest.fixture
def receiver(protocol):
    with GrpcReceiver() if protocol == "grpc" else HttpReceiver() as server:
        server.turn = TURNS[protocol].__getitem__
        yield server


@pytest.fixture
def exporter(receiver, protocol):
    made = made_exporter(receiver.url, protocol=protocol)
    yield made
    made.shutdown()


def made_exporter(*arguments, timeout=LONG, **keywords):
    made = OTLPExporter(*arguments, timeout=timeout, **keywords)
    made._sender.backoff = SOON
    return made


def flat(bodies):
    """The spans of messages with resource and scope, as protobuf's own text."""
    return [
        (str(r.resource), str(s.scope), str(span))
        for body in bodies
        for r in ExportTraceServiceRequest.FromString(body).resource_spans
        for s in r.scope_spans
        for span in s.spans
    ]


def test_both_kinds_of_spans(receiver, exporter):
    """A SpanList goes by the native encoder and any other sequence by OpenTelemetry's: the same spans arrive."""
    spans = span_list("a", "b", "c")
    assert exporter.export(spans) is SUCCESS
    assert exporter.export(list(spans)) is SUCCESS
    native, theirs = (flat([arrived.body]) for arrived in receiver.arrived)
    assert native == theirs
    assert exporter.stats == ExportStats(
        accepted_spans=6, requests=2, bytes_sent=sum(len(arrived.body) for arrived in receiver.arrived)
    )


def test_a_slice(receiver, exporter):
    """Of a slice only its spans are sent; one with gaps too."""
    spans = span_list(*"abcdef")
    assert exporter.export(spans[2:4]) is SUCCESS
    assert exporter.export(spans[::2]) is SUCCESS
    assert [arrived.names for arrived in receiver.arrived] == [["c", "d"], ["a", "c", "e"]]


def test_nothing_to_send(receiver, exporter):
    """No spans are no message."""
    assert exporter.export([]) is SUCCESS
    assert exporter.export(span_list()) is SUCCESS
    assert exporter.stats == ExportStats()


@pytest.mark.parametrize("kind", [span_list, lambda *names: list(span_list(*names))])
def test_messages_are_bounded(receiver, protocol, kind):
    """No message is larger than was asked for, unless one span alone is; all spans arrive, in order, once."""
    names = [f"span {number}" for number in range(50)] + ["x" * 2000]
    exporter = made_exporter(receiver.url, protocol=protocol, max_request_bytes=1000)
    assert exporter.export(kind(*names)) is SUCCESS
    exporter.shutdown()
    assert receiver.names == names
    assert len(receiver.arrived) >= 5
    *others, last = (len(arrived.body) for arrived in receiver.arrived)
    assert max(others) <= 1000 < last


def test_a_service(receiver, exporter):
    """It serves the SDK's own span processors."""
    provider = new_provider(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("request"):
        pass
    assert receiver.names == ["request"]
    provider.shutdown()


@pytest.mark.parametrize("fault", ["busy", "later"])
def test_it_tries_again(receiver, exporter, fault):
    """A receiver that is busy twice gets the message at the third attempt, once."""
    receiver.turns = [receiver.turn(fault)] * 2
    assert exporter.export(span_list("a")) is SUCCESS
    stats = exporter.stats
    assert (stats.accepted_spans, stats.failed_spans, stats.requests, stats.retries) == (1, 0, 3, 2)
    assert len({arrived.body for arrived in receiver.arrived}) == 1


def test_refused(receiver, protocol, caplog):
    """What is refused is not sent again; the log and the counters say why, without what the headers hold."""
    receiver.turns = [receiver.turn("bad")]
    exporter = made_exporter(receiver.url, protocol=protocol, headers={"authorization": "Bearer secret-token"})
    assert exporter.export(span_list("a", "b")) is FAILURE
    exporter.shutdown()
    stats = exporter.stats
    assert (stats.failed_spans, stats.requests) == (2, 1)
    assert "no such tenant: ***" in stats.last_error
    assert "2 spans were not delivered" in caplog.text
    assert "secret" not in caplog.text + repr(exporter) + str(stats)


def test_the_next_message_goes(receiver, protocol):
    """A message that is refused does not stop those after it; the answer is FAILURE all the same."""
    receiver.turns = [receiver.turn("bad")]
    exporter = made_exporter(receiver.url, protocol=protocol, max_request_bytes=1)
    assert exporter.export(span_list("a", "b", "c")) is FAILURE
    exporter.shutdown()
    assert receiver.names == ["a", "b", "c"]
    assert (exporter.stats.accepted_spans, exporter.stats.failed_spans) == (2, 1)


@pytest.mark.parametrize("kind", [span_list, lambda *names: list(span_list(*names))])
def test_too_large(receiver, exporter, kind):
    """A message that the receiver finds too large goes in halves, and these in halves; one span alone has failed."""
    receiver.turns = [receiver.turn("too large")] * 3 + [None] * 2
    large = "a" * 500
    assert exporter.export(kind(large, *"bcd")) is FAILURE
    assert [arrived.names for arrived in receiver.arrived] == [
        [large, *"bcd"],
        [large, "b"],
        [large],
        ["b"],
        list("cd"),
    ]
    assert (exporter.stats.accepted_spans, exporter.stats.failed_spans, exporter.stats.requests) == (3, 1, 5)


def test_partial_success(receiver, exporter, caplog):
    """Rejected spans are counted apart and logged; the message was taken, so it is not sent again."""
    receiver.turns = [receiver.turn("partial")]
    assert exporter.export(span_list("a", "b")) is SUCCESS
    stats = exporter.stats
    assert (stats.accepted_spans, stats.rejected_spans, stats.last_error) == (1, 1, "too old")
    assert "1 of 2 spans were rejected: too old" in caplog.text


def test_an_answer_that_cannot_be_read(receiver, exporter, caplog):
    """It counts as accepted, with a note and advice."""
    receiver.turns = [receiver.turn("garbage")]
    assert exporter.export(span_list("a")) is SUCCESS
    assert exporter.stats.accepted_spans == 1
    assert "the receiver's response cannot be read; perhaps what answers there is no receiver of OTLP" in caplog.text


def test_no_answer(receiver, exporter):
    """A receiver that never answers costs the timeout once; the next message goes."""
    receiver.turns = [receiver.turn("silence")]
    patient = exporter._sender.settings
    exporter._sender.settings = replace(patient, timeout=0.05)
    assert exporter.export(span_list("a")) is FAILURE
    exporter._sender.settings = patient
    assert exporter.export(span_list("b")) is SUCCESS
    assert (exporter.stats.accepted_spans, exporter.stats.failed_spans, exporter.stats.requests) == (1, 1, 2)


def test_a_bound_for_the_whole_call(receiver, exporter):
    """With a timeout for all messages together, those that it does not reach have failed without being sent."""
    receiver.turns = [receiver.turn("silence")]
    exporter._sender.settings = replace(exporter._sender.settings, max_request_bytes=1)
    assert exporter.export(span_list("a", "b", "c"), timeout_millis=50) is FAILURE
    assert (exporter.stats.failed_spans, exporter.stats.requests) == (3, 1)


def test_dies_and_returns(protocol, receiver, exporter):
    """A receiver that dies loses what was sent meanwhile, and gets everything again once it is back."""
    assert exporter.export(span_list("before")) is SUCCESS
    receiver.stop()
    port_is_free_again = threading.Event()

    def wait(seconds):
        port_is_free_again.set()
        return False

    exporter._sender._stopping.wait = wait
    back = threading.Thread(target=lambda: port_is_free_again.wait(LONG) and receiver.start())
    back.start()
    assert exporter.export(span_list("meanwhile")) is SUCCESS
    back.join()
    assert receiver.names == ["before", "meanwhile"]
    assert exporter.stats.retries >= 1


def test_shutdown(receiver, exporter, caplog):
    """After it nothing is sent, which is said once; a second shutdown does nothing."""
    assert exporter.force_flush()
    exporter.shutdown()
    exporter.shutdown()
    assert exporter.export(span_list("a")) is FAILURE
    assert exporter.export([*span_list("a", "b")]) is FAILURE
    assert exporter.stats == ExportStats(failed_spans=3, last_error="the exporter is shut down")
    assert len(caplog.messages) == 1
    assert receiver.arrived == []


def test_a_shutdown_while_a_message_is_sent(exporter, monkeypatch):
    """Whatever a connection raises that is closed under its request: the reason is the shutdown."""

    def closed(*_: object) -> None:
        exporter.shutdown()
        raise AttributeError("'NoneType' object has no attribute 'get'")

    monkeypatch.setattr(exporter._sender._transport, "send", closed)
    assert exporter.export(span_list("a")) is FAILURE
    assert exporter.stats.last_error == "the exporter is shut down"


def test_shutdown_wakes(receiver, protocol):
    """A shutdown ends a wait between two attempts at once."""
    receiver.turns = [receiver.turn("busy")]
    exporter = made_exporter(receiver.url, protocol=protocol)
    exporter._sender.backoff = Backoff(first=LONG / 2, longest=LONG / 2)
    exporter._sender._retrying = lambda answer, seconds: waiting.set()
    waiting, results = threading.Event(), []
    thread = threading.Thread(target=lambda: results.append(exporter.export(span_list("a"))))
    thread.start()
    assert waiting.wait(LONG)
    exporter.shutdown()
    thread.join(LONG / 4)
    assert results == [FAILURE]
    assert "shut down while waiting to try again" in exporter.stats.last_error


def test_several_threads(receiver, exporter):
    """Exports from several threads at a time all arrive, and the counters add up."""
    in_threads(*(functools.partial(exporter.export, span_list(f"{n}", "x")) for n in range(8)))
    assert sorted(receiver.names) == sorted([*map(str, range(8)), *["x"] * 8])
    assert (exporter.stats.accepted_spans, exporter.stats.requests) == (16, 8)


def test_its_own_traffic_is_not_traced(exporter):
    """While a transport sends, instrumentation is suppressed on that thread, and not after."""
    seen = []

    class Transport:
        def prepare(self, message):
            return message

        def send(self, message, timeout):
            seen.append(context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY))
            raise RuntimeError("a bug")

        def close(self):
            pass

    exporter._sender._transport = Transport()
    assert exporter.export(span_list("a")) is FAILURE
    assert seen == [True]
    assert context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY) is None
    assert exporter.stats.last_error == "RuntimeError"


def test_spans_that_cannot_be_encoded(receiver, exporter):
    """They have failed, and export does not raise."""
    assert exporter.export([object(), object()]) is FAILURE
    assert exporter.stats.failed_spans == 2
    assert exporter.stats.last_error.startswith("cannot be encoded: AttributeError")


def test_the_log_is_not_filled(caplog):
    """A receiver that is not there is logged once a minute, with the number of times that were not."""
    now = [0.0]
    exporter = made_exporter(f"http://127.0.0.1:{free_port()}", timeout=0.0005)
    exporter._sender._log._clock = lambda: now[0]
    for _ in range(5):
        exporter.export(span_list("a"))
    assert len(caplog.messages) == 1
    now[0] = 61.0
    exporter.export(span_list("a"))
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("(4 more like it since the last one)")
    exporter.shutdown()


def test_what_it_is(exporter, receiver, protocol):
    """Its repr names protocol and place; batching processors may hand it a whole SpanList."""
    assert protocol in repr(exporter)
    assert str(receiver.port) in repr(exporter)
    assert OTLPExporter.takes_span_lists is True


def test_from_the_environment(receiver, protocol, monkeypatch):
    """Without arguments everything comes from the standard variables."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url.removesuffix("/v1/traces"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "tenant=a%20b")
    exporter = OTLPExporter()
    assert exporter.export(span_list("a")) is SUCCESS
    exporter.shutdown()
    assert receiver.names == ["a"]
    assert receiver.arrived[0].headers["tenant"] == "a b"


FORKING = """
import logging, os, sys, threading
from span_tables import span_list
from otel_torchprof import OTLPExporter

exporter = OTLPExporter(sys.argv[1], protocol=sys.argv[2], timeout=30)
exporter.export(span_list("before"))
during = threading.Thread(target=exporter.export, args=(span_list("during"),))
during.start()
sys.stdin.readline()  # it has arrived, and is answered once the child's has
# As if other threads were inside at the moment of the fork: what they hold is never released in the child.
for lock in (exporter._sender._counts._lock, exporter._sender._log._lock, getattr(exporter._sender._transport, "_lock", threading.Lock())):
    lock.acquire()
child = os.fork()
if not child:
    ok = exporter.export(span_list("child")).name == "SUCCESS" and exporter.stats.requests == 1
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
for lock in (exporter._sender._counts._lock, exporter._sender._log._lock, getattr(exporter._sender._transport, "_lock", None)):
    lock and lock.release()
during.join()
exporter.export(span_list("after"))
assert exporter.stats.accepted_spans == 3, exporter.stats
exporter.shutdown()
"""


def test_fork(receiver, protocol):
    """A child that is forked in the middle of an export sends over a connection of its own; the parent's export goes on."""
    receiver.turns = [None, Held(3)]
    arguments = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, receiver.url, protocol]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(arguments, env={"PYTHONPATH": ":".join(sys.path)}, text=True, **pipes) as program:
        receiver.wait_for(2)
        try:
            _, said = program.communicate("go\n", timeout=LONG)
        finally:
            program.kill()
    said = [line for line in said.splitlines() if "fork_posix.cc" not in line]  # gRPC tells of threads in it
    assert (program.returncode, said) == (0, [])
    assert receiver.names == ["before", "during", "child", "after"]
    before, during, child, after = (arrived.peer for arrived in receiver.arrived)
    assert before == during == after != child


def test_nothing_is_imported_before_it_is_needed():
    """The package imports no transport; an exporter imports the one it uses."""
    program = (
        "import sys; from otel_torchprof import OTLPExporter; names = {'grpc', 'requests'};"
        "print(*names & set(sys.modules)); OTLPExporter(protocol='http/protobuf'); print(*names & set(sys.modules));"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "requests"]


# ---- resources that take most of a message, which has them again: the fewer messages, the better ----


def with_resource(size, spans, span_bytes=4):
    """So many spans of a resource of so many bytes."""
    names = [f"{number:0{span_bytes}}" for number in range(spans)]
    return SpanList(
        span_rows(names), resource=Resource({"large": "x" * size}), scope=InstrumentationScope("otel_torchprof", "1.2")
    )


@pytest.mark.parametrize("kind", [list, lambda spans: spans], ids=["objects", "SpanList"])
def test_a_large_resource(receiver, exporter, kind):
    """A resource above a MiB is sent once with all spans that fit into the 4 MiB that receivers take, not with each span."""
    assert exporter.export(kind(with_resource(1_500_000, 8))) is SUCCESS
    assert exporter.export(kind(with_resource(1_500_000, 40, span_bytes=100_000))) is SUCCESS
    sizes = [len(arrived.body) for arrived in receiver.arrived]
    assert exporter.stats.accepted_spans == 48
    assert len(sizes) == 3
    assert max(sizes) <= 4 << 20


@pytest.mark.parametrize("kind", [list, lambda spans: spans], ids=["objects", "SpanList"])
def test_a_resource_that_is_too_large(receiver, exporter, kind, caplog):
    """One above 4 MiB is not sent at all: its spans have failed, once, with the reason and the way out."""
    assert exporter.export(kind(with_resource(5_000_000, 8))) is FAILURE
    assert exporter.stats == ExportStats(failed_spans=8, last_error=exporter.stats.last_error)
    assert "resource and scope take 50000" in exporter.stats.last_error
    assert "give the resource fewer or shorter attributes" in exporter.stats.last_error
    assert [message.count("8 spans were not delivered: cannot be encoded") for message in caplog.messages] == [1]


@pytest.mark.parametrize("kind", [list, lambda spans: spans], ids=["objects", "SpanList"])
def test_a_resource_that_is_too_large_for_the_receiver(receiver, exporter, kind):
    """Where a single span with its resource is, the others of a batch that are no smaller are not tried one by one."""
    receiver.turns = [receiver.turn("too large")] * 1000
    assert exporter.export(kind(with_resource(100_000, 256))) is FAILURE
    assert (exporter.stats.failed_spans, exporter.stats.requests) == (256, 9)
    receiver.turns = []
    assert exporter.export(kind(with_resource(100_000, 256))) is SUCCESS
