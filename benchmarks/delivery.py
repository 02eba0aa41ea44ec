"""Recorded to acknowledged: from the first of many events to ``force_flush()``, beside the SDK's own way.

The receiver is a process of its own that only counts requests and bytes. Whoever's own count says that a span was not delivered has no time;
once, before anything is timed, everything goes to a receiver that parses what comes, which has to find each span once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import grpc
import peers
from harness import OURS, Budget, Row, Settings, in_turn, rows
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from receiver import CountingReceiver, Receiver

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

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
_TIMES = 1 / 60


class _Urls(Protocol):
    """A receiver, as far as it is sent to."""

    grpc: str
    http: str


class _Way(NamedTuple):
    """How both go to the receiver."""

    what: str
    of_sdk: Callable[[_Urls], SpanExporter]
    ours: Callable[[_Urls], otp.OTLPExporter]


class _Cost(NamedTuple):
    """Nanoseconds per span."""

    elapsed: float
    sender: float
    """Processor time of this process but for the recording thread until it asks for the flush."""
    receiver: float = 0.0
    """Processor time of the receiver's process."""


_WHAT = {
    "elapsed": "{}",
    "sender": "{}: processor time of sending",
    "receiver": "{}: processor time of the receiver",
}
"""What the rows of each part of a cost are called."""


_Sender = Callable[[_Way, _Urls], tuple[int, _Cost]]
"""Sends to a receiver: how many spans, and what that cost."""

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
    few = f"{OURS}: 200,000 operators"
    senders: dict[str, _Sender] = {
        _SDK: functools.partial(_sdk_delivers, _SDK_BATCH),
        f"{_SDK}, batches of {_LARGE_BATCH:,}": functools.partial(_sdk_delivers, _LARGE_BATCH),
        few: functools.partial(_we_deliver, _operators, _FEW),
        f"{OURS}: 1,000,000 operators": functools.partial(_we_deliver, _operators, _MANY),
        f"{OURS}: 200,000 labels": functools.partial(_we_deliver, _labels, _FEW),
    }
    table = _rows(_GRPC, senders, settings.rounds_or(_ROUNDS), Budget(_SDK, _TIMES))
    for way in _OTHERS:
        table += _rows(way, {who: senders[who] for who in (_SDK, few)}, settings.rounds_or(_OTHER_ROUNDS))
    return table


def _rows(way: _Way, senders: dict[str, _Sender], rounds: int, budget: Budget | None = None) -> list[Row]:
    with Receiver() as receiver:
        for who, send in senders.items():
            count, _ = send(way, receiver)
            received = receiver.take()
            if received.spans != count or received.different != count:
                raise RuntimeError(f"{who}: {count} spans were recorded, {received}")
    with CountingReceiver() as counting:
        costs = in_turn(
            {who: functools.partial(_counted, counting, way, send) for who, send in senders.items()}, rounds
        )
    table: list[Row] = []
    for part, what in _WHAT.items():
        values = {who: [getattr(cost, part) for cost in found] for who, found in costs.items()}
        budgets = {who: budget for who in costs if part == "elapsed" and budget and who.startswith(OURS)}
        table += rows(what.format(way.what), "ns", values, budgets)
    return table


def _counted(receiver: CountingReceiver, way: _Way, send: _Sender) -> _Cost:
    receiver.take()
    count, cost = send(way, receiver)
    return cost._replace(receiver=receiver.take().processor_ns / count)


def _we_deliver(record: Callable[[], None], requests: int, way: _Way, receiver: _Urls) -> tuple[int, _Cost]:
    count = requests * len(_spans_of_a_request(record))
    exporter = way.ours(receiver)
    with _instrumented(exporter) as processor:
        cost = _timed(record, requests, processor.force_flush, count)
        delivered = exporter.stats.accepted_spans
    if delivered != count:
        raise RuntimeError(f"{OURS}: {count} spans were recorded, {exporter.stats}")
    return count, cost


def _sdk_delivers(batch: int, way: _Way, receiver: _Urls) -> tuple[int, _Cost]:
    like = _spans_of_a_request(_operators)
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    exporter = _CountingExporter(way.of_sdk(receiver))
    processor = BatchSpanProcessor(exporter, max_queue_size=_QUEUE, max_export_batch_size=batch)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("benchmark")

    def record() -> None:
        for span in like:
            tracer.start_span(span.name, attributes=span.attributes).end()

    count = _SDK_REQUESTS * len(like)
    cost = _timed(record, _SDK_REQUESTS, processor.force_flush, count)
    provider.shutdown()
    if exporter.delivered != count:
        raise RuntimeError(f"{_SDK}: {count} spans were recorded, {exporter.delivered} delivered")
    return count, cost


def _timed(record: Callable[[], None], requests: int, flush: Callable[[int], bool], count: int) -> _Cost:
    begin, whole, own = time.perf_counter_ns(), time.process_time_ns(), time.thread_time_ns()
    for _ in range(requests):
        with _request():
            record()
    own = time.thread_time_ns() - own
    flushed = flush(_FLUSH_MILLIS)
    whole, took = time.process_time_ns() - whole, time.perf_counter_ns() - begin
    if not flushed:
        raise RuntimeError(f"{count} spans were recorded, and force_flush said False")
    return _Cost(took / count, (whole - own) / count)


class _CountingExporter(SpanExporter):
    """The SDK's own, whose spans are counted when it says that they were delivered."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.delivered = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends them."""
        result = self._exporter.export(spans)
        self.delivered += len(spans) if result is SpanExportResult.SUCCESS else 0
        return result

    def shutdown(self) -> None:
        """Closes its connection."""
        self._exporter.shutdown()


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
