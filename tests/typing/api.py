"""Uses the whole public API once. mypy checks it strictly; a test runs it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan


@otp.record_function("function")
def double(x: int) -> int:
    """Keeps its type under the label."""
    return 2 * x


@otp.record_function("generator", args="some")
def count(to: int) -> Generator[int, str, bool]:
    """Keeps its type under the label."""
    yield from range(to)
    return True


@otp.record_function("coroutine")
async def later(x: int) -> int:
    """Keeps its type under the label."""
    await asyncio.sleep(0)
    return x


@otp.record_function("async generator")
async def stream(to: int) -> AsyncGenerator[int, None]:
    """Keeps its type under the label."""
    for number in range(to):
        yield await later(number)


async def total() -> int:
    """Runs the asynchronous ones."""
    found: int = await later(1)
    async for number in stream(3):
        found += number
    return found


def record() -> otp.profile:
    """Records a few labels, in steps."""
    with otp.profile(
        True, activities=None, record_shapes=True, all_threads=False, operators=False, memory_limit=1 << 20
    ) as prof:
        with otp.record_function("block") as label:
            assert label.name == "block"
            doubled: int = double(2)
        prof.step()
        numbers: list[int] = list(count(3))
        summed: int = asyncio.run(total())
    assert (doubled, numbers, summed, prof.step_num) == (4, [0, 1, 2], 4, 1)
    return prof


def read(prof: otp.profile) -> None:
    """Asks a profile everything."""
    events: otp.EventList = prof.events()
    assert len(prof.function_events) == len(events)
    event: otp.FunctionEvent = events[0]
    interval: otp.Interval = event.time_range
    elapsed: float = interval.elapsed_us() + event.cpu_time_total + event.self_cpu_time_total
    parent: otp.FunctionEvent | None = event.cpu_parent
    children: list[otp.FunctionEvent] = event.cpu_children
    kernels: list[otp.Kernel] = event.kernels
    assert elapsed >= 0
    assert parent is None
    assert len(children) == 1
    assert not kernels
    averages: otp.EventList = prof.key_averages(
        group_by_input_shape=True, group_by_stack_n=0, group_by_overload_name=False
    )
    average: otp.FunctionEventAvg = prof.total_average()
    text: str = averages.table(sort_by="self_cpu_time_total", row_limit=10) + prof.table(time_unit="us")
    assert average.key == "Total"
    assert "block" in text
    assert prof.self_cpu_time_total > 0
    columns: Mapping[str, Any] = prof.columns
    names: Sequence[str] = prof.names
    assert names[int(columns["name"][0])] == "block"
    assert prof.threads[int(columns["thread"][0])].name == "MainThread"
    health: otp.Health = prof.health
    dropped: Mapping[str, int] = health.dropped
    assert health.labels == "on"
    assert not dropped


def write(prof: otp.profile, folder: Path) -> None:
    """Sends a profile everywhere."""
    resource = Resource.create({"service.name": "typed"})
    prof.export_chrome_trace(folder / "trace.json", metadata={"run": 1})
    prof.export_otlp(str(folder / "trace.otlp.gz"), resource=resource)
    messages: Iterator[bytes] = prof.to_otlp(resource=resource, max_bytes=1 << 20)
    spans: Sequence[ReadableSpan] = prof.spans(resource=resource)
    sent: int = prof.export(InMemorySpanExporter(), batch_size=4)
    assert sent == len(spans) > 0
    assert all(messages)


def serve(folder: Path) -> None:
    """Instruments a provider, and takes it back."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = otp.OTLPExporter("http://localhost:4317", headers={"team": "typed"}, timeout=1.5, compression="gzip")
    stats: otp.ExportStats = exporter.stats
    chrome = otp.ChromeTraceExporter(folder / "trace-{pid}.json.gz")
    processor = otp.TorchSpanProcessor(chrome, InMemorySpanExporter(), sdk_spans=True, schedule_delay_millis=100)
    provider.add_span_processor(processor)
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=provider, detail="modules", record_shapes=True)
    with otp.record_function("typed"):
        instrumentor.step()
    flushed: bool = provider.force_flush()
    averages: otp.EventList = processor.key_averages()
    health: otp.ProcessorHealth = processor.health
    sources: Mapping[str, str] = health.sources
    instrumentor.uninstrument()
    provider.shutdown()
    exporter.shutdown()
    assert flushed
    assert len(averages) > 0
    assert sources["recording"] == "on"
    assert stats.accepted_spans == 0


def fail() -> None:
    """Meets the errors."""
    kinds: tuple[type[otp.TorchProfError], ...] = (otp.NativeError, otp.TorchLibraryError, otp.ExportError)
    assert all(issubclass(kind, RuntimeError) for kind in kinds)
    try:
        otp.profile(operators=False).stop()
    except otp.TorchProfError as error:
        assert "not started" in str(error)  # noqa: PT017 - a program, not a test


def main() -> str:
    """All of it; returns the package's version."""
    with tempfile.TemporaryDirectory() as folder:
        prof = record()
        read(prof)
        write(prof, Path(folder))
        serve(Path(folder))
    fail()
    version: str = otp.__version__
    return version


if __name__ == "__main__":
    main()
