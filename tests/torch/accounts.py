"""Loads of which each event is known, receivers that answer as told, and the sums that have to come out, for test_ledger.py."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc
import torch
from fault_server import SILENCE, Abort, Arrived, GrpcReceiver, HttpReceiver, Reply, partial_success, silence, status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

import otel_torchprof as otp
from otel_torchprof._export import queue as queue_module
from otel_torchprof._export.response import Backoff
from otel_torchprof._native.recorder import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

GRPC, HTTP = "grpc", "http/protobuf"

HTTP_TURNS = {
    "busy": status(503),
    "refused": status(400, body=b"no"),
    "too large": status(413),
    "late": silence,
    "garbage": status(200, body=b"\xff\xff\xff"),
}
GRPC_TURNS = {
    "busy": Abort(grpc.StatusCode.UNAVAILABLE, "busy"),
    "refused": Abort(grpc.StatusCode.INVALID_ARGUMENT, "no"),
    "too large": Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max"),
    "late": SILENCE,
    "garbage": Reply(b"\xff\xff\xff"),
}


class Known:
    """Mixed into a receiver: knows every span by its id, and what it has answered for it."""

    behaves: Callable[[int, int], Any]
    """What to answer to the n-th request with so many spans: a name of a turn, a number of spans to reject, None to accept."""

    def prepare(self, protocol: str, behaves: Callable[[int, int], Any]) -> None:
        self.behaves, self._protocol = behaves, protocol
        self.accepted: Counter[bytes] = Counter()
        self.refused: set[bytes] = set()
        self.unanswered: set[bytes] = set()
        self.rejected: set[bytes] = set()
        self.requests = 0

    def note(self, arrived: Arrived) -> Any:
        request = ExportTraceServiceRequest.FromString(arrived.body)
        ids = [s.span_id for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        with self.came:
            self.requests += 1
            answer = self.behaves(self.requests, len(ids))
            if answer in {"refused", "too large"}:
                self.refused.update(ids)
            elif answer == "late" or (answer == "busy" and self._protocol == GRPC):  # gRPC cannot tell these apart
                self.unanswered.update(ids)
            elif answer != "busy":
                rejected = answer if isinstance(answer, int) else 0
                self.rejected.update(ids[:rejected])
                self.accepted.update(ids[rejected:])
            self.came.notify_all()
        if isinstance(answer, int):
            body = partial_success(answer, "as told")
            return Reply(body) if self._protocol == GRPC else status(200, body=body)
        return None if answer is None else (GRPC_TURNS if self._protocol == GRPC else HTTP_TURNS)[answer]


class KnownHttp(Known, HttpReceiver):
    """By HTTP."""


class KnownGrpc(Known, GrpcReceiver):
    """By gRPC."""


def accepts(_number: int, _spans: int) -> None:
    """A receiver that works."""


@dataclass
class Load:
    """What a program does, and its receiver."""

    work: Callable[[Service], int]
    """Gives how many events it was; -1 where only the recorder knows."""
    behaves: Callable[[int, int], Any] = accepts
    threads: int = 1
    is_up: bool = True
    returns: bool = False
    """A receiver that is not up comes up in the middle."""
    detail: str = "ops"
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``instrument()``."""
    processor: dict[str, Any] = field(default_factory=dict)
    provider: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    """Seconds, of the exporter."""
    deadline: float = 30.0
    """Seconds, of the shutdown."""
    loses: tuple[str, ...] = ()
    """Reasons for which something has to be lost, or the load is none."""
    stops: int = 0
    """How often torch is uninstrumented and instrumented again while the work goes on."""


