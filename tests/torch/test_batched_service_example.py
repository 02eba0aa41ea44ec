"""examples/batched_service.py under load: each request's trace tells where its time was, and each batch's what it ran."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.instrumentation.fastapi")

import httpx2  # noqa: E402
from example_modules import example_module  # noqa: E402
from instrumented import Collecting, Instrumented  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.trace import StatusCode  # noqa: E402

CLIENTS = 200
PATHS = ("/thread", "/task")
FIRST_TRACE = 0xC0FFEE << 64
TOLERANCE_NS = 1_000_000
"""The SDK's clock and the recorder's may differ by so much."""
DEADLINE = 60


@pytest.fixture
def example():
    """The example as a module."""
    return example_module("batched_service")


def gated(scorer, gate):
    """The model, which waits for an event, and which fails if a text has a ``!``."""

    class Gated(scorer):
        def forward(self, letters):
            assert gate.wait(DEADLINE)
            if (letters == ord("!")).any():
                raise OverflowError("too loud")
            return super().forward(letters)

    return Gated().eval()


def text_of(number):
    """Some texts are empty, which fails alone; a late one fails its whole batch."""
    return "" if number % 20 == 3 else "ouch!" if number == CLIENTS - 1 else "x" * (1 + number % 7)


async def serve(example, app, gate):
    """Sends all requests at once, cancels every tenth when all of them are in queues or batches, and returns the outcomes."""
    everyone, made, request = asyncio.Event(), [], example.Request

    def noted(*values):
        made.append(request(*values))
        if len(made) == CLIENTS:
            everyone.set()
        return made[-1]

    example.Request = noted
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url="http://s") as client:
        tasks = [
            asyncio.create_task(
                client.get(
                    PATHS[number % 2],
                    params={"text": text_of(number)},
                    headers={"traceparent": f"00-{FIRST_TRACE + number:032x}-{number + 1:016x}-01"},
                )
            )
            for number in range(CLIENTS)
        ]
        await asyncio.wait_for(everyone.wait(), DEADLINE)
        for task in tasks[::10]:
            task.cancel()
        await asyncio.wait(tasks[::10])
        gate.set()
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE)
    return ["cancelled" if isinstance(each, asyncio.CancelledError) else each.status_code for each in answers]


@pytest.fixture
def traffic(example):
    """All spans after the clients were served: the requests' own by number, and those of torch."""
    service, requests, gate = Instrumented(drained_every=20), Collecting(), threading.Event()
    service.provider.add_span_processor(SimpleSpanProcessor(requests))
    app = example.make_app(service.provider, gated(example.Scorer, gate))
    with service.on():
        outcomes = asyncio.run(serve(example, app, gate))
    roots = {span.context.trace_id - FIRST_TRACE: span for span in requests.spans if span.parent.is_remote}
    return outcomes, roots, [span for span in service.spans_at_end() if span.name != "torch.phase.gc"]


def of_requests(spans, roots):
    """For each request its spans by name."""
    found = {number: defaultdict(list) for number in roots}
    for span in spans:
        if span.name.startswith("torch.request."):
            number = span.context.trace_id - FIRST_TRACE
            assert span.parent.span_id == roots[number].context.span_id
            found[number][span.name].append(span)
    return found


def test_each_request_tells_where_its_time_was(traffic):
    """Of 200 clients at once, queue, stay and rest of each are all of its span, also of those that leave or fail."""
    outcomes, roots, spans = traffic
    assert set(roots) == set(range(CLIENTS))
    assert Counter(outcomes)["cancelled"] == CLIENTS // 10
    for number, own in of_requests(spans, roots).items():
        root, (queued,) = roots[number], own["torch.request.queue"]
        stays = own["torch.request.batch"]
        assert root.start_time - TOLERANCE_NS <= queued.start_time
        assert (stays or [queued])[-1].end_time <= root.end_time + TOLERANCE_NS
        if outcomes[number] == "cancelled":
            assert [queued, *stays][-1].attributes["error.type"] == "client_disconnected"
        else:
            (stay,) = stays
            assert stay.start_time == queued.end_time
            failed = {"": "empty_text", "ouch!": "OverflowError"}.get(text_of(number))
            in_failed = stay.attributes.get("error.type") == "OverflowError"
            assert in_failed or stay.attributes.get("error.type") == failed
            assert (outcomes[number] == 200) == (stay.status.status_code is StatusCode.UNSET)


def test_each_operator_is_in_one_batch_and_its_time_is_shared_out(traffic):
    """Batches are traces of their own with all operators below them; links lead both ways; shares add up to the batch."""
    _, roots, spans = traffic
    batches = {span.context.span_id: span for span in spans if span.name == "torch.batch"}
    traces = {span.context.trace_id: span for span in batches.values()}
    assert len(traces) == len(batches) > 2
    parents = {span.context.span_id: span.parent and span.parent.span_id for span in spans}
    operators = [span for span in spans if span.name.startswith("aten::")]
    assert operators
    for span in operators:
        top = span.context.span_id
        while parents[top] is not None:
            top = parents[top]
        assert batches[top] is traces[span.context.trace_id]
    stays = defaultdict(list)
    for own in of_requests(spans, roots).values():
        for stay in own["torch.request.batch"]:
            (link,) = stay.links
            assert link.context.trace_id == batches[link.context.span_id].context.trace_id
            stays[link.context.span_id].append(stay)
    for span_id, batch in batches.items():
        own = stays[span_id]
        assert len(own) == len(batch.links) == batch.attributes["torch.batch.size"]
        assert {link.context.trace_id for link in batch.links} == {stay.context.trace_id for stay in own}
        assert sorted(stay.attributes["torch.batch.position"] for stay in own) == list(range(len(own)))
        shares = sum(stay.attributes["torch.batch.share_duration"] for stay in own)
        assert shares == pytest.approx((batch.end_time - batch.start_time) / 1e9, rel=1e-9)
        assert sum(stay.attributes["torch.batch.tokens"] for stay in own) == batch.attributes["torch.batch.tokens"]
    failed = [batch for batch in batches.values() if batch.status.status_code is StatusCode.ERROR]
    assert [batch.attributes["error.type"] for batch in failed] == ["OverflowError"]
