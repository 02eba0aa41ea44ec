"""Trains a small language model and fills both dashboards: its steps as traces, its operators and GPUs as metrics.

    docker compose --file examples/observability/compose.yaml up --detach
    torchrun --nproc-per-node 2 examples/observability/train.py    # the first rank sends traces, the second counts operators
    python examples/observability/train.py --detail metrics        # or one process, with one of them

Each rank trains a model of its own: what is shown is telemetry. Every 50th step has 32 times the batch, to be found.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from pathlib import Path

import torch
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from torch.nn import functional

import otel_torchprof as otp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import BATCH, CONTEXT, TEXT, LanguageModel  # the model of the example beside this folder

RANK = int(os.environ.get("RANK", "0"))
RUN = os.environ.get("TORCHELASTIC_RUN_ID", "none").replace("none", "") or uuid.uuid4().hex[:8]


def instrument(detail: str, seconds: float) -> None:
    """Traces and metrics to OTEL_EXPORTER_OTLP_ENDPOINT, http://localhost:4317 unless it is set."""
    about = {"service.name": "training", "service.instance.id": f"{RUN}-{RANK}", "torch.distributed.rank": RANK}
    resource = Resource.create(about)
    # The provider of metrics is made first: at exit it is shut down last, and has the durations of the last steps.
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(), export_interval_millis=1000 * seconds)
    meters = MeterProvider([reader], resource=resource)
    metrics.set_meter_provider(meters)
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(otp.TorchSpanProcessor(otp.OTLPExporter()))
    trace.set_tracer_provider(tracers)
    slow = otp.SpanPolicy(keep="slow", slow_quantile=0.97)  # of the other steps, their spans and averages
    otp.TorchInstrumentor().instrument(tracer_provider=tracers, meter_provider=meters, detail=detail, policy=slow)


def train(steps: int) -> None:
    """The loop as one writes it."""
    text = TEXT.read_text(encoding="ascii")
    alphabet = sorted(set(text))
    letters = torch.tensor([alphabet.index(letter) for letter in text])
    model = LanguageModel(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        batch_size = 32 * BATCH if step % 50 == 0 else BATCH
        starts = torch.randint(len(letters) - CONTEXT, (batch_size,)).tolist()
        batch = torch.stack([letters[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"rank {RANK}   step {step}/{steps}   loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Instrument, then train."""
    parser = argparse.ArgumentParser(description="Train a small language model, observed.")
    parser.add_argument("--steps", type=int, default=5000, help="steps in all (default: %(default)s)")
    parser.add_argument("--detail", choices=("metrics", "steps", "modules", "ops"), help="of this process")
    parser.add_argument("--interval", type=float, default=10, help="seconds between metrics (default: %(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(RANK)
    torch.set_num_threads(1)
    instrument(chosen.detail or ("ops" if RANK == 0 else "metrics"), chosen.interval)
    train(chosen.steps)


if __name__ == "__main__":
    main()
