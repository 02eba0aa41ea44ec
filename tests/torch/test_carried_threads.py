"""Work that a request has other threads do: whose it is, and what becomes of it once the request is over."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections import defaultdict

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

import otel_torchprof as otp  # noqa: E402

X = torch.ones(4, 4)


class Model(torch.nn.Module):
    """Has a method that runs the model several times, as ``generate`` does."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

    def generate(self, times=1, between=None):
        for _ in range(times):
            self(X)
            if between is not None:
                between()


@pytest.fixture
def service():
    """A provider whose torch spans are kept, instrumented with ``detail="modules"``; the tracer, and what there is by trace."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    processor = otp.TorchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    start = threading.Thread.start
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="modules")

    def by_trace():
        processor.force_flush()
        found = defaultdict(list)
        for span in exporter.get_finished_spans():
            found[span.context.trace_id].append(span)
        return found

    try:
        yield provider.get_tracer("service"), by_trace
    finally:
        otp.TorchInstrumentor().uninstrument()
        threading.Thread.start = start  # a wrapper that was put around ours and taken back has left ours behind
        provider.shutdown()


@pytest.mark.parametrize(
    "target",
    [
        lambda model: model.generate,
        lambda model: functools.partial(model.generate, 1),
        lambda model: torch.no_grad()(model.generate),
    ],
    ids=["method", "partial", "decorated"],
)
def test_threads_with_a_method_of_a_model_have_the_span_that_starts_them(service, target):
    """Three requests at once, each with a thread of its own, are three traces, and nothing is in another's."""
    tracer, by_trace = service
    spans = []
    for _ in range(3):
        with tracer.start_as_current_span("request") as span:
            thread = threading.Thread(target=target(Model()))
            thread.start()
            thread.join()
        spans.append(span)
    assert {trace_id: len(found) for trace_id, found in by_trace().items()} == {
        span.context.trace_id: 3
        for span in spans  # the root's phase, the model, its layer
    }


def test_other_threads_are_carried_by_hand_only(service):
    """A batcher that the first request starts works for none of them; what is carried into it is its request's."""
    tracer, by_trace = service
    jobs: queue.Queue = queue.Queue()
    model = Model()

    def batcher():
        for job in iter(jobs.get, None):
            job()

    thread = threading.Thread(target=batcher)
    spans = []
    for number in range(3):
        with tracer.start_as_current_span("request") as span:
            if number == 0:
                thread.start()
            jobs.put(otp.carry(model.generate) if number == 2 else model.generate)
            if number == 2:
                jobs.put(None)
                thread.join()
        spans.append(span.context.trace_id)
    found = by_trace()
    assert spans[2] in found
    assert not {spans[0], spans[1]} & found.keys()


def test_work_that_outlives_its_request_links_to_it(service):
    """What a thread does after the request has ended is in traces of its own that link to the request, also with a task of asyncio's."""
    tracer, by_trace = service
    served, over = threading.Event(), threading.Event()

    def between():
        served.set()
        assert over.wait(30)

    with tracer.start_as_current_span("request") as span:
        thread = threading.Thread(target=Model().generate, args=(2, between))
        thread.start()
        assert served.wait(30)
    over.set()
    thread.join()
    check_late(by_trace(), span)


def check_late(found, span):
    own = found.pop(span.context.trace_id)
    assert len(own) == 3
    late = [each for spans in found.values() for each in spans]
    assert len(late) == 3
    (root,) = [each for each in late if each.parent is None]
    assert [(link.context.trace_id, link.context.span_id) for link in root.links] == [
        (span.context.trace_id, span.context.span_id)
    ]


def test_a_task_that_outlives_its_request_links_to_it(service):
    """A task has the context in which it was made for good; after the request has ended it works for nobody's request."""
    tracer, by_trace = service
    model = Model()

    async def serve():
        over = asyncio.Event()

        async def background():
            model.generate()
            served.set()
            await over.wait()
            model.generate()

        served = asyncio.Event()
        with tracer.start_as_current_span("request") as span:
            task = asyncio.create_task(background())
            await served.wait()
        over.set()
        await task
        return span

    span = asyncio.run(serve())
    check_late(by_trace(), span)


def test_thread_start_is_as_it_was_after_uninstrument(service):
    """While torch is not instrumented Python's own method is there."""
    before = threading.Thread.start
    assert before.__qualname__ == "Thread.start"
    otp.TorchInstrumentor().uninstrument()
    assert not hasattr(threading.Thread.start, "__wrapped__")


def test_another_wrapper_around_ours_stays(service, monkeypatch):
    """One that was put around ours works on, before and after; ours then carries nothing."""
    started = []
    inner = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), inner(thread))[1])
    otp.TorchInstrumentor().uninstrument()
    tracer, _ = service
    with tracer.start_as_current_span("request"):
        thread = threading.Thread(target=Model().generate)
        thread.start()
        assert not hasattr(getattr(thread, "_target", None), "__wrapped__")
        thread.join()
    assert started == [thread]


def test_a_target_that_cannot_be_looked_at_is_started(service):
    """An object that raises at every question is called in its thread like any other."""

    class Strange:
        def __getattribute__(self, name):
            raise RuntimeError(name)

        def __call__(self):
            called.set()

    tracer, _ = service
    called = threading.Event()
    with tracer.start_as_current_span("request"):
        thread = threading.Thread(target=Strange(), name="strange")
        thread.start()
        thread.join()
    assert called.is_set()
