"""examples/serving.py under load: every operator in the trace of the request that it ran for."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.instrumentation.fastapi")

import httpx2  # noqa: E402
from example_modules import example_module  # noqa: E402
from instrumented import Collecting, Instrumented  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.trace import SpanKind  # noqa: E402

REQUESTS = 50
PATHS = ("/predict", "/predict-in-thread")
FIRST_TRACE = 0xC0FFEE << 64


@pytest.fixture
def example():
    """The example as a module."""
    return example_module("serving")


@pytest.fixture(params=[None, 1], ids=["drained at the end", "drained all the time"])
def service(example, request):
    """The example's service with its torch instrumented; the requests' own spans are collected, too."""
    service = Instrumented(drained_every=request.param)
    service.requests = Collecting()
    service.provider.add_span_processor(SimpleSpanProcessor(service.requests))
    service.app = example.make_app(service.provider, service.processor)
    with service.on():
        yield service


async def post(client, number):
    """Sends one request from a caller that is in the trace ``FIRST_TRACE + number``; returns the answer."""
    header = {"traceparent": f"00-{FIRST_TRACE + number:032x}-{number + 1:016x}-01"}
    answer = await client.post(PATHS[number % len(PATHS)], headers=header, json={"texts": ["good light", "in here"]})
    assert answer.status_code == 200
    return answer.json()


async def serve(app, *bursts):
    """Sends requests: those of a burst at the same time, one burst after another. Returns all answers."""
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
        return [
            answer for burst in bursts for answer in await asyncio.gather(*(post(client, number) for number in burst))
        ]


def by_trace(spans):
    """Spans by the number of their request."""
    found = defaultdict(list)
    for span in spans:
        found[span.context.trace_id - FIRST_TRACE].append(span)
    return found


def in_a_request(span):
    """Garbage that is collected between two requests is in a trace of its own; everything else has to be in a request."""
    return span.name != "torch.phase.gc" or span.parent is not None


def tree(spans, root):
    """How often each path of names occurs below a span; all of the spans have to be there. Garbage is collected at any time."""
    names = {span.context.span_id: (span.name, span.parent.span_id) for span in spans}

    def path(span_id):
        name, parent = names[span_id]
        return (name,) if parent == root.context.span_id else (*path(parent), name)

    return Counter(path(span_id) for span_id, (name, _) in names.items() if name != "torch.phase.gc")


def test_concurrent_requests(service):
    """Of 50 requests at once each has its own operators in its own trace: as many, and as nested, as a request alone."""
    alone, crowd = range(2, 4), range(4, 4 + REQUESTS)
    answers = asyncio.run(serve(service.app, [0], [1], *([number] for number in alone), crowd))
    assert all(answer == answers[0] for answer in answers)
    torchs, requests = by_trace(filter(in_a_request, service.spans())), by_trace(service.requests.spans)
    assert set(torchs) == set(requests) == set(range(4 + REQUESTS))
    trees = {}
    for number, spans in torchs.items():
        (root,) = requests[number]
        assert (root.kind, root.parent.span_id) == (SpanKind.SERVER, number + 1)
        assert all(root.start_time <= span.start_time <= span.end_time <= root.end_time for span in spans)
        trees[number] = tree(spans, root)
    assert ("torch.phase.inference", "TextClassifier", "blocks", "blocks.0", "blocks.0.attention") in trees[alone[0]]
    assert any(path[-1] == "aten::addmm" for path in trees[alone[0]])
    for number in crowd:
        assert trees[number] == trees[alone[number % len(alone)]]


def test_averages(service):
    """The averages count each module once per request, and are no request of their own in the traces."""

    async def visit():
        await serve(service.app, range(4))
        transport = httpx2.ASGITransport(app=service.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.get("/averages")

    answer = asyncio.run(visit())
    assert answer.status_code == 200
    assert "aten::" in answer.text  # which operators are among the longest depends on the machine
    assert "aten::addmm" in {row.key for row in service.processor.key_averages()}
    (row,) = [row for row in service.processor.key_averages() if row.key == "TextClassifier"]
    assert row.count == 4
    assert len(service.requests.spans) == 4


def test_the_end_of_the_service_sends_the_last_spans(example):
    """When the server ends the lifespan of the app, as uvicorn does at SIGTERM, the provider is shut down."""
    shut_down = []

    class Provider(TracerProvider):
        def shutdown(self):
            shut_down.append(self)

    provider = Provider(shutdown_on_exit=False)
    app = example.make_app(provider, None)

    async def live():
        async with app.router.lifespan_context(app):
            assert not shut_down

    asyncio.run(live())
    assert shut_down == [provider]
