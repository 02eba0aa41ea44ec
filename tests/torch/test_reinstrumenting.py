"""Instrumenting and taking it back again and again leaves nothing behind, and the last time records what the first did."""

import gc
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from followed_calls import is_followed
from frame_trees import no_collections
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.optim.optimizer import _global_optimizer_post_hooks

import otel_torchprof as otp

TIMES = 20


def _left_behind():
    """What a process collects where somebody forgets to take it back; first what may not grow at all."""
    counts = {
        "hooks": len(_global_optimizer_post_hooks),
        "calls of modules": is_followed(torch.nn.Module._call_impl),
        "callbacks": len(gc.callbacks),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "profile functions": (sys.getprofile(), threading.getprofile()),
    }
    gc.collect()
    return counts, len(gc.get_objects())


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and files in Linux's /proc")
@pytest.mark.parametrize("new_processor", [False, True])
@pytest.mark.parametrize("detail", ["ops", "frames", "metrics"])
def test_many_times(detail, new_processor):
    """No thread, hook, callback, file or object more, with one processor or one each time; and every time is recorded."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    meters = MeterProvider(metric_readers=[InMemoryMetricReader()], shutdown_on_exit=False)
    model = torch.nn.Linear(2, 2)
    processors = []

    def once():
        if new_processor or not processors:
            processors.append(otp.TorchSpanProcessor(exporter))
            provider._active_span_processor._span_processors = (processors[-1],)  # the SDK has no way to remove one
        otp.TorchInstrumentor().instrument(tracer_provider=provider, meter_provider=meters, detail=detail)
        model(torch.ones(1, 2))
        otp.TorchInstrumentor().uninstrument()
        assert provider.force_flush()
        if new_processor:
            processors.pop().shutdown()
            exporter._stopped = False  # which the processor has shut down
        # Other threads' calls come when they come: of those of the package that begin just then, of a progress bar of an earlier test.
        spans = [(span.name, span.attributes.get("thread.id")) for span in exporter.get_finished_spans()]
        here = {thread for name, thread in spans if name == "aten::linear"}
        names = Counter(name for name, thread in spans if thread in here)
        exporter.clear()
        return names

    first = Counter[str]()
    with no_collections():  # each would be a span
        for number in range(
            5 + TIMES
        ):  # one line, since the calls that surround a recording are in it where steps were seen
            names = once()
            if number == 4:
                first, (counts, objects) = names, _left_behind()
            assert number < 5 or names == first
    again, objects_again = _left_behind()
    assert again == counts
    assert objects_again - objects < TIMES / 2
    assert first.get("aten::linear", 0) == (0 if detail == "metrics" else 1)
    for processor in processors:
        processor.shutdown()
    provider.shutdown()
    meters.shutdown()


@pytest.mark.parametrize("takes_back", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_steps_count_on(takes_back):
    """A program that is instrumented again, with another detail, has no step number twice at one provider; another one's begin at 0."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    exporter = InMemorySpanExporter()
    provider, another = TracerProvider(shutdown_on_exit=False), TracerProvider(shutdown_on_exit=False)
    instrumentor = otp.TorchInstrumentor()

    def train(to, detail):
        instrumentor.instrument(tracer_provider=to, detail=detail)
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        if takes_back:
            instrumentor.uninstrument()

    for each in (provider, another):
        each.add_span_processor(otp.TorchSpanProcessor(exporter))
    train(provider, "steps")
    train(provider, "ops")
    instrumentor.uninstrument()
    train(another, "steps")
    instrumentor.uninstrument()
    assert provider.force_flush()
    assert another.force_flush()
    steps = sorted((span for span in exporter.get_finished_spans() if span.name == "torch.step"), key=_start)
    assert [span.attributes["torch.step.number"] for span in steps] == [*range(10), *range(5)]
    provider.shutdown()
    another.shutdown()


def _start(span):
    return span.start_time
