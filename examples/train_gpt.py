"""Trains a small character-level GPT on the CPU and looks inside a few of its steps.

    python examples/train_gpt.py --steps 40 --profile-steps 10 --out out

Writes out/trace.json.gz (Chrome trace) and out/trace.otlp (OpenTelemetry spans) and prints where the time went. With
OTEL_EXPORTER_OTLP_ENDPOINT set, the spans are sent there too.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import otel_torchprof as otp

TEXT = Path(__file__).parent / "data" / "where-the-time-goes.txt"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
WARM_UP_STEPS = 5
"""Steps before the profiled ones: the first fill caches and settle the allocator, and say little about the rest."""


@dataclass(frozen=True)
class Shape:
    """How large everything is."""

    letters: int
    context: int = 96
    width: int = 128
    heads: int = 4
    layers: int = 3
    batch: int = 12


class Attention(nn.Module):
    """Causal self-attention: each letter looks at itself and at the letters before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.register_buffer("future", torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same. Written out, so that the trace shows each operator of it."""
        batch, time_, width = x.shape
        per_head = (batch, time_, self.heads, width // self.heads)
        query, key, value = (part.view(per_head).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1))
        scores = query @ key.transpose(-2, -1) * per_head[-1] ** -0.5
        weights = scores.masked_fill(self.future[:time_, :time_], float("-inf")).softmax(dim=-1)
        return self.output((weights @ value).transpose(1, 2).reshape(batch, time_, width))


class Block(nn.Module):
    """One layer: attention, then a small network for each letter, both added to what comes in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.network = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same."""
        x = x + self.attention(self.norms[0](x))
        return x + self.network(self.norms[1](x))


class GPT(nn.Module):
    """Letters in, a score for every possible next letter out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.letters = nn.Embedding(shape.letters, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.letters)

    def forward(self, letters: Tensor) -> Tensor:
        """``(batch, time)`` of letters to ``(batch, time, letters)`` of logits."""
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.scores(self.norm(self.blocks(self.letters(letters) + self.places(places))))


class Training:
    """The model, its data and its optimizer; one call of :meth:`step` is one training step."""

    def __init__(self, text: str) -> None:
        alphabet = sorted(set(text))
        self.text = torch.tensor([alphabet.index(letter) for letter in text])
        self.shape = Shape(letters=len(alphabet))
        self.model = GPT(self.shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random parts of the text, and the same parts one letter on."""
        length = self.shape.context
        starts = torch.randint(len(self.text) - length, (self.shape.batch,))
        rows = torch.stack([self.text[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def step(self) -> float:
        """Train on one batch and return its loss, in nats per letter."""
        with otp.record_function("data"):
            letters, following = self.batch()
        with otp.record_function("forward"):
            loss = functional.cross_entropy(self.model(letters).flatten(0, 1), following.flatten())
        with otp.record_function("backward"):
            loss.backward()
        with otp.record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


def timed_step(training: Training, number: int, steps: int, note: str = "") -> None:
    """Do one step and print a line about it."""
    start = time.perf_counter()
    loss = training.step()
    milliseconds = (time.perf_counter() - start) * 1e3
    print(f"step {number + 1:3d}/{steps}   loss {loss:.3f}   {milliseconds:6.1f} ms   {note}".rstrip(), flush=True)


def train(training: Training, steps: int, profile_steps: int) -> otp.profile:
    """Run all steps, some of them under the profiler once the first are over, and return the profiler."""
    end = WARM_UP_STEPS + profile_steps
    for number in range(WARM_UP_STEPS):
        timed_step(training, number, steps, "warm-up")
    with otp.profile(record_shapes=True) as prof:
        for number in range(WARM_UP_STEPS, end):
            timed_step(training, number, steps, "profiled")
            prof.step()
    for number in range(end, steps):
        timed_step(training, number, steps)
    return prof


def report(prof: otp.profile, out: Path) -> None:
    """Print where the time went, write both files and say what to do with them."""
    out.mkdir(parents=True, exist_ok=True)
    chrome, otlp = out / "trace.json.gz", out / "trace.otlp"
    prof.export_chrome_trace(str(chrome))
    prof.export_otlp(str(otlp))
    print(f"\n{prof.key_averages().table(sort_by='self_cpu_time_total', row_limit=15)}\n")
    print(f"health: {prof.health}\n")
    print(f"{chrome} ({chrome.stat().st_size / 1e6:.1f} MB): every operator on a time axis.")
    print("    Open it in https://ui.perfetto.dev or in chrome://tracing.")
    print(f"{otlp} ({otlp.stat().st_size / 1e6:.1f} MB): the same steps as OpenTelemetry spans, one trace per step.")
    print(
        "    It is an OTLP request in protobuf, ready to be sent to a Collector (collector-config.yaml) or a trace store:"
    )
    print(f"    otel-torchprof send {otlp} --endpoint http://localhost:4317")


def send(prof: otp.profile) -> None:
    """Send the spans where the environment says that spans go, if it says so."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    exporter = otp.OTLPExporter()
    try:
        print(f"\n{prof.export(exporter)} spans sent by {exporter}")
    except otp.ExportError:
        print(f"\nnot all spans were taken by {exporter}: {exporter.stats}")
    finally:
        exporter.shutdown()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the CPU and look inside a few of its steps.")
    parser.add_argument("--steps", type=int, default=40, help="steps in all (default: %(default)s)")
    parser.add_argument("--profile-steps", type=int, default=10, help="steps to profile (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the traces (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and batches (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.profile_steps < 1:
        parser.error(f"--profile-steps {chosen.profile_steps}: at least one step has to be profiled")
    least = WARM_UP_STEPS + chosen.profile_steps
    if chosen.steps < least:
        parser.error(
            f"--steps {chosen.steps}: at least {least} are needed, {WARM_UP_STEPS} to warm up and {chosen.profile_steps} "
            "to profile"
        )
    return chosen


def main() -> None:
    """Train, then report."""
    chosen = arguments()
    torch.manual_seed(chosen.seed)
    training = Training(TEXT.read_text(encoding="ascii"))
    weights = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"a GPT of {training.shape.layers} layers and {weights:,} weights; {len(training.text):,} letters of text")
    prof = train(training, chosen.steps, chosen.profile_steps)
    report(prof, chosen.out)
    send(prof)


if __name__ == "__main__":
    main()
