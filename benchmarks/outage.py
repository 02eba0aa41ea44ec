"""An hour without a backend: three threads of operators outside of any span, nobody at the other end, memory as far as it may go.

Resident memory beyond that of the idle program is what the recorder holds, what waits in the queue, and the rest: drains, tables in
the making, what the allocator keeps. The first two have limits; the rest is to stay under 80 MB, however long it takes.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
from children import Child, answer
from harness import Budget, Row, Settings
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp

_WHAT = "a backend that is down, 3 threads of operators"
_SECONDS, _SECONDS_QUICK = 3_600, 30
_LOOK_SECONDS = 0.5
_MIB = 1 << 20
_REST = "memory beyond all that, at most"
_SHUTDOWN = "shutdown"


def measure(settings: Settings) -> list[Row]:
    """Memory at its most, and the accounts."""
    with Child(__file__) as child:
        found = child.ask(str(_SECONDS_QUICK if settings.quick else _SECONDS))
    if found["recorded"] + found["added"] != found["accounted for"]:
        raise RuntimeError(f"the accounts do not add up: {found}")
    units, budgets = {_REST: "MiB", _SHUTDOWN: "s"}, {_REST: Budget(plus=80e6 / _MIB), _SHUTDOWN: Budget(plus=31)}
    return [
        Row(_WHAT, what, [value], units.get(what, "MiB" if "memory" in what else ""), budgets.get(what))
        for what, value in found.items()
    ]


def _main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # nor what gRPC says
    logging.getLogger("otel_torchprof").setLevel(logging.CRITICAL)  # what it says about a dead backend is expected here
    torch.set_num_threads(1)
    with socket.socket() as nobody:  # bound, and listened to by nobody
        nobody.bind(("127.0.0.1", 0))
        exporter = otp.OTLPExporter(endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", protocol="grpc")
        processor = otp.TorchSpanProcessor(exporter)
        provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
        provider.add_span_processor(processor)
        otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops")
        torch.ones(4).neg()
        for line in sys.stdin:
            answer(_hour(provider, processor, float(line)))


def _hour(provider: TracerProvider, processor: otp.TorchSpanProcessor, seconds: float) -> dict[str, float]:
    begin, idle = time.monotonic(), _resident()
    stop = threading.Event()
    threads = [threading.Thread(target=_operators, args=(stop,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    most = rest = 0
    while time.monotonic() - begin < seconds:
        time.sleep(_LOOK_SECONDS)
        resident, held = _resident() - idle, processor.figures().buffer_bytes
        (stats,) = processor.health.exporters.values()
        most, rest = max(most, resident), max(rest, resident - held - stats.waiting_bytes)
    stop.set()
    for thread in threads:
        thread.join()
    begin = time.monotonic()
    provider.shutdown()
    took = time.monotonic() - begin
    health = processor.health
    (stats,) = health.exporters.values()
    lost = ("not_sampled", "filtered", "failed", "aggregated", "collapsed", "detail_dropped", "buffered")
    return {
        "memory of the idle program": idle / _MIB,
        "memory with recorder and queue beyond it, at most": most / _MIB,
        _REST: rest / _MIB,
        "memory after the shutdown": _resident() / _MIB,
        _SHUTDOWN: took,
        "recorded": health.recorded,
        "dropped in the recorder": sum(health.dropped.values()),
        "added": health.spans.get("added", 0) + health.spans.get("parts", 0),
        "accounted for": sum(health.spans.get(what, 0) for what in lost) + stats.dropped_spans + stats.failed_spans,
    }


def _operators(stop: threading.Event) -> None:
    tensor = torch.ones(4, 4)
    while not stop.is_set():
        for _ in range(1000):
            tensor.neg()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _main()
