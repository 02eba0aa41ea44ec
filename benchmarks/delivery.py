"""Recorded to acknowledged: from the first of many events to ``force_flush()``, beside the SDK's own way.

The receiver is a process of its own, and what it acknowledged is counted after every round: whoever loses a span has no time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import peers
from harness import OURS, Budget, Row, Settings, in_turn, rows
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from receiver import Receiver

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_PER_REQUEST = 1_000
"""Events under one parent, and a few by which they are prepared."""
_FEW, _MANY = 200, 1_000
_SDK_REQUESTS = 20
"""The SDK's rate is the same for more of them, and they take a second."""
_SDK_BATCH, _LARGE_BATCH = 512, 8_192
_QUEUE = 1 << 22
_ROUNDS, _OTHER_ROUNDS = 5, 3
_FLUSH_MILLIS = 120_000
_SDK = "SDK"
_TIMES = 1 / 50


class _Way(NamedTuple):
    """How both go to the receiver."""

    what: str
    of_sdk: Callable[[Receiver], SpanExporter]
    ours: Callable[[Receiver], SpanExporter]


_GRPC = _Way(
    "recorded to acknowledged, per span",
    lambda receiver: GrpcExporter(receiver.grpc, insecure=True),
    lambda receiver: otp.OTLPExporter(endpoint=receiver.grpc),
)
_OTHERS = (
    _Way(
        "the same, gRPC with gzip",
        lambda receiver: GrpcExporter(receiver.grpc, insecure=True, compression=grpc.Compression.Gzip),
        lambda receiver: otp.OTLPExporter(endpoint=receiver.grpc, compression="gzip"),
    ),
    _Way(
        "the same, HTTP",
        lambda receiver: HttpExporter(receiver.http),
        lambda receiver: otp.OTLPExporter(endpoint=receiver.http, protocol="http/protobuf"),
    ),
    _Way(
        "the same, HTTP with gzip",
        lambda receiver: HttpExporter(receiver.http, compression=Compression.Gzip),
        lambda receiver: otp.OTLPExporter(endpoint=receiver.http, protocol="http/protobuf", compression="gzip"),
    ),
)


def measure(settings: Settings) -> list[Row]:
    """By gRPC in several sizes, then the other ways that OTLP knows."""
    rounds = settings.rounds_or(_ROUNDS)
    with Receiver() as receiver:
        like = _spans_of_a_request(_operators)
        sdk = functools.partial(_sdk_delivers, receiver, like)
        ours = functools.partial(_we_deliver, receiver)
        few = f"{OURS}: 200,000 operators"
        contestants: dict[str, Callable[[], float]] = {
            _SDK: lambda: sdk(_GRPC, _SDK_BATCH),
            f"{_SDK}, batches of {_LARGE_BATCH:,}": lambda: sdk(_GRPC, _LARGE_BATCH),
            few: lambda: ours(_GRPC, _operators, _FEW),
            f"{OURS}: 1,000,000 operators": lambda: ours(_GRPC, _operators, _MANY),
            f"{OURS}: 200,000 labels": lambda: ours(_GRPC, _labels, _FEW),
        }
        table = _rows(_GRPC, contestants, rounds, Budget(_SDK, _TIMES))
        for way in _OTHERS:
            contestants = {
                _SDK: functools.partial(sdk, way, _SDK_BATCH),
                few: functools.partial(ours, way, _operators, _FEW),
            }
            table += _rows(way, contestants, settings.rounds_or(_OTHER_ROUNDS))
    return table


def _rows(
    way: _Way, contestants: dict[str, Callable[[], float]], rounds: int, budget: Budget | None = None
) -> list[Row]:
    costs = in_turn(contestants, rounds)
    return rows(way.what, "ns", costs, {who: budget for who in costs if budget and who.startswith(OURS)})


def _we_deliver(receiver: Receiver, way: _Way, record: Callable[[], None], requests: int) -> float:
    count = requests * len(_spans_of_a_request(record))
    with _instrumented(way.ours(receiver)) as processor:
        begin = time.perf_counter_ns()
        for _ in range(requests):
            with _request():
                record()
        flushed = processor.force_flush(_FLUSH_MILLIS)
        took = time.perf_counter_ns() - begin
    return _per_span(receiver, took, count, flushed, OURS)


def _sdk_delivers(receiver: Receiver, like: Sequence[ReadableSpan], way: _Way, batch: int) -> float:
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    processor = BatchSpanProcessor(way.of_sdk(receiver), max_queue_size=_QUEUE, max_export_batch_size=batch)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("benchmark")
    begin = time.perf_counter_ns()
    for _ in range(_SDK_REQUESTS):
        with _request():
            for span in like:
                tracer.start_span(span.name, attributes=span.attributes).end()
    flushed = processor.force_flush(_FLUSH_MILLIS)
    took = time.perf_counter_ns() - begin
    provider.shutdown()
    return _per_span(receiver, took, _SDK_REQUESTS * len(like), flushed, _SDK)


def _per_span(receiver: Receiver, took: int, count: int, flushed: bool, who: str) -> float:
    received = receiver.take()
    if not flushed or received.spans != count or received.different != count:
        raise RuntimeError(f"{who}: {count} spans were recorded, force_flush said {flushed}, {received}")
    return took / count


@contextlib.contextmanager
def _instrumented(exporter: SpanExporter) -> Iterator[otp.TorchSpanProcessor]:
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    processor = otp.TorchSpanProcessor(exporter, max_queue_size=_QUEUE)
    provider.add_span_processor(processor)
    # Every span is to be delivered: what a trace would lose by its budget would be no work.
    policy = otp.SpanPolicy(max_spans=10**9, max_bytes=10**12)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", policy=policy)
    try:
        yield processor
    finally:
        otp.TorchInstrumentor().uninstrument()
        provider.shutdown()


def _request() -> contextlib.AbstractContextManager[Any]:
    """A request whose span some other service has: costs nobody anything but being the current one."""
    ids = trace.SpanContext(_new_id(), _new_id(), is_remote=True, trace_flags=trace.TraceFlags(1))
    return trace.use_span(trace.NonRecordingSpan(ids))


_new_id = itertools.count(1).__next__


def _operators() -> None:
    peers.load().peers_operators(_PER_REQUEST)


def _labels() -> None:
    label = otp.record_function
    for _ in itertools.repeat(None, _PER_REQUEST):
        with label("label"):
            pass


@functools.cache
def _spans_of_a_request(record: Callable[[], None]) -> Sequence[ReadableSpan]:
    """What one request makes us send: the SDK gets to send as many, of the same names and attributes."""
    kept = InMemorySpanExporter()
    with _instrumented(kept) as processor, _request():
        record()
        processor.force_flush()
    return kept.get_finished_spans()