class Service:
    """A program with torch instrumented, an exporter that is watched, and one that takes everything."""

    def __init__(self, load: Load, receiver: Any, protocol: str) -> None:
        self.load = load
        self.receiver = receiver
        exporter = otp.OTLPExporter(receiver.url, protocol=protocol, timeout=load.timeout, max_request_bytes=60_000)
        self.processor = otp.TorchSpanProcessor(exporter, **load.processor)
        self.provider = TracerProvider(shutdown_on_exit=False, **load.provider)
        self.provider.add_span_processor(self.processor)
        self.tracer = self.provider.get_tracer("application")
        self.events = 0

    def instrument(self) -> None:
        """Records from now on."""
        otp.TorchInstrumentor().instrument(
            tracer_provider=self.provider, detail=self.load.detail, skip_dep_check=True, **self.load.options
        )

    def run(self) -> None:
        """All of the work, with looks at the balance in the middle, to the end of the shutdown."""
        self.instrument()
        done: list[int] = []
        threads = [threading.Thread(target=lambda: done.append(self.load.work(self))) for _ in range(self.load.threads)]
        for thread in threads:
            thread.start()
        for _ in range(self.load.stops):
            otp.TorchInstrumentor().uninstrument()
            self.balance()
            self.instrument()
        while any(thread.is_alive() for thread in threads):
            self.balance()
            threads[0].join(0.01)
        if self.load.returns:
            self.receiver.start()
        self.processor.force_flush(300 if self.load.is_up else 1)
        self.balance()
        begin = time.monotonic()
        self.processor.shutdown_within(self.load.deadline)
        self.shutdown_seconds = time.monotonic() - begin
        otp.TorchInstrumentor().uninstrument()
        self.events = sum(done)
        # What runs in a span that is not sampled is not recorded at all; nor is what runs while torch is not instrumented.
        self.is_counted = (
            min(done) >= 0 and not self.load.stops and not self.load.provider and self.load.detail == "ops"
        )

    def balance(self) -> Any:
        """What health says adds up at any moment: no event is in two places, and none is nowhere."""
        health = self.processor.health
        spans, stats = Counter(health.spans), next(iter(health.exporters.values()))
        came = health.recorded + spans["added"] + spans["parts"]
        ended = sum(
            spans[what]
            for what in ("not_sampled", "filtered", "failed", "aggregated", "collapsed", "detail_dropped", "buffered")
        )
        put = stats.exported_spans + stats.failed_spans + stats.dropped_spans + stats.waiting_spans
        assert came == ended + put, str(health)
        return health


# ---- work ----


def negs(service: Service, count: int = 4_000) -> int:
    """Bare operators."""
    x = torch.ones(2)
    with torch.no_grad():
        for _ in range(count):
            x.neg()
    return count + ONES


def hot_label(_service: Service) -> int:
    """One label, as fast as it goes."""
    for _ in range(20_000):
        with otp.record_function("hot"):
            pass
    return 20_000


def ids_in_labels(_service: Service) -> int:
    """A name for each."""
    for number in range(5_000):
        with otp.record_function(f"{threading.get_ident()} {number}"):
            pass
    return 5_000


def requests(service: Service) -> int:
    """Requests in spans of the application."""
    x = torch.ones(2)
    with torch.no_grad():
        for _ in range(300):
            with service.tracer.start_as_current_span("request"), otp.record_function("handler"):
                for _ in range(10):
                    x.neg()
    return 300 * 11 + ONES


def requests_in_an_outage(service: Service) -> int:
    """Requests until some are lost to the outage, however late the first drain and the first attempt to send are."""
    events = 0
    for _ in range(200):
        events += requests(service)
        if next(iter(service.processor.health.exporters.values())).dropped.get("outage"):
            break
    return events


