"""The instrumentation and streams with random options, and every exporter."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc  # noqa: F401 - before interrupts: half imported and imported again it aborts the process
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from profiles import frame_filter, refused_where_full

import otel_torchprof as otp
from otel_torchprof._export import http  # noqa: F401 - before interrupts: who waits for an import that fails gets half a module

if TYPE_CHECKING:
    from world import Worker, World

_SHUTDOWN_SECONDS = 30.0
"""What a shutdown of a processor promises."""


def exporter(worker: Worker) -> Any:
    """Any exporter: to memory, files, or a receiver that accepts, refuses, hangs or hangs up."""
    world, number = worker.world, worker.random.randrange(3)
    made = [
        InMemorySpanExporter,
        lambda: otp.ChromeTraceExporter(world.folder / f"chrome{number}.json"),
        lambda: otp.OTLPFileExporter(world.folder / f"spans{number}.otlp"),
        lambda: otp.OTLPExporter(world.http_url, protocol="http/protobuf", timeout=1),
        lambda: otp.OTLPExporter(world.grpc_url, timeout=1),
    ]
    return worker.random.choice(made if world.grpc_url else made[:-1])()


def policy(worker: Worker) -> otp.SpanPolicy | None:
    """Any policy."""
    choose = worker.random.choice
    if worker.chance(0.5):
        return None
    return otp.SpanPolicy(every=choose([1, 2]), keep=choose(["all", "slow"]), max_spans=choose([10, 5000]))


def instrumented(worker: Worker) -> None:
    """Instruments with another provider, or again, or not any more."""
    instrumentor = otp.TorchInstrumentor()
    if worker.chance(0.4):
        instrumentor.uninstrument()
    else:
        processor = otp.TorchSpanProcessor(exporter(worker), schedule_delay_millis=50)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(processor)
        with refused_where_full():
            instrumentor.instrument(
                tracer_provider=provider,
                detail=worker.random.choice(["off", "metrics", "steps", "modules", "ops", "frames"]),
                record_shapes=worker.chance(0.3),
                sampling=worker.random.choice([False, True, 1000]),
                frames=frame_filter(worker) if worker.chance(0.3) else None,
                policy=policy(worker),
                skip_dep_check=True,
            )
        worker.world.providers.append(provider)
        if len(worker.world.providers) > 4:
            shut_down(worker.world, worker.world.providers.popleft())
        with provider.get_tracer("stress").start_as_current_span("request"):
            worker.some(2)
    instrumentor.step()


def shut_down(world: World, provider: TracerProvider) -> None:
    """Within its deadline, whatever else runs; an interrupt may cut it off."""
    begin = time.monotonic()
    provider.shutdown()
    if (took := time.monotonic() - begin) > _SHUTDOWN_SECONDS + 1:
        world.fail(f"a shutdown took {took:.1f} s, {_SHUTDOWN_SECONDS:g} are promised")


def flushed(worker: Worker) -> None:
    """Sends what there is, or ends a provider, also one that another thread uses."""
    with contextlib.suppress(IndexError):
        provider = worker.world.providers.popleft()
        if worker.chance(0.5):
            shut_down(worker.world, provider)
        else:
            provider.force_flush(1000)
            worker.world.providers.append(provider)


def streamed(worker: Worker) -> None:
    """A stream with steps."""
    running = otp.stream(
        exporter(worker),
        detail=worker.random.choice(["steps", "modules", "ops", "frames"]),
        record_shapes=worker.chance(0.3),
        policy=policy(worker),
    )
    worker.world.streams.append(running)  # to be stopped at the end where an interrupt keeps it from being stopped here
    try:
        with refused_where_full():
            running.start()
        for _ in range(worker.random.randint(0, 3)):
            worker.act()
            running.step()
        if worker.chance(0.3):
            running.flush(1.0)
        running.key_averages()
    finally:
        running.stop(worker.random.choice([0.0, 1.0, 5.0]))
    with contextlib.suppress(ValueError):
        worker.world.streams.remove(running)


ACTIONS = {"instrumented": instrumented, "flushed": flushed, "streamed": streamed}
