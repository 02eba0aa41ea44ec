"""Trains a small language model. Nothing in the loop knows of telemetry, and yet each step is a trace.

    pip install -r requirements/examples.txt
    opentelemetry-instrument python examples/training.py                             # to a Collector
    OTEL_TRACES_EXPORTER=chrome opentelemetry-instrument python examples/training.py # to a Chrome trace
    python examples/training.py --detail modules                                     # the same from code, see instrument()

``OTEL_TORCHPROF_DETAIL`` says how much: ``steps`` (the default), ``modules`` or ``ops``. A step ends where the optimizer's
step does, so there is nothing to call; its trace is linked to the one of the step before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT = Path(__file__).parent / "data" / "where-the-time-goes.txt"
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 48, 8


class LanguageModel(nn.Module):
    """Letters in, a score for every possible next letter out."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, letters)

    def forward(self, letters: Tensor) -> Tensor:
        """``(batch, time)`` of letters to ``(batch, time, letters)`` of logits."""
        time = letters.shape[1]
        x = self.letters(letters) + self.places(torch.arange(time))
        return self.scores(self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(time), is_causal=True))


def train(steps: int) -> None:
    """The loop as one writes it."""
    text = TEXT.read_text(encoding="ascii")
    alphabet = sorted(set(text))
    letters = torch.tensor([alphabet.index(letter) for letter in text])
    model = LanguageModel(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(letters) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([letters[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()  # here a step of the trace ends and the next begins
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3d}/{steps}   loss {loss.item():.3f}", flush=True)


def instrument(detail: str) -> None:
    """What ``opentelemetry-instrument`` does, for programs that would rather say it themselves."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    import otel_torchprof as otp

    provider = TracerProvider(resource=Resource.create({"service.name": "training"}))
    provider.add_span_processor(otp.TorchSpanProcessor(otp.OTLPExporter()))  # at exit the provider sends what is left
    trace.set_tracer_provider(provider)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail=detail)


def main() -> None:
    """Train; instrumented only where asked to."""
    parser = argparse.ArgumentParser(description="Train a small language model.")
    parser.add_argument("--steps", type=int, default=40, help="steps in all (default: %(default)s)")
    parser.add_argument("--detail", choices=("steps", "modules", "ops"), help="instrument from code, this closely")
    chosen = parser.parse_args()
    torch.manual_seed(1)
    if chosen.detail:
        instrument(chosen.detail)
    train(chosen.steps)


if __name__ == "__main__":
    main()
