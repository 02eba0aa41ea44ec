"""A text classifier behind FastAPI; the trace of each request continues inside the model, down to torch's operators.

    pip install -r requirements/examples.txt
    python examples/serving.py
    curl localhost:8000/predict -H 'content-type: application/json' -d '{"texts": ["the light is good in here"]}'
    curl localhost:8000/averages

Spans go by gRPC to ``OTEL_EXPORTER_OTLP_ENDPOINT``, http://localhost:4317 by default: a Collector, or a trace store. There,
a request looks like this, whether it came with a ``traceparent`` of its caller or began here:

    POST /predict > torch.phase.inference > TextClassifier > blocks > blocks.0 > blocks.0.network > blocks.0.network.0 > aten::linear > aten::addmm
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MOODS = ("calm", "curious", "cross")
WIDTH, HEADS, LAYERS, LONGEST = 64, 4, 2, 128


class Block(nn.Module):
    """One layer: every letter looks at all others, then a small network for each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, letters, width)`` to the same."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.network(self.norms[1](x))


class TextClassifier(nn.Module):
    """Bytes of texts in, a score for each mood out. Its weights are random: the moods mean nothing, the work is real."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.scores = nn.Linear(WIDTH, len(MOODS))

    def forward(self, letters: Tensor) -> Tensor:
        """``(batch, letters)`` of byte values to ``(batch, moods)`` of logits."""
        return self.scores(self.blocks(self.letters(letters)).mean(dim=1))


class Texts(BaseModel):
    """The body of a request."""

    texts: list[str]


def classify(model: nn.Module, texts: list[str]) -> list[str]:
    """The mood of each text. Labels are spans, too."""
    with otp.record_function("encode texts"):
        encoded = [torch.tensor(list(text.encode()[:LONGEST]) or [0]) for text in texts]
        letters = nn.utils.rnn.pad_sequence(encoded, batch_first=True)
    with torch.inference_mode():
        scores = functional.softmax(model(letters), dim=-1)
    return [MOODS[best] for best in scores.argmax(dim=-1).tolist()]


def make_app(provider: TracerProvider, processor: otp.TorchSpanProcessor) -> FastAPI:
    """The service; its requests are spans of ``provider``."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Sends the last spans at the end: at SIGTERM, uvicorn ends the process of the signal, and nothing else of Python runs."""
        yield
        provider.shutdown()

    app, model = FastAPI(lifespan=lifespan), TextClassifier().eval()

    @app.post("/predict")
    async def predict(body: Texts) -> list[str]:
        """Runs the model on the event loop, as is right for one this small."""
        return classify(model, body.texts)

    @app.post("/predict-in-thread")
    def predict_in_thread(body: Texts) -> list[str]:
        """Runs the model in FastAPI's thread pool: what takes long must not hold up the loop."""
        return classify(model, body.texts)

    @app.get("/averages", response_class=PlainTextResponse)
    def averages() -> str:
        """Where the time has gone since the service started."""
        return processor.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)

    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls="averages", exclude_spans=["receive", "send"]
    )
    return app


def main() -> None:
    """Serve until interrupted."""
    import uvicorn

    provider = TracerProvider(resource=Resource.create({"service.name": "moods"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # the service's own spans
    processor = otp.TorchSpanProcessor(otp.OTLPExporter())  # what torch does inside them
    provider.add_span_processor(processor)
    app = make_app(provider, processor)
    # From here on: what torch did to make the model belongs to no request, and would be traces of its own.
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops")
    uvicorn.run(app, host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
