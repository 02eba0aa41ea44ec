"""Requests served in batches, by a thread and by an asyncio task; each request's trace says how long it waited and what its share was.

    pip install -r requirements/examples.txt
    python examples/batched_service.py
    curl 'localhost:8000/thread?text=good'
    curl 'localhost:8000/task?text=good'

Spans go by gRPC to ``OTEL_EXPORTER_OTLP_ENDPOINT``, http://localhost:4317 by default. There are two kinds of traces, linked both ways:

    GET /thread > torch.request.queue, torch.request.batch
    torch.batch > torch.phase.inference > Scorer > ...
"""

from __future__ import annotations

import asyncio
import queue
from concurrent.futures import Future
from contextlib import asynccontextmanager
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import torch
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from torch import Tensor, nn

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LARGEST = 32


class Scorer(nn.Module):
    """Scores texts by their bytes. Its weights are random: the scores mean nothing, the work is real."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, 64)
        self.score = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, letters: Tensor) -> Tensor:
        """``(batch, letters)`` of byte values to ``(batch,)``."""
        return self.score(self.letters(letters).mean(dim=1)).squeeze(-1)


class Request(NamedTuple):
    """What the queues carry."""

    ticket: otp.Ticket
    text: bytes
    answer: Future[float]


def serve(model: nn.Module, requests: list[Request]) -> None:
    """Answers the requests that still wait, in one call of the model."""
    requests = [each for each in requests if each.ticket.failed is None and each.answer.set_running_or_notify_cancel()]
    if not requests:
        return
    tickets, tokens = [each.ticket for each in requests], [len(each.text) for each in requests]
    try:
        with otp.batch(tickets, tokens=tokens, model="scorer"), torch.inference_mode():
            letters = [torch.tensor(list(each.text), dtype=torch.long) for each in requests]
            scores = model(nn.utils.rnn.pad_sequence(letters, batch_first=True)).tolist()
            for each in requests:
                if not each.text:
                    each.ticket.fail("empty_text")
    except Exception as error:  # noqa: BLE001 - whatever it is, the clients learn it
        for each in requests:
            each.answer.set_exception(error)
        return
    for each, score in zip(requests, scores, strict=True):
        if each.ticket.failed is None:
            each.answer.set_result(score)
        else:
            each.answer.set_exception(ValueError(each.ticket.failed))


def serve_in_thread(model: nn.Module, waiting: queue.SimpleQueue[Request | None]) -> None:
    """Serves until it gets None: the first request that waits, with those that have come meanwhile."""
    while (first := waiting.get()) is not None:
        batch = [first]
        while len(batch) < LARGEST and not waiting.empty():
            if (following := waiting.get()) is None:
                waiting.put(None)
                break
            batch.append(following)
        serve(model, batch)


async def serve_in_task(model: nn.Module, waiting: asyncio.Queue[Request]) -> None:
    """The same on the event loop, which stays free while the model runs."""
    while True:
        batch = [await waiting.get()]
        while len(batch) < LARGEST and not waiting.empty():
            batch.append(waiting.get_nowait())
        await asyncio.to_thread(serve, model, batch)


async def ask(put: Callable[[Request], None], text: str) -> float:
    """Puts a request into a queue, and waits for its answer."""
    request = Request(otp.enqueue(), text.encode(), Future())
    put(request)
    try:
        return await asyncio.wrap_future(request.answer)
    except asyncio.CancelledError:
        request.ticket.fail("client_disconnected")
        raise


def make_app(provider: TracerProvider, model: nn.Module) -> FastAPI:
    """The service; its requests are spans of ``provider``."""
    for_thread: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    for_task: asyncio.Queue[Request] = asyncio.Queue()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Both workers begin here, outside of any request."""
        thread = Thread(target=serve_in_thread, args=(model, for_thread))
        thread.start()
        task = asyncio.create_task(serve_in_task(model, for_task))
        yield
        task.cancel()
        for_thread.put(None)
        thread.join()
        provider.shutdown()

    app = FastAPI(lifespan=lifespan)

    @app.get("/thread")
    async def by_thread(text: str) -> float:
        """Is served by the thread."""
        return await ask(for_thread.put, text)

    @app.get("/task")
    async def by_task(text: str) -> float:
        """Is served by the task."""
        return await ask(for_task.put_nowait, text)

    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, exclude_spans=["receive", "send"])
    return app


def main() -> None:
    """Serve until interrupted."""
    import uvicorn

    provider = TracerProvider(resource=Resource.create({"service.name": "scores"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    provider.add_span_processor(otp.TorchSpanProcessor(otp.OTLPExporter()))
    app = make_app(provider, Scorer().eval())
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="modules")
    uvicorn.run(app, host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
