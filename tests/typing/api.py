"""Uses the whole public API once. mypy checks it strictly; a test runs it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence

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


def label_by_name() -> tuple[str, ...]:
    """Labels a function without a change of its code."""
    labels: otp.FunctionLabels
    with otp.label_functions(["json:dumps dumping"]) as labels:
        found = labels.labelled + labels.waiting
    return found + labels.remove()


async def total() -> int:
    """Runs the asynchronous ones."""
    found: int = await later(1)
    async for number in stream(3):
        found += number
    return found


def record() -> otp.profile:
    """Records a few labels, in steps."""
    with otp.profile(
        True,
        activities=None,
        record_shapes=True,
        all_threads=False,
        operators=False,
        memory_limit=1 << 20,
        frames=otp.FrameFilter(include=["torch"], exclude=("*/test_*",), max_depth=9),
    ) as prof:
        with otp.record_function("block") as label:
            assert label.name == "block"
            doubled: int = double(2)
        prof.step()
        numbers: list[int] = list(count(3))
        summed: int = asyncio.run(total())
    assert (doubled, numbers, summed, prof.step_num) == (4, [0, 1, 2], 4, 1)
    assert label_by_name() == ("json:dumps",)
    return prof


def record_cycles(folder: Path) -> list[int]:
    """Records by a schedule, with torch's options; returns how many events each cycle had."""
    found: list[int] = []
    schedule: Callable[[int], otp.ProfilerAction] = otp.schedule(wait=0, warmup=1, active=1)
    activities: set[otp.ProfilerActivity] = otp.supported_activities()
    with otp.profile(
        activities=activities,
        activity_filters={otp.ProfilerActivity.CPU: {"USER_ANNOTATION"}},
        schedule=schedule,
        on_trace_ready=lambda ready: found.append(len(ready.events())),
        acc_events=True,
        with_flops=True,
        custom_trace_id_callback=lambda: "0A",
        operators=False,
    ) as prof:
        prof.add_metadata("text", "a")
        prof.add_metadata_json("list", "[1]")
        prof.preset_metadata_json("preset", "{}")
        while prof.current_action != otp.ProfilerAction.RECORD_AND_SAVE:
            prof.step()
        prof.toggle_collection_dynamic(False, activities)
    handler: Callable[[Any], None] = otp.tensorboard_trace_handler(folder, "worker", use_gzip=True)
    handler(prof)
    trace_id: str | None = prof.get_trace_id()
    stats: otp.ProfilerStats = prof.health.stats
    available: bool = otp.kineto_available()
    assert trace_id == "0A"
    assert stats.number_of_events == found[0]
    assert available in {True, False}
    return found