def steps(_service: Service) -> int:
    """A training loop."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return -1


ONES = 0
"""Events of ``torch.ones(2)``, as ``torch.autograd.profiler`` counts them."""
with torch.autograd.profiler.profile(use_kineto=False) as _legacy:
    torch.ones(2)
ONES = sum(event.name.startswith("aten::") for event in _legacy.function_events)


# ---- receivers ----


def at_random(seed: int, *answers: Any) -> Callable[[int, int], Any]:
    """One of these answers, or a good one."""
    generator = random.Random(seed)

    def behaves(_number: int, _spans: int) -> Any:
        return generator.choice((*answers, None))

    return behaves


def first(count: int, answer: Any) -> Callable[[int, int], Any]:
    """The same answer to the first requests, then good ones."""
    return lambda number, _spans: answer if number <= count else None


def always(answer: Any) -> Callable[[int, int], Any]:
    """The same answer to all."""
    return lambda _number, _spans: answer


_SOON = Backoff(first=0.02, longest=0.1)
"""Between attempts: what is counted is what became of them, and the sooner the next one is, the more there are."""
_SMALL_QUEUE = {"max_queue_bytes": 400_000, "schedule_delay_millis": 20}
LOADS = {
    "bare operators": Load(negs),
    "bare operators of eight threads": Load(negs, threads=8),
    "a hot label": Load(hot_label, threads=2),
    "more than the recorder may hold": Load(
        hot_label, threads=4, processor={"memory_limit": 5 * CHUNK_BYTES}, loses=("evicted",)
    ),
    "ids in labels": Load(ids_in_labels, threads=2),
    "requests": Load(requests, threads=4),
    "requests, half of them sampled": Load(requests, threads=4, provider={"sampler": TraceIdRatioBased(0.5)}),
    "steps": Load(steps),
    "steps, every second": Load(steps, options={"policy": otp.SpanPolicy(every=2)}),
    "steps, slow ones kept": Load(steps, options={"policy": otp.SpanPolicy(keep="slow")}),
    "steps that are too large": Load(steps, options={"policy": otp.SpanPolicy(max_spans=20)}),
    "steps alone": Load(steps, detail="steps"),
    "calls, long ones": Load(
        requests, detail="frames", options={"frames": otp.FrameFilter(min_duration=1e-4)}, threads=2
    ),
    "drained all the time": Load(requests, threads=4, processor={"schedule_delay_millis": 1}),
    "stopped in the middle": Load(requests, threads=4, stops=5),
    "down": Load(
        requests_in_an_outage, threads=4, is_up=False, processor=_SMALL_QUEUE, deadline=0.3, loses=("outage",)
    ),
    "down, and back": Load(negs, threads=3, is_up=False, returns=True),
    "busy at first": Load(requests, behaves=first(2, "busy")),
    "always busy": Load(requests, behaves=always("busy"), processor=_SMALL_QUEUE, deadline=0.3),
    "rejects three of each": Load(requests, behaves=always(3)),
    "rejects more than there are": Load(requests, behaves=always(10**6)),
    "refuses some": Load(requests, behaves=at_random(1, "refused")),
    "finds all too large": Load(requests, behaves=always("too large")),
    "finds some too large": Load(requests, behaves=at_random(2, "too large")),
    "answers too late": Load(
        requests, behaves=always("late"), timeout=0.1, deadline=0.3, loses=("no_response", "shutdown")
    ),
    "answers too late at first": Load(requests, behaves=first(2, "late"), timeout=0.1),
    "answers nonsense": Load(requests, behaves=always("garbage")),
    "anything": Load(
        requests,
        threads=4,
        behaves=at_random(3, "busy", "refused", "late", "too large", 2, "garbage"),
        timeout=0.1,
        deadline=0.5,
    ),
    "no time to stop": Load(requests, threads=4, deadline=0),
}


def done(load: Load, protocol: str) -> tuple[Service, Any]:
    """What became of a load: the service, shut down, and its receiver."""
    receiver = KnownGrpc() if protocol == GRPC else KnownHttp()
    receiver.prepare(protocol, load.behaves)
    receiver.start()
    if not load.is_up:
        receiver.stop()
    service = Service(load, receiver, protocol)
    gc.disable()  # a collection is an event too
    try:
        with patch.multiple(queue_module, _NORMAL_BACKOFF=_SOON, _URGENT_BACKOFF=_SOON):
            service.run()
    finally:
        gc.enable()
        if load.is_up or load.returns:
            receiver.stop()
    return service, receiver


def row(name: str, protocol: str) -> str:
    """A load as a row of a table."""
    service, receiver = done(LOADS[name], protocol)
    health = service.balance()
    stats, spans = next(iter(health.exporters.values())), Counter(health.spans)
    less = Counter(
        {what: spans[what] for what in ("not_sampled", "filtered", "aggregated", "collapsed", "detail_dropped")}
    )
    lost = Counter(health.dropped) + Counter(stats.dropped)
    cells = (
        f"{name}, {protocol.partition('/')[0]}",
        health.recorded + sum(health.dropped.values()),
        spans["added"] + spans["parts"],
        _reported(+less),
        stats.exported_spans,
        stats.failed_spans,
        _reported(lost),
        len(receiver.accepted),
    )
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"


def _reported(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "0"


if __name__ == "__main__":
    for _protocol in (GRPC, HTTP):
        for _name in LOADS:
            sys.stdout.write(row(_name, _protocol) + "\n")