def read(prof: otp.profile) -> None:
    """Asks a profile everything."""
    events: otp.EventList[otp.FunctionEvent] = prof.events()
    assert len(prof.function_events) == len(events)
    event: otp.FunctionEvent = events[0]
    interval: otp.Interval = event.time_range
    kind: otp.DeviceType = otp.DeviceType.CPU
    step: int = otp.KinetoStepTracker.current_step() + int(kind)
    elapsed: float = step + interval.elapsed_us() + event.cpu_time_total + event.self_cpu_time_total
    parent: otp.FunctionEvent | None = event.cpu_parent
    children: list[otp.FunctionEvent] = event.cpu_children
    kernels: list[otp.Kernel] = event.kernels
    assert elapsed >= 0
    assert parent is None
    assert len(children) == 1
    assert not kernels
    called: tuple[otp.FunctionInfo | None, otp.ModuleInfo | None, otp.OptimizerInfo | None] = (
        event.function,
        event.module,
        event.optimizer,
    )
    modules: tuple[otp.ModuleInfo, ...] = prof.modules
    optimizers: tuple[otp.OptimizerInfo, ...] = prof.optimizers
    groups: list[otp.ParameterGroupInfo] = [group for optimizer in optimizers for group in optimizer.groups]
    parameters: list[otp.ParameterInfo] = [parameter for module in modules for parameter in module.parameters]
    parameters += [parameter for group in groups for parameter in group.parameters]
    tensors: list[otp.TensorInfo | None] = [parameter.tensor for parameter in parameters]
    assert called == (None, None, None)
    assert not tensors
    averages: otp.EventList[otp.FunctionEventAvg] = prof.key_averages(
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


def names_and_records() -> None:
    """Uses what stands beside the events."""
    event = otp.FunctionEvent(1, "a", 1, 0.0, 2.0, extra_meta={"stream": "7"})
    metadata: otp.EventMetadata | None = event.event_metadata
    times: otp.FormattedTimesMixin = event
    text: str = times.cpu_time_str + otp.demangle("_Z3foov") + otp.StringTable()["_Z3foov"]
    found: list[object] = list(otp.MemRecordsAcc([]).in_interval(0, 1))
    assert metadata is not None
    assert metadata.stream == 7
    assert text == "2.000usfoo()foo()"
    assert not found


def write(prof: otp.profile, folder: Path) -> None:
    """Sends a profile everywhere."""
    resource = Resource.create({"service.name": "typed"})
    prof.export_chrome_trace(folder / "trace.json", metadata={"run": 1})
    loaded: otp.LoadedProfile = otp.load(folder / "trace.json", memory_limit=1 << 30)
    rank: int | None = loaded.rank
    if rank is not None:
        ranks: otp.LoadedRanks = otp.load_ranks([folder / "trace.json"])
        assert list(ranks) == [rank]
    assert len(loaded.events()) == len(prof.events())
    assert [step.number for step in loaded.steps] == [step.number for step in prof.steps]
    prof.export_otlp(str(folder / "trace.otlp.gz"), resource=resource)
    messages: Iterator[bytes] = prof.to_otlp(resource=resource, max_bytes=1 << 20)
    spans: Sequence[ReadableSpan] = prof.spans(resource=resource, detail="frames")
    sent: int = prof.export(InMemorySpanExporter(), batch_size=4)
    assert sent == len(spans) > 0
    assert all(messages)


def serve(folder: Path) -> None:
    """Instruments a provider, and takes it back."""
    provider = TracerProvider(shutdown_on_exit=False)
    otp.OTLPFileExporter("trace-{pid}.json", max_bytes="100M", max_files=3).shutdown()
    exporter = otp.OTLPExporter("http://localhost:4317", headers={"team": "typed"}, timeout=1.5, compression="gzip")
    stats: otp.ExportStats = exporter.stats
    chrome = otp.ChromeTraceExporter(folder / "trace-{pid}.json.gz")
    processor = otp.TorchSpanProcessor(chrome, InMemorySpanExporter(), sdk_spans=True, schedule_delay_millis=100)
    provider.add_span_processor(processor)
    assert otp.step_context(0, 0) is None
    assert "torch.run.attempt" not in otp.rank_resource().attributes
    instrumentor = otp.TorchInstrumentor()
    mine = otp.FrameFilter(include=["my_service"], c_functions=False)
    policy = otp.SpanPolicy(
        schedule=otp.schedule(wait=0, warmup=1, active=1), keep="slow", slow_limit=0.5, max_spans=100
    )
    instrumentor.instrument(
        tracer_provider=provider,
        detail="modules",
        record_shapes=True,
        frames=mine,
        policy=policy,
        ranks="together",
        steps="auto",
    )
    carried: Callable[[str], int] = otp.carry(len)
    assert carried("ab") == 2
    with otp.record_function("typed"):
        instrumentor.keep_step()
        instrumentor.step({"torch.step.loss": 0.5})
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


def record_for_hours() -> None:
    """Hands on what it records."""
    with otp.stream(InMemorySpanExporter(), detail="modules", policy=otp.SpanPolicy(every=2)) as running:
        with otp.record_function("typed"):
            running.step()
        flushed: bool = running.flush()
        counts: Mapping[str, int] = running.health.spans
    averages: otp.EventList = running.key_averages()
    assert flushed
    assert counts["added"] > 0
    assert len(averages) > 0
    assert running.steps == 1


def show() -> None:
    """Hands ranges to other profilers, and reads what one of them wrote."""
    with otp.emit_nvtx(enabled=False, record_shapes=True) as none:
        assert none is None
    itt: otp.emit_itt = otp.emit_itt(False, record_shapes=False, as_documented=False)
    itt.mark("nothing runs")
    unique = otp.EnforceUnique()
    unique.see("range", 1)
    try:
        explained: otp.Explanation = otp.explain("no such file", Path("nor this one"))
        assert explained.headline
        difference: otp.Difference = otp.diff("before", Path("after"))
        assert not difference.is_slower_by(0.05)
    except otp.TorchProfError as error:
        assert "no such file" in str(error)  # noqa: PT017 - a program, not a test
    try:
        events: otp.EventList = otp.load_nvprof("no such file")
        ranges: list[otp.FunctionEvent] = otp.parse_nvprof_trace(Path("no such file"))
        assert len(events) == len(ranges)
    except FileNotFoundError as error:
        assert "no such file" in str(error)  # noqa: PT017 - a program, not a test


def watch_gpus() -> None:
    """Watches GPUs, if there are any."""
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    with otp.GpuMetrics(meters, devices="all") as metrics:
        reader.collect()
        health: otp.GpuHealth = metrics.health
        states: Mapping[str, str] = health.sources
        assert states["nvml"] == "on" or states["nvml"].startswith("off: ")
    meters.shutdown()


def fail() -> None:
    """Meets the errors."""
    kinds: tuple[type[otp.TorchProfError], ...] = (otp.NativeError, otp.TorchLibraryError, otp.ExportError)
    assert all(issubclass(kind, RuntimeError) for kind in kinds)
    try:
        otp.profile(operators=False).stop()
    except otp.TorchProfError as error:
        assert "not started" in str(error)  # noqa: PT017 - a program, not a test


def serve_together() -> int:
    """Serves requests in one batch."""
    tickets: list[otp.Ticket] = [otp.enqueue(), otp.enqueue()]
    with otp.batch(tickets, tokens=[3, 4], model="small") as serving:
        serving.fail(tickets[1], "too_long")
    return serving.size


def main() -> str:
    """All of it; returns the package's version."""
    with tempfile.TemporaryDirectory() as folder:
        prof = record()
        read(prof)
        names_and_records()
        write(prof, Path(folder))
        assert record_cycles(Path(folder)) == [1]
        serve(Path(folder))
    assert serve_together() == 2
    record_for_hours()
    show()
    watch_gpus()
    fail()
    version: str = otp.__version__
    return version


if __name__ == "__main__":
    main()
